"""What a constraint says, and texts that are none."""

from typing import Any

import pytest

from dispfx.errors import BudgetError
from dispfx.settings import BudgetSettings
from dispfx.words.constraint_text import EXAMPLES, in_bytes, parse_constraint


@pytest.mark.parametrize(
    ("text", "kind", "tokens", "most"),
    [
        ("size: 6 GB", "size", 0, 6e9),
        ("size:6gb", "size", 0, 6e9),
        (" Size :  1.5  GiB ", "size", 0, 1.5 * 2**30),
        ("size: 800 B", "size", 0, 800),
        ("size: 60%", "size", 0, 0.6 * 1000),
        ("memory 8x4096: 12 GB", "memory", 8 * 4096, 12e9),
        ("memory 1 X 1: 12.25 KiB", "memory", 1, 12.25 * 1024),
        ("memory 2x10: 50 %", "memory", 20, 500),
        ("size: 3 TB", "size", 0, 3e12),
    ],
)
def test_a_constraint_is_read(text: str, kind: str, tokens: int, most: float):
    found = parse_constraint(text)
    assert (found.kind, found.tokens) == (kind, tokens)
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


def test_a_ratio_or_a_constraint_is_needed():
    assert BudgetSettings(constraint="size: 6 GB").constraint == ("size: 6 GB",)
    assert BudgetSettings(ratio=0.3).constraint == ()
    with pytest.raises(BudgetError, match="`ratio` is needed, or `constraint`"):
        BudgetSettings()


@pytest.mark.parametrize(
    ("number", "shown"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (2_398_424, "2.398 MB"), (13e9, "13 GB")],
)
def test_bytes_are_shown_to_four_digits(number: float, shown: str):
    assert in_bytes(number) == shown
