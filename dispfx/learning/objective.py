"""What learning minimises: next-token loss + λ · budget loss.

Legend: B batch, T tokens, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the mean cross entropy of every token given those before it, in nats, as float32."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def budget_loss(left: Tensor, target: float) -> Tensor:
    """Return R = log(max(T(s), keep · T) / min(T(s), keep · T)) (arXiv 2410.11988, section 3.3).

    Zero exactly when the budget is met, and of one scale above and below it.

    Args:
        left: T(s), of any shape.
        target: keep · T, the parameters that should be left.
    """
    left = left.clamp_min(1.0)  # every bit of a sample can be zero
    # The logarithm of each, not of the ratio: float64 holds both, and the gradient is ±1 / T(s).
    # Filled on the device: a CUDA graph cannot hold a copy from the host.
    bound = torch.full_like(left, target)
    return torch.log(torch.maximum(left, bound)) - torch.log(torch.minimum(left, bound))
