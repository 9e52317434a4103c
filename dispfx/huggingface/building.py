"""From a layout to a model whose modules have the pruned shapes.

`shape_modules` changes a model that may be on the meta device: `from_pretrained` then reads the weights
straight into the small shapes, and dense weights never exist.  `pruned_twin` makes a model with values
beside a dense one, which it shares every uncut tensor with.
"""

import copy
from collections.abc import Callable, Mapping
from itertools import chain

import torch
from torch import Tensor, nn

from dispfx.errors import PlanMismatchError
from dispfx.huggingface.layout import MARK, READ, SELECT, WRITE, Layout, ModuleLayout
from dispfx.huggingface.modules import PrunedModule, empty_index, selecting

Values = Callable[[str], Tensor]


def shape_modules(model: nn.Module, layout: Layout, values: Mapping[str, Tensor] | None = None) -> None:
    """Give the modules of `model` the shapes of the layout, and empty tensors or the given values.

    Args:
        model: the dense decoder, or its body without the head.
        layout: with the paths of the decoder that has the head.
        values: cut parameters and index buffers, by their path in the dense decoder.

    Raises:
        PlanMismatchError: if the model lacks a module or parameter that the layout names.
    """
    for path, module_layout in layout.modules.items():
        found = _find(model, path)
        if found is None:
            continue
        _shape(model, found, path, module_layout, values)
    for path in layout.buffers:
        _keep_buffer(model, path)
    if layout.marked:
        device = "cpu" if values is not None else next(model.parameters()).device
        model.register_buffer(MARK, torch.zeros(1, dtype=torch.int32, device=device))


def own_path(model: nn.Module, path: str) -> str:
    """Return a path of the decoder with a head as it is in `model`, which may be the body alone."""
    prefix = getattr(model, "base_model_prefix", "")
    if prefix and not hasattr(model, prefix) and path.startswith(f"{prefix}."):
        return path.removeprefix(f"{prefix}.")
    return path


def pruned_twin(model: nn.Module, layout: Layout, values: Mapping[str, Tensor]) -> nn.Module:
    """Return the pruned decoder beside the dense one; uncut tensors are shared, `model` is not changed."""
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    shape_modules(twin, layout, values)
    if hasattr(twin, "tie_weights"):
        twin.tie_weights()  # type: ignore[operator]
    return twin


def _find(model: nn.Module, path: str) -> str | None:
    """Return where a module of the layout is, or None where it is part of a head that `model` lacks."""
    own = own_path(model, path)
    try:
        model.get_submodule(own)
    except AttributeError:
        if own == path and own_path(model, f"{getattr(model, 'base_model_prefix', '')}.x") == "x":
            return None
        raise PlanMismatchError(
            "the layout names a module that this decoder does not have",
            where=path,
            hint="config.json must be the one that was written with the weights",
        ) from None
    return own


def _shape(
    model: nn.Module, own: str, path: str, layout: ModuleLayout, values: Mapping[str, Tensor] | None
) -> None:
    module = model.get_submodule(own)
    for name, shape in layout.shapes.items():
        old = module._parameters.get(name)
        if old is None:
            raise PlanMismatchError("the layout names a parameter that is none", where=f"{path}.{name}")
        if values is not None and f"{path}.{name}" not in values:
            continue  # a tied weight, which the module that it is kept under has
        value = _empty(old, shape) if values is None else values[f"{path}.{name}"]
        module._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    for name, size in layout.sizes.items():
        held = vars(module).get(name)
        if isinstance(held, tuple) and len(held) == 1:
            setattr(module, name, (size,))
        elif isinstance(held, int):
            setattr(module, name, size)
        else:
            raise PlanMismatchError("the layout names a size that the module has not", where=f"{path}.{name}")
    device = next(chain(module.parameters(), model.parameters())).device

    def index(name: str) -> Tensor | None:
        if name not in layout.indices:
            return None
        if values is not None:
            return values[f"{path}.{name}"].to(device)
        features, kept = layout.indices[name]
        return empty_index(features if name == WRITE else kept, device)

    selection = index(SELECT)
    if selection is not None:
        selecting(module, selection)
    if layout.wraps:
        parent, _, leaf = own.rpartition(".")
        wrapped = PrunedModule(module, index(READ), index(WRITE), padded=layout.padded)
        model.get_submodule(parent)._modules[leaf] = wrapped


def _empty(old: nn.Parameter, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=old.dtype, device=old.device)


def _keep_buffer(model: nn.Module, path: str) -> None:
    """Make a derived buffer part of the state: its stored value is not what the config gives."""
    owner, _, name = own_path(model, path).rpartition(".")
    try:
        module = model.get_submodule(owner)
    except AttributeError:
        return
    module._non_persistent_buffers_set.discard(name)
