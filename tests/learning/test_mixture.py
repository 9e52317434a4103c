"""Each text has its share of the sequences, at every point of a run, and a resumed run reads on."""

import math
from collections import Counter

import pytest
import torch

from dispfx.errors import DataError
from dispfx.learning.mixture import Mixture, quotas
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch, learn
from tests.learning.test_state import THIRTY, digest, stop_at
from tests.learning.tiny_decoder import markov_tokens, settings, task_of, untrained_decoder

# Token ids say which text they are from, and where in it.
TEXTS = [torch.arange(0, 400), torch.arange(1000, 1900), torch.arange(2000, 2200)]


def mixture(weights=(0.6, 0.3, 0.1), texts=TEXTS, batch_size: int = 2, seed: int = 0) -> Mixture:
    return Mixture.of(texts, weights, seq_len=5, batch_size=batch_size, seed=seed)


def parts_read(text: Mixture, batches: int) -> list[int]:
    return [int(row[0]) // 1000 for index in range(batches) for row in text.batch(index)]


@pytest.mark.parametrize(
    "weights", [(0.6, 0.3, 0.1), (2, 1), (1, 1, 1), (1, 3), (0.999, 0.001), (math.pi, 1)]
)
def test_after_any_number_of_sequences_every_text_is_within_two_of_its_share(weights):
    text = mixture(weights, TEXTS[: len(weights)], batch_size=1)
    read: Counter[int] = Counter()
    for position in range(3000):
        read[text.place(position).part] += 1
        for part, weight in enumerate(weights):
            assert abs(read[part] - (position + 1) * weight / sum(weights)) < 2


def test_simple_weights_give_the_simplest_pattern():
    assert quotas([2, 1], 2) == [2, 1] and quotas([0.25, 0.75], 2) == [1, 3] and quotas([5], 1) == [1]
    assert quotas([1 / 3, 2 / 3], 2) == [1, 2]
    assert [mixture((2, 1), TEXTS[:2]).place(position).part for position in range(6)] == [0, 1, 0, 0, 1, 0]
    assert sum(quotas([math.pi, math.e, 1.0], 3)) <= 10_000


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-7, 1e-6, 1.0, 1e6, 1e300, 10**400], ids=str)
def test_only_the_ratios_of_weights_count_however_small_or_large_they_are(scale):
    assert quotas([3 * scale, 7 * scale], 2) == [3, 7] and quotas([scale, scale], 2) == [1, 1]


def test_weights_near_a_millionth_keep_their_shares():
    assert quotas([6e-7, 1.4e-6], 2) == [3, 7] and quotas([1e308, 1e308, 1e308], 3) == [1, 1, 1]


def test_a_share_that_is_too_small_is_told_as_it_is():
    with pytest.raises(DataError, match="give one 1e-30"):
        quotas([1, 1e-30], 2)


def test_every_window_of_a_text_is_read_once_before_one_is_read_twice():
    text = mixture((1, 1), TEXTS[:2], batch_size=1)
    first = [int(text.batch(index)[0, 0]) for index in range(2 * 72)]
    assert sorted(start for start in first if start < 1000) == list(range(0, 360, 5))
    assert len({start for start in first if start >= 1000}) == 72


def test_a_batch_is_the_same_whatever_was_read_before():
    text, fresh = mixture(seed=9), mixture(seed=9)
    in_order = [text.batch(step) for step in range(50)]
    for step in (49, 3, 27, 8):
        assert torch.equal(fresh.batch(step), in_order[step])
        assert in_order[step].shape == (2, 5) and in_order[step].dtype == torch.int64
    assert not all(torch.equal(mixture(seed=10).batch(step), in_order[step]) for step in range(50))


def test_the_last_tenth_of_each_text_is_held_out_and_never_learned_from():
    text = mixture()
    learned = torch.cat([text.batch(step) for step in range(400)]).flatten()
    held_out = torch.cat(text.held_out_batches(1000)).flatten()
    for start, size in ((0, 400), (1000, 900), (2000, 200)):
        first_held_out = start + size - size // 10
        assert int(learned[(learned >= start) & (learned < start + 1000)].max()) < first_held_out
        assert int(held_out[(held_out >= start) & (held_out < start + 1000)].min()) == first_held_out
    assert len(text.held_out_batches(1000)) == 8 + 18 + 4


def test_held_out_text_is_mixed_as_the_text_that_is_learned_from():
    parts = [int(batch[0, 0]) // 1000 for batch in mixture((2, 1), TEXTS[:2]).held_out_batches(6)]
    assert Counter(parts) == {0: 4, 1: 2}
    alone = Mixture(
        [TokenBatches(TEXTS[0], 5, 1, held_out=TEXTS[2]), TokenBatches(TEXTS[1], 5, 1)], (1, 9), 2
    )
    assert [int(batch[0, 0]) for batch in alone.held_out_batches(3)] == [2000, 2005, 2010]


def test_the_digest_follows_every_text_their_order_and_their_shares():
    changed = [TEXTS[0], TEXTS[1], TEXTS[2].clone()]
    changed[2][7] = 0
    found = {
        mixture().digest,
        mixture((0.5, 0.4, 0.1)).digest,
        mixture(texts=TEXTS[::-1]).digest,
        mixture(texts=changed).digest,
        mixture((0.5, 0.5), TEXTS[:2]).digest,
    }
    assert len(found) == 5
    assert mixture().digest == mixture((6, 3, 1), seed=4).digest


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ((1, 2), "there are 2 for 3"),
        ((1, 0, 1), "positive numbers"),
        ((1, -1, 1), "positive numbers"),
        ((1, math.nan, 1), "positive numbers"),
        ((1, math.inf, 1), "positive numbers"),
        ((1, 1, 1e-4), "one sequence in a thousand"),
        ((1, 1, 1e-30), "one sequence in a thousand"),
    ],
)
def test_weights_that_make_no_mixture_are_refused(weights, message):
    with pytest.raises(DataError, match=message):
        mixture(weights)


def test_a_part_shorter_than_a_sequence_and_parts_of_several_lengths_are_refused():
    with pytest.raises(DataError, match="one sequence needs 5 tokens"):
        mixture((1, 1), [TEXTS[0], torch.arange(4)])
    with pytest.raises(DataError, match="of one length"):
        Mixture([TokenBatches(TEXTS[0], 5, 1), TokenBatches(TEXTS[1], 6, 1)], (1, 1), 1)


def test_a_run_on_a_mixture_resumes_bit_for_bit_and_refuses_other_weights(tmp_path):
    chosen = settings(steps=6, save_every=3)
    texts = [markov_tokens(900, seed=seed) for seed in (1, 2)]

    def run(state, weights=(0.7, 0.3), **options):
        decoder = untrained_decoder()
        text = Mixture.of(texts, weights, seq_len=chosen.seq_len, batch_size=chosen.batch_size, seed=3)
        return learn(task_of(decoder, text, THIRTY, chosen, fingerprint="tiny"), Watch(state, **options))

    with pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, on_step=stop_at(5, RuntimeError("stop")))
    with pytest.raises(DataError, match="text was"):
        run(tmp_path, weights=(0.3, 0.7), resume=True)
    resumed = run(tmp_path, resume=True)
    assert resumed.first_step == 3 and digest(resumed) == digest(run(None))
    assert digest(run(None, weights=(0.3, 0.7))) != digest(resumed)
