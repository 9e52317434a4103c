"""A recipe is a start, and what the user chose has the last word."""

from dataclasses import replace

import pytest

from dispfx.errors import DispfxError
from dispfx.run.fitting import fitted_settings
from dispfx.settings.learning_settings import RECIPES, LearnSettings, changed_settings, learn_settings


def test_the_recipe_of_the_paper_is_what_the_settings_say():
    assert replace(learn_settings("a-model", recipe="paper"), adaptable=()) == LearnSettings()


def test_both_recipes_learn_from_as_many_tokens():
    tokens = {
        name: (s := learn_settings("a-model", recipe=name)).steps * s.batch_size * s.seq_len
        for name in RECIPES
    }
    assert set(tokens.values()) == {20_480_000}


def test_an_option_wins_over_the_recipe_and_the_recipe_over_nothing():
    found = learn_settings("a-model", recipe="informed", lr=1e-2)
    assert (found.lr, found.samples, found.start) == (1e-2, 2, "sensitivity")


@pytest.mark.parametrize("batch", [1, 4, 6, 16])
def test_every_sequence_has_a_mask_whatever_batch_was_asked(batch):
    assert learn_settings("a-model", recipe="informed", batch_size=batch).samples == batch
    assert learn_settings("a-model", recipe="paper", batch_size=batch).samples == 1


def test_samples_that_do_not_divide_the_batch_are_refused_where_they_were_asked():
    with pytest.raises(DispfxError, match=r"`samples` must be a divisor of `batch_size` \(4\), and 3"):
        learn_settings("a-model", recipe="informed", samples=3, batch_size=4)


def test_the_demo_keeps_its_sizes_under_every_recipe():
    for name in RECIPES:
        found = learn_settings("demo", recipe=name)
        assert (found.steps, found.seq_len, found.batch_size) == (400, 128, 8)


def test_an_unknown_recipe_names_those_that_there_are():
    with pytest.raises(DispfxError, match="paper or informed"):
        learn_settings("a-model", recipe="better")


def test_every_decoder_learns_by_the_better_recipe_unless_the_paper_s_is_asked():
    assert learn_settings("demo").start == learn_settings("a-model").start == "sensitivity"
    assert learn_settings("demo", recipe="paper").start == "uniform"


@pytest.mark.parametrize(("steps", "counted", "width"), [(2499, "probabilities", 0.1), (2500, "masks", 0.0)])
def test_the_better_recipe_eases_the_budget_of_a_short_run_alone(steps, counted, width):
    found = learn_settings("a-model", steps=steps)
    assert (found.budget_on, found.budget_width) == (counted, width)
    assert learn_settings("a-model", steps=steps, budget_on="masks").budget_on == "masks"
    paper = learn_settings("a-model", recipe="paper", steps=steps)
    assert (paper.budget_on, paper.budget_width) == ("masks", 0.0)


def test_the_demo_is_a_short_run_unless_more_steps_are_asked():
    assert learn_settings("demo").budget_on == "probabilities"
    assert learn_settings("demo", steps=2_500).budget_on == "masks"


def test_what_is_changed_later_counts_as_chosen():
    later = changed_settings(learn_settings("a-model"), {"seq_len": 1024, "batch_size": 4})
    assert later == learn_settings("a-model", seq_len=1024, batch_size=4)
    assert fitted_settings(later, context=512, note=pytest.fail) == later
