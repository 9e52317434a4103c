"""Scores and estimators of a user's own: what they are given, and what is refused of what they return."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dispfx
from dispfx.errors import DispfxError
from dispfx.learning.estimators import OwnEstimator, StraightThrough, estimator
from dispfx.learning.scores import Scored, score
from tests.learning.problems import problem_of
from tests.programs import program_of

WANDA = """
def score(scored):
    norms, found = scored.weight_norms(), {}
    for name, (_, squares) in scored.moments().items():
        values = squares.sqrt() * norms[name]
        found[name] = (values - values.mean()) / values.std(correction=0)
    return found
"""


@pytest.fixture(scope="module")
def program() -> dispfx.Program:
    return program_of("pre-norm")


def test_a_score_from_a_file_gives_what_the_same_score_of_dispfx_gives(
    program: dispfx.Program, tmp_path: Path
):
    (tmp_path / "mine.py").write_text(WANDA)
    found, graph = problem_of(program)
    ours: Any = f"{tmp_path}/mine.py:score"
    expected, scores = (by_name(program, score(found, graph, name, 3)) for name in ("wanda", ours))
    for site in program.sites:
        if site.kind != "write":  # nobody reads a write: its norm is one there, and that of its rows here
            assert torch.allclose(scores[site.name], expected[site.name], atol=1e-5)


def by_name(program: dispfx.Program, values: Tensor) -> dict[str, Tensor]:
    parts = values.split([site.size for site in program.sites])
    return {site.name: part for site, part in zip(program.sites, parts, strict=True)}


def test_a_score_sees_weights_text_and_the_gradient_of_every_mask(program: dispfx.Program):
    found, graph = problem_of(program)
    seen: list[Tensor] = []

    def fisher(scored: Scored) -> dict[str, Tensor]:
        assert scored.weights["head.weight"].shape == (61, 32)
        total = {site.name: torch.zeros(site.size) for site in scored.sites}
        for ids_BT in scored.batches():
            seen.append(ids_BT)
            masks = scored.masks()
            scored.loss(ids_BT, masks).backward()
            for name, mask in masks.items():
                assert mask.grad is not None
                total[name] += mask.grad**2 / 3
        return total

    costs = found.count.feature_costs(found.groups)
    own: Any = fisher
    assert torch.allclose(
        (score(found, graph, own, 3) / costs).log(), score(found, graph, "fisher", 3), atol=1e-4
    )
    assert [tuple(ids.shape) for ids in seen] == [(1, 6)] * 3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda scored: None, "scores must be a mapping from site to score, but a NoneType was given"),
        (lambda scored: {}, "every site needs a score"),
        (
            lambda scored: dict.fromkeys(scored.masks(), torch.ones(3)),
            r"scores have shape \(32,\), found \(3,\)",
        ),
        (lambda scored: {name: mask / 0 for name, mask in scored.masks().items()}, "scores must be finite"),
        (lambda scored: scored.nothing, "raised AttributeError"),
    ],
)
def test_scores_that_cannot_be_used_are_refused(program: dispfx.Program, wrong: Any, message: str):
    with pytest.raises(DispfxError, match=message):
        score(*problem_of(program), wrong)


def straight_through(logits: Tensor, temperature: float, generator: torch.Generator) -> Tensor:
    soft = (logits / temperature).sigmoid()
    hard = (torch.rand(logits.shape, generator=generator) < logits.sigmoid()).to(logits.dtype)
    return hard + soft - soft.detach()


def test_an_estimator_of_ones_own_draws_and_has_slopes_as_the_same_one_of_dispfx():
    own: Any = straight_through
    logits = torch.linspace(-3, 3, 24).reshape(2, 12)
    first, second = (
        one.sample(logits, torch.Generator().manual_seed(5))
        for one in (estimator(own, 0.7), StraightThrough(0.7))
    )
    assert torch.equal(first.mask.round(), second.mask) and torch.allclose(first.mask, second.mask)
    assert torch.allclose(first.slope, second.slope) and not first.mask.requires_grad


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda logits, temperature, generator: None, "returned a NoneType"),
        (
            lambda logits, temperature, generator: logits[:3],
            r"of shape \(4,\) .* returned float32 of shape \(3,\)",
        ),
        (lambda logits, temperature, generator: logits > 0, "returned bool of shape"),
        (lambda logits, temperature, generator: (logits > 0).float(), "returned masks without a gradient"),
        (lambda logits, temperature, generator: 2 * logits, "returned values from -2.0 to 4.0"),
        (lambda logits, temperature, generator: (0 * logits).sqrt(), "masks whose gradient is not finite"),
        (lambda logits: logits, "raised TypeError"),
    ],
)
def test_masks_that_cannot_be_used_are_refused(wrong: Callable[..., Any], message: str):
    own: Any = wrong
    found = estimator(own, 1.0)
    assert isinstance(found, OwnEstimator)
    with pytest.raises(DispfxError, match=message):
        found.check(torch.tensor([-1.0, 0.5, 1.0, 2.0]))
