"""Is an ONNX model the decoder it was made from?

    onnx = checkpoint               whole texts, against the checkpoint's graph, which has no cache
    onnx with cache = checkpoint    new tokens after cached ones, one token after many, a batch of two with
                                    padding on the left, against the checkpoint's graph with a cache;
                                    every output is compared, the caches too

Both run on ONNX Runtime's CPU provider, at sizes that were not traced.  It has no bfloat16 products: such
a model is compared as its float32 twin, which is the same graph up to types, with the twin of the
checkpoint.

Shape legend: B batch, T new tokens, P cached tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.deploy.onnx.files import load_model, save_model
from dispfx.deploy.onnx.session import CachedSession, OnnxCachedDecoder, OnnxDecoder
from dispfx.deploy.onnx.twin import differences_beyond_types, float32_twin
from dispfx.errors import VerificationError
from dispfx.ir.cached_inputs import CachedShape, positions_of, sample_inputs
from dispfx.ir.program import Program
from dispfx.ir.retype import retyped
from dispfx.measure.equivalence import Verification, compare, compare_decoders

NAME, CACHED_NAME = "onnx = checkpoint", "onnx with cache = checkpoint"
# ONNX Runtime has kernels of its own: softmax, norms and products sum in other orders.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}
# (B, T, P), none of them traced: more after some, one after many, one after one.
CACHED_SHAPES = (CachedShape(2, 5, 7), CachedShape(3, 1, 41), CachedShape(1, 1, 1))
PADDED = (2, 11, 4)  # B, T and how many of the second text's are padding


@dataclass(frozen=True, eq=False)
class Reference:
    """What an ONNX model is compared with.

    Args:
        whole: token ids (B, T) to logits (B, T, V), or to an output with `.logits`, without a cache.
        graph: returns the same as a graph.
        cached: the program with a cache; None where the model has none.
        vocabulary_size: width of the logits.
        dtype: of the weights.
    """

    whole: Callable[[Tensor], Any]
    graph: Callable[[], fx.GraphModule]
    cached: Program | None
    vocabulary_size: int
    dtype: torch.dtype

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T)."""
        output = self.whole(ids)
        return getattr(output, "logits", output)


def onnx_lines(path: Path, reference: Reference, *, padding: bool = True) -> list[Verification]:
    """Compare an ONNX model with the decoder it was made from.

    Args:
        padding: whether the model's texts may be padded.

    Raises:
        DataError: if the model is missing or damaged.
        VerificationError: if it has other outputs, or its twin is another graph.
    """
    if reference.dtype == torch.bfloat16:
        with _twin(path) as twin:
            return _lines(twin, _in_float32(reference), padding)
    return _lines(path, reference, padding)


def _lines(path: Path, reference: Reference, padding: bool) -> list[Verification]:
    tolerance = TOLERANCES.get(reference.dtype, 1e-4)
    size = reference.vocabulary_size
    if reference.cached is None:
        decoder = OnnxDecoder(path)
        return compare_decoders(NAME, reference.logits, decoder, tolerance, vocabulary_size=size)
    session = CachedSession(path)

    def whole(ids: Tensor) -> Tensor:
        return OnnxCachedDecoder(session)(ids)

    lines = compare_decoders(NAME, reference.logits, whole, tolerance, vocabulary_size=size)
    for shape in CACHED_SHAPES:
        lines.append(_compare_cached(session, reference.cached, shape, tolerance, padding))
    return [*lines, _compare_padded(session, reference.cached, tolerance)] if padding else lines


def _compare_cached(
    session: CachedSession, program: Program, shape: CachedShape, tolerance: float, padding: bool
) -> Verification:
    """Compare every output for new tokens after cached ones; the line shows the worst."""
    inputs = sample_inputs(session.caches, shape, session.vocabulary_size, session.device)
    if not padding:
        inputs[1].fill_(1)
    pairs = zip(_torch_run(program)(inputs), _onnx_run(session)(inputs), strict=True)
    return _worst([compare(CACHED_NAME, *pair, tolerance, shape=shape) for pair in pairs])


def _compare_padded(session: CachedSession, program: Program, tolerance: float) -> Verification:
    """Compare the logits of a batch of two, one padded on the left, and of one more token after it."""
    batch, tokens, padding = PADDED
    ids = sample_inputs((), CachedShape(batch, tokens + 1, 0), session.vocabulary_size, session.device)[0]
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0

    def logits_of(run: _Run) -> Tensor:
        past = [cache.empty(batch, ids.device) for cache in session.caches]
        first, second = ids[:, :tokens].contiguous(), ids[:, tokens:].contiguous()
        seen = mask[:, :tokens].contiguous()
        logits, *past = run((first, seen, positions_of(seen, tokens), *past))
        after, *_ = run((second, mask, positions_of(mask, 1), *past))
        # What stands at padding is nobody's business, so it may be anything.
        return torch.cat([logits[seen.bool()], after[:, 0]])

    expected, actual = logits_of(_torch_run(program)), logits_of(_onnx_run(session))
    return compare(CACHED_NAME, expected, actual, tolerance, shape=(batch, tokens, padding))


_Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _onnx_run(session: CachedSession) -> _Run:
    return lambda inputs: list(session(inputs).values())


def _torch_run(program: Program) -> _Run:
    def run(inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        with torch.no_grad():
            return program.graph_module(*inputs)

    return run


def _worst(found: Sequence[Verification]) -> Verification:
    return max(found, key=lambda line: line.max_rel_error)


@contextmanager
def _twin(path: Path) -> Iterator[Path]:
    """Yield the path of a model's float32 twin, which is there for the time of the block."""
    model = load_model(path)
    twin = float32_twin(model)
    if other := differences_beyond_types(model, twin):
        raise VerificationError(f"the float32 twin is another graph: {other[0]}", where=str(path))
    with tempfile.TemporaryDirectory(prefix="dispfx-twin-") as folder:
        save_model(twin, Path(folder, path.name))
        yield Path(folder, path.name)


def _in_float32(reference: Reference) -> Reference:
    """Return the reference with the same weights in float32."""
    types = torch.bfloat16, torch.float32
    cached = reference.cached
    if cached is not None:
        cached = replace(cached, graph_module=retyped(cached.graph_module, *types))
    graph = retyped(reference.graph(), *types)
    return Reference(graph, lambda: graph, cached, reference.vocabulary_size, torch.float32)
