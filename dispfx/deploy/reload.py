"""Put the stored weights of an output folder into a decoder that was lowered with the folder's plan.

The steps of loading, of which the middle one is the compiler's own:

    skeleton = checkpoint.skeleton(folder)          # full size, zeros for weights
    lowered = lower(capture(skeleton), plan)        # sliced shapes
    reload.fill(lowered, folder)                    # the stored values

Index buffers in the weight files are the truth; `read_plan` refuses a folder whose plan says otherwise.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.deploy.checkpoint import PLAN_FILE
from dispfx.deploy.section import read_section
from dispfx.deploy.weights import INDEX_BUFFERS, StoredTensor, read_headers, read_tensors
from dispfx.errors import PlanMismatchError
from dispfx.ir.plan import Plan

_ONE_COMPILATION = "config.json, plan.safetensors and the weights must come from one compilation"


def read_plan(folder: Path) -> Plan:
    """Return the folder's plan after comparing it with the config's section and the index buffers.

    Raises:
        DataError: if a file is missing or damaged.
        OutputError: if the folder is not one of ours.
        PlanMismatchError: if the three do not describe the same selections.
    """
    plan = Plan.load(folder / PLAN_FILE)
    section = read_section(folder)
    _compare(folder, "fingerprint", section.get("fingerprint"), plan.fingerprint)
    claimed = [(site["name"], site["size"], site["kept"]) for site in _sites(section)]
    found = [(selection.site, selection.size, len(selection.kept)) for selection in plan.selections]
    _compare(folder, "sites", claimed, found)
    _check_indices(folder, plan, {site["name"] for site in _sites(section) if site["kind"] != "inner"})
    return plan


def fill(lowered: nn.Module, folder: Path) -> None:
    """Replace the parameters of `lowered`, and the buffers that are stored, by the tensors of `folder`.

    A parameter that stands at several paths is stored once, under its first, and put at all of them.

    Args:
        lowered: a decoder with the right shapes and any values, on the device it is to stay on.

    Raises:
        DataError: if a file is missing or damaged.
        PlanMismatchError: if names, shapes or dtypes differ from those of `lowered`.
    """
    headers = read_headers(folder)
    stored = {name: header for name, header in headers.items() if not name.startswith(INDEX_BUFFERS)}
    own: dict[str, Tensor] = dict(lowered.named_parameters())
    own.update((name, buffer) for name, buffer in lowered.named_buffers() if name in stored)
    _check_tensors(folder, stored, own)
    tensors = read_tensors(folder, stored)
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


def _check_tensors(folder: Path, stored: Mapping[str, StoredTensor], own: Mapping[str, Tensor]) -> None:
    if odd := stored.keys() ^ own.keys():
        name = min(odd)
        side = "is not stored" if name in own else "is stored and the decoder has no place for it"
        raise PlanMismatchError(
            f"{name} {side} ({len(odd)} tensors differ)", where=str(folder), hint=_ONE_COMPILATION
        )
    for name, tensor in own.items():
        header = stored[name]
        if (header.shape, header.dtype) != (tuple(tensor.shape), tensor.dtype):
            raise PlanMismatchError(
                f"{name}: {tuple(tensor.shape)} {tensor.dtype} follows from the plan, "
                f"{header.shape} {header.dtype} is stored",
                where=str(folder / header.file),
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


def _sites(section: Mapping[str, object]) -> list[Mapping[str, Any]]:
    sites = section.get("sites")
    known = {"name", "kind", "size", "kept"}
    if not isinstance(sites, list) or not all(
        isinstance(site, dict) and known <= site.keys() for site in sites
    ):
        raise PlanMismatchError("the config's dispfx section lists no sites", hint=_ONE_COMPILATION)
    return sites


def _compare(folder: Path, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise PlanMismatchError(
            f"the plan and the folder disagree about its {what}", where=str(folder), hint=_ONE_COMPILATION
        )


def _device(old: Tensor) -> torch.device:
    return torch.device("cpu") if old.is_meta else old.device
