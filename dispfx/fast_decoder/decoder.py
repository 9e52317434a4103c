"""A gated decoder that learning calls: token ids and masks to the loss of an objective.

    TrainingDecoder(program, …).loss(ids_BT, masks)

Legend: B batch, T tokens, V vocabulary, D width of the stream, N features of all sites, S samples of the
masks, R rows of a chunk.

A gate is an operation of its own, which a compiler cannot look into.  In a body that is compiled it is
spelled as the product it is, so that it fuses with what is around it:

    g = gate(x, mask, dim)     →     g = (x.float() · mask).to(x.dtype)

Projections that read one value are joined first (`sibling_products`): a compiler would read that value
several times in the backward pass.
"""

import copy
import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint

from dispfx.fast_decoder.head_loss import ChunkLoss, chunk_rows, chunked_loss, loss_and_gradient
from dispfx.fast_decoder.layered import BodyCall, LayeredDecoder
from dispfx.fast_decoder.shards import Sharding, Shards, hollow
from dispfx.fast_decoder.sibling_products import join_siblings
from dispfx.ir import ops
from dispfx.ir.gate import gate_product
from dispfx.ir.logit_errors import logit_errors
from dispfx.ir.outline import Body, Part
from dispfx.ir.program import Program
from dispfx.learning.divergence import (
    ChunkDivergence,
    Predictions,
    divergence_and_gradient,
    even_rows,
    kl_divergence,
)
from dispfx.learning.objective import (
    NEXT_TOKEN,
    NO_TARGET,
    MaskedLosses,
    Objective,
    loss_of_logits,
    next_tokens,
)

# Chunks through the epilogue may run in other kernels than the whole.
_CHUNK_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_TOLERANCE = 0.03


class TrainingDecoder(nn.Module, MaskedLosses):
    """A decoder as layers, with the loss in chunks where its epilogue works token by token.

    Args:
        program: gated, with its outline.
        objective: what is learned.
        compiled: compile every kind of layer once.
        checkpointing: keep only what enters a layer, and compute the layer again in the backward pass.
        join: in compiled layers, sum the gradient of projections that read one value where it is written.
        sharding: how the weights lie in parts on several ranks; whole by default.

    Raises:
        UnsupportedGraphError: if they cannot lie in parts.
    """

    def __init__(
        self,
        program: Program,
        *,
        objective: Objective = NEXT_TOKEN,
        compiled: bool = False,
        checkpointing: bool = False,
        join: bool = True,
        sharding: Sharding | None = None,
    ):
        super().__init__()
        self.objective = objective
        self.layered = LayeredDecoder(program, None if sharding is None else hollow(program))
        self.shards = None if sharding is None else Shards(self.layered, sharding)
        self.layered.first_needs_gradient = True
        self.sizes = [site.size for site in program.sites]
        self.rows = chunk_rows(program.vocabulary_size)
        self.separator = program.separator
        self.compiled = False
        self._join = join
        self._plain = dict(self.layered.bodies)
        self._compiled: dict[Body, BodyCall] = {}
        self._compiled_chunks: tuple[ChunkLoss, ChunkDivergence] | None = None
        self._compiled_for: tuple[torch.Size, torch.Size] | None = None
        self._runs_compiled = False
        self.checkpoint(checkpointing)
        if compiled:
            self.compile_layers(True)
        self.in_chunks = self._epilogue_works_by_token(program)
        if self.shards is not None and not self.in_chunks:
            self.shards.keep_ends()  # the backward pass goes through the head

    def compile_layers(self, wanted: bool) -> None:
        """Compute layers and epilogue by compiled bodies, or by plain ones.

        They are compiled for the shapes of the first loss with a gradient; others run plain.
        """
        outline = self.layered.outline
        for part in (*outline.layers, outline.epilogue):
            if wanted and part.body not in self._compiled:
                self._compiled[part.body] = compiled_call(part, join=self._join)
        if wanted and self._compiled_chunks is None:
            self._compiled_chunks = (
                compiled_function(loss_and_gradient),
                compiled_function(divergence_and_gradient),
            )
        self.compiled = wanted

    def _choose(self, ids_BT: Tensor, masks: Tensor) -> None:
        """Take compiled bodies for what they were compiled for, and plain ones otherwise."""
        shapes = (ids_BT.shape, masks.shape)
        learning = self.compiled and torch.is_grad_enabled() and masks.requires_grad
        if learning and self._compiled_for is None:
            self._compiled_for = shapes
        wanted = learning and shapes == self._compiled_for
        if wanted == self._runs_compiled:
            return
        for body, call in (self._compiled if wanted else self._plain).items():
            self.layered.replace_body(body, call)
        self._runs_compiled = wanted

    def checkpoint(self, wanted: bool) -> None:
        """Keep what is inside of layers for the backward pass, or compute it again."""
        for layer in self.layered.layers:
            layer.wrap = _again if wanted else None  # type: ignore[assignment]
        self.checkpointing = wanted

    def forward(self, ids_BT: Tensor, masks: Sequence[Tensor]) -> Tensor:
        """Return logits (B, T, V)."""
        return self.layered(ids_BT, *masks)

    def _loss(self, ids_BT: Tensor, masks: Tensor, objective: Objective, shift: int) -> Tensor:
        self._choose(ids_BT, masks)
        own, dense = (given.split(self.sizes, -1) for given in (masks, torch.ones_like(masks)))
        if not self.in_chunks:
            return loss_of_logits(
                objective,
                lambda as_dense: self(ids_BT, dense if as_dense else own),
                ids_BT,
                separator=self.separator,
                shift=shift,
            )
        dense_BTD = None
        if objective.divergence:
            with torch.no_grad():
                (dense_BTD,), _ = self.layered.stream(ids_BT, *dense)
        (x_BTD,), _ = self.layered.stream(ids_BT, *own)
        targets_BT = next_tokens(ids_BT, self.separator)
        compiled = self._compiled_chunks if self._runs_compiled else None
        of_loss, of_divergence = compiled or (None, None)
        parts = []
        with self.layered.epilogue.lend():  # once for all chunks
            if objective.cross_entropy:
                loss = chunked_loss(self._head, x_BTD, targets_BT, self.rows, of_loss)
                parts.append(objective.cross_entropy * loss)
            if dense_BTD is not None:
                found = kl_divergence(
                    Predictions(dense_BTD.roll(shift, 1), self._head),
                    Predictions(x_BTD, self._head),
                    targets_BT != NO_TARGET,
                    rows=even_rows(targets_BT.numel(), self.rows),
                    chunk=of_divergence,
                )
                parts.append(objective.divergence * found)
        return torch.stack(parts).sum()

    def _head(self, x_1RD: Tensor) -> Tensor:
        return self.layered.epilogue(x_1RD)[0]

    @torch.no_grad()
    def _epilogue_works_by_token(self, program: Program) -> bool:
        """Whether the epilogue takes the stream alone and gives each token the same in any company."""
        if not head_takes_stream_alone(program) or program.device.type == "meta":
            return False
        stream = next(iter(self.layered.outline.epilogue.body.graph.nodes)).meta["val"]
        generator = torch.Generator().manual_seed(0)
        x_BTD = torch.randn(2, 6, int(stream.shape[-1]), generator=generator).to(program.device, stream.dtype)
        whole = self.layered.epilogue(x_BTD)[0].flatten(0, 1)
        rows = self.layered.epilogue(x_BTD.flatten(0, 1)[None, 3:])[0][0]
        tolerance = _CHUNK_TOLERANCE.get(stream.dtype, _HALF_TOLERANCE)
        return logit_errors(whole[3:], rows)[1] <= tolerance


