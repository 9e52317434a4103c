"""Compute the logits of a text a few tokens at a time, to bound memory.

    for logits_BRV in by_rows(decoder, ids_BT).chunks(ids_BT): …      R rows, in order, until T

The body of the decoder runs once per text, and the head once per chunk:

1. A graph whose head is one product of each token (`dispfx.ir.head`) is cut before it.
2. A transformers module is called once with the head's input cut to the first rows.  For each further chunk
   it is called again, and its base model returns its first output.  So operations after the head, such as a
   softcap, are the module's own code.
3. Any other decoder gives all its logits at once.

Chunks are used only for texts with many logits, after they agreed with the decoder on the beginning of the
text.  Small logits are computed by the decoder itself.

Shape legend: B batch, T tokens, R rows of a chunk, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn

from dispfx.capturing.logits import logits_of, widths_of
from dispfx.capturing.module_capture import module_output
from dispfx.ir import ops
from dispfx.ir.head import split_at_head
from dispfx.ir.logit_errors import logit_errors

# Bytes of logits that become float32 log-probabilities at a time.  All logits of a window of 2048 tokens
# would take 1 GB for a vocabulary of 128,000.
CHUNK_BYTES = 64 * 2**20
_FLOAT_BYTES = 4
_TRIED_TOKENS, _TRIED_ROWS = 7, 3
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}
_HALF_TOLERANCE = 2e-2

Decoder = Callable[[Tensor], Any]


class LogitsByRows(Protocol):
    """A decoder whose logits come in chunks of tokens."""

    def chunks(self, ids_BT: Tensor, bytes_each: int = _FLOAT_BYTES) -> Iterator[Tensor]:
        """Yield the logits (B, R, V) of all tokens, in order.

        Args:
            bytes_each: bytes per logit in the caller's computation, which determines R.
        """
        ...


def by_rows(decoder: Decoder, ids_BT: Tensor) -> LogitsByRows:
    """Return a way to compute a decoder's logits for texts of this shape with little memory.

    A graph is cut and tried for it, so make one for all windows of a text.
    """
    module = _module_of(decoder)
    way: _Cut | _Replayed | None = None
    if isinstance(module, fx.GraphModule):
        if _FLOAT_BYTES * ids_BT.numel() * _vocabulary_of(module) <= CHUNK_BYTES:
            return _Whole(decoder)
        way = _Cut.of(module)
    elif module is not None:
        way = _Replayed.of(module)
    if way is None or _FLOAT_BYTES * ids_BT.numel() * way.vocabulary <= CHUNK_BYTES:
        return _Whole(decoder)
    return way if _gives_the_same(way, decoder, ids_BT[:1, :_TRIED_TOKENS]) else _Whole(decoder)


def _vocabulary_of(graph: fx.GraphModule) -> int:
    """Return the width of a graph's logits; 0 where the graph does not say."""
    value = ops.logits_of(graph.graph).meta.get("val")
    return int(value.shape[-1]) if isinstance(value, Tensor) else 0


