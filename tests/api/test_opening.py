"""A recipe is a start, and what the user chose has the last word."""

from dataclasses import replace

import pytest

from dispfx.api.opening import (
    changed_settings,
    learn_settings,
    settings_among,
    settings_for,
    settings_within,
)
from dispfx.api.programs import analyse
from dispfx.errors import DispfxError
from dispfx.ir.program import Program
from dispfx.learning.settings import RECIPES, LearnSettings
from dispfx.source.experts import Experts
from tests.tiny_transformers import tiny_transformer


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
    with pytest.raises(DispfxError, match=r"samples must be a divisor of batch_size \(4\), and 3 was given"):
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


def sorts(experts: Experts) -> Program:
    return analyse(tiny_transformer("mixtral"), experts=experts)


def test_experts_that_sort_tokens_get_one_mask_a_batch_and_a_note_says_so():
    said: list[str] = []
    of_recipe = learn_settings("a-model")
    assert settings_for(sorts("grouped"), of_recipe, said.append).samples == 1
    assert len(said) == 1 and "one mask a batch" in said[0]
    assert settings_for(sorts("batched"), of_recipe, said.append) == of_recipe and len(said) == 1


def test_masks_that_the_user_asked_for_are_not_taken_away():
    asked = learn_settings("a-model", samples=2)
    assert settings_for(sorts("grouped"), asked, pytest.fail) == asked


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decoder_of_short_texts_gets_more_of_them_and_a_note_says_so(recipe):
    said: list[str] = []
    of_recipe = learn_settings("a-model", recipe=recipe)
    found = settings_within(512, of_recipe, said.append)
    assert (found.seq_len, found.batch_size) == (512, 4 * of_recipe.batch_size)
    assert found.samples == (found.batch_size if of_recipe.samples > 1 else 1)
    assert said == ["sequences of 512 tokens: the decoder reads no longer ones"]
    assert settings_within(4096, of_recipe, pytest.fail) == of_recipe


def test_lengths_between_keep_about_as_many_tokens_a_step():
    of_recipe = learn_settings("a-model")
    tokens = {
        longest: (found := settings_within(longest, of_recipe, lambda note: None)).seq_len * found.batch_size
        for longest in (1500, 1025, 700)
    }
    assert all(0.7 * 4096 < found < 1.4 * 4096 for found in tokens.values()), tokens


def test_a_batch_that_nobody_chose_follows_the_masks_and_the_processes():
    assert learn_settings("a-model", samples=8).batch_size == 8
    of_four = settings_among(4, learn_settings("a-model"))
    assert (of_four.batch_size, of_four.samples) == (4, 4)
    asked = learn_settings("a-model", batch_size=2)
    assert settings_among(4, asked) == asked


def test_what_is_changed_later_counts_as_chosen():
    later = changed_settings(learn_settings("a-model"), {"seq_len": 1024, "batch_size": 4})
    assert later == learn_settings("a-model", seq_len=1024, batch_size=4)
    assert settings_within(512, later, pytest.fail) == later


def test_sizes_that_the_user_asked_for_stay():
    asked = learn_settings("a-model", seq_len=1024)
    assert settings_within(512, asked, pytest.fail) == asked
    of_batch = settings_within(512, learn_settings("a-model", batch_size=2), lambda note: None)
    assert (of_batch.seq_len, of_batch.batch_size, of_batch.samples) == (512, 2, 2)
