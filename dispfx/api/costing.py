"""`costs`: measure a latency table for a decoder on a device."""

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import torch

from dispfx.benchmark.product_times import product_times
from dispfx.benchmark.step_times import Timed, step_times
from dispfx.compiler.cached_programs import capture_cached
from dispfx.deploy.folder import refuse_existing
from dispfx.errors import DataError
from dispfx.files.disk import make_parents, new_file
from dispfx.ir.cached_inputs import CachedShape
from dispfx.ir.program import Program
from dispfx.plan.latency_table import LatencyTable
from dispfx.report import Observer
from dispfx.run.opening import open_model
from dispfx.run.timed_stages import Stages
from dispfx.settings.sections import ALIGNMENT
from dispfx.settings.trees import CostsSettings
from dispfx.source.loading import moved
from dispfx.source.source import named_context
from dispfx.words.chosen_device import chosen_device
from dispfx.words.constraint_text import parse_step

USUAL = {"cuda": ("decode 1@512", "prefill 1x512"), "cpu": ("decode 1@64", "prefill 1x64")}
# Sizes of products: the decoder's own, and shares of them.
_SHARES = (1.0, 0.75, 0.5, 0.25)
_MOST_SIZES = 10


def costs(model: Any, out: Any = None, *, observer: Observer | None = None, **changes: Any) -> LatencyTable:
    """Measure how long products and whole steps of a decoder take, and write a latency table.

    Args:
        model: MODEL, or `CostsSettings`.  Times depend on shapes, so its weights do not matter.
        out: JSON file to write, which `costs` of a run takes.
        observer: told what happens.
        changes: single settings, as in `step=["decode 1@1024"], device="cuda"`.

    Raises:
        UnknownSettingError: if one of `changes` is no setting.
        OutputError: if the file exists.
        DataError: if a step cannot be read, or is longer than the decoder reads.
        CaptureError, UnsupportedGraphError: if the decoder cannot be captured with a cache.
        DispfxError: if a step cannot be run.
    """
    settings = CostsSettings.given(model, changes | ({} if out is None else {"out": out}))
    asked = settings.measuring
    path, stages = refuse_existing(asked.path), Stages(observer)
    device = chosen_device(settings.model.device)
    shapes = [parse_step(text) for text in asked.step or USUAL[device.type]]
    with stages("open"):
        source = open_model(settings.model)
        decoder = moved(source.model, device)
    _require_lengths(shapes, named_context(source.config))
    with stages("capture"):
        plain = capture_cached(decoder)
        heads = capture_cached(decoder, sites=("heads",)) if "heads" in asked.sites else None
    timed = Timed(
        plain,
        heads,
        asked.align or ALIGNMENT[device.type],
        asked.mode or ("compiled" if device.type == "cuda" else "eager"),
        stages.observer.note,
    )
    with stages("steps"):
        steps = tuple(step_times(timed, CachedShape(*shape)) for shape in shapes)
    with stages("products"):
        first = steps[0]
        table = product_times(device, plain.dtype, first.batch * first.tokens, _sizes(plain))
    table = replace(table, steps=steps)
    make_parents(path)
    with new_file(path) as partial:
        partial.write_text(json.dumps(asdict(table), indent=1) + "\n", encoding="utf-8")
    return table


def _require_lengths(shapes: Iterable[tuple[int, int, int]], context: int | None) -> None:
    for _, tokens, past in shapes:
        if context is not None and tokens + past > context:
            raise DataError(f"{tokens + past} tokens were requested, but the decoder reads 1 to {context}")


def _sizes(program: Program) -> list[int]:
    """Return sizes of products between a quarter of the smallest and the largest size of a weight."""
    shapes = [program.shapes[cut.parameter] for site in program.sites for cut in site.slices]
    own = {size for shape in shapes if len(shape) == 2 for size in shape}
    sizes = sorted({max(1, round(share * size)) for size in own for share in _SHARES})
    places = torch.linspace(0, len(sizes) - 1, min(_MOST_SIZES, len(sizes))).round().int().tolist()
    return [sizes[place] for place in dict.fromkeys(places)]
