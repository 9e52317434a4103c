"""A decoder that chooses among equal scores: an ONNX model that differs is refused with that cause."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dispfx
from dispfx import api
from dispfx.errors import VerificationError
from dispfx.verification.tied_choices import tied_choice

VOCABULARY = 31


class Sparse(nn.Module):
    """Attends to the token with the largest score, and a ReLU makes many scores equal."""

    def __init__(self, equal: bool):
        super().__init__()
        self.equal = equal
        self.norm, self.scores = nn.LayerNorm(16), nn.Linear(16, 16)
        self.query, self.value, self.out = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        scores = self.scores(y) @ y.transpose(1, 2)
        scores = (scores - 50.0).relu() if self.equal else scores
        chosen = scores.masked_fill(later, -torch.inf).topk(1, dim=-1).indices
        closed = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False) | later
        weights = (self.query(y) @ y.transpose(1, 2)).masked_fill(closed, -1e9).softmax(-1)
        return x + self.out(weights @ self.value(y))


class Decoder(nn.Module):
    def __init__(self, equal: bool):
        super().__init__()
        self.embed, self.layer = nn.Embedding(VOCABULARY, 16), Sparse(equal)
        self.up, self.down, self.head = nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.layer(self.embed(ids))
        return self.head(x + self.down(self.up(x).relu()))


def build(equal: bool) -> Any:
    torch.manual_seed(0)
    return Decoder(equal).eval()


def test_a_choice_among_equal_scores_is_found_and_masked_places_do_not_count():
    ids = torch.arange(18).reshape(2, 9) % VOCABULARY
    found = {equal: tied_choice(dispfx.capture(build(equal)).graph_module, ids) for equal in (True, False)}
    assert found[False] is None, "the first token has one place that is not masked"
    assert "topk" in str(found[True])


def test_an_onnx_model_that_chooses_otherwise_is_refused_with_the_cause(tmp_path: Path):
    for equal in (True, False):
        model = build(equal)
        plan = dispfx.Plan.random(dispfx.capture(model), 0.3, seed=0)
        if not equal:
            api.apply(model, plan, out=tmp_path / "other", export="onnx")
            continue
        with pytest.raises(VerificationError, match="takes the largest of several equal scores") as raised:
            api.apply(model, plan, out=tmp_path / "tied", export="onnx")
        assert "where: topk" in str(raised.value), "a graph that was read from a file has no lines"
