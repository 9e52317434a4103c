"""The gradient of the logits is what autograd finds through the objective, whatever the budget counts."""

import math

import pytest
import torch
from torch import Tensor, nn

from dispfx.learning.hypernetwork import ElementwiseLogits, Hypernetwork
from dispfx.learning.objective import Term, budget_loss
from dispfx.learning.update import StepTensors, Surrogate, Update, fastest_update
from dispfx.plan.hardening import ParameterCount
from dispfx.plan.knots import ONE_KNOT, Knots
from tests.learning.tiny_decoder import untrained_decoder

DECODER = untrained_decoder()
COUNT = ParameterCount.of_sites(DECODER.sites, DECODER.shapes)
SIZES = [site.size for site in DECODER.sites]
FEATURES, SAMPLES, WEIGHT = sum(SIZES), 3, 6.0
TARGET = torch.tensor([0.5 * COUNT.dense], dtype=torch.float64)
RANGE = Knots.of_range(0.2, 0.6)


def numbers(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape)))


class Rows(Hypernetwork):
    """One logit per knot and feature, each a parameter."""

    def __init__(self, knots: Knots):
        super().__init__()
        self.logits_KN = nn.Parameter(torch.zeros(len(knots.ratios), FEATURES))

    def forward(self) -> Tensor:
        return self.logits_KN


def update(width: float = 0.0, *, counts_masks: bool = True, knots: Knots = ONE_KNOT) -> Update:
    hypernetwork = Rows(knots) if knots.is_range else ElementwiseLogits(SIZES, 0.3)
    return Update(hypernetwork, COUNT.count, WEIGHT, width, counts_masks=counts_masks)


def step(of_masks: Surrogate, counted: Surrogate, *, target: float = 0.5 * COUNT.dense) -> StepTensors:
    weights_SK = torch.ones(len(of_masks.values), 1)
    targets = torch.tensor([target], dtype=torch.float64)
    return StepTensors(torch.tensor(2.5), of_masks, counted, weights_SK, targets)


def gradient_of(updating: Update, given: StepTensors) -> tuple[Tensor, Tensor]:
    updating.logits()
    found = updating.gradients(given)
    (gradient,) = (parameter.grad for parameter in updating.hypernetwork.parameters())
    assert gradient is not None
    return gradient.view(-1, FEATURES), found


@pytest.mark.parametrize("samples", [1, SAMPLES])
def test_the_budget_of_masks_reaches_the_logits_by_the_slopes_of_the_masks(samples: int):
    shape = (samples, FEATURES)
    masks, slopes, of_loss = numbers(*shape).round(), numbers(*shape) / 4, numbers(*shape) - 0.5
    leaf = masks.clone().requires_grad_()
    over = budget_loss(COUNT.count(leaf), TARGET).mean()
    (of_budget,) = torch.autograd.grad(WEIGHT * over, leaf)
    expected = ((of_loss + of_budget) * slopes).sum(0, keepdim=True)
    gradient, found = gradient_of(update(), step(Surrogate(of_loss, slopes), Surrogate(masks, slopes)))
    torch.testing.assert_close(gradient, expected)
    left = COUNT.count(masks).mean()
    assert found.tolist() == pytest.approx([2.5, over.item(), left.item(), expected.norm().item()])


@pytest.mark.parametrize("of_ratio", [True, False])
def test_a_further_term_adds_its_own_budget_loss(of_ratio: bool):
    """Or it is the only one, if the ratio has no target."""
    masks, slopes = numbers(SAMPLES, FEATURES).round(), numbers(SAMPLES, FEATURES)
    bytes_N, nothing = numbers(FEATURES).double(), torch.zeros(SAMPLES, FEATURES)
    term = Term(lambda masks: masks.double() @ bytes_N + 7.0, 9.0)
    leaf = masks.clone().requires_grad_()
    over = budget_loss(term.count(leaf), torch.tensor([9.0])).mean()
    over = over + (budget_loss(COUNT.count(leaf), TARGET).mean() if of_ratio else 0.0)
    (expected,) = torch.autograd.grad(WEIGHT * over, leaf)
    both = Update(ElementwiseLogits(SIZES, 0.3), COUNT.count, WEIGHT, of_ratio=of_ratio, further=[term])
    gradient, found = gradient_of(both, step(Surrogate(nothing, nothing), Surrogate(masks, slopes)))
    torch.testing.assert_close(gradient[0], (expected * slopes).sum(0))
    assert found[1].item() == pytest.approx(over.item())
    assert found[2].item() == pytest.approx(COUNT.count(masks).mean().item())


