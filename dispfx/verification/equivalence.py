"""Compare two forms of a decoder.

`require(compare("reloaded = lowered", expected, actual, tolerance))` is the whole use: `compare`
measures, `require` stops the compilation.  The metric is the contract's (`dispfx.ir.logit_errors`): the
largest absolute difference over the largest absolute value of the expected tensor, both over the whole
tensor.

Half precision rounds so coarsely that a wrong index would pass, and two orders of sums can end far apart in a
long text.  Decoders in half precision are compared in float32 if memory allows.  In their own type they must
be finite.

Shape legend: B batch, T tokens, V vocabulary.
"""

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dispfx.capturing.module_capture import module_logits
from dispfx.errors import VerificationError
from dispfx.estimate.free_memory import free_bytes
from dispfx.ir.logit_errors import logit_errors
from dispfx.ir.retype import retyped

# (batch, tokens) at which every pair of forms is compared.  A capture is not traced at these sizes, so that a
# graph with a fixed batch size or length is detected.
SHAPES_BT = ((2, 9), (1, 17))


# A product over fewer features adds the same numbers in another order.  In float32 this changed the logits of
# tiny decoders by 1e-6 of the largest, and those of SmolLM2-135M, whose stream holds a few very large
# features through 30 layers, by 2e-5.  A wrong index changes them by 1e-3 and more.  Half precision sums in
# float32 and rounds the result of each product to 11 or 8 bits: another order flips some of these roundings
# by one step, at most 2⁻¹⁰ or 2⁻⁷ of a value, and half of that on average.  Flips of independent sign add up
# as a random
# walk: a layer writes through about six products, so L layers change a value by √(6 L) · 2⁻⁸ in bfloat16,
# which is 1.4e-2 for 2 layers and 5.4e-2 for 32.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 5e-2,
}
_HALF = (torch.float16, torch.bfloat16)
_SHARE_OF_MEMORY = 0.7
# Rounding in bfloat16 moved the logits of SmolLM2-135M by up to 0.21 of the largest after learning, and by
# 0.56 where a score alone had chosen.  What is larger is compared with what noise does to the reference.
_SURELY_BY_ROUNDING = 0.5
_TIMES_NOISE = 3.0
_PRODUCTS = ("mm", "linear", "matmul", "attention")
# What the name of a comparison ends with that was made in float32.
IN_FLOAT32 = " in float32"


class ModuleDecoder(nn.Module):
    """A module as a decoder: token ids (B, T) to logits (B, T, V).

    Args:
        model: the module, which is not changed.
        tensors: values to use in place of the module's own, by path.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, Tensor] | None = None):
        super().__init__()
        self.tensors = None if tensors is None else dict(tensors)
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (B, T, V) of token ids (B, T)."""
        return module_logits(self.model, ids, self.tensors)

    def retyped(self, old: torch.dtype, new: torch.dtype) -> "ModuleDecoder":
        """Return the same decoder with every tensor of type `old` converted to `new`."""
        own = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
            **(self.tensors or {}),
        }
        return ModuleDecoder(
            self.model, {path: one.detach().to(new) if one.dtype is old else one for path, one in own.items()}
        )


def shapes_up_to(most: int | None = None, longest: int = 0) -> tuple[tuple[int, int], ...]:
    """Return the shapes of every comparison.

    Args:
        most: maximum number of tokens of the decoder, if it has a limit.
        longest: sequence length of the run, which is also compared if it is longer than the default shapes.
    """
    shapes = tuple((batch, min(tokens, most or tokens)) for batch, tokens in SHAPES_BT)
    return (*shapes, (1, longest)) if longest > max(tokens for _, tokens in SHAPES_BT) else shapes


# End of the name of a comparison of a file with its digest in the report.
OF_REPORT = " = report"


