"""Check before the capture that all weights are finite."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from dispfx.errors import SourceError
from dispfx.words.option_names import option

_SHOWN = 3


def require_finite_weights(model: nn.Module) -> None:
    """Raise if a parameter contains NaN or infinity; -inf is allowed, because masks contain it.

    Every weight is read once, without a copy.

    Raises:
        SourceError: with the names of the weights.
    """
    found = [(path, tensor) for path, tensor in model.named_parameters() if not _is_finite(tensor)]
    if found:
        path, tensor = found[0]
        raise SourceError(
            f"weights must be finite: {_counted(tensor)} in {path}{_others(name for name, _ in found[1:])}",
            where=path,
            hint="the checkpoint is damaged, or its values overflow: copy it again, "
            f"or use {option('dtype', 'float32')}",
        )


def require_values(tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Raise if the weights of a decoder are on the meta device, where it can only be inspected.

    Args:
        tensors: the weights, with their paths.

    Raises:
        SourceError: with the first of them.
    """
    without = next((path for path, tensor in tensors if tensor.is_meta), None)
    if without is not None:
        raise SourceError(
            "the weights must have values, and are on the meta device",
            where=without,
            hint="load the decoder whole, without offloading; without values it can only be inspected",
        )


def _is_finite(tensor: Tensor) -> bool:
    # The capture rejects these.
    if isinstance(tensor, UninitializedParameter) or tensor.layout is not torch.strided:
        return True
    if tensor.is_meta or not tensor.is_floating_point() or not tensor.numel():
        return True
    value = tensor.detach()
    least, most = torch.aminmax(value if value.dtype.itemsize > 1 else value.float())
    return not bool(least.isnan() | most.isposinf())


def _counted(tensor: Tensor) -> str:
    value = tensor.detach().float()
    counts = {"NaN": int(value.isnan().sum()), "infinity": int(value.isinf().sum())}
    return " and ".join(f"{count:,} times {name}" for name, count in counts.items() if count)


def _others(names: Iterable[str]) -> str:
    further = list(names)
    shown = ", ".join(further[:_SHOWN]) + (", …" if len(further) > _SHOWN else "")
    return f"; also in {shown}" if further else ""
