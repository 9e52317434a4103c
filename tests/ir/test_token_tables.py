"""How many token ids a decoder reads, told from its graph and not from the width of its logits."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx import api
from dispfx.capturing.module_capture import capture
from dispfx.errors import DataError
from dispfx.ir.token_tables import tokens_read
from dispfx.run.folders import open_folder
from tests.plain_decoders import FORMS, WIDTH, Decoder

READ, PREDICTED = 40, 56


class LookedUp(nn.Module):
    """A head on what a test looks up by token ids."""

    def __init__(self, look_up: Callable[[Any, Tensor], Tensor]):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.hashed = nn.Embedding(READ, 8), nn.Embedding(7, 8)
        self.other, self.places = nn.Parameter(torch.randn(8, READ + 3)), nn.Embedding(4096, 8)
        self.head = nn.Linear(8, PREDICTED)
        self.look_up = look_up

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.look_up(self, ids))


@pytest.mark.parametrize(
    ("look_up", "expected"),
    [
        (lambda m, ids: m.table(ids), READ),
        (lambda m, ids: m.table.weight[ids], READ),
        (lambda m, ids: m.table.weight.index_select(0, ids.reshape(-1)).view(*ids.shape, 8), READ),
        (lambda m, ids: m.other.t()[ids], READ + 3),
        (lambda m, ids: m.other[:, ids].permute(1, 2, 0), READ + 3),
        (lambda m, ids: m.table(ids.to(torch.int32)) + F.embedding(ids, m.other.t()), READ),
        (lambda m, ids: m.table(ids) + m.hashed(ids % 7), READ),
        (lambda m, ids: m.table(ids) + m.places(torch.arange(ids.shape[1])), READ),
        (lambda m, ids: m.hashed(ids % 7), PREDICTED),
    ],
)
def test_the_smallest_table_that_token_ids_index_says_how_many_are_read(look_up, expected: int):
    program = capture(LookedUp(look_up).eval(), vocabulary_size=READ)
    assert program.known_tokens == expected and program.vocabulary_size == PREDICTED
    assert program.text_tokens == min(expected, PREDICTED)
    assert (tokens_read(program.graph) is None) == (expected == PREDICTED)


def decoder_of(read: int, predicted: int) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(FORMS["pre-norm"], layers=1)
    decoder.embedding = nn.Embedding(read, WIDTH)
    decoder.head = nn.Linear(WIDTH, predicted, bias=False)
    return decoder.eval()


@pytest.mark.parametrize(("read", "predicted"), [(READ, PREDICTED), (PREDICTED, READ)])
def test_a_head_wider_or_narrower_than_the_embedding_compiles_and_recovers(
    read: int, predicted: int, tmp_path: Path
):
    tokens = torch.randint(READ, (800,), generator=torch.Generator().manual_seed(0))
    few: dict[str, Any] = {"seq_len": 16, "steps": 1, "batch_size": 2}
    model = decoder_of(read, predicted)
    program = dispfx.capture(model)
    assert (program.known_tokens, program.vocabulary_size) == (read, predicted)
    report = api.compile(model, 0.3, data=tokens, out=tmp_path / "out", recover="scales", align=1, **few)
    assert report.verify and all(line.holds for line in report.verify)
    assert all(line.holds for line in api.verify(tmp_path / "out"))
    opened = open_folder(tmp_path / "out")
    assert (opened.known_tokens, opened.vocabulary_size, opened.text_tokens) == (read, predicted, READ)
    tokens[7] = READ
    with pytest.raises(DataError, match=rf"must be in \[0, {READ}\).* holds {READ}"):
        api.compile(model, 0.3, data=tokens, out=tmp_path / "other", align=1, **few)
    with pytest.raises(DataError, match=rf"must be in \[0, {READ}\)"):
        dispfx.learn(program, tokens, 0.3, steps=1)
