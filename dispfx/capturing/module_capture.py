"""Capture: an `nn.Module` becomes a `Program`.

Entry point: `capture`.

How a decoder becomes a graph:
1. It is exported in evaluation mode and without gradients at 3 × 13 tokens: two primes, so that a
   dimension of a reshape can be told by its size.
2. In-place operations are made functional.
3. Parameters, buffers and constants become `get_attr` nodes under their own paths; tied parameters
   become one.  Token ids stay the only input and logits the only output.
4. The graph runs at the traced and at another shape and must give what the module gives there,
   because `Dim.AUTO` may fix a dimension without saying so.
5. The lengths for which the graph holds are found (`dispfx.capturing.valid_lengths`); it raises at others.
   A decoder that computes a text otherwise in another batch is refused (`dispfx.capturing.valid_batches`).
6. A decoder on the meta device has shapes and no values: it is captured without being run, rule 4 is
   left out, and `Program.measured` is False.
"""

import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parameter import UninitializedParameter

from dispfx.capturing.caches import nothing_remembered
from dispfx.capturing.document_masks import ApartDocuments, refuse_mixing
from dispfx.capturing.fitting_shapes import OTHER_SHAPE, TRACED_SHAPE, Shapes, fitting_shapes
from dispfx.capturing.graph_export import torch_unheard, traced, user_frame
from dispfx.capturing.logits import Widths, logits_of, tensors_in, widths_of
from dispfx.capturing.module_state import (
    ModuleState,
    called_with,
    in_evaluation_mode,
    module_kept,
    random_state_kept,
)
from dispfx.capturing.refusals import refuse_export, refuse_fixed_length
from dispfx.capturing.repeatable import (
    require_repeatable,
    require_same_again,
    written_tensors,
)
from dispfx.capturing.rounding_noise import allowed_by_rounding, most_allowed
from dispfx.capturing.unlifting import program_of, straight_line, user_inputs, user_outputs
from dispfx.capturing.valid_batches import require_any_batch
from dispfx.capturing.valid_lengths import Outcome, Trial, conditions_of, valid_lengths
from dispfx.capturing.warm_up import length_bound, warm_up
from dispfx.errors import CaptureError, first_line
from dispfx.ir.logit_errors import logit_errors
from dispfx.ir.program import Program, is_zero
from dispfx.settings.verb_settings import LONGEST_CONTEXT
from dispfx.words.chosen_device import require_default_device
from dispfx.words.given import whole_number_given
from dispfx.words.option_names import option

# Shortest and longest of the sequences that every form of a decoder is compared on.
VERIFIED_LENGTHS = (8, 17)
IDENTITY_TOLERANCE = 1e-6
_WRAPPERS = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)
# Attention sums over more places, most of them hidden, than for a document alone.
_APART_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-6}
_HALF_APART_TOLERANCE = 0.05
_MASKING = "mask tokens with torch.finfo(dtype).min, and not with -inf"
# What helps where activations overflow.
_OTHER_TYPE = {
    torch.float16: f"load it with {option('dtype', 'float32')} or bfloat16",
    torch.bfloat16: f"load it with {option('dtype', 'float32')}",
}


