"""The Hugging Face side of an output folder: its config, its tokenizer, and a decoder without weights.

`write_checkpoint` writes config.json, generation_config.json, the tokenizer, the weight files and the
plan.  `skeleton` builds the decoder that config.json describes, at full size and without weights, so
that it can be captured and lowered again; `dispfx.deploy.reload` then puts the sliced weights in.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.initialization import no_init_weights

from dispfx.deploy.section import CONFIG_FILE, OUR_ENTRIES, ModelFiles, add_section, read_section
from dispfx.deploy.weights import INDEX_BUFFERS, MAX_SHARD_BYTES, read_headers, read_tensors, write_tensors
from dispfx.errors import DataError
from dispfx.huggingface.layout import Layout
from dispfx.ir.program import DENSE_PREFIX, main_dtype
from dispfx.ir.sites import Site
from dispfx.plan.plan import Plan
from dispfx.source.transformers_classes import require_known_class

PLAN_FILE = "plan.safetensors"

# Other implementations may be downloaded code, which a config must not request.
_ATTENTION = ("eager", "sdpa")
_EXPERTS = ("eager", "batched_mm", "grouped_mm")


@dataclass(frozen=True, eq=False)
class StoredDecoder:
    """A pruned decoder's tensors, as they are stored.

    Args:
        parameters: by their names on disk, a tied one once.
        buffers: those that `underived_buffers` names, and the indices.
        layout: of the decoder's modules; or the reason why it cannot be built from modules, and the tensors
            are those of the lowered graph.
    """

    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    layout: Layout | str


def write_checkpoint(
    folder: Path,
    model_files: ModelFiles,
    stored: StoredDecoder,
    plan: Plan,
    sites: Sequence[Site],
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write everything that `skeleton` and `dispfx.deploy.reload.fill` need into `folder`.

    Args:
        folder: an existing temporary folder; see `dispfx.deploy.folder`.
        model_files: of the dense decoder.
        stored: the pruned decoder.
        plan: of the sliced parameters.
        sites: of the decoder, for their kinds, in the order of the plan's selections.

    Raises:
        OutputError: if a file cannot be written.
    """
    model_files.write(folder)
    add_section(folder, plan, sites, model_files.config, main_dtype(stored.parameters), stored.layout)
    write_tensors(folder, stored.parameters, stored.buffers, max_shard_bytes=max_shard_bytes)
    plan.save(folder / PLAN_FILE)


def site_indices(plan: Plan, sites: Sequence[Site]) -> dict[str, Tensor]:
    """Return the kept indices, int32 (K,), of every read and write that the plan cuts, by buffer name.

    A decoder that is only a graph stores these.

    Inner features and heads need none: weights are smaller on both sides.
    """
    cut = {site.name for site in sites if site.is_gathered}
    return {
        INDEX_BUFFERS + selection.site: selection.kept
        for selection in plan.selections
        if selection.site in cut and not selection.full
    }


def skeleton(
    folder: Path, *, device: torch.device | str = "cpu", trust_remote_code: bool = False
) -> nn.Module:
    """Build the dense decoder of `folder` with zeros for weights, in eval mode.

    On the CPU the zeros take neither time nor memory until they are written to.  Every parameter has the
    dtype of its stored counterpart, because a capture fixes dtypes.  Buffers have their correct values, from
    the config or from the folder.  A decoder that divides weights by their statistics gets noise, because
    zeros would give NaN.

    Raises:
        DataError: if transformers cannot build a decoder from config.json.
        OutputError: if dispfx did not write the folder.
    """
    model = _without_weights(
        own_config(folder, trust_remote_code),
        AutoModelForCausalLM.from_config,
        **{"attn_implementation": None, **implementations(folder)},
        trust_remote_code=trust_remote_code,
    )
    headers = read_headers(folder)
    _put_zeros(model, {name: stored.dtype for name, stored in headers.items()})
    if any(name.startswith(f"{DENSE_PREFIX}.") for name in headers):
        _put_noise(model)
    _put_buffers(model, folder)
    return model.to(device).eval()


def implementations(folder: Path) -> dict[str, str]:
    """Return the attention and the experts with which the decoder of `folder` was captured, as options.

    Any of them gives the same decoder, but not the same bits.
    """
    section = read_section(folder)
    chosen = {
        "attn_implementation": (section.get("attention"), _ATTENTION),
        "experts_implementation": (section.get("experts"), _EXPERTS),
    }
    return {option: name for option, (name, known) in chosen.items() if name in known}


def require_rebuilt(model: nn.Module, config: Any) -> None:
    """Raise unless the decoder's class can be built from its config, as written and read back.

    Raises:
        DataError: if it cannot be built, or has other parameters.
    """
    with torch.device("meta"):
        twin = _without_weights(copy.deepcopy(config), type(model)._from_config)  # type: ignore[attr-defined]
    own, again = ({name: tuple(one.shape) for name, one in m.named_parameters()} for m in (model, twin))
    # Names of the decoder itself come first: they say what was done to it.
    odd = sorted({name for name, _ in own.items() ^ again.items()}, key=lambda name: (name not in own, name))
    if odd:
        raise DataError(
            f"the decoder differs from what its class builds from its config: {odd[0]}",
            where=type(model).__name__,
            hint=_remedy([name for name in odd if name in own]),
        )


