"""How alike two decoders predict: Kullback-Leibler divergence and top-1 agreement on one text.

    KL = 1/N · Σ_t Σ_v p(v) · (log p(v) − log q(v))        p the dense decoder, q the pruned one, in nats

Windows are those of `dispfx.measure.perplexity`; every position that predicts a token counts once.

Shape legend: B batch, T tokens, V vocabulary, N positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispfx.errors import DataError
from dispfx.measure.perplexity import first_predicted, windows_of

_CHUNK_ROWS = 256


@dataclass(frozen=True)
class Agreement:
    """How alike two decoders predict.

    Args:
        kl_nats: mean KL of the pruned decoder's prediction from the dense one's.
        top1: share of positions at which both find the same token likeliest.
        tokens: positions that were compared.
    """

    kl_nats: float
    top1: float
    tokens: int


def agreement(
    dense: Callable[[Tensor], Any],
    pruned: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    context: int,
    windows: int | None = None,
    device: torch.device | str = "cpu",
    bos: tuple[int, ...] = (),
) -> Agreement:
    """Compare two decoders of one vocabulary on a text.

    Args:
        dense, pruned: token ids (B, T) int64 to logits (B, T, V) or an output with `.logits`.
        tokens: (N,) token ids, two or more.
        context, windows: as for `dispfx.measure.perplexity.perplexity`.
        bos: tokens that every window begins with.

    Raises:
        DataError: if the vocabularies differ or there is nothing to predict.
    """
    divergence, same, count, first = 0.0, 0, 0, first_predicted(bos)
    with torch.no_grad():
        for ids_BT in windows_of(tokens, context, windows, 1, bos):
            ids_BT = ids_BT.to(device=device, dtype=torch.int64)
            p_NV, q_NV = (_predictions(decoder, ids_BT, first) for decoder in (dense, pruned))
            if p_NV.shape != q_NV.shape:
                raise DataError(
                    f"the decoders have vocabularies of {p_NV.shape[-1]} and {q_NV.shape[-1]} tokens",
                    hint="--dense is what the folder was compiled from",
                )
            for start in range(0, len(p_NV), _CHUNK_ROWS):
                p, q = (
                    functional.log_softmax(logits_NV[start : start + _CHUNK_ROWS].double(), -1)
                    for logits_NV in (p_NV, q_NV)
                )
                divergence += float(functional.kl_div(q, p, reduction="sum", log_target=True))
            same += int((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
            count += len(p_NV)
    if not count:
        raise DataError("the text must have 2 tokens or more to predict one")
    return Agreement(divergence / count, same / count, count)


def _predictions(decoder: Callable[[Tensor], Any], ids_BT: Tensor, first: int) -> Tensor:
    """Return (N, V) logits of the positions that predict a token from place `first` of the window."""
    output = decoder(ids_BT)
    logits_BTV = output if isinstance(output, Tensor) else output.logits
    return logits_BTV[:, first - 1 : -1].flatten(0, 1)
