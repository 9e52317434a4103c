"""The verb that measures speed: bench."""

from typing import TYPE_CHECKING

from dispfx.cli.screen import Screen
from dispfx.settings.trees import BenchSettings
from dispfx.words.model_origin import origin_of
from dispfx.words.preconditions import check_folder
from dispfx.words.text_origin import check_texts

if TYPE_CHECKING:
    from dispfx.benchmark.speed_row import SpeedRow


def bench(settings: BenchSettings, screen: Screen) -> None:
    """Time prefill and decode steps, pruned and dense, with the largest possible speed-up."""
    out = settings.timing.out
    check_folder(settings.model.model)
    check_texts(settings.text.eval_data or [])
    if settings.timing.dense is not None:
        origin_of(settings.timing.dense)
    from dispfx import api
    from dispfx.report.speed import speed_line, speed_markdown, speed_plain, write_speed

    rows: list[SpeedRow] = []

    def show(row: "SpeedRow") -> None:
        rows.append(row)
        screen.console.print(speed_line(row), markup=False, highlight=False, soft_wrap=True)
        if out is not None:
            write_speed(out, rows, {})

    with screen.observer():
        benched = api.bench(settings, on_row=show)
    if out is not None:
        write_speed(out, benched.rows, benched.facts)
    screen.print_json(speed_plain(benched.rows, benched.facts))
    screen.print_text(speed_markdown(benched.rows, benched.facts))
