"""The texts of recovery: what is learned from, what says when to stop, and what decides."""

import pytest
import torch

from dispfx.errors import DataError
from dispfx.quality.perplexity import TextFacts
from dispfx.run.recovery_job import (
    held_out_sequences,
    longest_sequence,
    recovery_batches,
    second_text_of,
)
from dispfx.run.run_text import MeasuredText, Text
from dispfx.settings.recovery_settings import RecoverySettings

TOKENS = torch.arange(100)
OTHER = MeasuredText(torch.arange(7), TextFacts("of another kind"))


def test_the_last_text_that_is_measured_decides():
    text = Text(learn=(TOKENS,), measure=torch.arange(5), about=TextFacts("first"))
    assert second_text_of(text).about.name == "first"
    text = Text(learn=(TOKENS,), measure=torch.arange(5), about=TextFacts("first"), further=(OTHER,))
    assert second_text_of(text) is OTHER
    with pytest.raises(DataError, match="recovery needs text to measure on"):
        second_text_of(Text(learn=(TOKENS,)))


def test_a_sequence_is_no_longer_than_what_is_held_out():
    split = Text(learn=(TOKENS[:90],), held_out=(TOKENS[90:],), about=TextFacts("", 0.1), bos=(1,))
    assert longest_sequence(split, 64) == 11 and longest_sequence(split, 8) == 8
    # With another text to measure on, the end of the data is held out all the same.
    named = Text(learn=(TOKENS,), held_out=(torch.arange(50),), about=TextFacts("other", None))
    assert longest_sequence(named, 64) == 10


def test_weights_of_texts_are_shares_of_sequences_and_no_sequence_crosses_two_texts():
    parts = torch.full((500,), 1), torch.full((900,), 2, dtype=torch.uint16)
    text = Text(learn=parts, held_out=(torch.arange(50),), weights=(1.0, 3.0), about=TextFacts("other", None))
    settings = RecoverySettings(steps=10, seq_len=20, batch_size=4, measure_every=1)
    batches = recovery_batches(text, settings)
    drawn = torch.cat([batches.batch(step) for step in range(5)])
    assert all(len(set(row.tolist())) == 1 for row in drawn), "one text per sequence"
    assert [int((drawn[:, 0] == one).sum()) for one in (1, 2)] == [5, 15]
    ends = torch.cat(batches.held_out_batches(6))
    assert set(ends[:, 0].tolist()) == {1, 2}, "each text has an end of its own"
    assert longest_sequence(text, 64) == 64 and longest_sequence(text, 5000) == 90


@pytest.mark.parametrize(
    ("measure_every", "batch_size", "seq_len", "expected"),
    [(10, 8, 128, 20), (50, 16, 512, 64), (1, 2, 16, 16), (500, 16, 2048, 16), (1, 1, 2**16, 1)],
)
def test_measuring_takes_a_quarter_of_the_tokens_in_between(measure_every, batch_size, seq_len, expected):
    settings = RecoverySettings(
        steps=1000, lr=1e-3, measure_every=measure_every, batch_size=batch_size, seq_len=seq_len
    )
    assert held_out_sequences(settings) == expected
