"""How far one decoder is from another: its predictions, and its residual stream.

The logits of a whole batch are never held.

    KL(p ‖ q) = mean over tokens of Σ_v p(v) · (log p(v) − log q(v))        p the teacher's, q the student's

Logits of both are made for a chunk of tokens at a time.  The gradient of a chunk follows in the forward pass
already,

    ∂KL/∂logits of q = (q − p) / number of tokens

so that autograd keeps one gradient of the shape of x, and one of each trained weight of the head.

    distance(t, s) = mean over values of the stream and tokens of |s − t|² / |t|²       t the teacher's

A pruned decoder keeps the width of the stream, so the two can be compared feature by feature, as hidden
states are in distillation (arXiv 1910.01108, 1909.10351).

Legend: B batch, T tokens, D width of the stream and of what the head reads, R rows of a chunk, V vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.ir.logit_errors import require_one_vocabulary

# Logits of a chunk of each decoder: 32 Mi numbers are 128 MiB in float32.
LARGEST_CHUNK = 32 * 2**20
_FEWEST_ROWS = 128

Head = Callable[[Tensor], Tensor]
ChunkDivergence = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
ValueDistance = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of one decoder for a batch, as what its head reads.

    Args:
        x_BTD: input of the head; the logits (B, T, V) themselves where the head is the identity.
        head: (1, R, D) -> logits (1, R, V), each row by itself.
        weights: tensors inside `head` that are to get a gradient.
        stream: values of the residual stream (B, T, D), in order, where they are compared.
    """

    x_BTD: Tensor
    head: Head = lambda x_1RD: x_1RD
    weights: tuple[Tensor, ...] = ()
    stream: tuple[Tensor, ...] = ()


def kl_divergence(
    teacher: Predictions,
    student: Predictions,
    where_BT: Tensor | None = None,
    *,
    rows: int | None = None,
    chunk: ChunkDivergence | None = None,
) -> Tensor:
    """Return KL(teacher ‖ student) in nats, the mean over tokens, as float32.

    It is differentiable in the student's `x_BTD` and `weights`.  The teacher gets no gradient.

    Args:
        where_BT: bool, the tokens that count; all by default.
        rows: R; by default so many that the logits of a chunk are about `LARGEST_CHUNK` numbers.
        chunk: `divergence_and_gradient`, or the same compiled.

    Raises:
        DataError: if the two have vocabularies of different sizes.
    """
    work = _Work(teacher, student, where_BT, rows, chunk or divergence_and_gradient)
    trained = (student.x_BTD, *student.weights)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in trained):
        return _Divergence.apply(work, *trained)  # type: ignore[return-value]
    return work.run([None] * len(trained))


def divergence_and_gradient(
    teacher_RV: Tensor, student_RV: Tensor, scale_R1: Tensor
) -> tuple[Tensor, Tensor]:
    """Return Σ scale · KL (float32), and its gradient for the student's logits in their dtype."""
    p_RV, q_RV = (logits_RV.float().log_softmax(-1) for logits_RV in (teacher_RV, student_RV))
    likely_RV = p_RV.exp()
    # A logit of minus infinity is a token that never comes: 0 · (−∞ + ∞) counts as nothing.
    terms_RV = torch.where(likely_RV > 0, likely_RV * (p_RV - q_RV), 0.0)
    divergence = (terms_RV.sum(-1, keepdim=True) * scale_R1).sum()
    return divergence, ((q_RV.exp() - likely_RV) * scale_R1).to(student_RV.dtype)


def distance_and_gradient(teacher_BTD: Tensor, student_BTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean |s − t|² / |t|² (float32), and its gradient for the student's value in its dtype."""
    size_BT1 = teacher_BTD.float().square().sum(-1, keepdim=True)
    scale_BT1 = torch.where(size_BT1 > 0, 1 / size_BT1, 0.0) / size_BT1.numel()
    difference_BTD = student_BTD.float() - teacher_BTD.float()
    distance = (difference_BTD.square() * scale_BT1).sum()
    return distance, (2 * scale_BT1 * difference_BTD).to(student_BTD.dtype)


def stream_distance(
    teacher: Predictions, student: Predictions, *, of_value: ValueDistance = distance_and_gradient
) -> Tensor:
    """Return the relative squared distance of the student's stream from the teacher's, as float32.

    A token at which the teacher's stream is zero does not count.  The teacher gets no gradient.

    Args:
        of_value: `distance_and_gradient`, or the same compiled.

    Raises:
        DataError: if one has no stream, or the two have other widths or numbers of values.
    """
    shapes = [[value.shape for value in one.stream] for one in (teacher, student)]
    if shapes[0] != shapes[1] or not shapes[0]:
        raise DataError(
            f"two streams of {len(shapes[0])} and {len(shapes[1])} values cannot be compared, or their "
            "widths differ"
        )
    pairs = zip(teacher.stream, student.stream, strict=True)
    each: list[Tensor] = [_Distance.apply(of_value, *pair) for pair in pairs]  # type: ignore[misc]
    return torch.stack(each).mean()


class _Distance(torch.autograd.Function):
    """The distance of one value; its gradient is kept, and neither value."""

    @staticmethod
    def forward(ctx: Any, of_value: ValueDistance, teacher_BTD: Tensor, student_BTD: Tensor) -> Tensor:
        distance, gradient_BTD = of_value(teacher_BTD, student_BTD.detach())
        ctx.save_for_backward(gradient_BTD)
        return distance

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None, Tensor]:
        (gradient_BTD,) = ctx.saved_tensors
        return None, None, gradient_BTD * grads[0].to(gradient_BTD.dtype)