@dataclass(frozen=True)
class Verification:
    """The difference of two forms of a decoder on one input.

    Args:
        name: the two forms, as in "reloaded = lowered".
        shape: (batch, tokens) of the input ids; empty for files.
        max_abs_error: max|a - b|; infinite if either side is not finite.
        max_rel_error: max|a - b| / max|b| with b the expected tensor; masked logits do not count in max|b|.
        tolerance: largest allowed relative error; 0.0 requires equal bits.
    """

    name: str
    shape: tuple[int, ...]
    max_abs_error: float
    max_rel_error: float
    tolerance: float

    @property
    def holds(self) -> bool:
        """Whether the relative error is a number and within the tolerance."""
        return self.max_rel_error <= self.tolerance


def compare(
    name: str, expected: Tensor, actual: Tensor, tolerance: float, *, shape: Sequence[int] | None = None
) -> Verification:
    """Measure the difference of `actual` and `expected`.

    NaN and infinity always fail, even on both sides at the same position: such a decoder cannot be
    verified.

    Args:
        name: the two forms.
        expected: (B, T, V), the reference.
        actual: (B, T, V), of the same shape and dtype.
        tolerance: largest allowed relative error, at least 0.
        shape: of the input ids, for the report; by default the first two sizes of `expected`.

    Raises:
        VerificationError: if shape or dtype differ.
    """
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        raise VerificationError(
            f"logits of shape {tuple(expected.shape)} and dtype {expected.dtype} were expected, but "
            f"{tuple(actual.shape)} and {actual.dtype} were found",
            where=name,
        )
    shown = tuple(expected.shape[:2] if shape is None else shape)
    max_abs_error, max_rel_error = logit_errors(expected.detach(), actual.detach())
    return Verification(name, shown, max_abs_error, max_rel_error, tolerance)


def require(*verifications: Verification) -> None:
    """Raise if a comparison fails.

    Raises:
        VerificationError: with the worst failing comparison.
    """
    failed = [verification for verification in verifications if not verification.holds]
    if not failed:
        return
    files = [one.name.removesuffix(OF_REPORT) for one in failed if one.name.endswith(OF_REPORT)]
    if files:
        raise VerificationError(
            f"{', '.join(files)}: missing, or changed since it was written",
            hint="copy the folder again, or write it again; its other forms may be intact",
        )
    worst = max(failed, key=lambda verification: verification.max_rel_error)
    others = f" ({len(failed)} of {len(verifications)} comparisons fail)" if len(failed) > 1 else ""
    raise VerificationError(
        f"{worst.name}: relative error {worst.max_rel_error:.3g} (absolute {worst.max_abs_error:.3g}) "
        f"exceeds the tolerance of {worst.tolerance:.3g}{others}",
        where=f"input of shape {worst.shape}",
    )


def compare_decoders(
    name: str,
    expected: Callable[[Tensor], Any],
    actual: Callable[[Tensor], Any],
    tolerance: float,
    *,
    vocabulary_size: int,
    shapes: Sequence[tuple[int, int]] = SHAPES_BT,
    device: torch.device | str = "cpu",
) -> list[Verification]:
    """Compare two decoders on random token ids, one `Verification` per shape.

    Args:
        expected: token ids (B, T) to logits (B, T, V) or an output with `.logits`, the reference.
        actual: the same, the form under test; it may be on another device.
        vocabulary_size: the ids are drawn below it.
        device: of the ids.

    Raises:
        VerificationError: if the logits differ in shape or dtype.
    """
    compared = _Compared(name, vocabulary_size, shapes, device)
    found = compared.lines(expected, actual, tolerance)
    dtype = _half_of(expected, actual) if tolerance > TOLERANCES[torch.float32] else None
    own = max((line.max_rel_error for line in found), default=0.0)
    if dtype is None or not math.isfinite(own):
        return found
    if own > _SURELY_BY_ROUNDING and own > _TIMES_NOISE * compared.noise(expected):
        return found
    # A module's code may insist on its type, and a GPU's memory may be in parts.
    with contextlib.suppress(Exception):
        _require_room(dtype, expected, actual)
        twins = [_in_float32(one, dtype) for one in (expected, actual)]
        with _Halves() as halves:
            twin = replace(compared, name=name + IN_FLOAT32)
            exact = twin.lines(twins[0], twins[1], TOLERANCES[torch.float32])
        written = any(_is_code(one) for one in (expected, actual))
        other = max(line.max_rel_error for line in exact)
        # Code that casts to half precision, or asks for its type, is another function in float32.
        if not (written and other > exact[0].tolerance and (halves.seen or own <= tolerance < other)):
            return exact
    return found


