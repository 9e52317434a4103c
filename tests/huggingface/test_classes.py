"""A class that nobody registered is named, with what to do, before transformers says to update itself."""

import json
from pathlib import Path

import pytest
from torch import nn

from dispfx.deploy.checkpoint import own_config
from dispfx.errors import DataError
from dispfx.huggingface.classes import code_of_class, require_known_class
from dispfx.huggingface.loading import load_model


class Mine(nn.Module):
    pass


def folder_of(path: Path, config: object) -> Path:
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("read", [require_known_class, own_config, load_model])
def test_a_class_that_only_the_users_code_registers_is_refused_with_that_reason(read, tmp_path: Path):
    with pytest.raises(DataError, match="no class is registered for 'mine'") as error:
        read(folder_of(tmp_path, {"model_type": "mine"}))
    assert "import that in Python" in str(error.value) and "pip install" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "trusted"),
    [
        ({"model_type": "llama"}, False),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "own.Config"}}, True),
        # transformers' own class, of a checkpoint that has one of its own too; its file is not here.
        ({"model_type": "llama", "auto_map": {"AutoConfig": "own.Config"}}, False),
        ({}, False),
        ([], False),
        (3, False),
    ],
)
def test_known_classes_and_trusted_code_of_the_checkpoint_pass(config: object, trusted: bool, tmp_path: Path):
    require_known_class(folder_of(tmp_path, config), trusted)


@pytest.mark.parametrize("read", [require_known_class, own_config, load_model])
def test_code_of_a_folder_is_refused_by_its_file_until_it_is_trusted(read, tmp_path: Path):
    with pytest.raises(DataError, match=r"comes with the folder: own\.py, parts\.py") as error:
        auto_map = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "parts.Model"}
        read(folder_of(tmp_path, {"model_type": "mine", "auto_map": auto_map}))
    assert "--trust-remote-code" in str(error.value) and len(str(error.value).splitlines()) == 3


def test_the_code_of_a_class_is_named_where_transformers_does_not_have_it():
    assert code_of_class(Mine()) == __name__
    Mine.__module__, before = "transformers_modules.owner.code", Mine.__module__
    try:
        assert code_of_class(Mine()) is None
    finally:
        Mine.__module__ = before
