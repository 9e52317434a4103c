"""Runs that cannot fit into memory are refused before they begin."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from dispfx.errors import DispfxError
from dispfx.estimate.free_memory import free_bytes
from dispfx.estimate.run_estimate import estimate
from dispfx.run import preflight
from dispfx.settings import ComputeSettings, ModelSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source.loaded_size import loaded_bytes
from tests.captures import plain
from tests.command_line import run
from tests.tiny_transformers import tiny_transformer
from tests.trust.hostile import write_gguf

CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what says how many bytes are free."""

    def say(size: int) -> None:
        monkeypatch.setattr(preflight, "free_bytes", lambda _: size)

    return say


def test_free_memory_is_known_and_less_than_all_of_it():
    free = free_bytes(CPU)
    assert free is not None and 2**20 < free < 2**45
    assert free_bytes(torch.device("meta")) is None


def write_shards(folder: Path) -> None:
    """Write 15 float32 and 7 bfloat16 numbers and 3 bytes as two shards with their index."""
    (folder / "config.json").write_text("{}", encoding="utf-8")
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    save_file({"a": torch.zeros(3, 5)}, folder / names[0])
    whole = torch.zeros(3, dtype=torch.uint8)
    save_file({"b": torch.zeros(7, dtype=torch.bfloat16), "c": whole}, folder / names[1])
    index = {"weight_map": {"a": names[0], "b": names[1], "c": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def test_the_size_of_weights_is_read_from_their_headers(tmp_path: Path):
    write_shards(tmp_path)
    assert loaded_bytes(str(tmp_path), None) == 15 * 4 + 7 * 2 + 3
    assert loaded_bytes(str(tmp_path), torch.float16) == (15 + 7) * 2 + 3


def test_only_the_files_that_are_loaded_count(tmp_path: Path):
    """As in a repository that has the weights as shards, in one piece and in its makers' own form."""
    write_shards(tmp_path)
    save_file({"a": torch.zeros(100)}, tmp_path / "consolidated.safetensors")
    assert loaded_bytes(str(tmp_path), None) == 15 * 4 + 7 * 2 + 3
    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert loaded_bytes(str(tmp_path), None) == 2 * 4, "one file is taken before an index"
    (tmp_path / "config.json").write_text('{"transformers_weights": "consolidated.safetensors"}')
    assert loaded_bytes(str(tmp_path), None) == 100 * 4


def test_transformers_loads_the_files_that_are_counted(tmp_path: Path):
    """The order in which it looks is its own, and may change."""
    from transformers import AutoModelForCausalLM, logging

    decoder: Any = tiny_transformer("llama")
    decoder.save_pretrained(tmp_path, max_shard_size="20KB")
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("*.safetensors")}
    assert len(sizes) > 1, sizes
    whole = sum(parameter.nbytes for parameter in decoder.parameters())
    assert loaded_bytes(str(tmp_path), None) == whole
    wrong = {name: torch.zeros_like(tensor) for name, tensor in decoder.state_dict().items()}
    save_file(wrong, tmp_path / "consolidated.safetensors", {"format": "pt"})
    logging.disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(bool(one.any()) for one in loaded.parameters()), "shards before a file of another name"
    save_file(wrong, tmp_path / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert not any(bool(one.any()) for one in loaded.parameters()), "one file before shards"


@pytest.mark.parametrize(
    "file", ["3", '"../other.safetensors"', '"/other.safetensors"', '"not-there.safetensors"']
)
def test_an_index_that_leads_elsewhere_is_left_to_those_who_load_it(tmp_path: Path, file: str):
    (tmp_path / "model").mkdir()
    write_shards(tmp_path / "model")
    save_file({"a": torch.zeros(3)}, tmp_path / "other.safetensors")
    (tmp_path / "model" / "model.safetensors.index.json").write_text(f'{{"weight_map": {{"a": {file}}}}}')
    assert loaded_bytes(str(tmp_path / "model"), None) is None


@pytest.mark.parametrize("index", ["[]", "{}", '{"weight_map": 3}', "no JSON"])
def test_a_damaged_index_is_left_to_those_who_load_it(tmp_path: Path, index: str):
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    assert loaded_bytes(str(tmp_path), None) is None


def test_the_size_of_a_gguf_file_is_that_of_its_numbers_in_float32(tmp_path: Path):
    write_gguf(tmp_path / "model.gguf")
    elements = 2 * 16 * 8 + 3 * 8 + 3 * 12 * 8 + 4 * 8 * 8
    assert loaded_bytes(str(tmp_path / "model.gguf"), None) == 4 * elements


@pytest.mark.parametrize("spec", ["some/model", "package.module:function"])
def test_the_size_of_what_is_not_here_is_not_known(spec: str):
    assert loaded_bytes(spec, None) is None


def test_a_damaged_file_is_left_to_those_who_load_it(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"no safetensors")
    assert loaded_bytes(str(tmp_path), None) is None


def test_weights_that_do_not_fit_are_refused_with_what_is_missing(free: Any):
    size = loaded_bytes("demo", None)
    assert size is not None
    free(int(0.76 * size))
    preflight.require_room_for_weights(ModelSettings("demo"))
    free(int(0.7 * size))
    with pytest.raises(DispfxError, match=r"1\.0 MB are missing") as refusal:
        preflight.require_room_for_weights(ModelSettings("demo"))
    assert refusal.value.exit_code == 2 and "`dtype='bfloat16'`" in str(refusal.value)
    with pytest.raises(DispfxError):
        free(int(1.2 * size))
        preflight.require_room_for_weights(ModelSettings("demo"), copies=1.7)


def test_learning_that_does_not_fit_is_refused_with_what_would_help(free: Any):
    program = plain("llama")
    settings = LearnSettings(batch_size=4, seq_len=64)
    off, auto = ComputeSettings(checkpointing="off"), ComputeSettings()
    found = estimate(program, settings)
    whole, least = found.beside_weights(), found.beside_weights(checkpoints=True)
    assert least < whole

    free(int(0.76 * whole))
    preflight.require_room_to_learn(program, settings, off)
    free(int(0.74 * whole))
    with pytest.raises(DispfxError, match="are missing") as refusal:
        preflight.require_room_to_learn(program, settings, off)
    assert "`batch_size`" in str(refusal.value) and "`checkpointing='on'`" in str(refusal.value)
    free(int(0.76 * least))
    preflight.require_room_to_learn(program, settings, auto)
    free(int(0.74 * least))
    with pytest.raises(DispfxError):
        preflight.require_room_to_learn(program, settings, auto)


@pytest.mark.parametrize("verb", ["compile", "learn", "apply"])
def test_no_verb_begins_without_room(verb: str, free: Any, tmp_path: Path):
    free(1000)
    words = [verb, "demo", "--out", str(tmp_path / "out")]
    if verb == "apply":
        from tests.report.runs import plan_of

        plan_of().save(tmp_path / "plan.safetensors")
        words.insert(2, str(tmp_path / "plan.safetensors"))
    else:
        words += ["--ratio", "0.3", "--steps", "1"]
    result = run(*words)
    assert result.exit_code == 2 and "are missing" in result.output, result.output
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.state").exists()
