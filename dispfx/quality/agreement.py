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

from dispfx.ir.logit_errors import require_one_vocabulary
from dispfx.quality.logits_by_rows import LogitsByRows, by_rows
from dispfx.quality.perplexity import (
    Perplexity,
    TextFacts,
    check_measurable,
    first_predicted,
    negative_log_likelihood,
    protocol_of,
    running_on,
    windows_of,
)

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


@dataclass(frozen=True)
class Comparison:
    """Two decoders on one text, under one protocol."""

    dense: Perplexity
    pruned: Perplexity
    agreement: Agreement


def compare_on_text(
    dense: Callable[[Tensor], Any],
    pruned: Callable[[Tensor], Any],
    tokens: Tensor,
    *,
    context: int,
    windows: int | None = None,
    device: torch.device | str = "cpu",
    text: TextFacts | None = None,
) -> Comparison:
    """Measure perplexity, KL divergence and top-1 agreement of two decoders of one vocabulary in one pass.

    Args:
        dense, pruned: token ids (B, T) int64 to logits (B, T, V) or an output with `.logits`.
        tokens: (N,) token ids of the whole text.
        context, windows, device, text: as for `dispfx.quality.perplexity.perplexity`.

    Raises:
        DataError: if the vocabularies differ, there is nothing to predict, or a decoder does not run on
            windows of `context` tokens.
    """
    text = text or TextFacts()
    check_measurable(tokens, context, windows, text)
    likelihoods, divergence = [0.0, 0.0], 0.0
    same, count, used, longest, first = 0, 0, 0, 0, first_predicted(text.bos)
    ways: list[LogitsByRows] = []
    with running_on(context, text), torch.no_grad():
        for ids_BT in windows_of(tokens, context, windows, 1, text.bos):
            ids_BT = ids_BT.to(device=device, dtype=torch.int64)
            place = 1
            used += 1
            longest = max(longest, ids_BT.shape[1])
            ways = ways or [by_rows(decoder, ids_BT) for decoder in (dense, pruned)]
            chunks = (way.chunks(ids_BT, _DOUBLE_BYTES) for way in ways)
            for pair in zip(*chunks, strict=False):
                require_one_vocabulary(*pair)
                for index, logits_BRV in enumerate(pair):
                    likelihoods[index] += negative_log_likelihood(logits_BRV, ids_BT, place, first)
                rows = slice(max(0, first - place), max(0, ids_BT.shape[1] - place))
                place += pair[0].shape[1]
                p_NV, q_NV = (logits_BRV[:, rows].flatten(0, 1) for logits_BRV in pair)
                p, q = (functional.log_softmax(logits_NV.double(), -1) for logits_NV in (p_NV, q_NV))
                divergence += float(functional.kl_div(q, p, reduction="sum", log_target=True))
                same += int((p_NV.argmax(-1) == q_NV.argmax(-1)).sum())
                count += len(p_NV)
                del pair, logits_BRV, p_NV, q_NV, p, q  # before the next chunks are made
    protocol = protocol_of(text, longest, used, count)
    of_dense, of_pruned = (Perplexity.of(likelihood / count, protocol) for likelihood in likelihoods)
    return Comparison(of_dense, of_pruned, Agreement(divergence / count, same / count, count))
