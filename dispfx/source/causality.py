"""Check that a model predicts each token from earlier tokens only; other models are rejected.

The class name is not enough: an encoder's checkpoint loads into a causal class without a missing weight.  So
the last token is changed, and the logits before it must not change.

B batch, T tokens, V vocabulary
"""

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import logits_of
from dispfx.errors import CaptureError, SourceError

# Relative to the largest logit.  Equal prefixes may round differently where experts are grouped by
# token (3e-7 in float32); an untrained bidirectional layer of the usual scale moves them by 4e-4.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}

# Ids 0 and 1 exist in every vocabulary.  The last position differs.
_IDS_BT = ((1, 0, 1, 1, 0, 1, 0, 1), (1, 0, 1, 1, 0, 1, 0, 0))


def check_causal(model: nn.Module, name: str, device: torch.device) -> None:
    """Check that `model` maps token ids to logits, each from earlier tokens only.

    Raises:
        SourceError: if it cannot run, does not return logits, or uses later tokens.
    """
    first_TV, second_TV = (_logits(model, torch.tensor([ids], device=device), name)[0] for ids in _IDS_BT)
    before_TV = first_TV[:-1].double()
    change = (before_TV - second_TV[:-1].double()).abs().max()
    if bool(change > _TOLERANCE.get(first_TV.dtype, 3e-2) * before_TV.abs().max()):
        raise SourceError(
            "a decoder must predict each token from the tokens before it, "
            "and this model's logits change with a later token",
            where=name,
            hint="encoders and models with bidirectional attention cannot be compiled",
        )


def _logits(model: nn.Module, ids_BT: Tensor, name: str) -> Tensor:
    try:
        with torch.no_grad():
            output = model(ids_BT)
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        raise SourceError(
            f"the model cannot run on token ids (batch, tokens): {type(error).__name__}: {message}",
            where=name,
            hint="its forward must take int64 token ids first and need nothing else",
        ) from error
    try:
        return logits_of(output, ids_BT)
    except CaptureError as error:
        found = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise SourceError(
            f"the model must return logits {(*ids_BT.shape, 'vocabulary')} for token ids "
            f"{tuple(ids_BT.shape)}, but returned {found}",
            where=name,
            hint="a decoder with a language-model head is needed",
        ) from error
