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
from dispfx.fast_decoder.decoder import compiled_function
from dispfx.ir import ops
from dispfx.ir.head import split_at_head
from dispfx.ir.program import Program
from dispfx.ir.sites import STREAM
from dispfx.learning.distillation import Predicting, Student
from dispfx.learning.divergence import Predictions
from dispfx.quality.logits_by_rows import same_logits

# Arguments of an embedding before its last one, `sparse`.
_SPARSE = 4


def graph_student(
    program: Program, trained: Mapping[str, nn.Parameter], *, with_stream: bool = False
) -> Student:
    """Return a program as a student.

    Args:
        trained: parameters of its graph, by name; from here on they alone require gradients.
        with_stream: as for `graph_predictions`.
    """
    program.graph_module.requires_grad_(False)
    for parameter in trained.values():
        parameter.requires_grad_(True)
    for node in program.graph.nodes:
        if ops.packet(node) is ops.aten.embedding:
            node.args = node.args[:_SPARSE]  # AdamW takes no sparse gradients
    program.graph_module.recompile()
    return Student(graph_predictions(program, with_stream=with_stream), trained)


def weights_of(program: Program) -> dict[str, nn.Parameter]:
    """Return the parameters that a program's graph reads and that can be trained, by path, a tied one once.

    An optimizer's step is lost in float8, and torch does not compute in it.
    """
    read = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    named = program.graph_module.named_parameters()
    return {path: one for path, one in named if path in read and one.is_floating_point() and one.itemsize > 1}


def graph_predictions(program: Program, *, with_stream: bool = False) -> "GraphPredictions":
    """Return ids → predictions of a program.

    Args:
        with_stream: whether they have the values of the residual stream, where the head can be kept apart.
    """
    named = {node.name: node for node in program.graph.nodes}
    values = program.stream.values if with_stream and program.stream is not None else ()
    parts = split_at_head(program.graph_module, also=[named[value] for value in values])
    body, head = parts or (program.graph_module, None)
    return GraphPredictions(body, head, with_stream=bool(values) and head is not None)


class GraphPredictions:
    """ids (B, T) → predictions of a graph.

    Args:
        body: ids → what the head reads, or a tuple of that and the values of the stream.
        head: that → logits, each token by itself; the identity by default.
        with_stream: whether the body returns a tuple.
    """

    def __init__(self, body: Callable[[Tensor], Any], head: nn.Module | None, *, with_stream: bool):
        self._body, self._head, self._with_stream = body, head, with_stream

    def __call__(self, ids_BT: Tensor) -> Predictions:
        x_BTD, *stream = self._body(ids_BT) if self._with_stream else (self._body(ids_BT),)
        if self._head is None:
            return Predictions(x_BTD)
        weights = tuple(one for one in self._head.parameters() if one.requires_grad)
        return Predictions(x_BTD, self._head, weights, tuple(stream))

    def compiled(self) -> "GraphPredictions":
        """Return the same with a body that compiles itself when it is first called."""
        return GraphPredictions(compiled_function(self._body), self._head, with_stream=self._with_stream)


def has_stream(program: Program) -> bool:
    """Whether the predictions of a program and of what was cut from it can have streams of one width.

    With one selection for the whole stream the pruned one is narrower.
    """
    whole = any(site.kind == STREAM for site in program.sites)
    head = split_at_head(program.graph_module)
    return program.stream is not None and not whole and head is not None


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
