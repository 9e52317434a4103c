"""`bench`: the speed of a folder's decoder beside the dense one, step by step.

    folder → captured with a cache, lowered by its plan, filled  ┐
    MODEL, or the folder's own class with random weights         ┘→ the same passes → timed in turn

Without a dense MODEL the dense side has random weights: speed depends on shapes, not on values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from dispfx.api.cached import capture_cached
from dispfx.api.folders import Opened, open_folder
from dispfx.api.onnx_speed import compare_onnx
from dispfx.api.opening import Opening
from dispfx.api.programs import lower_program, only_planned
from dispfx.api.speed import Contender, Mode, compare
from dispfx.deploy.checkpoint import skeleton
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.plan import Plan
from dispfx.ir.program import Program
from dispfx.measure.speed import device_name
from dispfx.measure.speed_row import SpeedRow
from dispfx.passes.gather_add import GatherAdd
from dispfx.pipeline import Pipeline

Runtime = Literal["torch", "onnx"]
BATCHES = (1, 8, 32, 128)
ONNX_FACTS = {"runtime": "ONNX Runtime", "head": "it reads all tokens"}
LENGTHS = {"cuda": (128, 512, 2048), "cpu": (16, 64)}
_STANDARD_DEVIATION = 0.02
# Tried on a GPU; a CPU runs what the compiler makes.
_KERNELS = ("library", "generated", "fused")


@dataclass(frozen=True)
class Steps:
    """Which steps to time.

    Args:
        batches: sequences at a time.
        prompts: lengths of a prefill.
        pasts: cached tokens before a decode step.
        modes: eager, compiled or both.
    """

    batches: Sequence[int]
    prompts: Sequence[int]
    pasts: Sequence[int]
    modes: Sequence[Mode]

    def shapes(self) -> Iterator[tuple[CachedShape, Mode]]:
        """Yield every step, prefills first."""
        prefills = [CachedShape(batch, tokens, 0) for tokens in self.prompts for batch in self.batches]
        decodes = [CachedShape(batch, 1, past) for past in self.pasts for batch in self.batches]
        for shape in (*prefills, *decodes):
            for mode in self.modes:
                yield shape, mode


@dataclass(frozen=True)
class Benched:
    """A speed table, and what a reader must know to repeat it."""

    rows: tuple[SpeedRow, ...]
    facts: dict[str, str]


def bench(
    folder: str | Path,
    *,
    dense: str | nn.Module | None = None,
    batches: Sequence[int] = (),
    prompts: Sequence[int] = (),
    pasts: Sequence[int] = (),
    modes: Sequence[Mode] = (),
    device: str | None = None,
    trust_remote_code: bool = False,
    runtime: Runtime = "torch",
    on_row: Callable[[SpeedRow], None] = lambda row: None,
) -> Benched:
    """Time prefill and decode steps of a folder's decoder, pruned and dense.

    Args:
        folder: an output folder with a checkpoint.
        dense: MODEL that the folder was compiled from; by default its class with random weights.
        batches: 1, 8, 32 and 128 by default.
        prompts, pasts: token counts; by default what suits the device and fits the decoder's context.
        modes: eager and compiled by default.
        device: cpu by default.
        runtime: what runs the decoders: torch, or ONNX Runtime on models that the exporter makes of both.
        on_row: called with every row as soon as it is there.

    Raises:
        OutputError: if the folder holds no checkpoint.
        DataError: if a length does not fit the decoder's context.
        PlanMismatchError: if the dense decoder has other shapes.
        CaptureError, UnsupportedGraphError: if the decoder cannot be captured with a cache.
    """
    place = torch.device(device or "cpu")
    opened = open_folder(folder, device=place, trust_remote_code=trust_remote_code)
    steps = _steps(opened, place, batches, prompts, pasts, modes)
    empty = _captured_empty(opened)
    pruned = _pruned(opened, empty)
    whole = _dense(opened, dense, place, empty)
    rows: list[SpeedRow] = []
    if runtime == "onnx":
        shapes = list(dict.fromkeys(shape for shape, _ in steps.shapes()))
        rows = compare_onnx(Path(folder).name, whole, pruned, shapes, place, on_row)
        return Benched(tuple(rows), _facts(opened, whole, pruned, dense, place) | ONNX_FACTS)
    for shape, mode in steps.shapes():
        kernels = (
            ("library", "generated", "fused") if place.type == "cuda" and shape.batch == 1 else ("library",)
        )
        row = compare(Path(folder).name, whole, pruned, shape, mode, kernels=kernels)
        rows.append(row)
        on_row(row)
    return Benched(tuple(rows), _facts(opened, whole, pruned, dense, place))


def _steps(
    opened: Opened,
    device: torch.device,
    batches: Sequence[int],
    prompts: Sequence[int],
    pasts: Sequence[int],
    modes: Sequence[Mode],
) -> Steps:
    """Fill in what was not chosen, and refuse lengths that the decoder cannot read."""
    longest = getattr(opened.config, "max_position_embeddings", None)
    limit = longest if isinstance(longest, int) else max(LENGTHS["cuda"])
    for tokens in (*prompts, *(past + 1 for past in pasts)):
        if not 1 <= tokens <= limit:
            raise DataError(f"a text of {tokens} tokens was asked, the decoder reads 1 to {limit}")
    usual = tuple(length for length in LENGTHS[device.type] if length < limit) or (limit - 1,)
    return Steps(
        tuple(batches) or BATCHES,
        tuple(prompts) or usual,
        tuple(pasts) or usual,
        tuple(modes) or ("eager", "compiled"),
    )


def _captured_empty(opened: Opened) -> Program:
    """Capture the folder's decoder with a cache, in its dense shapes and without weights.

    Raises:
        OutputError: if the folder holds no checkpoint.
    """
    if opened.plan is None or opened.program is None:
        raise OutputError(
            "bench needs a folder that transformers loads, and this one holds a graph alone",
            where=str(opened.path),
        )
    return only_planned(capture_cached(_empty(opened), select=opened.plan.select), opened.plan)


def _pruned(opened: Opened, empty: Program) -> Contender:
    """Lower the captured decoder by the folder's plan, and put the folder's weights in."""
    assert opened.plan is not None and opened.program is not None
    lowered = lower_program(empty, opened.plan)
    lowered.rebuild({**dict(lowered.tensors()), **opened.program.parameters})
    return _contender(lowered, opened.plan.achieved)


def _dense(opened: Opened, dense: str | nn.Module | None, device: torch.device, empty: Program) -> Contender:
    """Return the decoder that the folder was compiled from, or one of its shapes."""
    if dense is None:
        program = capture_cached(_empty(opened))
        with torch.no_grad():
            for tensor in program.parameters.values():
                tensor.normal_(1.0 if tensor.dim() == 1 else 0.0, _STANDARD_DEVIATION)
    else:
        model = Opening(dense, device=str(device)).open().model
        program = capture_cached(model.to(device))
        _require_same_shapes(program, empty)
    return _contender(lower_program(program, Plan.random(program, 0.0, seed=0)), 0.0)


def _empty(opened: Opened) -> nn.Module:
    return skeleton(opened.path, device=opened.device, trust_remote_code=opened.trust_remote_code)


def _require_same_shapes(program: Program, expected: Program) -> None:
    if program.shapes != expected.shapes:
        raise PlanMismatchError(
            "the dense decoder must have the shapes that the folder's decoder had before it was pruned",
            where=program.model_class,
            hint="name the MODEL that the folder was compiled from",
        )
    if program.dtype != expected.dtype:
        raise PlanMismatchError(
            f"the dense decoder is {program.dtype} and the folder's {expected.dtype}; speeds of different "
            "types say nothing",
            where=program.model_class,
        )


def _contender(reference: Program, removed: float) -> Contender:
    return Contender(reference, Pipeline([GatherAdd()]).run(reference.clone()), removed)


def _facts(
    opened: Opened,
    dense: Contender,
    pruned: Contender,
    name: str | nn.Module | None,
    device: torch.device,
) -> dict[str, str]:
    counts = [sum(tensor.numel() for tensor in one.reference.parameters.values()) for one in (dense, pruned)]
    return {
        "folder": opened.path.name,
        "dense": "the same class with random weights" if name is None else str(name),
        "device": device_name(device),
        "torch": torch.__version__,
        "dtype": str(pruned.reference.dtype).removeprefix("torch."),
        "parameters": f"{counts[0]:,} → {counts[1]:,}; {pruned.removed:.1%} of the layers' weights removed",
        "head": "of a prefill it reads the last token",
    }
