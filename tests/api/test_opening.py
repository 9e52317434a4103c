"""A recipe is a start, and what the user chose has the last word."""

import pytest

from dispfx.api.opening import learn_settings
from dispfx.errors import DispfxError
from dispfx.learning.settings import RECIPES, LearnSettings


def test_the_recipe_of_the_paper_is_what_the_settings_say():
    assert learn_settings("a-model", recipe="paper") == LearnSettings()


def test_both_recipes_learn_from_as_many_tokens():
    tokens = {
        name: (s := learn_settings("a-model", recipe=name)).steps * s.batch_size * s.seq_len
        for name in RECIPES
    }
    assert set(tokens.values()) == {20_480_000}


def test_an_option_wins_over_the_recipe_and_the_recipe_over_nothing():
    found = learn_settings("a-model", recipe="informed", lr=1e-2)
    assert (found.lr, found.samples, found.start) == (1e-2, 8, "sensitivity")


@pytest.mark.parametrize(("batch", "samples"), [(1, 1), (4, 4), (6, 2), (16, 8)])
def test_a_batch_draws_as_many_masks_as_divide_it(batch, samples):
    assert learn_settings("a-model", recipe="informed", batch_size=batch).samples == samples


def test_samples_that_do_not_divide_the_batch_are_refused_where_they_were_asked():
    with pytest.raises(DispfxError, match=r"samples must be a divisor of batch_size \(8\), and 3 was given"):
        learn_settings("a-model", recipe="informed", samples=3)


def test_the_demo_keeps_its_sizes_under_every_recipe():
    for name in RECIPES:
        found = learn_settings("demo", recipe=name)
        assert (found.steps, found.seq_len, found.batch_size) == (400, 128, 8)


def test_an_unknown_recipe_names_those_that_there_are():
    with pytest.raises(DispfxError, match="paper or informed"):
        learn_settings("a-model", recipe="better")


def test_the_demo_learns_by_the_better_recipe_and_other_models_by_the_paper_s():
    assert learn_settings("demo").start == "sensitivity"
    assert learn_settings("demo", recipe="paper").start == learn_settings("a-model").start == "uniform"