def capture(
    model: nn.Module,
    *,
    vocabulary_size: int | None = None,
    separator: int | None = None,
    longest: int = LONGEST_CONTEXT,
) -> Program:
    """Return the graph of a decoder; the decoder itself is not changed.

    Args:
        model: takes token ids (B, T) int64 first and returns logits (B, T, V), or an output that
            holds them; on the meta device, or with all its values.
        vocabulary_size: ids are drawn below it; by default taken from the input embedding.
        separator: token that ends a document; those of a sequence are kept apart then
            (`dispfx.capturing.document_masks`).
        longest: tables that the module makes as long as its texts are captured for so many tokens.

    Raises:
        CaptureError: if the module cannot be exported, works at one shape only, or the graph
            differs from the module by more than rounding explains; or if documents cannot be kept apart.
    """
    require_decoder(model)
    if vocabulary_size is not None:
        whole_number_given(vocabulary_size, 1, "vocabulary_size")
    if separator is not None:
        whole_number_given(separator, 0, "separator")
    require_default_device(meta=not _has_values(model))
    vocabulary = vocabulary_size or embedding_rows(model)
    with evaluation(model) as state, torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = _fixed_arguments(model)
        called = model
        if separator is not None:
            called, arguments = ApartDocuments(model, separator, arguments).eval(), {}

        def run(tokens: int) -> None:
            _run(called, token_ids(model, vocabulary, (1, tokens)), arguments)

        measured = _has_values(model)
        # What torch.export says of a module that cannot run at all is hard to read.
        fit = fitting_shapes(run) if measured else Shapes()
        ids = token_ids(model, vocabulary, fit.traced)
        if measured:
            returned = _run(called, ids, arguments)
            logits = logits_of(returned, ids, widths_of(model))
            # Those of a written folder are captured with zeros, and filled later.
            if not all(map(is_zero, model.parameters())):
                _require_unlike(logits, ids, type(model).__name__)
        exported = _export_at_its_longest(called, ids, state, run, longest)
        conditions = conditions_of(exported)
        straight = straight_line(exported, type(model).__name__, _prefix(model, called))
        program = _program_of(straight, model, called)
        program.separator = separator
        if measured:
            alike = [leaf for leaf in tensors_in(returned) if leaf.shape == logits.shape]
            program.logits_returned = max(1, len(alike))
            again = partial(_logits, called, ids, arguments, widths_of(model))
            written = written_tensors(straight, _prefix(model, called), model, again)
            require_repeatable(program, written, ids, again, logits)
        at = partial(_trial, program, called, vocabulary, arguments)
        of_lengths = at(lambda tokens: (1, tokens), lambda tokens: (TRACED_SHAPE[0], tokens))
        program.hold_to(fit.narrowed(valid_lengths(conditions, fit.traced[1], of_lengths)))
        for tokens in VERIFIED_LENGTHS:
            program.lengths.require(fit.within(tokens), "what is compiled is verified at that length, too")
        for shape in (fit.traced, fit.other) if measured else ():
            ids = token_ids(model, vocabulary, shape)
            try:
                program.identity = {**program.identity, shape: _identity(program, called, ids, arguments)}
            except _FixedLength as error:
                raise _refuse_fixed_length(program, called, ids, error.__cause__, fit) from error.__cause__
        of_batches = replace(
            at(*(lambda sequences: (sequences, fit.traced[1]),) * 2),
            conditions=partial(conditions_of, axis=0, other=fit.traced[1]),
        )
        require_any_batch(of_batches.conditions(exported), fit.traced, of_batches)
        if measured:
            # The module has run several times since then.
            require_same_again(program, again, logits)
        if separator is not None and measured:
            _check_apart(program, model, token_ids(model, vocabulary, fit.other), separator)
    return program


