"""What lies between two branches as one operation, whose gradient is computed by one kernel.

    t = x + gate(p, m₁)                       t, s = add_norm_gate(x, p, m₁, w, b, m₂)
    s = gate(norm(t, w, b), m₂)          →

Rules:
1. The write is gated at its last dimension, added to a value of its shape, and used by that sum alone.
2. The norm is one of `dispfx.ir.norms`, of weights that are frozen, and used by its gate alone, which may
   gate a view of it as rows.
3. Where no gated write is added, x itself is t; where t is normalised for nobody's gate, only t is there.
   Whatever else reads t reads what the operation returns, so that its gradient arrives there.
4. Forward, each is computed by the operations that the graph had, into which a compiler can look.

Legend: B batch, T tokens, D width, R rows (B T), S masks.
"""

import operator
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.ir import ops
from dispfx.ir.gate import gate_product
from dispfx.ir.norms import Norm, norm_of
from dispfx.ir.ops import argument, aten, packet
from dispfx.kernels.norm_gate import add_norm_gate_backward

# Whether the operation is wanted for a stream of that dtype and width.
Fits = Callable[[torch.dtype, int], bool]


class _AddNormGate(torch.autograd.Function):
    """The operands of `add_norm_gate` → total, or total and normed."""

    @staticmethod
    def forward(ctx, x, written, write_mask, weight, bias, read_mask, eps, is_rms, rounds):
        last = x.dim() - 1
        total = x.view_as(x) if written is None else x + gate_product(written, write_mask, last)
        ctx.has_write, ctx.has_norm, ctx.has_bias = written is not None, weight is not None, bias is not None
        write = [] if written is None else [written, write_mask]
        if weight is None:
            ctx.save_for_backward(*write)
            return total
        normal, statistics = _normalised(total, weight, bias, eps, is_rms, rounds)
        of_norm = [weight, read_mask] if bias is None else [weight, read_mask, bias]
        ctx.save_for_backward(*write, total, *of_norm, *statistics)
        return total, gate_product(normal, read_mask, last)

    @staticmethod
    def backward(ctx, of_total, of_normed=None):
        saved = list(ctx.saved_tensors)
        written, write_mask = (saved.pop(0), saved.pop(0)) if ctx.has_write else (None, None)
        total, weight, read_mask, bias, mean, rstd = None, None, None, None, None, None
        if ctx.has_norm:
            total, weight, read_mask = saved.pop(0), saved.pop(0), saved.pop(0)
            bias = saved.pop(0) if ctx.has_bias else None
            rstd = saved.pop()
            mean = saved.pop() if saved else None
        of_x, of_written, of_write, of_read = add_norm_gate_backward(
            of_total, of_normed, total, written, mean, rstd, weight, bias, write_mask, read_mask
        )
        return (
            of_x if ctx.has_norm else of_total,
            of_written if ctx.has_write else None,
            of_write if ctx.has_write else None,
            None,
            None,
            of_read if ctx.has_norm else None,
            None,
            None,
            None,
        )


def _normalised(
    total: Tensor, weight: Tensor, bias: Tensor | None, eps: float, is_rms: bool, rounds: bool
) -> tuple[Tensor, list[Tensor]]:
    """Return the norm (…, D), and what its gradient needs: mean and rstd (R,) or rstd alone."""
    if not is_rms:
        normal, mean, rstd = torch.native_layer_norm(total, weight.shape, weight, bias, eps)
        return normal, [mean.flatten(), rstd.flatten()]
    # No cast that does nothing: torch 2.11 compiles a gradient without the part that came through one.
    whole = total if total.dtype in (torch.float32, torch.float64) else total.float()
    rstd = torch.rsqrt(whole.pow(2).mean(-1, keepdim=True) + eps)
    scaled = (whole * rstd).to(total.dtype) if rounds else whole * rstd
    return (weight * scaled).to(total.dtype), [rstd.flatten()]


def add_norm_gate(
    x: Tensor,
    written: Tensor | None,
    write_mask: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    read_mask: Tensor | None,
    eps: float = 0.0,
    is_rms: bool = False,
    rounds: bool = False,
) -> Any:
    """Return t = x + written · write_mask, and norm(t) · read_mask where there is a norm.

    It is differentiable in everything but the norm's weights.

    Args:
        x, written: (…, D), the stream and what a branch wrote; x itself is t where nothing is written.
        write_mask, read_mask: (D,) or (S, D).
        weight, bias: (D,) of the norm; without a weight t is all that is wanted.
        eps, is_rms, rounds: of the norm, as in `dispfx.ir.norms.Norm`.
    """
    return _AddNormGate.apply(x, written, write_mask, weight, bias, read_mask, eps, is_rms, rounds)


@dataclass(frozen=True)
class _Read:
    """A norm that is gated, and used by its gate alone."""

    norm: Norm
    gate: fx.Node


