"""Compare an ONNX model with the decoder it was made from.

    onnx = checkpoint               whole texts, the longest of the run among them, against the checkpoint,
                                    which has no cache; with a cache, the last token is a run of its own
    onnx with cache = checkpoint    new tokens after cached ones, one token after many, a batch of two with
                                    padding on the left, against the checkpoint's graph with a cache;
                                    every output is compared, the caches too

Both run on ONNX Runtime's CPU provider, at sizes that were not traced.  The provider has no bfloat16
products: such a model is compared as its float32 twin, the same graph up to types, with the twin of the
    checkpoint.

Shape legend: B batch, T new tokens, P cached tokens.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from dispfx.deploy.onnx.files import load_model, save_model, takes_cache, takes_padding
from dispfx.deploy.onnx.session import CachedSession, OnnxDecoder
from dispfx.deploy.onnx.twin import differences_beyond_types, float32_twin
from dispfx.errors import VerificationError
from dispfx.ir.cached_inputs import CachedShape, CacheTensor, cache_tensors, positions_of, sample_inputs
from dispfx.ir.program import Program
from dispfx.ir.retype import retyped
from dispfx.verification.equivalence import SHAPES_BT, Verification, compare, random_token_ids

NAME, CACHED_NAME = "onnx = checkpoint", "onnx with cache = checkpoint"
# ONNX Runtime's kernels sum in other orders in softmax, norms and products.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-2}
# (B, T, P), not traced: several tokens after some, one after many, one after one.
CACHED_SHAPES = (CachedShape(2, 5, 7), CachedShape(3, 1, 41), CachedShape(1, 1, 1))
PADDED = (2, 11, 4)  # B, T and the number of padding tokens of the second text


@dataclass(frozen=True, eq=False)
class Reference:
    """The reference of an ONNX model.

    Args:
        whole: token ids (B, T) to logits (B, T, V), or to an output with `.logits`, without a cache.
        graph: returns the same as a graph.
        vocabulary_size: token ids are drawn below it.
        dtype: of the weights.
        device: of `whole`.
    """

    whole: Callable[[Tensor], Any]
    graph: Callable[[], fx.GraphModule]
    vocabulary_size: int
    dtype: torch.dtype
    device: torch.device | str = "cpu"

    def logits(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of token ids (B, T), both on the CPU."""
        output = self.whole(ids.to(self.device))
        return getattr(output, "logits", output).cpu()


_Run = Callable[[Sequence[Tensor]], Sequence[Tensor]]


@dataclass(frozen=True, eq=False)
class _Question:
    """One comparison.

    Args:
        name: which two forms are compared.
        shape: for display.
        ask: runs a decoder and returns its outputs.
    """

    name: str
    shape: tuple[int, ...]
    ask: Callable[[_Run], Sequence[Tensor]]


_Asked = tuple[tuple[_Question, Sequence[Tensor]], ...]


@dataclass(frozen=True, eq=False)
class Answers:
    """The expected outputs of an ONNX model, computed first so that few decoders are in memory at once.

    Args:
        dtype: of the reference decoder.
        whole: comparisons on whole texts, with the expected outputs.
        cached: comparisons with a cache; None if the model has none.
    """

    dtype: torch.dtype
    whole: _Asked
    cached: _Asked | None = None


def whole_answers(reference: Reference, shapes: Sequence[tuple[int, int]] = SHAPES_BT) -> Answers:
    """Run the decoder that an ONNX model was made from; bfloat16 runs in float32."""
    logits_of = reference.logits
    if reference.dtype == torch.bfloat16:
        graph = retyped(reference.graph(), torch.bfloat16, torch.float32)
        logits_of = replace(reference, whole=graph).logits
    questions = [_of_whole_texts(shape, reference.vocabulary_size) for shape in shapes]
    return Answers(reference.dtype, _asked(questions, _whole_run(logits_of)))


def with_cached_answers(answers: Answers, program: Program, *, padding: bool = True) -> Answers:
    """Also run the decoder's program with a cache.

    Args:
        program: on the CPU.
        padding: whether the model's texts may be padded.
    """
    module = program.graph_module
    if answers.dtype == torch.bfloat16:
        module = retyped(module, torch.bfloat16, torch.float32)
    questions = cached_questions(
        cache_tensors(module.graph), program.known_tokens, context=program.context, padding=padding
    )
    return replace(answers, cached=_asked(questions, lambda inputs: module(*inputs)))


def cached_questions(
    caches: Sequence[CacheTensor], size: int, *, context: int | None = None, padding: bool = True
) -> "list[_Question]":
    """Return the comparisons of a model with a cache.

    Args:
        caches: of the model.
        size: of the vocabulary.
        context: most tokens that the model takes, or None.
        padding: whether its texts may be padded.
    """
    longest = context or sum(CACHED_SHAPES[1][1:])
    shapes = [shape._replace(past=min(shape.past, longest - shape.tokens)) for shape in CACHED_SHAPES]
    questions = [_of_cached(caches, shape, size, padding) for shape in shapes]
    return [*questions, _of_padded(caches, size)] if padding else questions


def _asked(questions: Sequence[_Question], run: _Run) -> _Asked:
    with torch.no_grad():
        return tuple((question, list(question.ask(run))) for question in questions)


def onnx_lines(path: Path, answers: Answers) -> list[Verification]:
    """Compare an ONNX model with the expected outputs.

    Raises:
        DataError: if the model is missing or damaged.
        VerificationError: if it has other outputs, or its twin is a different graph.
    """
    if answers.dtype == torch.bfloat16:
        with float32_file(path) as twin:
            return _lines(twin, answers)
    return _lines(path, answers)


