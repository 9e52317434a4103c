"""A checkpoint folder for where a page says MODEL: the demo's shapes and tokenizer, and one layer."""

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dispfx.demo import DECODER_FOLDER


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("checkpoint") / "MODEL"
    config = AutoConfig.from_pretrained(DECODER_FOLDER)
    config.num_hidden_layers = 1
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for file in Path(DECODER_FOLDER).glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)
