"""Another default device of torch, and weights without values, are refused before any work."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dispfx
from dispfx.capturing.module_capture import capture as capture_module
from dispfx.errors import DataError, DispfxError, SourceError
from tests.plain_decoders import FORMS, Decoder, build

TOKENS = torch.arange(3_000) % 60
QUICK: dict[str, Any] = {"seq_len": 16, "batch_size": 2, "steps": 2}


@pytest.fixture
def meta() -> Iterator[None]:
    """Let torch make tensors without values where no device is named."""
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def without_values() -> nn.Module:
    with torch.device("meta"):
        return Decoder(FORMS["pre-norm"])


@pytest.mark.parametrize("method", ["learned", "wanda", "flap", "magnitude"])
def test_nothing_is_learned_from_weights_without_values(method: str):
    program = dispfx.capture(without_values())
    with pytest.raises(SourceError, match="the weights must have values") as caught:
        dispfx.learn(program, TOKENS, 0.3, method=method, **QUICK)
    assert caught.value.where in dict(program.tensors())


def test_token_ids_without_values_are_refused():
    with pytest.raises(DataError, match="token ids must have values"):
        dispfx.learn(dispfx.capture(build(FORMS["pre-norm"])), TOKENS.to("meta"), 0.3, **QUICK)


@pytest.mark.parametrize(
    "work",
    [
        lambda model, program, folder: dispfx.capture(model),
        lambda model, program, folder: dispfx.learn(program, TOKENS, 0.3, method="magnitude", **QUICK),
        lambda model, program, folder: dispfx.compile(model, 0.3, data=TOKENS, out=folder / "out"),
        lambda model, program, folder: dispfx.load(folder),
    ],
    ids=["capture", "learn", "compile", "load"],
)
def test_another_default_device_is_named(work: Callable[..., Any], tmp_path: Path):
    model = build(FORMS["pre-norm"])
    program = dispfx.capture(model)
    torch.set_default_device("meta")
    try:
        with pytest.raises(DispfxError, match="default device of torch must be the CPU here, and it is meta"):
            work(model, program, tmp_path)
    finally:
        torch.set_default_device(None)


def test_a_decoder_without_values_is_captured_where_tensors_have_none(meta: None):
    assert not capture_module(without_values()).measured
