"""A device is checked once, for every verb and function, before a model or a text is looked at."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import dispfx.api
from dispfx.api import ComputeSettings
from dispfx.errors import DispfxError
from dispfx.source.loading import load_source
from dispfx.words.chosen_device import chosen_device, local_device
from tests.command_line import NAMED, options

UNKNOWN = (
    "gpu",
    "mps",
    "meta",
    "cpu:3",
    "",
    "cuda:",
    "cuda:-1",
    "cuda:01",
    "cuda:１",
    "cuda:x",
    "CUDA",
    "cuda:99999",
    "abacus",
    " cpu",
)
NOT_HERE = ("cuda", "cuda:0", "cuda:99")
VERBS = {name for name, verb in NAMED.items() if "device" in {option.name for option in options(verb)}}
# Nothing that these name exists: a device is told before it is looked for.
WORDS = {
    "compile": ("no-such/model", "--ratio", "0.3", "--out", "out", "--data", "no-such-text.txt"),
    "learn": ("no-such/model", "--ratio", "0.3", "--data", "no-such-text.txt"),
    "apply": ("no-such/model", "no-such-plan.safetensors", "--out", "out"),
    "inspect": ("no-such/model",),
    "curve": ("no-such/model", "no-such-family.safetensors"),
    "eval": ("no-such/model", "--eval-data", "no-such-text.txt"),
    "bench": ("no-such-folder",),
    "costs": ("no-such/model", "--out", "costs.json"),
    "export": ("no-such-folder", "--quantize", "int8"),
    "sample": ("no-such/model", "--out", "no-such-folder/own.safetensors"),
    **dict.fromkeys(
        ("recover", "finetune"),
        ("no-such-folder", "--dense", "no-such/model", "--data", "no-such-text.txt", "--out", "out"),
    ),
}


@pytest.fixture
def without_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def test_every_verb_with_a_device_is_tried_here():
    assert WORDS.keys() == VERBS


@pytest.mark.parametrize("device", [*UNKNOWN, *NOT_HERE])
@pytest.mark.parametrize("verb", sorted(WORDS))
def test_every_verb_refuses_a_device_that_is_not_there_before_anything_else(
    dispfx, without_cards: None, verb: str, device: str
):
    result = dispfx(verb, *WORDS[verb], f"--device={device}")
    assert result.exit_code == 2 and len(result.stderr.splitlines()) == 2
    told = f"--device {device} was given, but torch sees no CUDA device"
    if device in UNKNOWN:
        told = f"--device must be cpu, cuda or cuda:N, and {device!r} was given"
    assert result.stderr.startswith(f"error: {told}")


FUNCTIONS: dict[str, Callable[[str], Any]] = {
    "inspect": lambda device: dispfx.api.inspect("no-such/model", device=device),
    "bench": lambda device: dispfx.api.bench("no-such-folder", device=device),
    "load": lambda device: dispfx.api.load("no-such-folder", device=device),
    "load_source": lambda device: load_source("demo", device=device),
    "Compute": lambda device: ComputeSettings(shard_on=device),
}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("device", ["gpu", "", "meta", "cuda:7"])
def test_functions_refuse_it_as_the_command_line_does(without_cards: None, name: str, device: str):
    with pytest.raises(DispfxError, match="`device") as error:
        FUNCTIONS[name](device)
    assert error.value.exit_code == 2 and error.value.hint


def test_a_device_that_is_there_is_taken(monkeypatch: pytest.MonkeyPatch):
    assert (
        chosen_device(None)
        == chosen_device("cpu")
        == chosen_device(torch.device("cpu"))
        == torch.device("cpu")
    )
    assert chosen_device("cpu:0").type == "cpu"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert chosen_device("cuda") == torch.device("cuda") and chosen_device("cuda:1").index == 1
    with pytest.raises(DispfxError, match=r"torch sees 2 CUDA device\(s\)") as error:
        chosen_device("cuda:2")
    assert error.value.hint == "use `device='cuda:1'` or below"


def test_each_process_of_a_run_has_a_card_of_its_own(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device("cuda") == "cuda:3"
    assert [local_device(word) for word in ("cpu", "cuda:1", None, "")] == ["cpu", "cuda:1", None, ""]
