"""The gradient of the logits is what autograd finds through the objective, whatever the budget counts."""

import math

import pytest
import torch
from torch import Tensor

from dispfx.learning.hypernetwork import ElementwiseLogits
from dispfx.learning.objective import Term, budget_loss
from dispfx.learning.update import Surrogate, Update, fastest_update
from dispfx.plan.hardening import ParameterCount
from tests.learning.tiny_decoder import untrained_decoder

DECODER = untrained_decoder()
COUNT = ParameterCount.of_sites(DECODER.sites, DECODER.shapes)
SIZES = [site.size for site in DECODER.sites]
FEATURES, SAMPLES, WEIGHT = sum(SIZES), 3, 6.0


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


def update(target: float = 0.5 * COUNT.dense, width: float = 0.0) -> Update:
    return Update(ElementwiseLogits(SIZES, 0.3), COUNT.count, target, WEIGHT, width)


def gradient_of(given: Update, of_masks: Surrogate, counted: Surrogate) -> tuple[Tensor, Tensor]:
    given.logits()
    found = given.gradients(torch.tensor(2.5), of_masks, counted)
    (gradient_N,) = (parameter.grad for parameter in given.hypernetwork.parameters())
    assert gradient_N is not None
    return gradient_N, found


@pytest.mark.parametrize("shape", [(FEATURES,), (SAMPLES, FEATURES)], ids=["one mask", "several masks"])
def test_the_budget_of_masks_reaches_the_logits_by_the_slopes_of_the_masks(shape: tuple[int, ...]):
    masks, slopes, of_loss = numbers(*shape).round(), numbers(*shape) / 4, numbers(*shape) - 0.5
    leaf = masks.clone().requires_grad_()
    over = budget_loss(COUNT.count(leaf), 0.5 * COUNT.dense).mean()
    (of_budget,) = torch.autograd.grad(WEIGHT * over, leaf)
    expected = ((of_loss + of_budget) * slopes).reshape(-1, FEATURES).sum(0)
    gradient, found = gradient_of(update(), Surrogate(of_loss, slopes), Surrogate(masks, slopes))
    torch.testing.assert_close(gradient, expected)
    left = COUNT.count(masks).mean()
    assert found.tolist() == pytest.approx([2.5, over.item(), left.item(), expected.norm().item()])


def test_a_further_term_adds_its_own_budget_loss():
    masks, slopes = numbers(SAMPLES, FEATURES).round(), numbers(SAMPLES, FEATURES)
    bytes_N, nothing = numbers(FEATURES).double(), torch.zeros(SAMPLES, FEATURES)
    term = Term(lambda masks: masks.double() @ bytes_N + 7.0, 9.0)
    leaf = masks.clone().requires_grad_()
    over = (
        budget_loss(COUNT.count(leaf), 0.5 * COUNT.dense).mean() + budget_loss(term.count(leaf), 9.0).mean()
    )
    (expected,) = torch.autograd.grad(WEIGHT * over, leaf)
    both = Update(ElementwiseLogits(SIZES, 0.3), COUNT.count, 0.5 * COUNT.dense, WEIGHT, further=[term])
    gradient, found = gradient_of(both, Surrogate(nothing, nothing), Surrogate(masks, slopes))
    torch.testing.assert_close(gradient, (expected * slopes).sum(0))
    assert found[1].item() == pytest.approx(over.item())


def test_the_budget_of_probabilities_has_the_gradient_of_their_count():
    sharpness, logits_N = 2.0, numbers(FEATURES) - 0.5
    leaf = logits_N.clone().requires_grad_()
    over = budget_loss(COUNT.count(torch.sigmoid(sharpness * leaf)), 0.5 * COUNT.dense)
    (expected,) = torch.autograd.grad(WEIGHT * over, leaf)
    keep = torch.sigmoid(sharpness * logits_N)
    nothing = torch.zeros(SAMPLES, FEATURES)
    gradient, found = gradient_of(
        update(),
        Surrogate(nothing, nothing),
        Surrogate(keep, keep * (1 - keep) * sharpness),
    )
    torch.testing.assert_close(gradient, expected)
    assert found[1].item() == pytest.approx(over.item())


def test_the_count_of_probabilities_is_the_mean_count_of_the_masks_drawn_with_them():
    keep = numbers(FEATURES)
    counts = COUNT.count((numbers(4000, FEATURES) < keep).float())
    standard_error = float(counts.std()) / len(counts) ** 0.5
    assert abs(float(counts.mean() - COUNT.count(keep))) < 3 * standard_error


def test_an_eased_budget_pulls_less_near_the_budget_and_is_recorded_as_it_is():
    keep = numbers(FEATURES)
    kept, nothing = Surrogate(keep, keep * (1 - keep)), torch.zeros(FEATURES)
    close = float(COUNT.count(keep)) / 1.01
    plain, found = gradient_of(update(close), Surrogate(nothing, nothing), kept)
    gradient, again = gradient_of(update(close, width=0.1), Surrogate(nothing, nothing), kept)
    assert again[1].item() == pytest.approx(found[1].item()) == pytest.approx(math.log(1.01))
    torch.testing.assert_close(gradient, plain * math.log(1.01) / 0.1)


def test_a_budget_that_is_met_pulls_at_nothing():
    keep = numbers(FEATURES)
    met = update(target=float(COUNT.count(keep)))
    nothing = torch.zeros(FEATURES)
    _, found = gradient_of(met, Surrogate(nothing, nothing), Surrogate(keep, keep * (1 - keep)))
    assert found[1].item() == pytest.approx(0.0, abs=1e-9)


def test_a_gpu_that_replays_nothing_is_told_with_the_reason():
    plain, notes = update(), list[str]()
    # The hypernetwork is on the CPU, which records nothing, whether there is a GPU or not.
    assert fastest_update(plain, (FEATURES,), (FEATURES,), torch.device("cuda"), notes.append) is plain
    (note,) = notes
    assert note.startswith("the hypernetwork is not replayed as a CUDA graph: ") and "Error" in note
    assert all(parameter.grad is None for parameter in plain.hypernetwork.parameters())


def test_a_cpu_has_nothing_to_be_told():
    notes = list[str]()
    plain = update()
    assert fastest_update(plain, (FEATURES,), (FEATURES,), torch.device("cpu"), notes.append) is plain
    assert not notes
