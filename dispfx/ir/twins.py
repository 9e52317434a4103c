"""Frozen twins: a decoder's parameters as its programs own them, without gradients and in the same storage.

    decoder's parameter  ──  one twin  ──  every program captured from the decoder

A parameter has one twin however often it is captured, so whoever moves a weight can move all that hold it.
"""

from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

# Parameter → its twin, and twin → weak reference to its parameter: neither keeps the decoder alive.
_TWINS = WeakTensorKeyDictionary()
_ORIGINS = WeakTensorKeyDictionary()


def frozen_twin(parameter: nn.Parameter) -> nn.Parameter:
    """Return the parameter's twin; a new one where its values have been put elsewhere since the last."""
    twin = _TWINS.get(parameter)
    if twin is None or not _same_place(twin, parameter):
        twin = nn.Parameter(parameter.detach(), requires_grad=False)
        _TWINS[parameter], _ORIGINS[twin] = twin, TensorWeakRef(parameter)
    return twin


def move(twin: Tensor, values: Tensor) -> None:
    """Put values of the same shape and dtype in the place of a tensor's, and of those of its parameter.

    A parameter that was given other values in the meantime keeps those.
    """
    origin = _ORIGINS.get(twin)
    parameter = None if origin is None else origin()
    if parameter is not None and _same_place(parameter, twin):
        parameter.data = values
    twin.data = values


def _same_place(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers in the same storage."""
    alike = _layout(one) == _layout(other)
    return alike and (one.is_meta or one.data_ptr() == other.data_ptr())


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device
