"""Every setting, once: name, type, choices, range, default and documentation.

    field              `setting(…)`: what is known about one field
    sections           model, text, budget, compute, output
    learning_settings  how masks are learned; recipes
    verb_settings      sections of single verbs
    tree               sections under one root: flat names ⇄ sections
    stored             `RunSettings` as a report has them, checked
    trees              `RunSettings` and the trees of the other verbs

Nothing here imports torch.
"""

from dispfx.settings.learning_settings import LearnSettings, changed_settings, learn_settings
from dispfx.settings.sections import (
    BudgetSettings,
    ComputeSettings,
    ModelSettings,
    OutputSettings,
    TextSettings,
)
from dispfx.settings.trees import RunSettings

__all__ = [
    "BudgetSettings",
    "ComputeSettings",
    "LearnSettings",
    "ModelSettings",
    "OutputSettings",
    "RunSettings",
    "TextSettings",
    "changed_settings",
    "learn_settings",
]