def test_masks_of_a_range_reach_the_knots_that_they_were_drawn_from_each_with_its_own_target():
    shape, ratios_S = (SAMPLES, FEATURES), torch.tensor([0.2, 0.37, 0.6])
    masks, slopes, of_loss = numbers(*shape).round(), numbers(*shape) / 4, numbers(*shape) - 0.5
    targets, weights_SK = (1 - ratios_S.double()) * COUNT.dense, RANGE.weights(ratios_S)
    # By autograd through the mixture, with masks that are linear in the logits.
    logits_KN = torch.zeros(len(RANGE.ratios), FEATURES, requires_grad=True)
    drawn = masks + slopes * (weights_SK @ logits_KN)
    over = budget_loss(COUNT.count(drawn), targets)
    (of_loss * drawn).sum().add(WEIGHT * over.mean()).backward()
    given = StepTensors(
        torch.tensor(2.5), Surrogate(of_loss, slopes), Surrogate(masks, slopes), weights_SK, targets
    )
    gradient, found = gradient_of(update(knots=RANGE), given)
    torch.testing.assert_close(gradient, logits_KN.grad)
    assert found[1].item() == pytest.approx(over.mean().item())


def test_probabilities_of_a_range_are_counted_knot_by_knot():
    logits_KN = (numbers(len(RANGE.ratios), FEATURES) - 0.5).requires_grad_()
    targets = torch.tensor([(1 - ratio) * COUNT.dense for ratio in RANGE.ratios], dtype=torch.float64)
    over = budget_loss(COUNT.count(torch.sigmoid(logits_KN)), targets)
    (WEIGHT * over.mean()).backward()
    keep, nothing = torch.sigmoid(logits_KN.detach()), torch.zeros(SAMPLES, FEATURES)
    counted, weights_SK = Surrogate(keep, keep * (1 - keep)), RANGE.weights(torch.tensor([0.2, 0.3, 0.5]))
    given = StepTensors(torch.tensor(2.5), Surrogate(nothing, nothing), counted, weights_SK, targets)
    gradient, found = gradient_of(update(counts_masks=False, knots=RANGE), given)
    torch.testing.assert_close(gradient, logits_KN.grad)
    assert found[1].item() == pytest.approx(over.mean().item())


def test_the_budget_of_probabilities_has_the_gradient_of_their_count():
    sharpness, logits_KN = 2.0, numbers(1, FEATURES) - 0.5
    leaf = logits_KN.clone().requires_grad_()
    over = budget_loss(COUNT.count(torch.sigmoid(sharpness * leaf)), TARGET)
    (expected,) = torch.autograd.grad(WEIGHT * over.mean(), leaf)
    keep = torch.sigmoid(sharpness * logits_KN)
    nothing = torch.zeros(SAMPLES, FEATURES)
    given = step(Surrogate(nothing, nothing), Surrogate(keep, keep * (1 - keep) * sharpness))
    gradient, found = gradient_of(update(counts_masks=False), given)
    torch.testing.assert_close(gradient, expected)
    assert found[1].item() == pytest.approx(over.item())


def test_the_count_of_probabilities_is_the_mean_count_of_the_masks_drawn_with_them():
    keep = numbers(FEATURES)
    counts = COUNT.count((numbers(4000, FEATURES) < keep).float())
    standard_error = float(counts.std()) / len(counts) ** 0.5
    assert abs(float(counts.mean() - COUNT.count(keep))) < 3 * standard_error


def test_an_eased_budget_pulls_less_near_the_budget_and_is_recorded_as_it_is():
    keep, nothing = numbers(1, FEATURES), torch.zeros(1, FEATURES)
    close = float(COUNT.count(keep)) / 1.01
    given = step(Surrogate(nothing, nothing), Surrogate(keep, keep * (1 - keep)), target=close)
    plain, found = gradient_of(update(counts_masks=False), given)
    gradient, again = gradient_of(update(0.1, counts_masks=False), given)
    assert again[1].item() == pytest.approx(found[1].item()) == pytest.approx(math.log(1.01))
    torch.testing.assert_close(gradient, plain * math.log(1.01) / 0.1)


def test_a_budget_that_is_met_pulls_at_nothing():
    keep, nothing = numbers(1, FEATURES), torch.zeros(1, FEATURES)
    met = step(Surrogate(nothing, nothing), Surrogate(keep, keep), target=float(COUNT.count(keep)))
    _, found = gradient_of(update(counts_masks=False), met)
    assert found[1].item() == pytest.approx(0.0, abs=1e-9)


def like() -> StepTensors:
    nothing = torch.zeros(1, FEATURES)
    return step(Surrogate(nothing, nothing), Surrogate(nothing, nothing))


def test_a_gpu_that_replays_nothing_is_told_with_the_reason():
    plain, notes = update(), list[str]()
    # The hypernetwork is on the CPU, which records nothing, whether there is a GPU or not.
    assert fastest_update(plain, like(), torch.device("cuda"), notes.append) is plain
    (note,) = notes
    assert note.startswith("the hypernetwork is not replayed as a CUDA graph: ") and "Error" in note
    assert all(parameter.grad is None for parameter in plain.hypernetwork.parameters())


def test_a_cpu_has_nothing_to_be_told():
    notes = list[str]()
    plain = update()
    assert fastest_update(plain, like(), torch.device("cpu"), notes.append) is plain
    assert not notes
