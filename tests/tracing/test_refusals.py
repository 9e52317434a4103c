"""A module that cannot be captured is refused in three lines: what is wrong, its own line, and what helps."""

import linecache
import textwrap
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from dispfx.capturing.graph_export import user_frame
from dispfx.capturing.module_capture import capture
from dispfx.errors import CaptureError
from tests.one_branch import VOCABULARY, WIDTH


class Decoder(nn.Module):
    """One branch, whose input a test mixes over time."""

    def __init__(self, mix: Callable[["Decoder", Tensor], Tensor]):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.step, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.tables: dict[int, Tensor] = {}
        self.mix = mix

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mix(self, x))


def loop(m: Decoder, x: Tensor) -> Tensor:
    state, states = torch.zeros(x.shape[0], WIDTH), []
    for t in range(x.shape[1]):  # the loop
        state = torch.tanh(m.step(state) + x[:, t])
        states.append(state)
    return torch.stack(states, 1)


def whole_number(m: Decoder, x: Tensor) -> Tensor:
    tokens = int(x.shape[1])  # the number
    return m.step(x) + torch.arange(tokens)[:, None].sin()


def python_list(m: Decoder, x: Tensor) -> Tensor:
    shares = torch.tensor([1 / (t + 1) for t in range(x.shape[1])])  # the list
    return m.step(x) * shares[:, None]


def looked_up(m: Decoder, x: Tensor) -> Tensor:
    tokens = x.shape[1]
    if tokens not in m.tables:  # the table
        m.tables[tokens] = torch.arange(tokens)[:, None].sin()
    return m.step(x) + m.tables[tokens]


def by_value(m: Decoder, x: Tensor) -> Tensor:
    return m.step(x) if bool(x.sum() > 0) else x  # the value


def encoder_with_a_mask(m: Decoder, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
    return nn.modules.transformer._detect_is_causal_mask(mask, None, x.shape[1]) * m.step(x)  # the mask


def shuffled(m: Decoder, x: Tensor) -> Tensor:
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(0))
    return m.step(x)[..., order]


CASES = {
    loop: ("it has every step of a loop over the tokens", "# the loop", "one operation on all tokens"),
    whole_number: ("the length is fixed", "# the number", "no int()"),
    python_list: ("the length is fixed", "# the list", "no list"),
    looked_up: (
        "torch.export cannot capture this module",
        "# the table",
        "slice a table of the longest length",
    ),
    by_value: ("depends on the values of a tensor", "# the value", "torch.where"),
    encoder_with_a_mask: ("depends on the values of a tensor", "# the mask", "pass is_causal=True"),
}


@pytest.mark.parametrize("mix", CASES, ids=lambda mix: mix.__name__)
def test_a_refusal_names_the_line_and_what_helps(mix: Callable[..., Tensor], capfd: pytest.CaptureFixture):
    problem, marked, hint = CASES[mix]
    torch.manual_seed(0)
    with pytest.raises(CaptureError, match=problem) as error:
        capture(Decoder(mix).eval())
    assert error.value.where is not None
    file, _, line = error.value.where.rpartition(":")
    assert marked in linecache.getline(file, int(line)), error.value.where
    assert error.value.hint is not None and hint in error.value.hint
    assert ("loop" in str(error.value)) == (mix is loop), "a loop is claimed where one was seen"
    assert len(str(error.value).splitlines()) == 3
    assert not any(capfd.readouterr()), "torch's report stays off the terminal"


def test_a_graph_with_a_generator_is_refused():
    with pytest.raises(CaptureError, match=r"aten\.randperm takes an object that is no tensor") as error:
        capture(Decoder(shuffled).eval())
    assert error.value.where is not None and error.value.where.startswith(__file__)
    assert error.value.hint is not None and "keep it as a buffer" in error.value.hint


def test_the_line_of_an_error_is_not_one_of_pythons_own_library():
    with pytest.raises(ValueError, match="placeholder") as caught:
        textwrap.shorten("a long text", width=1)  # the error
    where = user_frame(caught.value)
    assert where is not None
    file, _, line = where.rpartition(":")
    assert (file, "# the error" in linecache.getline(file, int(line))) == (__file__, True)
