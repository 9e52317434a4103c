"""Decoders that compute a text otherwise, depending on how many texts are in the batch."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dispfx.capturing.module_capture import capture
from dispfx.errors import CaptureError
from tests.lengths_decoders import Scaled, scaled
from tests.programs import relative_error, token_ids

Mix = Callable[[Tensor], Tensor]


def by_batch(mix: Mix):
    """Return a decoder in which `mix` stands before the second layer's MLP."""
    decoder = scaled(lambda tokens, x: x)
    mlp = decoder.layers[1].mlp  # type: ignore[index, union-attr]
    assert isinstance(mlp, Scaled)
    mlp.scale = lambda tokens, x: mix(x)
    return decoder


def beyond_four(x: Tensor) -> Tensor:
    return x * 1.5 if x.shape[0] > 4 else x


def by_len_beyond_four(x: Tensor) -> Tensor:
    return x * 1.5 if len(x) > 4 else x


def alone(x: Tensor) -> Tensor:
    return x * 1.5 if x.shape[0] == 1 else x


def many_tokens(x: Tensor) -> Tensor:
    return x * 1.5 if x.shape[0] * x.shape[1] > 150 else x


def too_many_tokens(x: Tensor) -> Tensor:
    return x * 1.5 if x.shape[0] * x.shape[1] > 20_000 else x


def even(x: Tensor) -> Tensor:
    return x * 1.5 if x.shape[0] % 6 == 0 else x


def one_by_one(x: Tensor) -> Tensor:
    return x.unbind()[0][None] if x.shape[0] == 1 else x


def in_place_of_itself_beyond_four(x: Tensor) -> Tensor:
    return x + 0 if x.shape[0] > 4 else x


def beyond_hundreds(x: Tensor) -> Tensor:
    return x.contiguous() if x.shape[0] > 128 else x


class Masked(nn.Module):
    """A decoder that never predicts its last tokens."""

    def __init__(self, decoder: nn.Module, value: float):
        super().__init__()
        self.decoder, self.value = decoder, value

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.decoder(ids)
        last = torch.arange(logits.shape[-1]) >= logits.shape[-1] - 3
        return logits.masked_fill(last, self.value)


@pytest.mark.parametrize("value", [torch.finfo(torch.float32).min, -1e9])
def test_a_masked_vocabulary_hides_no_difference(value: float):
    with pytest.raises(CaptureError, match="5 sequences"):
        capture(Masked(by_batch(beyond_four), value).eval())


def test_infinite_logits_are_named():
    with pytest.raises(CaptureError, match="logits that are infinite or not a number"):
        capture(Masked(scaled(lambda tokens, x: x), float("-inf")).eval())


@pytest.mark.parametrize(
    ("mix", "batch"),
    [
        (beyond_four, "5 sequences"),
        (by_len_beyond_four, "5 sequences"),
        (many_tokens, "12 sequences"),
        (even, "6 sequences"),
    ],
)
def test_a_decoder_whose_arithmetic_depends_on_the_batch_is_refused_with_the_line(mix: Mix, batch: str):
    with pytest.raises(CaptureError, match=f"the decoder computes {batch} at once otherwise") as error:
        capture(by_batch(mix))
    line = inspect.getsourcelines(mix)[1] + 1
    assert str(error.value.where).endswith(f"test_valid_batches.py:{line}")


def test_a_decoder_that_computes_one_sequence_otherwise_is_refused():
    with pytest.raises(CaptureError, match="the decoder computes one sequence otherwise"):
        capture(by_batch(alone))


def test_a_branch_on_batches_that_are_too_large_to_be_tried_is_refused_with_the_line():
    with pytest.raises(CaptureError, match="1,539 sequences of 13 tokens and more, which are too") as error:
        capture(by_batch(too_many_tokens))
    line = inspect.getsourcelines(too_many_tokens)[1] + 1
    assert str(error.value.where).endswith(f"test_valid_batches.py:{line}")


@pytest.mark.parametrize("mix", [one_by_one, in_place_of_itself_beyond_four, beyond_hundreds])
def test_a_branch_on_the_batch_that_makes_no_difference_is_none(mix: Mix):
    model = by_batch(mix)
    program = capture(model)
    for shape in ((1, 8), (2, 17), (5, 9), (6, 9)):
        ids = token_ids(*shape)
        assert relative_error(program.graph_module(ids), model(ids)) <= 1e-6, shape