def join_norm_gates(graph: fx.Graph, frozen: Collection[fx.Node], fits: Fits) -> int:
    """Compute sums, norms and gates by `add_norm_gate`, and return how many there are.

    Args:
        graph: changed in place.
        frozen: inputs that never need a gradient.
        fits: whether the operation is wanted for a stream of that dtype and width.
    """
    constants = _constants(graph, frozen)
    reads: dict[fx.Node, _Read] = {}
    for node in graph.nodes:
        read = _read(node, constants)
        if read is not None and read.norm.value not in reads:
            reads[read.norm.value] = read
    sums = [node for node in graph.nodes if _write(node) is not None]
    steps = [node for node in graph.nodes if node in reads or node in sums]
    steps = [node for node in steps if fits(node.meta["val"].dtype, ops.shape_of(node)[-1])]
    count = 0
    for total in steps:
        write, read = _write(total), reads.get(total)
        # A gate that was the read of another operation is a write no more.
        if write is not None or read is not None:
            _replace(graph, total, write, read)
            count += 1
    graph.eliminate_dead_code()
    graph.lint()
    return count


def _constants(graph: fx.Graph, frozen: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes that depend on frozen inputs alone."""
    found = set(frozen)
    for node in graph.nodes:
        given = node.all_input_nodes
        if node.op == "call_function" and given and all(value in found for value in given):
            found.add(node)
    return found


def _write(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the other operand and the gate where a value is a sum with a gated write (rule 1)."""
    if packet(total) is not aten.add or len(total.args) != 2 or total.kwargs:
        return None
    for x, gate in (total.args, total.args[::-1]):
        if not isinstance(x, fx.Node) or not isinstance(gate, fx.Node) or x is gate:
            continue
        alike = all(value.meta["val"].shape == total.meta["val"].shape for value in (x, gate))
        types = {value.meta["val"].dtype for value in (x, gate, total)}
        if _gates_last(gate) and alike and len(types) == 1 and len(gate.users) == 1:
            return x, gate
    return None


def _read(gate: fx.Node, constants: Collection[fx.Node]) -> _Read | None:
    """Return the gated norm that a node is the result of, or None (rule 2)."""
    if not _gates_last(gate):
        return None
    normal = gate.args[0]
    assert isinstance(normal, fx.Node)
    if packet(normal) in (aten.reshape, aten.view) and len(normal.users) == 1:
        given = normal.args[0]
        assert isinstance(given, fx.Node)
        same_width = ops.shape_of(given)[-1] == ops.shape_of(normal)[-1]
        normal = given if same_width else normal
    norm = norm_of(normal, lambda operand: operand in constants)
    if norm is None or len(normal.users) != 1:
        return None
    frozen = norm.weight in constants and (norm.bias is None or norm.bias in constants)
    return _Read(norm, gate) if frozen and ops.rank(norm.value) > 1 else None


def _gates_last(node: fx.Node) -> bool:
    """Whether a node gates the last dimension, all its rows by one mask or runs of them by several."""
    if not ops.is_gate(node) or argument(node, 3, "experts") is not None:
        return False
    x, _, dim = node.args[:3]
    assert isinstance(x, fx.Node)
    return ops.rank(x) > 1 and bool(dim == ops.rank(x) - 1)


def _replace(
    graph: fx.Graph, total: fx.Node, write: tuple[fx.Node, fx.Node] | None, read: _Read | None
) -> None:
    x, written, write_mask = (total, None, None)
    if write is not None:
        x, gate = write
        written, write_mask = gate.args[:2]
    of_read: tuple[Any, ...] = (None, None, None)
    if read is not None:
        norm = read.norm
        of_read = (norm.weight, norm.bias, read.gate.args[1], norm.eps, norm.is_rms, norm.rounds)
    users = list(total.users)
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    with graph.inserting_after(inputs[-1] if total.op == "placeholder" else total):
        result = graph.call_function(add_norm_gate, (x, written, write_mask, *of_read))
    _place_before(result, [value for value in of_read if isinstance(value, fx.Node)])
    given = result
    if read is not None:
        with graph.inserting_after(result):
            given = graph.call_function(operator.getitem, (result, 0))
            normed = graph.call_function(operator.getitem, (result, 1))
        normed.meta["val"] = read.norm.value.meta["val"]
        _spell_as_gate(graph, read.gate, normed)
    given.meta["val"] = total.meta["val"]
    for user in users:
        user.replace_input_with(total, given)


def _place_before(node: fx.Node, values: list[fx.Node]) -> None:
    """Move values that depend on constants before a node, in the order that they depend on each other."""
    for value in values:
        if value.op != "placeholder" and node < value:
            _place_before(node, value.all_input_nodes)
            node.prepend(value)


def _spell_as_gate(graph: fx.Graph, gate: fx.Node, normed: fx.Node) -> None:
    """Let what read a gate read its result, in the shape of the gate."""
    value = normed
    if ops.rank(gate) != ops.rank(normed):
        view = gate.args[0]
        assert isinstance(view, fx.Node)
        with graph.inserting_before(gate):
            value = graph.call_function(view.target, (normed, *view.args[1:]))  # type: ignore[arg-type]
        value.meta["val"] = gate.meta["val"]
    gate.replace_all_uses_with(value)
