"""Speed tables: figures, flags, and rows that have none."""

import json
from dataclasses import replace
from pathlib import Path

from dispfx.benchmark.speed_row import Side, SpeedRow
from dispfx.ir.cached_inputs import CachedShape
from dispfx.report.speed import speed_line, speed_markdown, speed_plain, write_speed

PREFILL, DECODE = CachedShape(2, 512, 0), CachedShape(8, 1, 1024)
FACTS = {"device": "a card", "dtype": "bfloat16"}


def row(dense: float = 0.004, pruned: float = 0.0025, shape: CachedShape = PREFILL) -> SpeedRow:
    sides = Side(dense, dense, 8 * 10**9, 20.0), Side(pruned, pruned, 5 * 10**9, 25.0, "generated")
    unpruned = {"head_operations": 0.001, "attention_operations": 0.08}
    return SpeedRow("a decoder", shape, "compiled", *sides, bound=2.0, unpruned=unpruned)


def test_a_row_says_how_much_faster_and_what_share_of_the_bound_that_is():
    (line,) = (line for line in speed_markdown([row()], FACTS).splitlines() if "a decoder" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "a decoder", "prefill", "2 × 512", "compiled", "4.000 ms", "2.500 ms ᵍ", "1.60", "2.00", "80%",
        "256,000 → 409,600", "8.00 GB → 5.00 GB", "20 → 25 s", "attention 8%",
    ]  # fmt: skip
    assert "1.600 × as fast (80% of the bound of 2.000; kernels library → generated)" in speed_line(row())


def test_a_decode_step_names_its_cached_tokens():
    assert row(shape=DECODE).kind == "decode"
    assert "8 × 1 (1024)" in speed_markdown([row(shape=DECODE)], FACTS)


def test_slowdowns_are_flagged():
    slow = row(dense=0.002)
    page = speed_markdown([row(), slow], FACTS)
    assert "0.80 ⚠" in page and "**1 of 2 rows are slower than the dense decoder**" in page
    assert "SLOWER" in speed_line(slow) and "SLOWER" not in speed_line(row())
    assert "slower" not in speed_markdown([row()], FACTS)
    assert [found["slower"] for found in speed_plain([row(), slow], FACTS)["rows"]] == [False, True]


def test_a_row_without_figures_says_why():
    failed = SpeedRow("a decoder", PREFILL, "compiled", None, None, 2.0, note="OutOfMemoryError: 80 GB")
    assert failed.speedup is None and failed.share_of_bound is None and not failed.is_slower
    assert "OutOfMemoryError" in speed_markdown([failed], FACTS) and "OutOfMemory" in speed_line(failed)


def test_a_cpu_has_no_peak_memory():
    side = Side(1.0, 1.0, None, 0.0)
    cpu = replace(row(), dense=side, pruned=side)
    assert "GB" not in speed_markdown([cpu], FACTS)


def test_both_files_hold_every_row_and_the_facts(tmp_path: Path):
    write_speed(tmp_path / "speed", [row(), row(shape=DECODE)], FACTS, ["a page"])
    page = (tmp_path / "speed" / "speed.md").read_text()
    assert "- device: a card" in page and page.endswith("a page")
    written = json.loads((tmp_path / "speed" / "speed.json").read_text())
    assert written["facts"] == FACTS
    first = written["rows"][0]
    assert first["shape"] == {"batch": 2, "tokens": 512, "past": 0} and first["kind"] == "prefill"
    assert first["speedup"] == 1.6 and first["share_of_bound"] == 0.8
    assert first["pruned_tokens_per_second"] == 409_600 and first["pruned"]["kernels"] == "generated"
