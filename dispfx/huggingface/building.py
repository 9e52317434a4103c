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
    # Walked once: there are hundreds of modules, and every search for one walks from the top.
    modules = dict(model.named_modules(remove_duplicate=False))
    missing_prefix = headless_prefix(model)
    for path, module_layout in layout.modules.items():
        own = _find(modules, path, missing_prefix)
        if own is None:
            continue
        wrapper = _shape(model, modules[own], path, module_layout, values)
        if wrapper is not None:
            parent, _, leaf = own.rpartition(".")
            modules[parent]._modules[leaf] = wrapper
    for path in layout.buffers:
        _keep_buffer(model, path)
    if layout.marked:
        device = "cpu" if values is not None else next(model.parameters()).device
        model.register_buffer(MARK, torch.zeros(1, dtype=torch.int32, device=device))


def headless_prefix(model: nn.Module) -> str:
    """Return what paths of the decoder with a head begin with and those of `model`, its body, lack; or ""."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and not hasattr(model, prefix) else ""


def own_path(model: nn.Module, path: str) -> str:
    """Return a path of the decoder with a head as it is in `model`, which may be the body alone."""
    return path.removeprefix(headless_prefix(model))


def pruned_twin(model: nn.Module, layout: Layout, values: Mapping[str, Tensor]) -> nn.Module:
    """Return the pruned decoder beside the dense one; uncut tensors are shared, `model` is not changed."""
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    shape_modules(twin, layout, values)
    if hasattr(twin, "tie_weights"):
        twin.tie_weights()  # type: ignore[operator]
    return twin


def _find(modules: Mapping[str, nn.Module], path: str, missing_prefix: str) -> str | None:
    """Return where a module of the layout is, or None where it is part of a head that the model lacks."""
    own = path.removeprefix(missing_prefix)
    if own in modules:
        return own
    if own == path and missing_prefix:
        return None
    raise PlanMismatchError(
        "the layout names a module that this decoder does not have",
        where=path,
        hint="config.json must be the one that was written with the weights",
    )


def _shape(
    model: nn.Module, module: nn.Module, path: str, layout: ModuleLayout, values: Mapping[str, Tensor] | None
) -> PrunedModule | None:
    """Give one module its shapes, and return the one that is to stand around it, or None."""
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
    indices = layout.indices
    if not indices:
        return None
    device = next(chain(module.parameters(), model.parameters())).device
    made = {
        name: empty_index(features if name == WRITE else kept, device)
        if values is None
        else values[f"{path}.{name}"].to(device)
        for name, (features, kept) in indices.items()
    }
    if SELECT in made:
        selecting(module, made[SELECT])
    if not layout.wraps:
        return None
    return PrunedModule(module, made.get(READ), made.get(WRITE), padded=layout.padded)


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
