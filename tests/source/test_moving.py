"""A decoder is moved by whatever `to` it has."""

import pytest
import torch
from torch import nn

from dispfx.errors import SourceError
from dispfx.source import load_config, load_source
from dispfx.source.loading import moved
from tests.plain_decoders import FORMS, Decoder

META = torch.device("meta")


class Positional(Decoder):
    """Takes a device or a dtype by position, and says so."""

    def __init__(self) -> None:
        super().__init__(FORMS["pre-norm"], layers=1)
        self.calls: list[object] = []

    def to(self, device_or_dtype: object, print_details: bool = True) -> "Positional":  # type: ignore[override]
        self.calls.append(device_or_dtype)
        return super().to(device_or_dtype)  # type: ignore[call-overload]


class InPlace(Positional):
    """Moves, and returns nothing."""

    def to(self, device_or_dtype: object) -> None:  # type: ignore[override]
        super().to(device_or_dtype)


def positional() -> nn.Module:
    torch.manual_seed(0)
    return Positional()


@pytest.mark.parametrize("kind", [Positional, InPlace])
def test_a_to_of_ones_own_is_given_one_thing_at_a_time(kind: type[Positional]):
    model = kind()
    assert moved(model, META, torch.bfloat16) is model
    assert model.calls == [META, torch.bfloat16]
    assert {(tensor.device, tensor.dtype) for tensor in model.parameters()} == {(META, torch.bfloat16)}


def test_what_is_there_already_is_not_asked_to_move():
    model = Positional()
    assert moved(model, torch.device("cpu")) is moved(model, torch.device("cpu"), torch.float32) is model
    assert model.calls == []


def test_a_module_of_torch_moves_in_one_step():
    model = moved(Decoder(FORMS["pre-norm"], layers=1), META, torch.float16)
    assert {(tensor.device, tensor.dtype) for tensor in model.parameters()} == {(META, torch.float16)}


def test_such_a_decoder_is_opened():
    name = "tests.source.test_moving:positional"
    assert next(load_source(name, dtype="bfloat16").model.parameters()).dtype == torch.bfloat16
    assert next(load_config(name).model.parameters()).is_meta


def test_a_decoder_without_values_is_refused_by_name():
    model = Decoder(FORMS["pre-norm"], layers=1)
    model.layers[0].to(META)
    with pytest.raises(SourceError, match="no values in memory") as found:
        moved(model, torch.device("cpu"))
    assert "offloading" in str(found.value.hint) and found.value.where == "Decoder"