def head_takes_stream_alone(program: Program) -> bool:
    """Whether all that is between stream and logits takes the stream (B, T, D) and nothing else."""
    assert program.outline is not None
    epilogue = program.outline.epilogue
    logits = ops.logits_of(program.graph).meta["val"]
    stream = next(iter(epilogue.body.graph.nodes)).meta["val"]
    return len(epilogue.values) == len(epilogue.results) == 1 and stream.dim() == logits.dim() == 3


def _again(call: BodyCall, *operands: object) -> object:
    return checkpoint(call, *operands, use_reentrant=False, preserve_rng_state=False)


BACKEND = "inductor"


def compiled_call(part: Part, *, join: bool = True) -> BodyCall:
    """Return a call of the part's body that compiles itself when it is first called.

    It is compiled once for every shape of its inputs, so once for all parts that share the body.  The part's
    tensors are frozen.

    Args:
        join: compute projections that read one value by `sibling_products`.
    """
    graph = copy.deepcopy(part.body.graph)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    frozen = frozenset(inputs[len(part.values) :])
    _spell_gates(graph)
    if join:
        join_siblings(graph, frozen)
    return compiled_function(fx.GraphModule(nn.Module(), graph, "Body").forward)


def compiled_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that compiles itself once for every shape of its operands."""
    compiled = torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND)

    @wraps(function)
    def call(*operands: Any) -> Any:
        with warnings.catch_warnings():
            # The tracer looks at `.grad` of every operand, masks and stream values among them.
            warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
            # It makes an object of torch.autograd.Function for its own use.
            warnings.filterwarnings("ignore", message=".* should not be instantiated")
            return compiled(*operands)

    return call


def _spell_gates(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if not ops.is_gate(node):
            continue
        with graph.inserting_before(node):
            result = graph.call_function(gate_product, node.args)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    graph.lint()
