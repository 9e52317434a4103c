"""The objective of learning: next-token loss + λ · budget loss.

Legend: B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

NO_TARGET = -100


def next_tokens(ids_BT: Tensor, separator: int | None = None) -> Tensor:
    """Return the next token for every token, and NO_TARGET for the last one of a sequence.

    With a `separator`, which ends a document, the first token of the next document is not a target.
    """
    targets_BT = torch.full_like(ids_BT, NO_TARGET)
    targets_BT[:, :-1] = ids_BT[:, 1:]
    return targets_BT if separator is None else targets_BT.masked_fill(ids_BT == separator, NO_TARGET)


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor, separator: int | None = None) -> Tensor:
    """Return the mean cross entropy of every token given the tokens before it, in nats, as float32.

    With a `separator`, which ends a document, only tokens of the same document count.
    """
    if separator is None:
        return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())
    targets_BT = next_tokens(ids_BT, separator)[:, :-1]
    total = F.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(),
        targets_BT.flatten(),
        ignore_index=NO_TARGET,
        reduction="sum",
    )
    return total / (targets_BT != NO_TARGET).sum().clamp_min(1)


def budget_loss(left: Tensor, target: float) -> Tensor:
    """Return R = log(max(T(s), keep · T) / min(T(s), keep · T)) (arXiv 2410.11988, section 3.3).

    Zero exactly when the budget is met, with the same scale above and below it.

    Args:
        left: T(s), of any shape.
        target: keep · T, the number of parameters that should remain.
    """
    left = left.clamp_min(1.0)  # every bit of a sample can be zero
    # Difference of logarithms: exact in float64, and the gradient is ±1 / T(s).
    # Filled on the device: a CUDA graph cannot hold a copy from the host.
    bound = torch.full_like(left, target)
    return torch.log(torch.maximum(left, bound)) - torch.log(torch.minimum(left, bound))


def eased(loss: Tensor, width: float) -> Tensor:
    """Return a budget loss that is quadratic below `width` (Huber 1964).

    R² / (2 · width) if R is below the width, otherwise R − width / 2: the gradient grows with the distance
    from the budget and is constant far from it.  Unchanged if the width is zero.

    Args:
        loss: R, of any shape.
    """
    if width == 0.0:
        return loss
    return torch.where(loss < width, loss.square() / (2.0 * width), loss - width / 2.0)
