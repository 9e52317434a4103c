"""Decoders as training takes them: token ids to predictions, with what is trained of them.

    graph      the lowered program; its weights or scales are trained
    adapters   the folder's transformers model with PEFT's adapters

The head is kept apart from what it reads if that gives the same logits; they are made in chunks then.

Legend: B batch, T tokens, R rows of a chunk, D width of what the head reads.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import module_logits, module_output
from dispfx.ir import ops
from dispfx.ir.head import split_at_head
from dispfx.ir.program import Program
from dispfx.learning.distillation import Predicting, Student
from dispfx.learning.divergence import Predictions
from dispfx.quality.logits_by_rows import same_logits

# Arguments of an embedding before its last one, `sparse`.
_SPARSE = 4


def graph_student(program: Program, trained: Mapping[str, nn.Parameter]) -> Student:
    """Return a program as a student.

    Args:
        trained: parameters of its graph, by name; from here on they alone require gradients.
    """
    program.graph_module.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    for node in program.graph.nodes:
        if ops.packet(node) is ops.aten.embedding:
            node.args = node.args[:_SPARSE]  # AdamW takes no sparse gradients
    program.graph_module.recompile()
    return Student(graph_predictions(program), trained)


def weights_of(program: Program) -> dict[str, nn.Parameter]:
    """Return the parameters that a program's graph reads and that can be trained, by path, a tied one once.

    An optimizer's step is lost in float8, and torch does not compute in it.
    """
    read = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    named = program.graph_module.named_parameters()
    return {path: one for path, one in named if path in read and one.is_floating_point() and one.itemsize > 1}


def graph_predictions(program: Program) -> Predicting:
    """Return ids → predictions of a program."""
    module = program.graph_module
    parts = split_at_head(module)
    if parts is None:
        return lambda ids_BT: Predictions(module(ids_BT))
    body, head = parts

    def predictions(ids_BT: Tensor) -> Predictions:
        weights = tuple(one for one in head.parameters() if one.requires_grad)
        return Predictions(body(ids_BT), head, weights)

    return predictions


def adapted_student(model: Any) -> Student:
    """Return a transformers decoder with PEFT's adapters as a student."""
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}
    return Student(_module_predictions(model), trained)


def _module_predictions(model: Any) -> Predicting:
    """Return ids → predictions of a module: by what its head reads, if head and logits are all there is."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None

    def whole(ids_BT: Tensor) -> Predictions:
        return Predictions(module_logits(model, ids_BT))

    def by_head(ids_BT: Tensor) -> Predictions:
        assert isinstance(head, nn.Module)
        return Predictions(_read_by(head, model, ids_BT), head)

    if not isinstance(head, nn.Module) or any(one.requires_grad for one in head.parameters()):
        return whole
    return by_head if _gives_the_same(by_head, whole, next(model.parameters()).device) else whole


def _read_by(head: nn.Module, model: nn.Module, ids_BT: Tensor) -> Tensor:
    """Return what the head of a decoder reads, (B, T, D); it makes the logits of one token alone."""
    read: list[Tensor] = []

    def first_token(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        read.append(given[0])
        return (given[0][:, :1], *given[1:])

    handle = head.register_forward_pre_hook(first_token)
    try:
        module_output(model, ids_BT)
    finally:
        handle.remove()
    return read[0]


@torch.no_grad()
def _gives_the_same(
    by_head: Callable[[Tensor], Predictions], whole: Callable[[Tensor], Predictions], device: torch.device
) -> bool:
    """Whether head and what it reads give a decoder's logits of a short text."""
    ids_BT = torch.tensor([[0, 1, 2, 1, 0]], device=device)
    expected = whole(ids_BT).x_BTD
    try:
        parts = by_head(ids_BT)
        found = parts.head(parts.x_BTD)
    except Exception:
        return False  # code of the decoder's own, which is called as it never was before
    return same_logits(found, expected)
