"""The objective of learning: loss of the predictions + λ · budget loss.

    loss of the predictions = a · cross entropy with the next token + b · KL(dense decoder ‖ under masks)

a and b are named by the objective: `ce`, `kl` or `mix`.

Legend: B batch, T tokens, V vocabulary, N features of all sites, S samples of the masks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dispfx.learning.divergence import Predictions, kl_divergence

NO_TARGET = -100


@dataclass(frozen=True)
class Objective:
    """Weights of the two parts of a loss.

    Args:
        cross_entropy: of that with the next token.
        divergence: of KL(dense ‖ under masks), forward KL as in distillation (arXiv 1503.02531).
    """

    cross_entropy: float
    divergence: float


NEXT_TOKEN = Objective(1.0, 0.0)
OBJECTIVES: Mapping[str, Objective] = {
    "ce": NEXT_TOKEN,
    "kl": Objective(0.0, 1.0),
    "mix": Objective(0.5, 0.5),
}


class MaskedLosses(ABC):
    """The losses of a decoder under masks (N,) or (S, N) of all sites; means over tokens, in nats."""

    objective: Objective = NEXT_TOKEN

    def loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return what is learned from a batch."""
        return self._loss(ids_BT, masks, self.objective, shift=0)

    def next_token_loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the cross entropy with the next token."""
        return self._loss(ids_BT, masks, NEXT_TOKEN, shift=0)

    def trial_loss(self, ids_BT: Tensor, masks: Tensor) -> Tensor:
        """Return the loss with the dense decoder's predictions for the token before.

        Two ways to compute a loss are compared on it: near the dense decoder the divergence from it is little
        more than rounding.
        """
        return self._loss(ids_BT, masks, self.objective, shift=1)

    @abstractmethod
    def _loss(self, ids_BT: Tensor, masks: Tensor, objective: Objective, shift: int) -> Tensor:
        """Return a loss; the dense decoder's predictions are shifted by so many tokens."""


def loss_of_logits(
    objective: Objective,
    logits: Callable[[bool], Tensor],
    ids_BT: Tensor,
    *,
    separator: int | None = None,
    shift: int = 0,
) -> Tensor:
    """Return a loss from whole logits.

    Args:
        logits: (B, T, V) under the masks, or those of the dense decoder where it is given True.
        separator: token that ends a document, as for `next_tokens`.
        shift: as for `MaskedLosses`.
    """
    dense_BTV = _of_dense(objective, logits, shift)
    logits_BTV = logits(False)
    parts = []
    if objective.cross_entropy:
        parts.append(objective.cross_entropy * next_token_loss(logits_BTV, ids_BT, separator))
    if dense_BTV is not None:
        where_BT = next_tokens(ids_BT, separator) != NO_TARGET
        divergence = kl_divergence(Predictions(dense_BTV), Predictions(logits_BTV), where_BT)
        parts.append(objective.divergence * divergence)
    return torch.stack(parts).sum()


def _of_dense(objective: Objective, logits: Callable[[bool], Tensor], shift: int) -> Tensor | None:
    if not objective.divergence:
        return None
    with torch.no_grad():
        return logits(True).roll(shift, 1)


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


@dataclass(frozen=True, eq=False)
class Term:
    """A further term of the budget loss, of the same form as that of the parameters.

    Args:
        count: masks (S, N) of all groups -> what is left, (S,).
        target: what should be left.
    """

    count: Callable[[Tensor], Tensor]
    target: float

    def loss(self, masks: Tensor) -> Tensor:
        """Return the budget loss of masks, (S,)."""
        left = self.count(masks)
        # Filled on the device: a CUDA graph cannot hold a copy from the host.
        return budget_loss(left, left.new_full((1,), self.target))


def budget_loss(left: Tensor, target: Tensor) -> Tensor:
    """Return R = log(max(T(s), keep · T) / min(T(s), keep · T)) (arXiv 2410.11988, section 3.3).

    Zero exactly when the budget is met, with the same scale above and below it.

    Args:
        left: T(s), (S,), or (S, P) for P costs of the user.
        target: keep · T, the number of parameters that should remain, (S,) or (1,).
    """
    left = left.clamp_min(1.0)  # every bit of a sample can be zero
    # Difference of logarithms: exact in float64, and the gradient is ±1 / T(s).
    bound = target.to(left.dtype).view(-1, *[1] * (left.dim() - 1)).expand_as(left)
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
