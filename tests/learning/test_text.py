"""Batches depend on the seed and the step alone, and hold-out text is never learned from."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dispfx.errors import DataError
from dispfx.learning.text import TokenBatches, token_vector


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
    with pytest.raises(
        DataError, match=r"one sequence needs 2,048 tokens, .* has 1,800 after 200 tokens to measure on"
    ):
        TokenBatches.split(torch.arange(2000), seq_len=2048, batch_size=1)


@pytest.mark.parametrize("tokens", [torch.zeros(4, 4, dtype=torch.int64), torch.zeros(40), np.zeros(40)])
def test_anything_but_a_vector_of_integers_is_a_data_error(tokens):
    with pytest.raises(DataError, match="vector of token ids"):
        TokenBatches(tokens, seq_len=4, batch_size=1)


def test_every_sequence_begins_with_the_bos_and_every_token_is_read_once():
    text = TokenBatches(torch.arange(100), seq_len=5, batch_size=5, bos=(200,), held_out=torch.arange(50, 59))
    assert text.windows == 25
    read = torch.cat([text.batch(index) for index in range(5)])
    assert read.shape == (25, 5) and read[:, 0].tolist() == [200] * 25
    assert sorted(read[:, 1:].flatten().tolist()) == list(range(100))
    held_out = [[200, 50, 51, 52, 53], [200, 54, 55, 56, 57]]
    assert [ids_BT.tolist() for ids_BT in text.held_out_batches(9)] == [[ids_T] for ids_T in held_out]


def test_documents_that_are_kept_apart_begin_with_the_bos_too():
    tokens = torch.tensor([1, 2, 9, 3, 4, 9, 5, 6, 9, 9, 7, 9])
    text = TokenBatches(tokens, seq_len=7, batch_size=1, bos=(8,), separator=9)
    read = sorted(text.batch(index)[0].tolist() for index in range(2))
    assert read == [[8, 1, 2, 9, 8, 3, 4], [8, 5, 6, 9, 8, 9, 8]]
    two = TokenBatches(tokens, seq_len=8, batch_size=1, bos=(7, 8), separator=9)
    assert sorted(two.batch(index)[0].tolist() for index in range(2))[0] == [7, 8, 1, 2, 9, 7, 8, 3]


def test_tokens_of_a_small_type_and_of_a_memory_map_take_a_larger_bos():
    for tokens in (torch.arange(100, dtype=torch.uint8), np.arange(100, dtype=np.uint8)):
        assert int(TokenBatches(tokens, seq_len=5, batch_size=1, bos=(70_000,)).batch(0)[0, 0]) == 70_000


def test_the_bos_is_part_of_what_identifies_a_text():
    plain, begun = (TokenBatches(torch.arange(40), 5, 1, bos=bos) for bos in ((), (3,)))
    assert begun.digest == f"{plain.digest}, each sequence after token 3"


def test_a_sequence_must_have_room_for_text():
    with pytest.raises(DataError, match="no room for text after the 2 that it begins with"):
        TokenBatches(torch.arange(40), seq_len=2, batch_size=1, bos=(1, 2))


def test_token_ids_of_every_kind_of_array_are_taken_as_they_are():
    ids = np.arange(12, dtype=np.int64) % 5
    for given in (ids, torch.from_numpy(ids), ids.tolist(), tuple(ids.tolist()), ids.astype(np.uint16)):
        assert np.asarray(token_vector(given, 5)).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a text", "learning takes token ids, but a str was given"),
        (["one", "two"], "learning takes token ids, but a str was given"),
        (Path("text.txt"), "learning takes token ids, but a .*Path was given"),
        ([1, 2, 5], r"token ids must be in \[0, 5\) for this decoder, found 5"),
        (np.array([1, -1]), "found -1"),
        (np.array([[1, 2], [3, 4]]), r"found shape \(2, 2\)"),
        ([0.5, 1.5], "found shape .* of torch.float32"),
        ([0.5, 1.5], "try: +give the integers that a tokenizer returns"),
        (torch.tensor([True, False]), "try: +give the integers that a tokenizer returns"),
        (torch.tensor([[1, 2], [3, 4]]), r"try: +give one long text: .* with \.flatten\(\)"),
        ([[1, 2], [3]], "this is not an array"),
        (None, "this is not an array"),
    ],
)
def test_what_are_no_token_ids_of_the_decoder_is_refused(data: object, message: str):
    with pytest.raises(DataError, match=message):
        token_vector(data, 5)
