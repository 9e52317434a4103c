"""Agreement of two decoders on a text: Kullback-Leibler divergence and top-1 agreement.

    KL = 1/N · Σ_t Σ_v p(v) · (log p(v) − log q(v))        p the dense decoder, q the pruned one, in nats

Windows are those of `dispfx.quality.perplexity`; every position that predicts a token counts once.

Shape legend: B batch, T tokens, V vocabulary, N positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispfx.errors import DataError
from dispfx.quality.logits_by_rows import by_rows
from dispfx.quality.perplexity import first_predicted, windows_of

# KL is computed in float64.
_DOUBLE_BYTES = 8


@dataclass(frozen=True)
class Agreement:
    """Agreement of two decoders.

    Args:
        kl_nats: mean KL divergence of the pruned decoder's prediction from the dense one's.
        top1: share of positions with the same likeliest token.
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
        context, windows: as for `dispfx.quality.perplexity.perplexity`.
        bos: tokens that every window begins with.

    Raises:
        DataError: if the vocabularies differ or there is nothing to predict.
    """
    divergence, same, count, first = 0.0, 0, 0, first_predicted(bos)
    with torch.no_grad():
        for ids_BT in windows_of(tokens, context, windows, 1, bos):
            ids_BT = ids_BT.to(device=device, dtype=torch.int64)
            place = 1
            chunks = (by_rows(decoder, ids_BT).chunks(ids_BT, _DOUBLE_BYTES) for decoder in (dense, pruned))
            for p_BRV, q_BRV in zip(*chunks, strict=False):
                if p_BRV.shape[-1] != q_BRV.shape[-1]:
                    raise DataError(
                        f"the decoders have vocabularies of {p_BRV.shape[-1]} and {q_BRV.shape[-1]} tokens",
                        hint="--dense is the MODEL that the folder was compiled from",
                    )
                rows = slice(max(0, first - place), max(0, ids_BT.shape[1] - place))
                place += p_BRV.shape[1]
                p_NV, q_NV = (logits_BRV[:, rows].flatten(0, 1) for logits_BRV in (p_BRV, q_BRV))
                p, q = (functional.log_softmax(logits_NV.double(), -1) for logits_NV in (p_NV, q_NV))
                divergence += float(functional.kl_div(q, p, reduction="sum", log_target=True))
                same += int((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
                count += len(p_NV)
                del p_BRV, q_BRV, p_NV, q_NV, p, q  # before the next chunks are made
    if not count:
        raise DataError("the text must have 2 tokens or more to predict one")
    return Agreement(divergence / count, same / count, count)
