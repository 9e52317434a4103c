"""The next-token loss of a decoder's head, without ever holding the logits of a whole batch.

    loss = Σ over chunks of rows of cross_entropy(epilogue(x_rows), next token)  /  number of next tokens

The head's weights are frozen, so the gradient of x follows chunk by chunk in the forward pass already:

    ∂loss/∂logits = (softmax(logits) − one-hot(next token)) / number of next tokens

(the gradient of a cross entropy), and what autograd keeps is one gradient of the shape of x.

Legend: B batch, T tokens, D width of the stream, R rows of a chunk, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.learning.divergence import even_rows
from dispfx.learning.objective import NO_TARGET

# Logits of a chunk: 64 Mi numbers are 128 MiB in bfloat16, rows enough for fast products.
LARGEST_CHUNK = 64 * 2**20

Head = Callable[[Tensor], Tensor]
ChunkLoss = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def chunk_rows(vocabulary: int) -> int:
    """Return the number of rows of a chunk."""
    return max(128, LARGEST_CHUNK // vocabulary)


def chunked_loss(
    head: Head, x_BTD: Tensor, targets_BT: Tensor, rows: int, chunk_loss: ChunkLoss | None = None
) -> Tensor:
    """Return the mean cross entropy in nats over all targets, as float32; differentiable in x.

    Args:
        head: (1, R, D) -> (1, R, V), each row by itself, with frozen weights.
        targets_BT: token ids, or NO_TARGET.
        rows: R.
        chunk_loss: `loss_and_gradient`, or the same compiled.
    """
    calls = (head, chunk_loss or loss_and_gradient, rows)
    if x_BTD.requires_grad and torch.is_grad_enabled():
        return _ChunkedLoss.apply(x_BTD, targets_BT, calls)  # type: ignore[return-value]
    return _in_chunks(x_BTD, targets_BT, calls, None)


def loss_and_gradient(logits_RV: Tensor, targets_R: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale · Σ cross entropy (float32), and its gradient in the dtype of the logits."""
    wide_RV = logits_RV.float()
    total_R1 = wide_RV.logsumexp(-1, keepdim=True)
    counts_R1 = (targets_R != NO_TARGET).unsqueeze(1) * scale
    picked_R1 = wide_RV.gather(1, targets_R.clamp_min(0).unsqueeze(1))
    loss = ((total_R1 - picked_R1) * counts_R1).sum()
    hit_RV = torch.arange(wide_RV.shape[1], device=wide_RV.device) == targets_R.unsqueeze(1)
    gradient_RV = ((wide_RV - total_R1).exp() - hit_RV.float()) * counts_R1
    return loss, gradient_RV.to(logits_RV.dtype)


def _in_chunks(
    x_BTD: Tensor, targets_BT: Tensor, calls: tuple[Head, ChunkLoss, int], gradient_BTD: Tensor | None
) -> Tensor:
    head, chunk_loss, rows = calls
    flat, targets = x_BTD.detach().flatten(0, 1), targets_BT.flatten()
    rows = even_rows(len(flat), rows)
    scale = (targets != NO_TARGET).sum().clamp_min(1).float().reciprocal()
    total = torch.zeros((), device=x_BTD.device)
    for start in range(0, len(flat), rows):
        part = slice(start, start + rows)
        into_RD = None if gradient_BTD is None else gradient_BTD.flatten(0, 1)[part]
        total = total + _of_chunk(head, chunk_loss, flat[part], targets[part], scale, into_RD)
    return total


def _of_chunk(
    head: Head,
    chunk_loss: ChunkLoss,
    x_RD: Tensor,
    targets_R: Tensor,
    scale: Tensor,
    into_RD: Tensor | None,
) -> Tensor:
    """Return the loss of a chunk, and write its gradient where one is wanted.

    All else that it computed is freed with it: a chunk's logits are as large as what a decoder keeps.
    """
    chunk_1RD = x_RD.unsqueeze(0).requires_grad_(into_RD is not None)
    with torch.set_grad_enabled(into_RD is not None):
        logits_1RV = head(chunk_1RD)
    loss, gradient_RV = chunk_loss(logits_1RV.detach().squeeze(0), targets_R, scale)
    if into_RD is not None:
        (back_1RD,) = torch.autograd.grad(logits_1RV, chunk_1RD, gradient_RV.unsqueeze(0))
        into_RD.copy_(back_1RD.squeeze(0))
    return loss


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, targets_BT: Tensor, calls: tuple[Head, ChunkLoss, int]) -> Tensor:
        gradient_BTD = torch.empty(x_BTD.shape, dtype=x_BTD.dtype, device=x_BTD.device)
        loss = _in_chunks(x_BTD, targets_BT, calls, gradient_BTD)
        ctx.save_for_backward(gradient_BTD)
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (gradient_BTD,) = ctx.saved_tensors
        return gradient_BTD * grads[0].to(gradient_BTD.dtype), None, None
