"""The indices of a pruned decoder must stay those that it was made with.

An index is an integer buffer, so a script that handles all tensors of a decoder changes it like a weight: a
cast to bfloat16 rounds what is above 256, and a moving average cuts 300 down to 299.  Other features would be
gathered then, without an error.

1. A module keeps a digest of each of its indices.
2. A state dict is refused if an index in it does not hold integers, or holds other ones.
3. An index is compared with its digest at its first use, and where torch says that it was written since.
   After eight writes that changed nothing, only the 16th, 32nd and so on are compared: a comparison waits for
   the GPU, and DistributedDataParallel writes every buffer in every forward pass.
4. Where a forward pass is traced or compiled there are no values to compare.
"""

import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dispfx.errors import PlanMismatchError

_DIGESTS = "_dispfx_digests"
_ALWAYS_COMPARED = 8
_HINT = "cast or average floating-point tensors only (not with use_buffers=True), and load the decoder again"
# (version, writes) of what was compared.  Copies of a module have tensors of their own.
_compared = WeakTensorKeyDictionary()


def remember_index(module: nn.Module, name: str, index: Tensor) -> None:
    """Let a module know the digest of its index, int32 (K,), and refuse other values from a state dict."""
    digests = vars(module).get(_DIGESTS)
    if digests is None:
        digests = {}
        setattr(module, _DIGESTS, digests)
        module.register_load_state_dict_pre_hook(_require_in_state_dict)
    if not index.is_meta:
        digests[name] = _digest(index)


def require_unchanged(module: nn.Module, name: str, index: Tensor) -> None:
    """Pass if an index has the values that its module was made with (rule 3).

    Raises:
        PlanMismatchError: otherwise.
    """
    if torch.compiler.is_compiling() or type(index) is not Tensor or index.is_meta:
        return
    version = 0 if index.is_inference() else index._version
    compared: Any = _compared.get(index, (None, -1))
    known, writes = compared
    if known == version or (index.is_cuda and torch.cuda.is_current_stream_capturing()):
        return
    writes += 1
    if writes <= _ALWAYS_COMPARED or writes & (writes - 1) == 0:
        _require_same(module, name, index, f"{type(module).__name__}.{name}")
    _compared[index] = (version, writes)


def _require_in_state_dict(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    for name in vars(module)[_DIGESTS]:
        given = state_dict.get(f"{prefix}{name}")
        if isinstance(given, Tensor) and not given.is_meta:
            _require_same(module, name, given, f"{prefix}{name}")


def _require_same(module: nn.Module, name: str, index: Tensor, where: str) -> None:
    expected = vars(module).get(_DIGESTS, {}).get(name)
    if index.is_floating_point() or index.is_complex():
        raise PlanMismatchError(
            f"this index of a pruned module must hold integers, and it holds {index.dtype}",
            where=where,
            hint=_HINT,
        )
    if expected is not None and _digest(index) != expected:
        raise PlanMismatchError(
            "this index of a pruned module is not the one that the decoder was made with, so other features "
            "would be gathered",
            where=where,
            hint=_HINT,
        )


def _digest(index: Tensor) -> str:
    values = index.detach().to("cpu", torch.int32).contiguous()
    return hashlib.sha256(values.numpy().tobytes()).hexdigest()
