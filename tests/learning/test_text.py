"""Batches depend on the seed and the step alone, and hold-out text is never learned from."""

import numpy as np
import pytest
import torch

from dispfx.errors import DataError
from dispfx.learning.text import TokenBatches


def test_an_epoch_reads_every_window_once_in_a_shuffled_order():
    text = TokenBatches(torch.arange(103), seq_len=5, batch_size=4)
    assert text.windows == 20
    first = torch.cat([text.batch(step) for step in range(5)])
    second = torch.cat([text.batch(step) for step in range(5, 10)])
    for epoch in (first, second):
        assert sorted(epoch[:, 0].tolist()) == list(range(0, 100, 5))
        assert bool((epoch[:, 1:] == epoch[:, :-1] + 1).all())
    assert not torch.equal(first, second)
    assert first[:, 0].tolist() != sorted(first[:, 0].tolist())


def test_a_batch_is_the_same_whatever_was_read_before():
    text = TokenBatches(torch.arange(100), seq_len=5, batch_size=3, seed=9)
    in_order = [text.batch(step) for step in range(30)]
    fresh = TokenBatches(torch.arange(100), seq_len=5, batch_size=3, seed=9)
    for step in (29, 3, 17, 6):
        assert torch.equal(fresh.batch(step), in_order[step])
    other = TokenBatches(torch.arange(100), seq_len=5, batch_size=3, seed=10)
    assert not all(torch.equal(other.batch(step), in_order[step]) for step in range(5))


def test_batches_run_over_the_end_of_an_epoch_without_a_gap():
    text = TokenBatches(torch.arange(35), seq_len=5, batch_size=4)
    starts = torch.cat([text.batch(step) for step in range(7)])[:, 0].view(4, 7)
    assert all(sorted(epoch.tolist()) == list(range(0, 35, 5)) for epoch in starts)


def test_the_last_tenth_is_held_out_and_never_learned_from():
    text = TokenBatches.split(torch.arange(200), seq_len=4, batch_size=2)
    learned = torch.cat([text.batch(step) for step in range(100)])
    assert int(learned.max()) < 180
    held_out = text.held_out_batches(3)
    assert torch.cat(held_out).flatten().tolist() == list(range(180, 192))
    assert len(text.held_out_batches(100)) == 5


def test_nothing_is_held_out_when_asked():
    text = TokenBatches.split(torch.arange(20), seq_len=4, batch_size=1, held_out_share=0.0)
    assert text.windows == 5 and text.held_out is None and text.held_out_batches(2) == []


def test_a_read_only_memory_map_of_small_integers_serves_as_text(tmp_path):
    path = tmp_path / "tokens.bin"
    np.arange(60, dtype=np.uint16).tofile(path)
    mapped = np.memmap(path, dtype=np.uint16, mode="r")
    text = TokenBatches.split(mapped, seq_len=6, batch_size=2, seed=1)
    same = TokenBatches.split(torch.arange(60), seq_len=6, batch_size=2, seed=1)
    assert text.batch(0).dtype == torch.int64
    assert torch.equal(text.batch(1), same.batch(1))
    assert text.digest == same.digest
    assert torch.equal(text.held_out_batches(1)[0], same.held_out_batches(1)[0])


def test_the_digest_follows_content_and_length():
    def digest(tokens: torch.Tensor) -> str:
        return TokenBatches(tokens, seq_len=4, batch_size=1).digest

    changed = torch.arange(1000)
    changed[777] = 0
    assert len({digest(torch.arange(1000)), digest(torch.arange(1001)), digest(changed)}) == 3


def test_a_text_shorter_than_one_sequence_is_a_data_error_with_both_numbers():
    with pytest.raises(DataError, match=r"one sequence needs 2,048 tokens, .* has 1,800 beside 200 held out"):
        TokenBatches.split(torch.arange(2000), seq_len=2048, batch_size=1)


@pytest.mark.parametrize("tokens", [torch.zeros(4, 4, dtype=torch.int64), torch.zeros(40), np.zeros(40)])
def test_anything_but_a_vector_of_integers_is_a_data_error(tokens):
    with pytest.raises(DataError, match="vector of token ids"):
        TokenBatches(tokens, seq_len=4, batch_size=1)
