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
from dispfx.ir.cached_inputs import CachedShape, CacheTensor, cache_tensors, positions_of, sample_inputs
from dispfx.ir.program import Program
from dispfx.ir.retype import retyped
from dispfx.measure.equivalence import SHAPES_BT, Verification, compare, random_token_ids

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
        device: where `whole` computes; the program with a cache is on the CPU.
    """

    whole: Callable[[Tensor], Any]
    graph: Callable[[], fx.GraphModule]
    cached: Program | None
    vocabulary_size: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T), both on the CPU."""
        output = self.whole(ids.to(self.device))
        return getattr(output, "logits", output).cpu()


@dataclass(frozen=True, eq=False)
class Answers:
    """What an ONNX model must give, computed before it runs, so that two decoders are never held at once.

    Args:
        questions: each with the outputs that are expected, on the CPU.
        dtype: of the decoder that gave them.
        cached: whether the model has a cache.
        padding: whether the model's texts may be padded.
    """

    questions: "Sequence[tuple[_Question, Sequence[Tensor]]]"
    dtype: torch.dtype
    cached: bool
    padding: bool


@dataclass(frozen=True, eq=False)
class _Question:
    """One comparison.

    Args:
        name: which two forms are compared.
        shape: as it is shown.
        of_whole: whether it is asked of the decoder without a cache.
        ask: gives the outputs of a decoder, which is given as a run.
    """

    name: str
    shape: tuple[int, ...]
    of_whole: bool
    ask: "Callable[[_Run], Sequence[Tensor]]"


def answers_of(reference: Reference, *, padding: bool = True) -> Answers:
    """Ask the decoder that an ONNX model was made from; bfloat16 is asked in float32.

    Args:
        padding: whether the model's texts may be padded.
    """
    asked = _in_float32(reference) if reference.dtype == torch.bfloat16 else reference
    questions = _questions(asked, padding)
    whole, cached = _whole_run(asked.logits), None if asked.cached is None else _torch_run(asked.cached)
    found = []
    with torch.no_grad():
        for question in questions:
            run = whole if question.of_whole or cached is None else cached
            found.append((question, list(question.ask(run))))
    return Answers(found, reference.dtype, reference.cached is not None, padding)


def onnx_lines(path: Path, answers: Answers) -> list[Verification]:
    """Compare an ONNX model with what the decoder it was made from has answered.

    Raises:
        DataError: if the model is missing or damaged.
        VerificationError: if it has other outputs, or its twin is another graph.
    """
    if answers.dtype == torch.bfloat16:
        with _twin(path) as twin:
            return _lines(twin, answers)
    return _lines(path, answers)


def _lines(path: Path, answers: Answers) -> list[Verification]:
    tolerance = TOLERANCES.get(answers.dtype, 1e-4)
    if not answers.cached:
        whole, cached = _whole_run(OnnxDecoder(path)), None
    else:
        session = CachedSession(path)
        whole, cached = _whole_run(lambda ids: OnnxCachedDecoder(session)(ids)), _onnx_run(session)
    lines = []
    for question, expected in answers.questions:
        run = whole if question.of_whole or cached is None else cached
        pairs = zip(expected, question.ask(run), strict=True)
        lines.append(_worst([compare(question.name, *pair, tolerance, shape=question.shape) for pair in pairs]))
    return lines


def _questions(reference: Reference, padding: bool) -> list[_Question]:
    size = reference.vocabulary_size
    found = [_of_whole_texts(shape, size) for shape in SHAPES_BT]
    if reference.cached is None:
        return found
    caches = cache_tensors(reference.cached.graph)
    found += [_of_cached(caches, shape, size, padding) for shape in CACHED_SHAPES]
    return [*found, _of_padded(caches, size)] if padding else found


def _of_whole_texts(shape: tuple[int, int], size: int) -> _Question:
    ids = random_token_ids(size, shape)
    return _Question(NAME, shape, True, lambda run: run((ids,)))


def _of_cached(caches: Sequence[CacheTensor], shape: CachedShape, size: int, padding: bool) -> _Question:
    """Ask for every output for new tokens after cached ones; the line shows the worst."""
    inputs = sample_inputs(caches, shape, size, torch.device("cpu"))
    if not padding:
        inputs[1].fill_(1)
    return _Question(CACHED_NAME, shape, False, lambda run: run(inputs))


def _of_padded(caches: Sequence[CacheTensor], size: int) -> _Question:
    """Ask for the logits of a batch of two, one padded on the left, and of one more token after it."""
    batch, tokens, padding = PADDED
    ids = sample_inputs((), CachedShape(batch, tokens + 1, 0), size, torch.device("cpu"))[0]
    mask = torch.ones_like(ids)
    mask[-1, :padding] = 0

    def ask(run: _Run) -> Sequence[Tensor]:
        past = [cache.empty(batch, ids.device) for cache in caches]
        first, second = ids[:, :tokens].contiguous(), ids[:, tokens:].contiguous()
        seen = mask[:, :tokens].contiguous()
        logits, *past = run((first, seen, positions_of(seen, tokens), *past))
        after, *_ = run((second, mask, positions_of(mask, 1), *past))
        # What stands at padding is nobody's business, so it may be anything.
        return [torch.cat([logits[seen.bool()], after[:, 0]])]

    return _Question(CACHED_NAME, (batch, tokens, padding), False, ask)


_Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


def _onnx_run(session: CachedSession) -> _Run:
    return lambda inputs: list(session(inputs).values())


def _whole_run(logits_of: Callable[[Tensor], Tensor]) -> _Run:
    return lambda inputs: [logits_of(inputs[0])]


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
    size, device = reference.vocabulary_size, reference.device
    return Reference(graph, lambda: graph, cached, size, torch.float32, device)
