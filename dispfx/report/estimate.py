"""The estimated memory and time of learning, as text and as JSON."""

from typing import Any

from rich.console import Console

from dispfx.estimate.devices import CARDS, Device
from dispfx.estimate.run_estimate import Estimate
from dispfx.report.numbers import shown_bytes

_GIGA = 1e9


def print_estimate(estimate: Estimate, console: Console) -> None:
    """Print one line on memory, then one line per kind of GPU with time and number of GPUs."""
    for line in estimate_lines(estimate):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def estimate_lines(estimate: Estimate) -> list[str]:
    """Return the lines that `print_estimate` prints."""
    settings, share = estimate.settings, estimate.gated_parameters / estimate.parameters
    free = estimate.free_bytes
    verdict = "" if free is None else f"; {estimate.fits(free)} here ({shown_bytes(free)} free)"
    return [
        f"{estimate.gated_parameters:,} of {estimate.parameters:,} parameters are gated ({share:.1%})",
        f"learning at {settings.batch_size} × {settings.seq_len} tokens takes about "
        f"{shown_bytes(estimate.peak_bytes)}: weights {shown_bytes(estimate.weight_bytes)}, "
        f"hypernetwork {shown_bytes(estimate.hypernetwork_bytes)}, the rest for a step{verdict}",
        *(_card_line(estimate, card) for card in CARDS.values()),
    ]


def estimate_plain(estimate: Estimate) -> dict[str, Any]:
    """Return all figures, ready for JSON; bytes, operations and seconds."""
    settings, free = estimate.settings, estimate.free_bytes
    checkpoints = estimate.beside_weights(checkpoints=True, compiled=estimate.place == "cuda")
    return {
        "batch_size": settings.batch_size,
        "seq_len": settings.seq_len,
        "steps": settings.steps,
        "gated_parameters": estimate.gated_parameters,
        "bytes": {
            "weights": estimate.weight_bytes,
            "weights_by_dtype": estimate.weight_bytes_by_dtype,
            "hypernetwork": estimate.hypernetwork_bytes,
            "kept_for_backward": estimate.step.kept,
            "step": estimate.step.bytes(),
            "peak": estimate.peak_bytes,
            "peak_with_checkpointing": estimate.weight_bytes + checkpoints,
            "free": free,
        },
        "fits": None if free is None else estimate.fits(free),
        "flops_a_step": estimate.flops_a_step,
        "seconds": {name: estimate.seconds(card) for name, card in CARDS.items()},
    }


def _card_line(estimate: Estimate, card: Device) -> str:
    """Return how long one GPU takes, and whether its memory suffices."""
    fit = estimate.fits(card.memory_bytes - estimate.weight_bytes, "cuda")
    if fit == "does not fit":
        needed = estimate.weight_bytes + estimate.beside_weights("cuda", checkpoints=True, compiled=True)
        fit = f"needs the memory of at least {max(2, -(-needed // card.memory_bytes)):,}"
    else:
        fit = fit.replace("fits", "fits on one", 1)
    return (
        f"  {card.name}: about {duration(estimate.seconds(card))} on one for {estimate.settings.steps:,} "
        f"steps; {fit} ({card.memory_bytes / _GIGA:.0f} GB)"
    )


def duration(seconds: float) -> str:
    """Format a duration in the largest unit that gives at least 2."""
    for unit, length in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.1f} s"
