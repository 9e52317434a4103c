"""Settings refuse what makes no sense, and say which setting it was."""

import pytest

from dispfx.errors import DispfxError
from dispfx.settings.learning_settings import LearnSettings, seed_for


def test_the_defaults_are_the_papers_constants():
    defaults = LearnSettings()
    assert (defaults.steps, defaults.lr, defaults.weight_decay, defaults.lambda_) == (10_000, 1e-3, 0.05, 6.0)
    assert (defaults.bias, defaults.temperature, defaults.estimator) == (3.0, 1.0, "reinmax")
    assert {defaults.learning_rate(step) for step in (0, 5_000, 9_999)} == {1e-3}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("seq_len", 1),
        ("batch_size", 0),
        ("accumulate", 0),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lambda_", -1.0),
        ("bias", float("inf")),
        ("temperature", 0.0),
        ("sharpen", 0.5),
        ("budget_width", -0.1),
        ("budget_on", "hopes"),
        ("sharpen", float("inf")),
        ("estimator", "reinforce"),
        ("hypernetwork", "big"),
        ("schedule", "linear"),
        ("max_bad_steps", 0),
    ],
)
def test_a_senseless_value_is_refused_by_name(name, value):
    with pytest.raises(DispfxError, match=rf"`{name}` must be .* was given"):
        LearnSettings(**{name: value})


def test_a_cosine_schedule_falls_from_the_learning_rate_to_nearly_zero():
    falling = LearnSettings(steps=100, lr=2e-3, schedule="cosine")
    rates = [falling.learning_rate(step) for step in range(100)]
    assert rates[0] == 2e-3 and rates[50] == pytest.approx(1e-3) and 0 < rates[99] < 1e-5
    assert rates == sorted(rates, reverse=True)


def test_logits_are_sharpened_over_the_second_half_of_the_steps():
    found = LearnSettings(steps=100, sharpen=3.0)
    assert [found.sharpness(step) for step in (0, 25, 50, 75, 100)] == [1, 1, 1, 2, 3]
    assert {LearnSettings().sharpness(step) for step in (0, 5_000, 9_999)} == {1.0}


def test_every_use_of_randomness_has_a_seed_of_its_own():
    assert len({seed_for(seed, use) for seed in (0, 1) for use in ("masks", "text:0", "text:1")}) == 6
    assert 0 <= seed_for(0, "masks") < 2**63
    assert seed_for(0, "masks") == seed_for(0, "masks")