# What is found in the name of a parameter whose weight is computed, and what makes an ordinary weight of it.
_COMPUTED = {
    ".parametrizations.": "torch.nn.utils.parametrize.remove_parametrizations(module, name)",
    ".base_layer.": "merge the adapter: model.merge_and_unload() on the PEFT model",
    "_orig": "torch.nn.utils.prune.remove(module, name)",
    "_g": "torch.nn.utils.remove_weight_norm(module)",
}


def _remedy(odd: Collection[str]) -> str:
    """Return what to do about a decoder whose parameters have other names or shapes than its class gives."""
    for part, call in _COMPUTED.items():
        if any(part in name if part.startswith(".") else name.endswith(part) for name in odd):
            return f"make the weights ordinary ones first: {call}"
    return "bring the config up to date, or wrap the decoder in a module of your own to get a graph"


def rebuilt(model: nn.Module, config: Any, without: Collection[str] = ()) -> nn.Module:
    """Return what the decoder's class builds from its config, with the tensors of `model`, in eval mode.

    Args:
        without: tensors that are not taken from `model`.
    """
    twin = _without_weights(copy.deepcopy(config), type(model)._from_config)  # type: ignore[attr-defined]
    own = dict(model.named_modules())
    for path, part in twin.named_modules():
        for kind in ("_parameters", "_buffers"):
            tensors, given = getattr(part, kind), getattr(own.get(path), kind, {})
            taken = {name for name in given if f"{path}.{name}".removeprefix(".") not in without}
            tensors.update({name: given[name] for name in tensors.keys() & taken})
    return twin.eval()


def underived_buffers(model: nn.Module, config: Any) -> frozenset[str]:
    """Return the names of buffers of `model` that must be stored because its config does not determine them.

    This includes all persistent buffers, and other buffers whose values differ from a newly built decoder's,
    as after `model.to(torch.bfloat16)`, which rounds buffers that are kept in float32.
    """
    dtype = main_dtype(dict(model.named_parameters()))
    twin = _without_weights(copy.deepcopy(config), type(model)._from_config, dtype=dtype)  # type: ignore[attr-defined]
    derived = dict(twin.named_buffers())
    persistent = model.state_dict().keys()
    return frozenset(
        name
        for name, buffer in model.named_buffers()
        if name in persistent or not _same_bits(buffer, derived.get(name))
    )


def _same_bits(buffer: Tensor, other: Tensor | None) -> bool:
    if other is None or (buffer.shape, buffer.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(buffer.cpu(), other)


def own_config(folder: Path, trust_remote_code: bool = False) -> Any:
    """Return the config of the decoder's own class, without the dispfx entries.

    Raises:
        DataError: if transformers does not know that class, or rejects the config.
    """
    require_known_class(folder, trust_remote_code)
    try:
        config = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:
        # transformers and its config classes may raise anything here; report it as an error of the config.
        raise DataError(
            f"transformers rejects this config: {error}", where=str(folder / CONFIG_FILE)
        ) from error
    for entry in OUR_ENTRIES:
        if hasattr(config, entry):
            delattr(config, entry)
    return config


def own_generation_config(folder: Path) -> Any | None:
    """Return the folder's generation config, or None."""
    if not (folder / "generation_config.json").is_file():
        return None
    try:
        return GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise DataError(
            f"transformers rejects this file: {error}", where=str(folder / "generation_config.json")
        ) from error


def _without_weights(config: Any, build: Callable[..., Any], **chosen: Any) -> nn.Module:
    """Build a decoder on the CPU with correct buffers and uninitialised parameters."""
    try:
        with no_init_weights():
            model = build(config, **chosen)
    except Exception as error:
        raise DataError(
            f"transformers cannot build a decoder from this config: {error}", where=type(config).__name__
        ) from error
    # Tying is part of the skipped initialisation.
    model.tie_weights()
    return model


def _put_zeros(model: nn.Module, dtypes: Mapping[str, torch.dtype]) -> None:
    """Replace every parameter by zeros of its stored dtype; tied ones stay tied."""
    own = list(model.named_parameters(remove_duplicate=False))
    stored = {id(parameter): dtypes[name] for name, parameter in own if name in dtypes}
    made: dict[int, nn.Parameter] = {}
    for name, old in own:
        if id(old) not in made:
            zeros = _lazy_zeros(old.shape, stored.get(id(old), old.dtype))
            made[id(old)] = nn.Parameter(zeros, requires_grad=False)
        owner_path, _, leaf = name.rpartition(".")
        model.get_submodule(owner_path)._parameters[leaf] = made[id(old)]


def _put_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02, generator=generator)


def _lazy_zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return zeros in lazily allocated pages; `torch.zeros` writes all of them."""
    count = shape.numel()
    # At least one element: bytes of an empty tensor have no stride, and torch views them as nothing else.
    zeros = torch.from_numpy(np.zeros(max(count, 1) * dtype.itemsize, np.uint8)).view(dtype)
    return zeros[:count].view(shape)


def _put_buffers(model: nn.Module, folder: Path) -> None:
    """Insert stored buffers of full size; those that the plan cuts are filled after lowering."""
    headers = read_headers(folder)
    own = dict(model.named_buffers())
    names = [
        name for name, buffer in own.items() if name in headers and headers[name].shape == tuple(buffer.shape)
    ]
    for name, tensor in read_tensors(folder, names).items():
        owner_path, _, leaf = name.rpartition(".")
        model.get_submodule(owner_path)._buffers[leaf] = tensor.clone()