def rows_of(vocabulary: int, bytes_each: int = _FLOAT_BYTES) -> int:
    """Return the number of rows of logits in a chunk."""
    return max(1, CHUNK_BYTES // (bytes_each * vocabulary))


def _module_of(decoder: Decoder) -> nn.Module | None:
    """Return the module that is called: itself, or the first argument of a function that calls it."""
    if isinstance(decoder, nn.Module):
        return decoder
    first = decoder.args[0] if isinstance(decoder, partial) and decoder.args else None
    return first if isinstance(first, nn.Module) else None


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def _gives_the_same(way: "_Cut | _Replayed", decoder: Decoder, ids_BT: Tensor) -> bool:
    """Whether chunks of a short text equal the decoder's output."""
    whole_BTV = _logits(decoder(ids_BT))
    try:
        parts = list(way.chunks(ids_BT, _FLOAT_BYTES * CHUNK_BYTES // (_TRIED_ROWS * way.vocabulary)))
        parts_BTV = torch.cat(parts, 1)
    except Exception:
        return False  # the decoder's code may fail when it is called in this way
    return len(parts) > 1 and same_logits(parts_BTV, whole_BTV)


def same_logits(found: Tensor, expected: Tensor) -> bool:
    """Whether logits of one shape differ by no more than other kernels round."""
    allowed = _TOLERANCE.get(expected.dtype, _HALF_TOLERANCE)
    return found.shape == expected.shape and logit_errors(expected, found)[1] <= allowed


class _Whole:
    """All logits at once, handed out in chunks."""

    def __init__(self, decoder: Decoder):
        self._decoder = decoder

    def chunks(self, ids_BT: Tensor, bytes_each: int = _FLOAT_BYTES) -> Iterator[Tensor]:
        logits_BTV = _logits(self._decoder(ids_BT))
        yield from logits_BTV.split(rows_of(logits_BTV.shape[-1], bytes_each), dim=1)


class _Cut:
    """A graph in two parts: its body, and the head with the operations after it (rule 1)."""

    def __init__(self, body: nn.Module, head: nn.Module, vocabulary: int):
        self._body, self._head = body, head
        self.vocabulary = vocabulary

    @staticmethod
    def of(module: fx.GraphModule) -> "_Cut | None":
        parts = split_at_head(module)
        if parts is None:
            return None
        return _Cut(*parts, _vocabulary_of(module))

    def chunks(self, ids_BT: Tensor, bytes_each: int = _FLOAT_BYTES) -> Iterator[Tensor]:
        stream_BTD = self._body(ids_BT)
        for x_BRD in stream_BTD.split(rows_of(self.vocabulary, bytes_each), dim=1):
            yield self._head(x_BRD)


class _Replayed:
    """A module of transformers whose head takes some rows, and whose base model runs once (rule 2)."""

    def __init__(self, module: nn.Module, base: nn.Module, head: nn.Module, vocabulary: int):
        self._module, self._base, self._head = module, base, head
        self.vocabulary = vocabulary

    @staticmethod
    def of(module: nn.Module) -> "_Replayed | None":
        base, find_head = (getattr(module, name, None) for name in ("base_model", "get_output_embeddings"))
        try:
            head = find_head() if callable(find_head) else None
        except Exception:
            return None  # it has none, and raises its own kind of error
        weight = getattr(head, "weight", None)
        if not isinstance(base, nn.Module) or base is module or not isinstance(head, nn.Module):
            return None
        return _Replayed(module, base, head, len(weight)) if isinstance(weight, Tensor) else None

    def chunks(self, ids_BT: Tensor, bytes_each: int = _FLOAT_BYTES) -> Iterator[Tensor]:
        rows = rows_of(self.vocabulary, bytes_each)
        returned: list[Any] = []
        kept = self._base.register_forward_hook(lambda base, given, output: returned.append(output))
        try:
            part = self._some(ids_BT, slice(0, rows))
        finally:
            kept.remove()
        yield part
        del part  # before the next one is made
        for start in range(rows, ids_BT.shape[1], rows):
            with _returning(self._base, returned[0]):
                part = self._some(ids_BT, slice(start, start + rows))
            yield part
            del part

    def _some(self, ids_BT: Tensor, rows: slice) -> Tensor:
        """Call the module with some rows of the head's input, and return their logits."""

        def cut(head: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (given[0][:, rows], *given[1:])

        handle = self._head.register_forward_pre_hook(cut)
        try:
            output = module_output(self._module, ids_BT)
            return logits_of(output, ids_BT[:, rows], widths_of(self._module))
        finally:
            handle.remove()


@contextmanager
def _returning(module: nn.Module, output: Any) -> Iterator[None]:
    """Let a module return a value that it returned before."""
    own = module.__dict__.get("forward")
    module.forward = lambda *arguments, **options: output
    try:
        yield
    finally:
        del module.__dict__["forward"]
        if own is not None:
            module.forward = own
