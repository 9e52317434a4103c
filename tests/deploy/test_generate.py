from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dispfx.deploy.generate import generate
from dispfx.errors import CaptureError, DataError

VOCABULARY = 7


def counting(ids_BT: Tensor) -> Tensor:
    """Prefer the sum of the last two tokens, modulo the vocabulary; all other logits fall with distance."""
    before_BT = torch.cat([torch.zeros_like(ids_BT[:, :1]), ids_BT[:, :-1]], dim=1)
    wanted_BT = (ids_BT + before_BT) % VOCABULARY
    distance_BTV = (torch.arange(VOCABULARY) - wanted_BT[..., None]) % VOCABULARY
    return -distance_BTV.float()


def test_greedy_generation_follows_the_likeliest_token_of_the_whole_sequence() -> None:
    ids = generate(counting, torch.tensor([[1, 1], [2, 3]]), max_new_tokens=5)

    assert ids.tolist() == [[1, 1, 2, 3, 5, 1, 6], [2, 3, 5, 1, 6, 0, 6]]
    assert ids.dtype == torch.int64


def test_an_output_with_logits_is_a_decoder_too() -> None:
    ids = torch.tensor([[1, 1]])
    wrapped = generate(lambda x: SimpleNamespace(logits=counting(x)), ids, max_new_tokens=3)

    assert torch.equal(wrapped, generate(counting, ids, max_new_tokens=3))


def test_a_sequence_that_ended_keeps_its_end_token_while_others_go_on() -> None:
    ids = generate(counting, torch.tensor([[1, 1], [2, 3]]), max_new_tokens=9, eos=6)

    assert ids.tolist() == [[1, 1, 2, 3, 5, 1, 6], [2, 3, 5, 1, 6, 6, 6]]


def test_generation_stops_at_any_of_several_end_tokens() -> None:
    ids = generate(counting, torch.tensor([[1, 1]]), max_new_tokens=9, eos=[3, 5])

    assert ids.tolist() == [[1, 1, 2, 3]]


def test_an_end_token_in_the_prompt_ends_nothing() -> None:
    assert generate(counting, torch.tensor([[1, 1]]), max_new_tokens=2, eos=1).shape == (1, 4)


def test_the_same_seed_draws_the_same_tokens_whatever_the_global_generator_does() -> None:
    ids = torch.tensor([[1, 1], [2, 3]])
    first = generate(counting, ids, max_new_tokens=20, temperature=2.0, seed=3)
    torch.rand(100)
    state = torch.get_rng_state()

    assert torch.equal(first, generate(counting, ids, max_new_tokens=20, temperature=2.0, seed=3))
    assert not torch.equal(first, generate(counting, ids, max_new_tokens=20, temperature=2.0, seed=4))
    assert torch.equal(state, torch.get_rng_state())


def test_draws_follow_the_softmax_of_the_logits() -> None:
    logits_V = torch.tensor([1.0, 0.0, 2.0])
    ids = torch.zeros(20_000, 1, dtype=torch.int64)

    drawn = generate(lambda x: logits_V.expand(*x.shape, 3), ids, max_new_tokens=1, temperature=0.5)

    shares = torch.bincount(drawn[:, -1], minlength=3) / len(ids)
    # 20,000 draws: one standard deviation of a share is below 0.0036.
    assert torch.allclose(shares, (logits_V / 0.5).softmax(0), atol=0.015)


def test_top_k_draws_exactly_k_tokens_even_among_equals() -> None:
    logits_V = torch.tensor([0.0, 1.0, 1.0, 1.0, -1.0])
    ids = torch.zeros(500, 1, dtype=torch.int64)

    drawn = generate(lambda x: logits_V.expand(*x.shape, 5), ids, max_new_tokens=1, temperature=5.0, top_k=2)

    assert len(drawn[:, -1].unique()) == 2
    assert set(drawn[:, -1].tolist()) <= {1, 2, 3}


def test_top_one_and_a_tiny_temperature_are_greedy() -> None:
    ids = torch.tensor([[1, 1], [2, 3]])
    greedy = generate(counting, ids, max_new_tokens=6)

    assert torch.equal(greedy, generate(counting, ids, max_new_tokens=6, temperature=3.0, top_k=1))
    assert torch.equal(greedy, generate(counting, ids, max_new_tokens=6, temperature=1e-30))


@pytest.mark.parametrize("temperature", [1e-320, 1e-46, 1e39, 1e308])
def test_temperatures_beyond_float32_are_as_the_nearest_ones_within(temperature: float) -> None:
    ids = torch.tensor([[1, 1], [2, 3]])
    near = 1e-30 if temperature < 1 else 1e30
    found = generate(counting, ids, max_new_tokens=6, temperature=temperature, top_k=3)

    assert torch.equal(found, generate(counting, ids, max_new_tokens=6, temperature=near, top_k=3))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drawn_from_logits_that_are_not_finite(value: float, temperature: float) -> None:
    def broken(ids_BT: Tensor) -> Tensor:
        return torch.where(torch.arange(VOCABULARY) == 2, value, counting(ids_BT))

    with pytest.raises(CaptureError, match="infinite or not a number"):
        generate(broken, torch.tensor([[1, 1]]), max_new_tokens=2, temperature=temperature)


@pytest.mark.parametrize(
    "wrong", [{"max_new_tokens": 0}, {"temperature": -1.0}, {"temperature": float("nan")}, {"top_k": 0}]
)
def test_an_argument_out_of_range_is_refused(wrong: dict[str, float]) -> None:
    arguments = {"max_new_tokens": 1, **wrong}
    with pytest.raises(DataError):
        generate(counting, torch.tensor([[1]]), **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 3), (1, 0), (3,)])
def test_an_empty_prompt_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(DataError, match="at least one token"):
        generate(counting, torch.zeros(shape, dtype=torch.int64), max_new_tokens=1)
