"""Defaults that depend on recipe, demo or kind of training are written for people as what they are."""

import re
from collections.abc import Mapping
from typing import Any

import pytest

from dispfx.settings import RunSettings
from dispfx.settings.learning_settings import DEMO, FEW_STEPS, RECIPES, RECIPES_OF_FEW_STEPS, LearnSettings
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.trees import RecoverSettings

INFORMED, FEW = RECIPES["informed"], RECIPES_OF_FEW_STEPS["informed"]
# In words of their own.
SAID = {"samples": "one per sequence", "antithetic": "on; acts with two or more masks"}


def parts(text: str) -> dict[str, str]:
    """Return what a text says of each case; the first part is of all others."""
    found = {}
    for part in text.split("; "):
        case, _, value = part.rpartition(": ")
        found.setdefault(case or "usual", value)
    return found


def value_of(text: str) -> Any:
    """Return the number or word that a part begins with."""
    word = re.split(r", (?!\d{3})| ", text)[0].replace(",", "")
    try:
        return float(word)
    except ValueError:
        return word


@pytest.mark.parametrize("name", sorted({*INFORMED, *DEMO, *FEW}))
def test_what_help_says_of_learning_is_what_the_recipe_does(name: str):
    text = RunSettings.settings()[name].facts.default
    if name in SAID:
        assert text == SAID[name] and INFORMED[name]
        return
    said = parts(text)
    usual = INFORMED.get(name, getattr(LearnSettings(), name))
    assert value_of(said["usual"]) == usual
    if name in DEMO and DEMO[name] != usual:
        assert value_of(said["demo"]) == DEMO[name]
    if name in FEW:
        assert text.endswith(f"; {FEW[name]} below {FEW_STEPS:,} steps")


@pytest.mark.parametrize("name", ["steps", "lr", "batch_size"])
@pytest.mark.parametrize("train", ["weights", "scales", "lora"])
@pytest.mark.parametrize("demo", [False, True])
def test_what_help_says_of_recovery_is_what_it_does(name: str, train: Any, demo: bool):
    text = RecoverSettings.settings()[name].facts.default
    found = getattr(RecoverySettings(train=train).fitted(512, demo=demo), name)
    said: Mapping[str, str] = parts(text)
    if not demo:
        assert value_of(said.get(train, said["usual"])) == found
        return
    # One value, or those of weights, scales and adapters.
    each = said["demo"].split(", ")
    assert value_of(each[["weights", "scales", "lora"].index(train)] if len(each) > 1 else each[0]) == found