@dataclass(frozen=True, eq=False)
class _Work:
    """One divergence to compute."""

    teacher: Predictions
    student: Predictions
    where_BT: Tensor | None
    rows: int | None
    chunk: ChunkDivergence

    def run(self, gradients: list[Tensor | None]) -> Tensor:
        """Return the divergence, and add its gradient for x and each weight to those that are not None."""
        teacher_ND, student_ND = (one.x_BTD.detach().flatten(0, 1) for one in (self.teacher, self.student))
        scale_N1 = self._scale(student_ND)
        rows = self.rows or self._rows(student_ND)
        into_ND = None if gradients[0] is None else gradients[0].flatten(0, 1)
        total = torch.zeros((), device=student_ND.device)
        for start in range(0, len(student_ND), rows):
            part = slice(start, start + rows)
            total = total + self._of_chunk(
                (teacher_ND[part], student_ND[part], scale_N1[part]),
                None if into_ND is None else into_ND[part],
                gradients[1:],
            )
        return total

    def _of_chunk(
        self, values: tuple[Tensor, Tensor, Tensor], into_RD: Tensor | None, of_weights: list[Tensor | None]
    ) -> Tensor:
        """Return the divergence of a chunk, and add its gradients; all else that it computed is freed."""
        teacher_RD, student_RD, scale_R1 = values
        x_1RD = student_RD.unsqueeze(0).requires_grad_(into_RD is not None)
        wanted = [x_1RD] if into_RD is not None else []
        into: list[Tensor] = [] if into_RD is None else [into_RD]
        for weight, gradient in zip(self.student.weights, of_weights, strict=True):
            if gradient is not None:
                wanted.append(weight)
                into.append(gradient)
        with torch.no_grad():
            teacher_RV = self.teacher.head(teacher_RD.unsqueeze(0)).squeeze(0)
        with torch.set_grad_enabled(bool(wanted)):
            student_1RV = self.student.head(x_1RD)
        require_one_vocabulary(teacher_RV, student_1RV)
        divergence, slope_RV = self.chunk(teacher_RV, student_1RV.detach().squeeze(0), scale_R1)
        if wanted:
            found = torch.autograd.grad(student_1RV, wanted, slope_RV.unsqueeze(0), materialize_grads=True)
            for place, gradient in zip(into, found, strict=True):
                place += gradient.view_as(place)
        return divergence

    def _scale(self, x_ND: Tensor) -> Tensor:
        """Return (N, 1): 1 / number of tokens that count for each of them, 0 for tokens that do not count."""
        if self.where_BT is None:
            return torch.full((len(x_ND), 1), 1.0 / len(x_ND), device=x_ND.device)
        counts_N1 = self.where_BT.flatten().unsqueeze(1).to(x_ND.device, torch.float32)
        return counts_N1 / counts_N1.sum().clamp_min(1.0)

    def _rows(self, x_ND: Tensor) -> int:
        with torch.no_grad():
            vocabulary = self.teacher.head(self.teacher.x_BTD[:1, :1]).shape[-1]
        return even_rows(len(x_ND), max(_FEWEST_ROWS, LARGEST_CHUNK // vocabulary))


def even_rows(count: int, most: int) -> int:
    """Return the rows of a chunk: equal ones where few more chunks make them so, for one compiled shape."""
    fewest = -(-count // most)
    even = next((chunks for chunks in range(fewest, 2 * fewest) if count % chunks == 0), fewest)
    return -(-count // even)


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, work: _Work, *trained: Tensor) -> Tensor:
        gradients = [torch.zeros_like(tensor) if tensor.requires_grad else None for tensor in trained]
        value = work.run(gradients)
        ctx.save_for_backward(*gradients)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(
            None if gradient is None else gradient * grads[0].to(gradient.dtype)
            for gradient in ctx.saved_tensors
        )