class _Halves(TorchDispatchMode):
    """Whether an operation gave a tensor in half precision."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        output = function(*args, **(kwargs or {}))
        made = output if isinstance(output, tuple | list) else (output,)
        self.seen |= any(isinstance(one, Tensor) and one.dtype in _HALF for one in made)
        return output


class _Rounding(TorchDispatchMode):
    """Changes what products give in half precision by up to half a unit in the last place, at random."""

    _generator: torch.Generator | None = None

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation."""
        output = function(*args, **(kwargs or {}))
        if not any(name in str(function) for name in _PRODUCTS):
            return output
        if isinstance(output, tuple):
            return (self._changed(output[0]), *output[1:])
        return self._changed(output)

    def _changed(self, output: Any) -> Any:
        if not isinstance(output, Tensor) or output.dtype not in _HALF:
            return output
        if self._generator is None:
            self._generator = torch.Generator(output.device).manual_seed(0)
        part = torch.rand(output.shape, generator=self._generator, device=output.device) - 0.5
        return (output.float() * (1.0 + torch.finfo(output.dtype).eps * part)).to(output.dtype)


def _is_code(decoder: Any) -> bool:
    """Whether a decoder runs code of its own, and no graph."""
    return isinstance(decoder, ModuleDecoder) or not (
        isinstance(decoder, fx.GraphModule) or hasattr(decoder, "retyped")
    )


@dataclass(frozen=True)
class _Compared:
    """One comparison of two decoders: its name, and the token ids."""

    name: str
    vocabulary_size: int
    shapes: Sequence[tuple[int, int]]
    device: torch.device | str

    @torch.no_grad()
    def lines(
        self, expected: Callable[[Tensor], Any], actual: Callable[[Tensor], Any], tolerance: float
    ) -> list[Verification]:
        """Return one line per shape."""
        found = []
        for shape in self.shapes:
            ids_BT = random_token_ids(self.vocabulary_size, shape, device=self.device)
            expected_BTV = _logits(expected(ids_BT))
            actual_BTV = _logits(actual(ids_BT)).to(expected_BTV.device)
            found.append(compare(self.name, expected_BTV, actual_BTV, tolerance, shape=shape))
        return found

    @torch.no_grad()
    def noise(self, decoder: Callable[[Tensor], Any]) -> float:
        """Return the largest relative change of a decoder's logits if each product is rounded once more."""

        def rounded(ids_BT: Tensor) -> Any:
            with _Rounding():
                return decoder(ids_BT)

        return max(line.max_rel_error for line in self.lines(decoder, rounded, 0.0))


def _half_of(*decoders: Any) -> torch.dtype | None:
    """Return the type of half precision that modules have parameters of; None if one is no module."""
    if not all(isinstance(one, nn.Module) for one in decoders):
        return None
    return next((one.dtype for each in decoders for one in each.parameters() if one.dtype in _HALF), None)


def _require_room(dtype: torch.dtype, *decoders: Any) -> None:
    """Raise MemoryError if float32 copies would not fit."""
    copied = [one for each in decoders for one in each.parameters() if one.dtype is dtype]
    free = free_bytes(copied[0].device)
    if free is not None and 4 * sum(one.numel() for one in copied) > _SHARE_OF_MEMORY * free:
        raise MemoryError


def _in_float32(decoder: Any, dtype: torch.dtype) -> Callable[[Tensor], Any]:
    """Return a decoder with its tensors of a type converted to float32."""
    if isinstance(decoder, fx.GraphModule):
        return retyped(decoder, dtype, torch.float32)
    own = getattr(decoder, "retyped", None) or ModuleDecoder(decoder).retyped
    return own(dtype, torch.float32)


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def random_token_ids(
    vocabulary_size: int, shape: Sequence[int], *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return uniform token ids, int64 of `shape`; the same seed and shape give the same ids anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary_size, tuple(shape), generator=generator).to(device)
