"""A decoder that reads few tokens is captured, compiled and verified within them, or told its limit."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import dispfx
from dispfx import api
from dispfx.capturing.fitting_shapes import OTHER_SHAPE, TRACED_SHAPE, fitting_shapes
from dispfx.errors import CaptureError, DataError
from dispfx.settings import learn_settings
from tests.learning_options import options_of
from tests.plain_decoders import FORMS, VOCABULARY, WIDTH, Decoder

SETTINGS = learn_settings(None, method="random")


class Positions(Decoder):
    """Looks positions up in a table."""

    def __init__(self, positions: int):
        super().__init__(FORMS["plain-mlp"], layers=1)
        self.places = nn.Embedding(positions, WIDTH)
        self.embedding.register_forward_hook(self.placed)

    def placed(self, module: nn.Module, given: tuple[Tensor], output: Tensor) -> Tensor:
        return output + self.places(torch.arange(output.shape[1]))


def of(positions: int) -> nn.Module:
    torch.manual_seed(0)
    return Positions(positions).eval()


def tiny_gpt2(positions: int) -> nn.Module:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, n_positions=positions, n_embd=16, n_layer=1, n_head=2)
    return GPT2LMHeadModel(config).eval()


def words() -> Tensor:
    return torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("positions", [8, 13, 16])
def test_the_shapes_fit_and_the_limit_is_known(positions: int):
    program = dispfx.capture(of(positions))
    assert program.lengths.most == positions and program.lengths.limit
    assert program.identity and all(tokens <= positions for _, tokens in program.identity)
    ids = torch.arange(positions)[None]
    assert torch.equal(program.graph_module(ids), of(positions)(ids))
    with pytest.raises(DataError, match=f"this decoder reads at most {positions} tokens"):
        program.graph_module(torch.arange(positions + 1)[None])


def longer_otherwise(tokens: int, output: Tensor) -> Tensor:
    return output * 1.5 if tokens > 8 else output


def shorter_otherwise(tokens: int, output: Tensor) -> Tensor:
    return output * 1.5 if tokens < 3 else output


def of_twelve(scale: Callable[[int, Tensor], Tensor]) -> nn.Module:
    model: Any = of(12)
    model.embedding.register_forward_hook(lambda module, given, output: scale(output.shape[1], output))
    return model


def test_a_branch_on_the_length_is_found_within_few_positions():
    with pytest.raises(CaptureError, match="the decoder's arithmetic changes at 9 tokens") as error:
        dispfx.capture(of_twelve(longer_otherwise))
    line = inspect.getsourcelines(longer_otherwise)[1] + 1
    assert str(error.value.where).endswith(f"test_fitting_shapes.py:{line}")
    program = dispfx.capture(of_twelve(shorter_otherwise))
    assert (program.lengths.least, program.lengths.most, program.lengths.limit) == (3, 12, True)


def test_a_decoder_that_reads_enough_has_the_usual_shapes():
    program = dispfx.capture(of(17))
    assert set(program.identity) == {TRACED_SHAPE, OTHER_SHAPE}


def test_a_decoder_that_reads_next_to_nothing_is_told_its_limit():
    with pytest.raises(CaptureError, match="this decoder reads at most 7 tokens, and a capture takes 8"):
        dispfx.capture(of(7))


def test_a_decoder_that_runs_at_no_length_has_its_own_error():
    def broken(tokens: int) -> None:
        raise CaptureError("no")

    with pytest.raises(CaptureError, match=r"^no"):
        fitting_shapes(broken)


@pytest.mark.parametrize("build", [of, tiny_gpt2])
def test_it_compiles_to_a_folder_that_verifies(build: Callable[[int], nn.Module], tmp_path: Path):
    report = api.compile(build(16), 0.3, data=words(), out=tmp_path / "out", align=1, **options_of(SETTINGS))
    assert all(line.holds for line in report.verify)
    assert max(line.shape[1] for line in report.verify if line.shape) == 16
    again = api.verify(tmp_path / "out")
    assert again and all(line.holds for line in again)
