"""A smaller ordinary decoder: its own class with a smaller config, without dispfx.

It exists if one selection holds for the whole stream and all layers have equal inner widths, so that a
config can describe the widths.  The class is built to find out whether it supports them
(`dispfx.huggingface.widths_of_config`), and compared with the lowered graph, because a class may derive a
number, such as the scale of its embedding, from a changed width.
"""

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from dispfx.analysis.label_map import Mismatch
from dispfx.analysis.positions import places, taken
from dispfx.huggingface.dense import forget_format
from dispfx.huggingface.planning import site_cuts
from dispfx.huggingface.widths import Axis
from dispfx.huggingface.widths_of_config import Resized, resized
from dispfx.ir.program import Program


def build_ordinary(
    model: nn.Module, program: Program, kept: Mapping[str, Tensor]
) -> PreTrainedModel | Mismatch:
    """Return the decoder with the features `kept`, as its own class, or the reason why this is not possible.

    Args:
        model: the dense decoder of transformers, which is not changed; uncut tensors are shared.
        program: of the decoder, with one site for the whole stream.
        kept: sorted kept indices by site.
    """
    if not isinstance(model, PreTrainedModel):
        return Mismatch("its module is not from transformers")
    found = ordinary_config(model, program, kept)
    if isinstance(found, Mismatch):
        return found
    cuts, own = site_cuts(program.sites, kept), _tensors(model)
    with no_init_weights():
        smaller = type(model)._from_config(found.config, dtype=program.dtype)
    for path, tensor in own.items():
        # A buffer that no cut reaches is what the config says, in whatever type the class wants it.
        if isinstance(tensor, nn.Parameter) or path in model.state_dict():
            _put(smaller, path, _cut(path, tensor.detach(), cuts))
    smaller.tie_weights()
    smaller.generation_config = copy.deepcopy(getattr(model, "generation_config", None))  # type: ignore
    return smaller.eval()


def ordinary_config(
    model: PreTrainedModel, program: Program, kept: Mapping[str, Tensor]
) -> Resized | Mismatch:
    """Return the config of the decoder with the features `kept`, or why it has no config.

    The arguments are those of `build_ordinary`; no weight is read.
    """
    cuts = site_cuts(program.sites, kept)
    dense = {path: tuple(tensor.shape) for path, tensor in _tensors(model).items()}
    wanted = {path: _kept_shape(path, shape, cuts) for path, shape in dense.items()}
    config = forget_format(copy.deepcopy(model.config))
    heads = {(site.size, len(kept[site.name])) for site in program.sites if site.kind == "heads"}
    return resized(config, dense, wanted, type(model)._from_config, heads)


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _kept_shape(path: str, shape: tuple[int, ...], cuts: Mapping[Axis, np.ndarray]) -> tuple[int, ...]:
    kept = {axis: places(cuts[path, axis]).shape[-1] for axis in range(len(shape)) if (path, axis) in cuts}
    return tuple(kept.get(axis, size) for axis, size in enumerate(shape))


def _cut(path: str, tensor: Tensor, cuts: Mapping[Axis, np.ndarray]) -> Tensor:
    for axis in range(tensor.dim()):
        stays = cuts.get((path, axis))
        if stays is not None and not stays.all():
            tensor = taken(tensor, axis, places(stays))
    return tensor


def _put(model: nn.Module, path: str, value: Tensor) -> None:
    owner, _, name = path.rpartition(".")
    module: Any = model.get_submodule(owner)
    if name in module._parameters:
        module._parameters[name] = nn.Parameter(value, requires_grad=False)
    else:
        module._buffers[name] = value
