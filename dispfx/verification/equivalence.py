"""Compare two forms of a decoder.

`require(compare("reloaded = lowered", expected, actual, tolerance))` is the whole use: `compare`
measures, `require` stops the compilation.  The metric is the contract's (`dispfx.ir.logit_errors`): the
largest absolute difference over the largest absolute value of the expected tensor, both over the whole
tensor.

Shape legend: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import VerificationError
from dispfx.ir.logit_errors import logit_errors

# (batch, tokens) at which every pair of forms is compared.  A capture is not traced at these sizes, so that a
# graph with a fixed batch size or length is detected.
SHAPES_BT = ((2, 9), (1, 17))


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
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[Verification]:
    """Compare two decoders on random token ids, one `Verification` per shape.

    Args:
        expected: token ids (B, T) to logits (B, T, V) or an output with `.logits`, the reference.
        actual: the same, the form under test; it may be on another device.
        device: of the ids.

    Raises:
        VerificationError: if the logits differ in shape or dtype.
    """
    found = []
    with torch.no_grad():
        for shape in shapes:
            ids_BT = random_token_ids(vocabulary_size, shape, seed=seed, device=device)
            expected_BTV = _logits(expected(ids_BT))
            actual_BTV = _logits(actual(ids_BT)).to(expected_BTV.device)
            found.append(compare(name, expected_BTV, actual_BTV, tolerance, shape=shape))
    return found


def _logits(output: Any) -> Tensor:
    return output if isinstance(output, Tensor) else output.logits


def random_token_ids(
    vocabulary_size: int, shape: Sequence[int], *, seed: int = 0, device: torch.device | str = "cpu"
) -> Tensor:
    """Return uniform token ids, int64 of `shape`; the same seed and shape give the same ids anywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary_size, tuple(shape), generator=generator).to(device)
