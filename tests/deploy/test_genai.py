"""genai_config.json says what the model's inputs are, whatever the decoder's config says."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dispfx.deploy.genai import GENAI_FILE, write_genai_config
from dispfx.ir.cached_inputs import CACHED_INPUTS, CacheTensor

CACHES = [
    CacheTensor(f"{layer}.{kind}", 2, 16, torch.float32) for layer in range(3) for kind in ("key", "value")
]


def written(folder: Path, config: Any, generation: Any = None, inputs=CACHED_INPUTS) -> dict[str, Any]:
    write_genai_config(
        folder,
        model_file="model.onnx",
        caches=CACHES,
        inputs=inputs,
        vocabulary_size=96,
        config=config,
        generation_config=generation,
    )
    return json.loads((folder / GENAI_FILE).read_text(encoding="utf-8"))


def test_sizes_come_from_the_model_and_not_from_the_config(tmp_path: Path):
    # A head size of width / heads would be 8, and the config counts another vocabulary.
    config = SimpleNamespace(
        hidden_size=32, num_attention_heads=4, num_hidden_layers=9, vocab_size=7, max_position_embeddings=128
    )
    model = written(tmp_path, config)["model"]
    decoder = model["decoder"]

    assert (decoder["head_size"], decoder["num_key_value_heads"], decoder["num_hidden_layers"]) == (16, 2, 3)
    assert decoder["num_attention_heads"] == 4 and model["vocab_size"] == 96
    assert model["context_length"] == 128 and decoder["filename"] == "model.onnx"


class ByLayer:
    """A config whose number of heads differs by layer, as transformers has them."""

    hidden_size = 32

    @property
    def num_attention_heads(self) -> int:
        raise RuntimeError("'num_attention_heads' is a per-layer attribute")


def test_a_number_of_heads_that_differs_by_layer_is_taken_from_the_model(tmp_path: Path):
    assert written(tmp_path, ByLayer())["model"]["decoder"]["num_attention_heads"] == 2


def test_only_inputs_that_the_model_has_are_named(tmp_path: Path):
    named = written(tmp_path, SimpleNamespace(), inputs=("input_ids", "attention_mask"))["model"]["decoder"]

    assert "position_ids" not in named["inputs"] and named["inputs"]["input_ids"] == "input_ids"
    assert named["inputs"]["past_key_names"] == "past_key_values.%d.key"
    assert named["outputs"]["present_value_names"] == "present.%d.value"


def test_the_cache_grows_and_is_not_shared(tmp_path: Path):
    assert written(tmp_path, SimpleNamespace())["search"]["past_present_share_buffer"] is False


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, (0, 0, 0)),
        ({"bos_token_id": 1, "eos_token_id": 2}, None, (1, 2, 2)),
        ({"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 5}, {"eos_token_id": [7, 8]}, (1, [7, 8], 5)),
        ({"eos_token_id": [3, 4]}, None, (0, [3, 4], 3)),
        ({"eos_token_id": 2, "pad_token_id": 0}, None, (0, 2, 0)),
    ],
)
def test_special_tokens_come_from_the_generation_config_first(
    tmp_path: Path, config: dict, generation: dict | None, expected: tuple
):
    given = None if generation is None else SimpleNamespace(**generation)
    model = written(tmp_path, SimpleNamespace(**config), given)["model"]

    assert (model["bos_token_id"], model["eos_token_id"], model["pad_token_id"]) == expected


@pytest.mark.parametrize("odd", ["x", -1, 96, 1.5, True, [], ["x"], {}])
def test_a_token_that_the_vocabulary_does_not_have_is_ignored(odd: Any, tmp_path: Path):
    generation = SimpleNamespace(eos_token_id=odd, pad_token_id=odd, bos_token_id=[odd, 7])
    model = written(tmp_path, SimpleNamespace(eos_token_id=5), generation)["model"]
    assert (model["eos_token_id"], model["pad_token_id"], model["bos_token_id"]) == (5, 5, 7)
