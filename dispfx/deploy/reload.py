"""Load the stored weights of an output folder into a graph that was lowered with the folder's plan.

The steps from a folder to a graph:

    skeleton = checkpoint.skeleton(folder)          # full size, zeros for weights
    lowered = lower(capture(skeleton), plan)        # sliced shapes
    reload.fill(lowered, folder)                    # the stored values

Index buffers in the weight files are authoritative; a folder with a different plan is rejected.  The files
hold the tensors of the pruned modules, which may be larger than those of the graph (see
`dispfx.huggingface.widths`); `convert` removes the rest.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.section import read_layout, read_section
from dispfx.deploy.weights import INDEX_BUFFERS, is_added, is_index, read_headers, read_tensors
from dispfx.errors import DataError, PlanMismatchError
from dispfx.ir.sites import GATHERED
from dispfx.plan.plan import Plan

_ONE_COMPILATION = "config.json, plan.safetensors and the weights must come from one compilation"


def read_plan(folder: Path) -> Plan:
    """Return the folder's plan after comparing it with the config's section and the index buffers.

    Raises:
        DataError: if a file is missing or damaged.
        OutputError: if the folder is not one of ours.
        PlanMismatchError: if the three do not describe the same selections.
    """
    section = read_section(folder)
    if not (folder / PLAN_FILE).is_file():
        raise DataError(
            f"the folder has no {PLAN_FILE}; transformers and PEFT open it, commands of dispfx do not",
            where=str(folder),
            hint=f"copy {PLAN_FILE} from the folder that this one was made from",
        )
    plan = Plan.load(folder / PLAN_FILE)
    _compare(folder, "fingerprint", section.get("fingerprint"), plan.fingerprint)
    sites = _sites(section)
    claimed = [(site.name, site.size, site.kept) for site in sites]
    found = [(selection.site, selection.size, len(selection.kept)) for selection in plan.selections]
    _compare(folder, "sites", claimed, found)
    _compare(folder, "selections", section.get("selections"), plan.digest)
    layout = read_layout(folder)
    if layout is None:
        _check_indices(folder, plan, {site.name for site in sites if site.kind in GATHERED})
    else:
        layout.check_indices(read_tensors(folder, [name for name in read_headers(folder) if is_index(name)]))
    return plan


def fill(
    lowered: nn.Module,
    folder: Path,
    convert: Callable[[str, Tensor], Tensor] = lambda path, tensor: tensor,
    *,
    buffers: Collection[str] = (),
) -> None:
    """Replace the parameters of `lowered`, and the buffers that are stored, by the tensors of `folder`.

    A parameter that stands at several paths is stored once, under its first, and put at all of them.

    Args:
        lowered: a decoder with the right shapes and any values, on the device it is to stay on.
        convert: from a stored tensor to the lowered one, by path.
        buffers: of the decoder, where the files do not say which tensors are buffers.

    Raises:
        DataError: if a file is missing or damaged.
        PlanMismatchError: if names, shapes or dtypes differ from those of `lowered`.
    """
    headers = {name: header for name, header in read_headers(folder).items() if not is_added(name)}
    own: dict[str, Tensor] = dict(lowered.named_parameters())
    own.update((name, buffer) for name, buffer in lowered.named_buffers() if name in headers)
    # A graph has no place for buffers that it does not read.
    parameters = {name for name, header in headers.items() if header.is_parameter} - set(buffers)
    stored = [name for name in headers if name in parameters or name in own]
    tensors = {name: convert(name, tensor) for name, tensor in read_tensors(folder, stored).items()}
    _check_tensors(folder, tensors, own)
    path_of = {id(tensor): name for name, tensor in own.items()}
    made = {
        name: nn.Parameter(tensors[name].to(_device(old)), old.requires_grad)
        if isinstance(old, nn.Parameter)
        else tensors[name].to(_device(old))
        for name, old in own.items()
    }
    for owner in lowered.modules():
        for table in (owner._parameters, owner._buffers):
            for leaf, old in table.items():
                if id(old) in path_of:
                    table[leaf] = made[path_of[id(old)]]  # type: ignore[assignment]


def _check_tensors(folder: Path, stored: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    if odd := stored.keys() ^ own.keys():
        name = min(odd)
        side = "is not stored" if name in own else "is stored and the decoder has no place for it"
        raise PlanMismatchError(
            f"{name} {side} ({len(odd)} tensors differ)", where=str(folder), hint=_ONE_COMPILATION
        )
    for name, tensor in own.items():
        found = stored[name]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise PlanMismatchError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} follows from the plan, "
                f"{tuple(found.shape)} {found.dtype} is stored",
                where=str(folder),
                hint=_ONE_COMPILATION,
            )


def _check_indices(folder: Path, plan: Plan, cut: set[str]) -> None:
    expected = {
        INDEX_BUFFERS + selection.site: selection.kept
        for selection in plan.selections
        if selection.site in cut and not selection.full
    }
    stored = sorted(name for name in read_headers(folder) if name.startswith(INDEX_BUFFERS))
    _compare(folder, "index buffers", stored, sorted(expected))
    for name, kept in read_tensors(folder, stored).items():
        if kept.dtype != torch.int32 or not torch.equal(kept, expected[name]):
            raise PlanMismatchError(
                f"the stored indices {name} are not those of the plan",
                where=str(folder),
                hint=_ONE_COMPILATION,
            )


@dataclass(frozen=True)
class _ListedSite:
    name: str
    kind: str
    size: int
    kept: int


def _sites(section: Mapping[str, Any]) -> list[_ListedSite]:
    """Return the sites that the config lists."""
    listed = section.get("sites")
    if isinstance(listed, list):
        try:
            return [_listed(site) for site in listed]
        except (KeyError, TypeError, ValueError):
            pass
    raise PlanMismatchError("the config's dispfx section lists no sites", hint=_ONE_COMPILATION)


def _listed(site: Any) -> _ListedSite:
    """Read one site: a text, or the entries that folders of version 3 have."""
    if isinstance(site, dict):
        return _ListedSite(site["name"], site["kind"], site["size"], site["kept"])
    found = re.fullmatch(r"(.+): (\S+) (\d+) of (\d+)", site, re.ASCII)
    if found is None:
        raise TypeError(f"{site!r} is no site")
    name, kind, kept, size = found.groups()
    return _ListedSite(name, kind, int(size), int(kept))


def _compare(folder: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise PlanMismatchError(
            f"the plan and the folder disagree about its {what}", where=str(folder), hint=_ONE_COMPILATION
        )


def _device(old: Tensor) -> torch.device:
    return torch.device("cpu") if old.is_meta else old.device
