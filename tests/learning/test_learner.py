"""A bad step leaves no trace, and a gate that does nothing is found before learning starts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dispfx.errors import DispfxError, PassError
from dispfx.ir.gate import gate
from dispfx.learning.learner import Learner, Problem, check_gates, check_samples
from dispfx.learning.state import Position
from dispfx.learning.update import StepTensors, Surrogate, Update
from dispfx.plan.hardening import Groups, ParameterCount
from dispfx.plan.knots import Knots
from tests.learning.tiny_decoder import batches, markov_tokens, settings, untrained_decoder

TEXT = markov_tokens(2_000)
DECODER = untrained_decoder()


def problem(gated: Callable[..., Tensor] = DECODER, **changes: Any) -> Problem:
    chosen = settings(**changes)
    count = ParameterCount.of_sites(DECODER.sites, DECODER.shapes)
    return Problem(
        gated=gated,
        sites=DECODER.sites,
        groups=Groups.alone(DECODER.sites),
        count=count,
        knots=Knots((0.3,)),
        text=batches(TEXT, chosen),
        settings=chosen,
        device=torch.device("cpu"),
    )


class Faulty:
    """The tiny decoder, spoilt at chosen calls: its loss, or only its gradient."""

    def __init__(self, bad_calls: set[int], spoil: Callable[[Tensor], Tensor]):
        self.calls = 0
        self.bad_calls = bad_calls
        self.spoil = spoil

    def __call__(self, ids_BT: Tensor, masks) -> Tensor:
        self.calls += 1
        logits_BTV = DECODER(ids_BT, masks)
        return self.spoil(logits_BTV) if self.calls in self.bad_calls else logits_BTV


class _SpoiltGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx, *grads: Tensor) -> Tensor:
        return grads[0] * float("inf")


SPOILS = {"loss": lambda logits: logits * float("nan"), "gradient": _SpoiltGradient.apply}


def test_every_sample_has_its_sequences_and_their_gradient():
    """Two samples of one mask, or one sample: the same batch, the same loss and the same gradient."""
    one, two = problem(batch_size=4), problem(batch_size=4, samples=2)
    mask = torch.rand(sum(site.size for site in DECODER.sites)).round().requires_grad_()
    masks = mask.detach().expand(2, -1).clone().requires_grad_()
    ids_BT = one.text.batch(0)
    loss_one, loss_two = one.loss(ids_BT, mask), two.loss(ids_BT, masks)
    assert torch.allclose(loss_one, loss_two)
    loss_one.backward()
    loss_two.backward()
    assert mask.grad is not None and masks.grad is not None
    assert torch.allclose(masks.grad.sum(0), mask.grad, atol=1e-6)
    assert not torch.allclose(masks.grad[0], masks.grad[1])


def test_a_step_draws_as_many_masks_as_were_asked():
    shapes = []

    def watching(ids_BT: Tensor, masks) -> Tensor:
        shapes.append({tuple(mask.shape[:-1]) for mask in masks})
        return DECODER(ids_BT, masks)

    Learner(problem(watching, batch_size=4, samples=2)).advance()
    assert shapes == [{(2,)}]


def test_the_last_masks_are_those_that_the_logits_say_where_they_are_sharpened():
    drawn: list[list[Tensor]] = []

    def watching(ids_BT: Tensor, masks) -> Tensor:
        drawn.append([mask.detach().clone() for mask in masks])
        return DECODER(ids_BT, masks)

    for sharpen, alike in ((1e6, True), (1.0, False)):
        learner = Learner(problem(watching, steps=4, hypernetwork="none", bias=0.5, sharpen=sharpen))
        for _ in range(3):
            learner.advance()
        said = (learner.logits()[0] > 0).float()
        learner.advance()
        assert torch.equal(torch.cat(drawn[-1]), said) == alike


def test_sharpened_logits_have_gradients_that_much_larger(monkeypatch):
    """Straight-through at logits of zero, where the same masks are drawn: the slope of sigmoid(kθ) is k/4."""
    slopes: list[Tensor] = []
    gradients = Update.gradients

    def watched(update: Update, given: StepTensors) -> Tensor:
        slopes.append(given.of_masks.surrogate.clone())
        return gradients(update, given)

    monkeypatch.setattr(Update, "gradients", watched)
    for sharpen in (1.0, 3.0):
        chosen: dict[str, Any] = dict(hypernetwork="none", bias=0.0, estimator="straight-through", steps=2)
        learner = Learner(problem(**chosen, sharpen=sharpen))
        learner.position = Position(2)
        learner.advance()
    assert torch.allclose(slopes[0], torch.tensor(0.25)) and torch.allclose(slopes[1], torch.tensor(0.75))


@pytest.mark.parametrize("budget_on", ["masks", "probabilities"])
def test_what_the_budget_counts_is_as_asked(budget_on: str, monkeypatch):
    counted: list[Surrogate] = []
    gradients = Update.gradients

    def watched(update: Update, given: StepTensors) -> Tensor:
        counted.append(given.counted)
        return gradients(update, given)

    monkeypatch.setattr(Update, "gradients", watched)
    chosen: dict[str, Any] = dict(hypernetwork="none", bias=0.5, steps=2, sharpen=3.0, batch_size=4)
    learner = Learner(problem(**chosen, samples=2, budget_on=budget_on))
    learner.position = Position(1)
    sharpness = learner.problem.settings.sharpness(1)
    keep_KN = torch.sigmoid(sharpness * learner.logits())
    outcome = learner.advance()
    if budget_on == "probabilities":
        assert torch.equal(counted[0].values, keep_KN)
        assert torch.allclose(counted[0].surrogate, sharpness * keep_KN * (1 - keep_KN))
    else:
        assert counted[0].values.shape == (2, keep_KN.shape[1]) and set(
            counted[0].values.unique().tolist()
        ) == {
            0,
            1,
        }
    left = learner.problem.count.count(counted[0].values.detach()).mean()
    assert outcome.achieved_ratio == pytest.approx(1 - float(left) / learner.problem.count.dense)


def test_a_decoder_that_mixes_its_sequences_takes_one_sample_only():
    def mixing(ids_BT: Tensor, masks) -> Tensor:
        return DECODER(ids_BT.flip(0), masks).flip(0)

    check_samples(problem(batch_size=4, samples=4))
    check_samples(problem(mixing, batch_size=4))
    with pytest.raises(
        DispfxError, match=r"`samples=4` is not possible, .* mixes its sequences: the loss differs"
    ):
        check_samples(problem(mixing, batch_size=4, samples=4))


def test_a_gate_that_has_no_rows_for_samples_is_refused():
    def by_feature(ids_BT: Tensor, masks) -> Tensor:
        return DECODER(ids_BT, masks) + gate(torch.zeros(DECODER.sites[0].size, 3), masks[0], 0).sum()

    with pytest.raises(DispfxError, match="mixes its sequences: 2 masks do not divide dimension 0"):
        check_samples(problem(by_feature, batch_size=4, samples=2))


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_step_that_is_not_finite_changes_nothing_and_is_counted(spoil):
    learner = Learner(problem(Faulty({3}, spoil)))
    for _ in range(2):
        assert learner.advance().finite
    before = {name: tensor.clone() for name, tensor in learner.tensors().items()}
    assert not learner.advance().finite
    after = learner.tensors()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (learner.position.step, learner.position.bad_steps, learner.position.bad_in_a_row) == (3, 1, 1)
    assert learner.advance().finite
    assert (learner.position.step, learner.position.bad_steps, learner.position.bad_in_a_row) == (4, 1, 0)
    assert not all(torch.equal(before[name], learner.tensors()[name]) for name in before)


@pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS.keys())
def test_a_run_that_begins_with_a_bad_step_goes_on_as_one_that_has_not_begun(spoil):
    """The optimizer has its moments from then on: they are zero, and it has counted no step."""
    bad, whole = Learner(problem(Faulty({1}, spoil))), Learner(problem())
    assert not bad.advance().finite
    whole.position = bad.position  # the text moves on
    for learner in (bad, whole):
        assert learner.advance().finite
    after, expected = bad.tensors(), whole.tensors()
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_the_optimizer_has_its_work_before_the_host_waits_for_the_numbers(monkeypatch):
    order = []
    learner = Learner(problem())

    def watched(numbers: Tensor) -> Callable[[], list[float]]:
        order.append("begin to read")
        return lambda: (order.append("wait"), numbers.tolist())[1]

    step = learner._optimizer.step
    monkeypatch.setattr(learner._optimizer, "step", lambda: (order.append("optimize"), step()))
    monkeypatch.setattr("dispfx.learning.learner.reading", watched)
    assert learner.advance().finite
    assert order == ["begin to read", "optimize", "wait"]


def test_a_bad_step_redraws_the_random_numbers_that_it_had_drawn():
    drawn = []

    class Watching(Faulty):
        def __call__(self, ids_BT: Tensor, masks) -> Tensor:
            drawn.append(torch.cat(list(masks)).detach().clone())
            return super().__call__(ids_BT, masks)

    learner = Learner(problem(Watching({2}, SPOILS["loss"])))
    for _ in range(3):
        learner.advance()
    assert torch.equal(drawn[1], drawn[2]) and not torch.equal(drawn[0], drawn[1])


def test_bad_steps_in_a_row_end_the_run_with_their_number():
    learner = Learner(problem(Faulty(set(range(2, 99)), SPOILS["loss"]), max_bad_steps=3))
    for _ in range(3):
        learner.advance()
    with pytest.raises(DispfxError, match=r"stopped at step 4: .* not finite 3 times in a row"):
        learner.advance()


def test_every_gate_of_a_sound_decoder_acts():
    check_gates(problem())


def test_a_gate_without_effect_is_a_pass_error_that_names_its_site():
    def gated(ids_BT: Tensor, masks) -> Tensor:
        cut = list(masks)
        cut[4] = torch.ones_like(cut[4])  # the inner gate of the second layer is not in the graph
        return DECODER(ids_BT, cut)

    with pytest.raises(PassError, match="1 of 6 get a gradient of zero") as caught:
        check_gates(problem(gated))
    assert caught.value.where == "layer.1.inner"


def test_a_decoder_without_any_gate_is_a_pass_error():
    with pytest.raises(PassError, match="depend on no gate"):
        check_gates(problem(lambda ids_BT, masks: DECODER.dense(ids_BT)))


def test_a_decoder_that_is_not_finite_from_the_start_says_so():
    with pytest.raises(DispfxError, match="everything kept is nan at the start"):
        check_gates(problem(Faulty({1}, SPOILS["loss"])))


@pytest.mark.parametrize("bad", [set(), {1}], ids=["good", "bad"])
def test_no_gradient_of_the_hypernetwork_is_held_between_two_steps(bad: set[int]):
    """It is as large as the hypernetwork, and the decoder's step needs the memory."""
    learner = Learner(problem(Faulty(bad, SPOILS["loss"])))
    assert learner.advance().finite is not bool(bad)
    assert all(parameter.grad is None for parameter in learner._hypernetwork.parameters())
