"""Load linear layers whose weights a folder stores in 8 or 4 bits.

empty parameters like the stored tensors → transformers reads them → a plain weight in the decoder's dtype
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import nn

from dispfx.errors import OutputError, PlanMismatchError
from dispfx.huggingface.building import own_path
from dispfx.quantization.stored_weights import WEIGHT, empty_tensors, weight_of

_DTYPE = "_dispfx_dtype"


def rounded_modules(model: nn.Module, section: dict[str, Any]) -> list[nn.Module]:
    """Return the modules of a decoder, or of its body, whose weights are rounded according to a section."""
    modules = dict(model.named_modules())
    paths = (section.get("rounded") or {}).get("layers", ())
    return [modules[own] for own in (own_path(model, path) for path in paths) if own in modules]


def require_form_of_files(files: Sequence[str] | None, section: dict[str, Any]) -> None:
    """Refuse a config of plain weights with files of rounded ones, and the other way round.

    transformers would make up every layer that it does not find.

    Raises:
        PlanMismatchError: if they do not belong together.
    """
    stored: set[str] = set()
    for file in files or ():
        if Path(file).suffix == ".safetensors":
            with safe_open(file, framework="pt") as opened:
                stored.update(opened.keys())
    layers = (section.get("rounded") or {}).get("layers", ())
    scales = {name for name in stored if name.endswith(f".{WEIGHT}_scale")}
    if stored and bool(scales) != bool(layers):
        held = "rounded" if scales else "plain"
        raise PlanMismatchError(
            f"the files hold {held} weights, and the config is that of another folder",
            where=str(Path(str((files or [""])[0])).parent),
            hint="load the folder without a config of your own",
        )


def make_room(module: nn.Module, section: dict[str, Any]) -> None:
    """Replace the weight of a linear layer by parameters of the shapes and dtypes of the stored tensors."""
    weight = module._parameters.pop(WEIGHT)
    assert weight is not None
    vars(module)[_DTYPE] = weight.dtype
    for name, room in empty_tensors(section["rounded"]["scheme"], weight.detach()).items():
        module.register_parameter(name, nn.Parameter(room, requires_grad=False))


def require_held(model: nn.Module, modules: Sequence[nn.Module], section: dict[str, Any]) -> None:
    """Refuse rounded weights that transformers has left on disk or in main memory for later.

    It would look for a tensor of the file under the name of the weight at every forward pass.

    Raises:
        OutputError: with what takes such a place.
    """
    places = set(getattr(model, "hf_device_map", {}).values()) & {"disk", "cpu"}
    if places and any(one.is_meta for module in modules for one in module.parameters()):
        raise OutputError(
            f"weights of {section['rounded']['scheme']} cannot be offloaded, and device_map puts some on "
            f"{' and '.join(sorted(places))}",
            hint="load all of them on one device, or load the folder that they were rounded from, "
            "which can be offloaded",
        )


def fill_weight(module: nn.Module, section: dict[str, Any]) -> None:
    """Replace the stored tensors of a linear layer, which transformers has read, by its weight.

    Raises:
        DataError: if compressed-tensors is not installed.
    """
    scheme, dtype = section["rounded"]["scheme"], vars(module).pop(_DTYPE)
    names = {name for name in module._parameters if name.startswith(WEIGHT)}
    read = {name: module._parameters.pop(name) for name in names}
    held = {name: tensor.detach() for name, tensor in read.items() if tensor is not None}
    module.register_parameter(WEIGHT, nn.Parameter(weight_of(scheme, held, dtype)))