def compare_at(model: nn.Module, program: Program, tokens: int, *, listed: bool = True) -> None:
    """Compare a graph with its decoder on one more sequence.

    Args:
        tokens: of the sequence.
        listed: whether the difference joins `program.identity`.

    Raises:
        CaptureError: if they differ.
    """
    with evaluation(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ids = token_ids(model, program.known_tokens, (1, tokens))
        found = _identity(program, model, ids, _fixed_arguments(model))
    if listed:
        program.identity = {**program.identity, (1, tokens): found}


def _check_apart(program: Program, model: nn.Module, ids: Tensor, separator: int) -> None:
    """Pass if two documents of a sequence have the logits that the module gives to each alone."""
    arguments = _fixed_arguments(model)
    ids[ids == separator] = (separator + 1) % int(ids.max() + 1)
    middle = ids.shape[1] // 2
    ids[:, middle - 1] = separator
    widths = widths_of(model)
    parts = (ids[:, :middle], ids[:, middle:])
    alone = [logits_of(_run(model, part, arguments), part, widths) for part in parts]
    found = difference(program.graph_module(ids), torch.cat(alone, 1))
    if not found.relative <= _APART_TOLERANCE.get(program.dtype, _HALF_APART_TOLERANCE):
        raise refuse_mixing(type(model).__name__, found.relative)


def module_logits(model: nn.Module, ids: Tensor, tensors: Mapping[str, Tensor] | None = None) -> Tensor:
    """Return the logits (B, T, V) that a decoder gives for token ids (B, T), in evaluation mode and uncached.

    Args:
        tensors: values to use in place of the module's own, by path; the module is not changed.

    Raises:
        CaptureError: if the module raises, or returns no logits.
    """
    if tensors is None:
        return logits_of(module_output(model, ids), ids, widths_of(model))
    arguments = _fixed_arguments(model)
    with in_evaluation_mode(model):
        output = called_with(model, tensors, (ids,), arguments)
    return logits_of(output, ids, widths_of(model))


def module_output(model: nn.Module, ids: Tensor) -> Any:
    """Return what a decoder gives for token ids (B, T) in evaluation mode, without a cache.

    Raises:
        CaptureError: if the module raises.
    """
    with in_evaluation_mode(model):
        return _run(model, ids, _fixed_arguments(model))


@dataclass(frozen=True)
class Difference:
    """max|a − b|, the same over max|b|, and how large that may be."""

    absolute: float
    relative: float
    allowed: float = IDENTITY_TOLERANCE


def require_decoder(model: nn.Module) -> None:
    """Pass if a module may be a decoder: it has parameters, with shapes, and Python code.

    Raises:
        CaptureError: otherwise.
    """
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a decoder is a torch.nn.Module, this is a {type(model).__name__}")
    if next(model.parameters(), None) is None:
        raise CaptureError("a decoder has parameters, this module has none", where=type(model).__name__)
    for path, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise CaptureError(
                "a parameter has no shape before the module has run",
                where=path,
                hint="run the module on some token ids first",
            )
        if parameter.layout is not torch.strided:
            raise CaptureError(
                f"the weights must be dense tensors, and this one has the layout {parameter.layout}",
                where=path,
                hint="give it as a dense tensor, as `to_dense()` makes it",
            )
    for path, part in model.named_modules():
        if isinstance(part, _WRAPPERS):
            raise CaptureError(
                f"a module in {type(part).__name__} cannot be captured",
                where=path or type(model).__name__,
                hint="give the module that it was made from",
            )
        if any(isinstance(value, torch.ScriptObject) for value in vars(part).values()):
            raise CaptureError(
                f"the weights of {type(part).__name__} are packed by torch, as quantization does, and cannot "
                "be cut",
                where=path or type(model).__name__,
                hint="give the decoder before it was quantized, and quantize the pruned one",
            )
        if getattr(part, "max_norm", None) is not None and isinstance(part, nn.Embedding | nn.EmbeddingBag):
            raise CaptureError(
                "an embedding with `max_norm` changes its weights each time that it runs",
                where=path,
                hint="scale its weights once, and set `max_norm` to None",
            )


def _has_values(model: nn.Module) -> bool:
    """Return whether the module's tensors hold values, which those on the meta device do not.

    Raises:
        CaptureError: if some do and some do not, as where weights are left on disk.
    """
    without = [path for path, tensor in model.named_parameters() if tensor.is_meta]
    if without and len(without) < sum(1 for _ in model.parameters()):
        raise CaptureError(
            f"all parameters must hold values, or none; {len(without)} are on the meta device",
            where=without[0],
            hint="load the whole decoder, or put all of it on the meta device",
        )
    return not without


def embedding_rows(model: nn.Module) -> int:
    """Return the number of tokens: the rows of the embedding that comes first in the module."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            return module.num_embeddings
    shapes = [tensor.shape for _, tensor in model.named_parameters() if tensor.dim() == 2]
    if not shapes:
        raise CaptureError("no embedding was found in the module", where=type(model).__name__)
    return int(shapes[0][0])


@contextmanager
def evaluation(model: nn.Module, *, use_cache: bool = False) -> Iterator[ModuleState]:
    """Hold the module in evaluation mode, not compiled, and its config's `use_cache` as asked.

    Afterwards module and random states are as they were.
    """
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    with module_kept(model) as state, random_state_kept(), torch.compiler.set_stance("force_eager"):
        model.eval()
        if before is not None:
            config.use_cache = use_cache  # type: ignore[union-attr]
        try:
            yield state
        finally:
            if before is not None:
                config.use_cache = before  # type: ignore[union-attr]


def _fixed_arguments(model: nn.Module) -> dict[str, Any]:
    """Return the keyword arguments that make a forward pass stateless."""
    accepted = inspect.signature(model.forward).parameters
    return {"use_cache": False} if "use_cache" in accepted else {}


def token_ids(model: nn.Module, vocabulary: int, shape: tuple[int, int]) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    low = min(4, vocabulary - 1)
    ids = torch.randint(low, vocabulary, shape, generator=generator)
    return ids.to(next(model.parameters()).device)


def _logits(model: nn.Module, ids: Tensor, arguments: Mapping[str, Any], widths: Widths) -> Tensor:
    return logits_of(_run(model, ids, arguments), ids, widths)


def _run(model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> Any:
    try:
        return model(ids, **arguments)
    except Exception as error:
        raise CaptureError(
            f"the module must take token ids of shape {tuple(ids.shape)}; it raised {first_line(error)}",
            where=user_frame(error) or type(model).__name__,
            hint="wrap the decoder in a module whose forward takes token ids first",
        ) from error


class _LogitsOnly(nn.Module):
    """A decoder that returns its logits alone, whatever its own module returns them in."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder = decoder
        self.arguments = _fixed_arguments(decoder)
        self.widths = widths_of(decoder)

    def forward(self, ids: Tensor) -> Tensor:
        return logits_of(self.decoder(ids, **self.arguments), ids, self.widths)


def _export_at_its_longest(
    model: nn.Module, ids: Tensor, state: ModuleState, run: Callable[[int], None], longest: int
) -> ExportedProgram:
    """Export a module whose masks and tables, if it makes them where they are needed, are made already.

    Args:
        state: of the module before it ran at all.
        run: runs the module on so many tokens.
        longest: how many tokens such tables are made for.
    """
    warm = state.restructured() and warm_up(run, longest)
    exported = _export(model, ids)
    bound = length_bound(exported, user_inputs(exported)[0])
    if not warm and bound is not None and bound < longest and warm_up(run, longest) and state.restructured():
        return _export(model, ids)
    return exported


def _export(model: nn.Module, ids: Tensor) -> ExportedProgram:
    dynamic = ({0: Dim.AUTO, 1: Dim.AUTO},)
    try:
        with module_kept(model, values=False), nothing_remembered(model):
            return traced(_LogitsOnly(model), (ids,), dynamic)
    except CaptureError:
        raise  # of `logits_of`
    except Exception as error:
        raise refuse_export(error, type(model).__name__) from error


def _program_of(exported: ExportedProgram, model: nn.Module, called: nn.Module) -> Program:
    """Return the program of a module; `called` is the module itself, or holds it as `decoder`."""
    ids, logits = user_inputs(exported)[0], user_outputs(exported)[0]
    return program_of(exported, model, {"input_ids": ids}, {"logits": logits}, prefix=_prefix(model, called))


def _prefix(model: nn.Module, called: nn.Module) -> str:
    """Return what an exported module puts in front of the decoder's own paths."""
    return "decoder." if called is model else "decoder.decoder."


def _identity(program: Program, model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> Difference:
    """Return how far the graph is from the module at these ids; raise where it is not close.

    A graph spells out the causal mask that a module may leave to the attention kernel, and a GPU then
    takes another kernel, which in half precision rounds otherwise.  Where the two differ they are compared
    once more with the reference kernel in both.  What still differs by more than `IDENTITY_TOLERANCE` is held
    against what rounding alone does to the module (`dispfx.capturing.rounding_noise`).
    """
    found = _difference_at(program, model, ids, arguments)
    if not found.relative <= IDENTITY_TOLERANCE:
        with sdpa_kernel(SDPBackend.MATH):
            found = min(found, _difference_at(program, model, ids, arguments), key=lambda d: d.relative)
    if IDENTITY_TOLERANCE < found.relative <= most_allowed(model.parameters()):
        found = replace(found, allowed=_rounding(program, model, ids, arguments))
    if not found.relative <= found.allowed:
        _require_same_twice(model, ids, arguments)
        raise CaptureError(
            f"the graph must give the module's logits within {found.allowed:.2g}, "
            f"at {tuple(ids.shape)} tokens it differs by {found.relative:.2e}",
            where=type(model).__name__,
        )
    return found


def _rounding(program: Program, model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> float:
    """Return how far rounding may move graph and module apart, `IDENTITY_TOLERANCE` at the least."""
    widths = widths_of(model)

    def logits(tensors: Mapping[str, Tensor]) -> Tensor:
        output = called_with(model, tensors, (ids,), arguments)
        return logits_of(output, ids, widths)

    def apart(actual: Tensor, expected: Tensor) -> float:
        return difference(actual, expected).relative

    allowed = allowed_by_rounding(model, program.graph_module, ids, logits, apart)
    return max(IDENTITY_TOLERANCE, allowed)


def _require_unlike(logits: Tensor, ids: Tensor, where: str) -> None:
    """Raise CaptureError for logits that are the same for every token: comparing them would show nothing.

    In half precision also for logits that are alike for one token, whose activations have overflowed.
    """
    kind = str(logits.dtype).removeprefix("torch.")
    half = logits.dtype in (torch.float16, torch.bfloat16)
    alike_BT = (logits == logits[..., :1]).all(-1)
    if bool((ids != ids[0, 0]).any()) and bool((logits == logits[:1, :1]).all()):
        found = "are the same for every token"
    elif half and logits.shape[-1] > 1 and bool(alike_BT.any()):
        found = f"are all alike for {int(alike_BT.sum())} of {alike_BT.numel()} tokens"
    else:
        return
    raise CaptureError(
        f"the logits of this decoder {found} in {kind}, so a comparison would show nothing",
        where=where,
        hint=_OTHER_TYPE.get(logits.dtype, "its weights may be zero, or not loaded"),
    )


def _require_same_twice(model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]) -> None:
    """Raise CaptureError for a module whose logits are not finite, or other ones each time that it runs."""
    widths = widths_of(model)
    once, twice = (logits_of(_run(model, ids, arguments), ids, widths) for _ in range(2))
    if not bool(once.isfinite().all()):
        raise CaptureError(
            "the module gives logits that are infinite or not a number, which cannot be compared",
            where=type(model).__name__,
            hint="; or ".join(filter(None, (_MASKING, _OTHER_TYPE.get(once.dtype)))),
        )
    if difference(twice, once).relative > IDENTITY_TOLERANCE:
        raise CaptureError(
            "the module gives other logits each time that it runs on the same tokens",
            where=type(model).__name__,
            hint="in evaluation mode nothing may be random, and nothing may depend on earlier calls",
        )


def _trial(
    program: Program,
    model: nn.Module,
    vocabulary: int,
    arguments: Mapping[str, Any],
    run_at: Callable[[int], tuple[int, int]],
    trace_at: Callable[[int], tuple[int, int]],
) -> Trial:
    """Return how a module and its graph are tried at other lengths, or with other batches.

    Args:
        run_at, trace_at: the shape (B, T) to run or trace the module at, by the size that is tried.
    """

    def ids_at(shape: tuple[int, int]) -> Tensor:
        return token_ids(model, vocabulary, shape)

    def run(size: int) -> None:
        _run(model, ids_at(run_at(size)), arguments)

    def compared(size: int) -> Outcome:
        ids = ids_at(run_at(size))
        try:
            if ids.shape[1] > 1:
                return "same" if _identity(program, model, ids, arguments) else "other"
            # Another kernel may take a single token, and sum in another order.
            found = _difference_at(program, model, ids, arguments).relative
            return "same" if found <= max(1e-5, 20 * torch.finfo(program.dtype).eps) else "other"
        except CaptureError as error:
            return "stops" if isinstance(error, _FixedLength) else "other"

    return Trial(
        model,
        run,
        lambda size: _export(model, ids_at(trace_at(size))),
        compared if _has_values(model) else None,
    )


class _FixedLength(CaptureError):
    """The graph does not run at another length than the traced one."""


def _refuse_fixed_length(
    program: Program, model: nn.Module, ids: Tensor, error: Any, fit: Shapes
) -> CaptureError:
    def traced_at(tokens: int) -> ExportedProgram:
        return _export(model, token_ids(model, program.known_tokens, (TRACED_SHAPE[0], tokens)))

    name = type(model).__name__
    lengths = (fit.traced[1], OTHER_SHAPE[1])
    return refuse_fixed_length(program.graph_module, ids, error, name, traced_at, lengths)


def _difference_at(
    program: Program, model: nn.Module, ids: Tensor, arguments: Mapping[str, Any]
) -> Difference:
    expected = logits_of(_run(model, ids, arguments), ids, widths_of(model))
    try:
        with torch_unheard():
            actual = program.graph_module(ids)
    except Exception as error:
        raise _FixedLength(f"the graph does not run at {tuple(ids.shape)} tokens") from error
    return difference(actual, expected)


def difference(actual: Tensor, expected: Tensor) -> Difference:
    """Compare logits; infinite where shapes differ or a value is not finite."""
    if actual.shape != expected.shape:
        return Difference(math.inf, math.inf)
    return Difference(*logit_errors(expected, actual))
