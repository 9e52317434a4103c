"""Which of several outputs are the logits: a hidden state is never pruned in their place."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.capturing.logits import Widths, widths_of
from dispfx.errors import CaptureError
from dispfx.ir.program import is_zero
from tests.command_line import run
from tests.one_branch import VOCABULARY, WIDTH, Middle, OneBranch, to_logits
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import relative_error, token_ids


class Named(NamedTuple):
    """An output whose first field is a hidden state."""

    hidden: Tensor
    logits: Tensor


End = Callable[[OneBranch, Tensor], Any]
ENDS: dict[str, End] = {
    "hidden first": lambda m, x: (x, m.head(x)),
    "hidden last": lambda m, x: (m.head(x), x),
    "by field": lambda m, x: Named(x, m.head(x)),
    "by key": lambda m, x: {"hidden": x, "logits": m.head(x)},
    "by attribute": lambda m, x: SimpleNamespace(hidden=x, logits=m.head(x)),
    "two heads": lambda m, x: [m.head(x), m.head(-x)],
    "a hidden state of a router": lambda m, x: (x[..., :3], m.head(x)),
}


def decoder(end: End, rows: int = VOCABULARY, seed: int = 0) -> OneBranch:
    torch.manual_seed(seed)
    model = OneBranch(Middle(lambda m, h: F.gelu(h)), end)
    model.head = nn.Linear(WIDTH, rows, bias=False)
    perturb(model)
    return model


def require_logits(model: OneBranch, program: Any) -> None:
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    twin = decoder(to_logits, model.head.out_features)
    twin.load_state_dict(model.state_dict())
    assert relative_error(program.graph_module(ids), twin(ids)) <= 1e-6
    assert program.vocabulary_size == model.head.out_features


@pytest.mark.parametrize("name", ENDS)
def test_the_logits_are_found_among_other_outputs(name: str):
    model = decoder(ENDS[name])
    require_logits(model, dispfx.capture(model))


@pytest.mark.parametrize("rows", [VOCABULARY - 3, VOCABULARY + 5])
@pytest.mark.parametrize("end", [to_logits, ENDS["hidden first"]])
def test_a_head_may_have_other_rows_than_the_embedding(rows: int, end: End):
    model = decoder(end, rows)
    require_logits(model, dispfx.capture(model))


def test_a_head_as_narrow_as_the_stream_is_known_by_its_name():
    model = decoder(ENDS["by key"], rows=WIDTH)
    require_logits(model, dispfx.capture(model))


def test_a_hidden_state_alone_is_refused():
    with pytest.raises(CaptureError) as refusal:
        dispfx.capture(decoder(lambda m, x: x))
    assert refusal.value.exit_code == 2 and refusal.value.where == "OneBranch"
    assert f"looks like a hidden state: its width is {WIDTH}" in str(refusal.value)
    assert f"{VOCABULARY} rows" in str(refusal.value) and "with its head" in str(refusal.value)


def test_a_hidden_state_alone_is_refused_where_nothing_has_values():
    with pytest.raises(CaptureError, match="looks like a hidden state"):
        dispfx.capture(decoder(lambda m, x: x).to("meta"))


def backbone() -> nn.Module:
    """MODEL, as a function."""
    return decoder(lambda m, x: (x, x.mean(1)))


def test_the_command_line_refuses_a_backbone():
    result = run("inspect", "tests.tracing.test_logits:backbone", "--trust-remote-code")
    assert result.exit_code == 2 and "looks like a hidden state" in result.stderr


AMBIGUOUS: dict[str, tuple[int, End]] = {
    "as wide as the logits": (WIDTH, lambda m, x: (x, m.head(x))),
    "neither as wide as the embedding": (VOCABULARY - 3, lambda m, x: (x[..., :3], m.head(x))),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_cannot_be_told_is_refused_with_the_widths(name: str):
    rows, end = AMBIGUOUS[name]
    model = decoder(end, rows)
    if rows == WIDTH:
        model.embedding = nn.Embedding(WIDTH, WIDTH)
    with pytest.raises(CaptureError, match=rf"cannot be told .* widths are \d+, {rows}") as refusal:
        dispfx.capture(model)
    assert "as the attribute or key `logits`" in str(refusal.value)


def test_a_config_names_vocabulary_and_width_too():
    model: Any = decoder(to_logits)
    model.config = SimpleNamespace(vocab_size=7, hidden_size=5)
    assert widths_of(model) == Widths((VOCABULARY, 7), (WIDTH, 5), "OneBranch")
    assert widths_of(nn.Linear(2, 3)) == Widths(decoder="Linear")


def test_logits_of_more_tokens_than_were_given_are_said_to_be_that():
    with pytest.raises(CaptureError, match="logits for 3 more tokens than it is given") as caught:
        dispfx.capture(decoder(lambda m, x: m.head(torch.cat([x[:, :3], x], 1))))
    assert caught.value.where == "OneBranch" and "without the tokens that it adds" in str(caught.value.hint)


def overflowing(scale: float, dtype: torch.dtype) -> nn.Module:
    """Return a decoder whose sums of squares are about `scale` squared."""
    model = build(FORMS["pre-norm"])
    with torch.no_grad():
        model.embedding.weight.mul_(scale)
    return model.to(dtype)


@pytest.mark.parametrize(
    ("scale", "found"),
    [(1000.0, "are the same for every token"), (100.0, r"are all alike for \d+ of 39 tokens")],
)
def test_logits_that_tell_nothing_are_no_proof(scale: float, found: str):
    with pytest.raises(CaptureError, match=f"{found} in float16") as caught:
        dispfx.capture(overflowing(scale, torch.float16))
    assert "`dtype='float32'` or bfloat16" in str(caught.value.hint)
    assert dispfx.capture(overflowing(scale, torch.bfloat16)).sites


def test_a_head_of_zeros_is_no_proof():
    model = build(FORMS["pre-norm"])
    nn.init.zeros_(model.head.weight)
    with pytest.raises(CaptureError, match="the same for every token in float32"):
        dispfx.capture(model)


def test_zeros_are_known_in_every_type():
    for dtype in (torch.float8_e4m3fn, torch.float16, torch.int8, torch.bool, torch.complex64):
        assert is_zero(torch.zeros(3).to(dtype)) and not is_zero(torch.ones(3).to(dtype))