def _lines(path: Path, answers: Answers) -> list[Verification]:
    tolerance = TOLERANCES.get(answers.dtype, 1e-4)
    if answers.cached is None:
        return _compared(answers.whole, _whole_run(OnnxDecoder(path)), tolerance)
    session = CachedSession(path)
    whole = _whole_run(partial(_in_two_runs, session))
    lines = _compared(answers.whole, whole, tolerance)
    return lines + _compared(answers.cached, lambda inputs: list(session(inputs).values()), tolerance)


@dataclass(frozen=True)
class ModelPair:
    """Two ONNX models of one decoder; the first is known to be correct.

    Args:
        name: which two forms are compared.
        expected, actual: their files.
        vocabulary_size: token ids are drawn below it.
        shapes: (batch, tokens) of whole texts.
        context: most tokens that the decoder takes, or None.
        tolerance: largest allowed relative error.
        random_caches: whether also to compare after random numbers in the cache, which enlarge rounding.
    """

    name: str
    expected: Path
    actual: Path
    vocabulary_size: int
    shapes: Sequence[tuple[int, int]] = SHAPES_BT
    context: int | None = None
    tolerance: float = 1e-3
    random_caches: bool = True


def model_lines(pair: ModelPair) -> list[Verification]:
    """Compare two ONNX models on whole texts and, if they take a cache, with one and with padding.

    Raises:
        DataError: if a model is missing or damaged.
    """
    questions = [_of_whole_texts(shape, pair.vocabulary_size) for shape in pair.shapes]
    if not takes_cache(pair.actual):
        expected, actual = (_whole_run(OnnxDecoder(path)) for path in (pair.expected, pair.actual))
        return _named(pair, _compared(_asked(questions, expected), actual, pair.tolerance))
    sessions = [CachedSession(path) for path in (pair.expected, pair.actual)]
    whole = [_whole_run(partial(_in_two_runs, session)) for session in sessions]
    with_cache = [partial(_outputs, session) for session in sessions]
    asked = cached_questions(
        sessions[0].caches,
        pair.vocabulary_size,
        context=pair.context,
        padding=takes_padding(pair.actual),
    )
    if not pair.random_caches:
        asked = asked[len(CACHED_SHAPES) :]
    lines = _compared(_asked(questions, whole[0]), whole[1], pair.tolerance)
    return _named(pair, lines + _compared(_asked(asked, with_cache[0]), with_cache[1], pair.tolerance))


def _outputs(session: CachedSession, inputs: Sequence[Tensor]) -> list[Tensor]:
    return list(session(inputs).values())


def _named(pair: ModelPair, lines: Sequence[Verification]) -> list[Verification]:
    """Give the comparisons the name of the pair; those with a cache say so."""
    other = pair.name.replace(" = ", " with cache = ")
    return [replace(line, name=pair.name if line.name == NAME else other) for line in lines]


def _in_two_runs(session: CachedSession, ids: Tensor) -> Tensor:
    """Return the logits of a text whose last token runs with all earlier tokens cached."""
    decoder = session.decoder()
    return torch.cat([decoder(ids[:, :-1]), decoder(ids[:, -1:])], dim=1)


def _compared(asked: _Asked, run: _Run, tolerance: float) -> list[Verification]:
    """Run the model on the same inputs; each line shows its worst output."""
    return [
        _worst(
            [
                compare(question.name, *pair, tolerance, shape=question.shape)
                for pair in zip(expected, question.ask(run), strict=True)
            ]
        )
        for question, expected in asked
    ]


def _of_whole_texts(shape: tuple[int, int], size: int) -> _Question:
    ids = random_token_ids(size, shape)
    return _Question(NAME, shape, lambda run: run((ids,)))


def _of_cached(caches: Sequence[CacheTensor], shape: CachedShape, size: int, padding: bool) -> _Question:
    """Compare every output for new tokens after cached ones; the line shows the worst."""
    inputs = sample_inputs(caches, shape, size, torch.device("cpu"))
    if not padding:
        inputs[1].fill_(1)
    return _Question(CACHED_NAME, shape, lambda run: run(inputs))


def _of_padded(caches: Sequence[CacheTensor], size: int) -> _Question:
    """Compare the logits of a batch of two, one padded on the left, and of one more token after it."""
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
        # Values at padding are undefined.
        return [torch.cat([logits[seen.bool()], after[:, 0]])]

    return _Question(CACHED_NAME, (batch, tokens, padding), ask)


def _whole_run(logits_of: Callable[[Tensor], Tensor]) -> _Run:
    return lambda inputs: [logits_of(inputs[0])]


def _worst(found: Sequence[Verification]) -> Verification:
    return max(found, key=lambda line: line.max_rel_error)


@contextmanager
def float32_file(path: Path) -> Iterator[Path]:
    """Yield the path of a model's float32 twin, which exists inside the block.

    Raises:
        VerificationError: if the twin is a different graph.
    """
    model = load_model(path)
    twin = float32_twin(model)
    if other := differences_beyond_types(model, twin):
        raise VerificationError(f"the float32 twin is a different graph: {other[0]}", where=str(path))
    with tempfile.TemporaryDirectory(prefix="dispfx-twin-") as folder:
        save_model(twin, Path(folder, path.name))
        yield Path(folder, path.name)
