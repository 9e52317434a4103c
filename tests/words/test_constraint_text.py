"""What a constraint says, and texts that are none."""

from typing import Any

import pytest

from dispfx.errors import BudgetError, DataError
from dispfx.settings import BudgetSettings
from dispfx.words.constraint_text import EXAMPLES, in_bytes, in_unit, parse_constraint, parse_step


@pytest.mark.parametrize(
    ("text", "kind", "shape", "most"),
    [
        ("size: 6 GB", "size", (0, 0), 6e9),
        ("size:6gb", "size", (0, 0), 6e9),
        (" Size :  1.5  GiB ", "size", (0, 0), 1.5 * 2**30),
        ("size: 800 B", "size", (0, 0), 800),
        ("size: 60%", "size", (0, 0), 0.6 * 1000),
        ("memory 8x4096: 12 GB", "memory", (8, 4096), 12e9),
        ("memory 1 X 1: 12.25 KiB", "memory", (1, 1), 12.25 * 1024),
        ("memory 2x10: 50 %", "memory", (2, 10), 500),
        ("size: 3 TB", "size", (0, 0), 3e12),
        ("decode 1@1024: 1.5x", "decode", (1, 1024), 1000 / 1.5),
        ("Prefill 1x2048:80ms", "prefill", (1, 2048), 0.08),
        ("decode 8@1: 20 us", "decode", (8, 1), 20e-6),
        ("prefill 1x1: 1.25 s", "prefill", (1, 1), 1.25),
    ],
)
def test_a_constraint_is_read(text: str, kind: str, shape: tuple[int, int], most: float):
    found = parse_constraint(text)
    assert (found.kind, (found.batch, found.length)) == (kind, shape)
    assert found.is_time == (kind in ("decode", "prefill"))
    assert found.most(1000) == pytest.approx(most)
    assert parse_constraint(found.text) == found, "what is kept can be read again"


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        "size",
        "size: ",
        "size 6 GB",
        "size: GB",
        "size: -1 GB",
        "size: 0 GB",
        "size: 6",
        "size: 6 parsecs",
        "size: 1e9 B",
        "size: 100%",
        "size: 130%",
        "size 8x4096: 6 GB",
        "memory: 12 GB",
        "memory 8: 12 GB",
        "memory 0x4096: 12 GB",
        "memory 8@4096: 12 GB",
        "memory 99999999999x99999999999: 1 GB",
        "decode 1x1024: 1.5x",
        "prefill 1@2048: 80 ms",
        "decode 1@1024: 1x",
        "decode 1@1024: 0.5x",
        "decode 1@1024: 0x",
        "decode 1@1024: 50%",
        "decode 1@1024: 6 GB",
        "prefill 1x2048: 0 ms",
        "size: 80 ms",
        "size: 2x",
        "weight: 6 GB",
        "size: 6 GB; size: 7 GB",
        "size: 6 GB\nsize: 7 GB",
        "size: ٣ GB",
        f"size: 1{'0' * 400} GB",
        7,
        None,
        b"size: 6 GB",
    ],
)
def test_other_texts_are_refused_with_examples(wrong: Any):
    with pytest.raises(BudgetError, match="`constraint` cannot be read") as error:
        parse_constraint(wrong)
    assert error.value.hint is not None and all(example in error.value.hint for example in EXAMPLES)
    with pytest.raises(BudgetError, match="cannot be read"):
        BudgetSettings(constraint=(wrong,))


def test_a_time_needs_a_latency_table():
    with pytest.raises(BudgetError, match="needs a latency table") as error:
        BudgetSettings(constraint=("size: 60%", "decode 1@1024: 1.5x"))
    assert "dispfx costs MODEL" in str(error.value.hint)
    BudgetSettings(constraint=("decode 1@1024: 1.5x",), costs="costs.json")


@pytest.mark.parametrize(("text", "shape"), [("decode 2@16", (2, 1, 16)), ("prefill 1x8", (1, 8, 0))])
def test_a_step_is_read(text: str, shape: tuple[int, int, int]):
    assert parse_step(text) == shape


@pytest.mark.parametrize(
    "wrong", ["", "decode", "size", "memory 1x8", "decode 1x8", "decode 1@8: 2x", 3, None]
)
def test_other_texts_are_no_steps(wrong: Any):
    with pytest.raises(DataError, match="`step` cannot be read") as error:
        parse_step(wrong)
    assert "decode 1@1024" in str(error.value.hint)


@pytest.mark.parametrize(
    ("text", "number", "shown"),
    [
        ("size: 6 GB", 2_398_424, "2.398 MB"),
        ("decode 1@1: 2x", 0.0123456, "12.35 ms"),
        ("decode 1@1: 2x", 1.5, "1.5 s"),
    ],
)
def test_what_is_limited_is_shown_in_its_unit(text: str, number: float, shown: str):
    assert in_unit(text, number) == shown


def test_a_ratio_or_a_constraint_is_needed():
    alone: Any = "size: 6 GB"
    assert BudgetSettings(constraint=alone).constraint == ("size: 6 GB",)
    assert BudgetSettings(ratio=0.3).constraint == ()
    with pytest.raises(BudgetError, match="`ratio` is needed, or `constraint`"):
        BudgetSettings()


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_398_424, "2.398 MB"), (13e9, "13 GB")],
)
def test_bytes_are_shown_to_four_digits(number: float, shown: str):
    assert in_bytes(number) == shown
