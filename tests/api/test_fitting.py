"""Settings suit a decoder where nobody chose them, whatever is known first."""

import dataclasses
from functools import cache

import pytest

from dispfx.compiler.programs import analyse, capture
from dispfx.ir.program import Program
from dispfx.run.fitting import fitted_settings, settings_among, settings_for, settings_of
from dispfx.settings.learning_settings import RECIPES, learn_settings
from dispfx.source.experts import Experts
from tests.captures import plain
from tests.plain_decoders import FORMS, build
from tests.tiny_transformers import tiny_transformer


@cache
def sorts(experts: Experts) -> Program:
    return analyse(tiny_transformer("mixtral", layers=1), experts=experts)


def test_experts_that_sort_tokens_get_one_mask_a_batch_and_a_note_says_so():
    said: list[str] = []
    of_recipe = learn_settings("a-model")
    assert settings_for(sorts("grouped"), of_recipe, said.append).samples == 1
    assert len(said) == 1 and "one mask per batch" in said[0]
    assert settings_for(sorts("batched"), of_recipe, said.append) == of_recipe and len(said) == 1


def test_masks_that_the_user_asked_for_are_not_taken_away():
    asked = learn_settings("a-model", samples=2)
    assert settings_for(sorts("grouped"), asked, pytest.fail) == asked


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decoder_of_short_texts_gets_more_of_them_and_a_note_says_so(recipe):
    said: list[str] = []
    of_recipe = learn_settings("a-model", recipe=recipe)
    found = fitted_settings(of_recipe, context=512, note=said.append)
    assert (found.seq_len, found.batch_size) == (512, 4 * of_recipe.batch_size)
    assert found.samples == (found.batch_size if of_recipe.samples > 1 else 1)
    assert said == [f"batches of {found.batch_size} × 512 tokens: the decoder does not read longer sequences"]
    assert fitted_settings(of_recipe, context=4096, note=pytest.fail) == of_recipe


def test_lengths_between_keep_about_as_many_tokens_a_step():
    of_recipe = learn_settings("a-model")
    tokens = {
        longest: (found := fitted_settings(of_recipe, context=longest)).seq_len * found.batch_size
        for longest in (1500, 1025, 700)
    }
    assert all(0.7 * 4096 < found < 1.4 * 4096 for found in tokens.values()), tokens


def test_a_batch_that_nobody_chose_follows_the_masks_and_the_processes():
    assert learn_settings("a-model", samples=8).batch_size == 8
    of_four = settings_among(4, learn_settings("a-model"))
    assert (of_four.batch_size, of_four.samples) == (4, 4)
    asked = learn_settings("a-model", batch_size=2)
    assert settings_among(4, asked) == asked


def test_sizes_that_the_user_asked_for_stay():
    asked = learn_settings("a-model", seq_len=1024)
    assert fitted_settings(asked, context=512, note=pytest.fail) == asked
    of_batch = fitted_settings(learn_settings("a-model", batch_size=2), context=512)
    assert (of_batch.seq_len, of_batch.batch_size, of_batch.samples) == (512, 2, 2)


def with_table() -> Program:
    """Return a plain decoder, whose table of positions has 64 places, and which has no config."""
    program = capture(build(FORMS["pre-norm"]))
    assert program.context is None
    return program


@pytest.mark.parametrize(("named", "length"), [(1400, 64), (64, 64), (40, 40)])
def test_all_limits_count_at_once_whatever_is_known_first(named, length):
    """One after the other would round twice: by 2048 / 1400 and 1400 / 64, 2 would become 44 and not 64."""
    program, of_recipe, said = with_table(), learn_settings("a-model"), []
    found = fitted_settings(of_recipe, context=named, program=program, note=said.append)
    assert (found.seq_len, found.batch_size) == (length, 2 * round(2048 / length))
    assert said == [
        f"batches of {found.batch_size} × {length} tokens: the decoder does not read longer sequences"
    ]
    program.context = named
    assert settings_of(program, of_recipe) == found


def test_a_limit_that_the_config_alone_names_is_one_of_the_captured_decoder():
    program = plain("llama")  # its positions are computed, and have no table
    assert program.context == program.clone().context == 128
    assert settings_of(program, learn_settings("a-model")).seq_len == 128


def test_processes_share_the_batch_that_short_sequences_make():
    found = fitted_settings(learn_settings("a-model"), context=700, ranks=4)
    assert (found.seq_len, found.batch_size, found.samples) == (700, 8, 8)


def test_experts_that_sort_tokens_have_one_mask_in_a_batch_made_for_processes():
    program = sorts("grouped")
    found = fitted_settings(learn_settings("a-model"), program=program, ranks=3)
    assert found.samples == 1 and found.batch_size % 3 == 0
    assert dataclasses.replace(found, samples=2, batch_size=2, seq_len=2048) == learn_settings("a-model")
