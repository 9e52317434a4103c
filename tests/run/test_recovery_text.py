"""The texts of recovery: what is learned from, what says when to stop, and what decides."""

import pytest
import torch

from dispfx.errors import DataError
from dispfx.quality.perplexity import TextFacts
from dispfx.run.recovery_job import held_out_sequences, longest_sequence, second_text_of
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


@pytest.mark.parametrize(
    ("measure_every", "batch_size", "seq_len", "expected"),
    [(10, 8, 128, 20), (50, 16, 512, 64), (1, 2, 16, 16), (500, 16, 2048, 16), (1, 1, 2**16, 1)],
)
def test_measuring_takes_a_quarter_of_the_tokens_in_between(measure_every, batch_size, seq_len, expected):
    settings = RecoverySettings(
        steps=1000, lr=1e-3, measure_every=measure_every, batch_size=batch_size, seq_len=seq_len
    )
    assert held_out_sequences(settings) == expected
