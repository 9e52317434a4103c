"""From a layout to a model whose modules have the pruned shapes.

`shape_modules` changes a model that may be on the meta device: `from_pretrained` then reads the weights
straight into the small shapes, and dense weights never exist.  `pruned_twin` makes a model with values from
a dense one, and shares all uncut tensors with it.
"""

import copy
from collections.abc import Collection, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import PlanMismatchError
from dispfx.huggingface.layout import MARK, WRITE, Layout, ModuleLayout
from dispfx.huggingface.modules import empty_index, make_gathering

# Before the name of a number that a module reads from its config.
CONFIG = "config."


class ConfigOfFewerHeads:
    """A config as an attention sees it whose own number of heads is smaller; all else is the decoder's.

    Args:
        config: of the decoder, or another one of these.
        name, number: what this attention has another number of.
    """

    def __init__(self, config: Any, name: str, number: int):
        vars(self).update({"_dense": config, name: number})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dense" not in vars(self):
            raise AttributeError(name)  # while it is copied or unpickled
        return getattr(self._dense, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._dense, name, value)


def shape_modules(model: nn.Module, layout: Layout, values: Mapping[str, Tensor] | None = None) -> None:
    """Give the modules of `model` the shapes of the layout, and empty tensors or the given values.

    Args:
        model: the dense decoder, or its body with another head or without one.
        layout: with the paths of the decoder that has the head.
        values: cut parameters and index buffers, by their path in the dense decoder.

    Raises:
        PlanMismatchError: if the model lacks a module or parameter that the layout names.
    """
    # Walked once: there are hundreds of modules, and every search for one walks from the top.
    modules = dict(model.named_modules(remove_duplicate=False))
    found = {path: modules.get(own_path(model, path)) for path in layout.modules}
    _require_body(model, found)
    width = _embedded_width(model)
    for path, module in found.items():
        if module is not None:
            _shape(model, module, path, layout.modules[path], values)
    kept = _embedded_width(model)
    if width is not None and kept is not None and width != kept:
        _shape_new_heads(model, width, kept, {id(module) for module in found.values()})
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
    """Return the pruned decoder for a dense one; uncut tensors are shared, and `model` is not changed."""
    tensors = chain(model.parameters(), model.buffers())
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})
    shape_modules(twin, layout, values)
    if hasattr(twin, "tie_weights"):
        twin.tie_weights()  # type: ignore[operator]
    return twin


def _require_body(model: nn.Module, found: Mapping[str, nn.Module | None]) -> None:
    """Require every module of the layout but those of a head, which a model may lack or have another of."""
    body = f"{getattr(model, 'base_model_prefix', '')}."
    missing = [path for path, module in found.items() if module is None]
    kind = type(model).__name__
    if missing and len(missing) == len(found):
        raise PlanMismatchError(
            f"{kind} has none of the pruned modules: its body has another name than the checkpoint's",
            where=missing[0],
            hint="load the folder with another class; all weights of this one would be random",
        )
    if required := [path for path in missing if path.startswith(body)]:
        raise PlanMismatchError(
            f"the layout names a module that {kind} does not have",
            where=required[0],
            hint="config.json must be the one that was written with the weights",
        )


def _embedded_width(model: nn.Module) -> int | None:
    """Return the width of the token embedding, which is that of the residual stream where it is cut."""
    find = getattr(model, "get_input_embeddings", None)
    weight = getattr(find() if find else None, "weight", None)
    return None if weight is None else weight.shape[-1]


def _shape_new_heads(model: nn.Module, full: int, kept: int, known: Collection[int]) -> None:
    """Let linear layers outside of the body, which the layout does not know, take the narrower stream."""
    body = set(getattr(model, "base_model", model).modules())
    for module in set(model.modules()) - body:
        if isinstance(module, nn.Linear) and module.in_features == full and id(module) not in known:
            old = module.weight
            module.weight = nn.Parameter(old.new_empty((len(old), kept)), requires_grad=old.requires_grad)
            module.in_features = kept


def _shape(
    model: nn.Module, module: nn.Module, path: str, layout: ModuleLayout, values: Mapping[str, Tensor] | None
) -> None:
    """Give one module its shapes and its indices."""
    for name, shape in layout.shapes.items():
        old = module._parameters.get(name)
        if old is None:
            raise PlanMismatchError(
                "the layout names a parameter that does not exist", where=f"{path}.{name}"
            )
        if values is not None and f"{path}.{name}" not in values:
            continue  # a tied weight, which the module that it is kept under has
        value = _empty(old, shape) if values is None else values[f"{path}.{name}"]
        module._parameters[name] = nn.Parameter(value, requires_grad=old.requires_grad)
    for name, size in layout.sizes.items():
        number = name.removeprefix(CONFIG)
        held = vars(module).get("config" if name.startswith(CONFIG) else name)
        if name.startswith(CONFIG) and isinstance(getattr(held, number, None), int):
            vars(module)["config"] = ConfigOfFewerHeads(held, number, size)
        elif isinstance(held, tuple) and len(held) == 1:
            setattr(module, name, (size,))
        elif isinstance(held, int):
            setattr(module, name, size)
        else:
            raise PlanMismatchError("the layout names a size that does not exist", where=f"{path}.{name}")
    device = next(chain(module.parameters(), model.parameters())).device
    indices = {
        name: empty_index(features if name == WRITE else kept, device)
        if values is None
        else values[f"{path}.{name}"].to(device)
        for name, (features, kept) in layout.indices.items()
    }
    make_gathering(module, indices, padded=layout.padded, filled=values is not None)


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
