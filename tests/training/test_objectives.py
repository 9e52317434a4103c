"""Learning from the dense decoder's predictions: every way to compute the divergence gives the same."""

import pytest
import torch
from torch.nn.functional import kl_div

from dispfx.fast_decoder.comparison import compare, sample_masks, value_and_gradient
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.preparation import PlainDecoder, TrialBatch, prepare
from dispfx.learning.learner import check_gates
from dispfx.learning.objective import OBJECTIVES, next_token_loss
from dispfx.run.mask_learning import learn
from dispfx.settings import ComputeSettings
from tests.learning.problems import problem_of
from tests.programs import program_of, token_ids
from tests.training.gated import plain_and_fast

IDS = token_ids(2, 24)


def masks_of(decoder: TrainingDecoder, *samples: int) -> torch.Tensor:
    return sample_masks((*samples, sum(decoder.sizes)), torch.device("cpu"))


def expected(name: str, plain: PlainDecoder, masks: torch.Tensor) -> torch.Tensor:
    """The losses written out from whole logits."""
    dense, own = (plain(IDS, given.split(plain.sizes)) for given in (torch.ones_like(masks), masks))
    p, q = (logits[:, :-1].log_softmax(-1).flatten(0, 1) for logits in (dense, own))
    divergence = kl_div(q, p, reduction="batchmean", log_target=True)
    entropy = next_token_loss(own, IDS)
    return {"ce": entropy, "kl": divergence, "mix": (entropy + divergence) / 2}[name]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_each_objective_is_what_its_name_says(name: str):
    plain, fast = plain_and_fast()
    ordinary, decoder = (
        PlainDecoder(plain, OBJECTIVES[name]),
        TrainingDecoder(fast, objective=OBJECTIVES[name]),
    )
    decoder.rows = 10
    masks = masks_of(decoder)
    for one in (ordinary, decoder):
        torch.testing.assert_close(one.loss(IDS, masks), expected(name, ordinary, masks))
        torch.testing.assert_close(one.next_token_loss(IDS, masks), expected("ce", ordinary, masks))


@pytest.mark.parametrize("samples", [(), (2,)])
@pytest.mark.parametrize("name", ["kl", "mix"])
@pytest.mark.parametrize("form", ["pre-norm", "fused-gate-up"])
def test_layers_in_chunks_have_the_gradient_of_the_whole_graph(
    form: str, name: str, samples: tuple[int, ...]
):
    plain, fast = plain_and_fast(form)
    decoder, ordinary = (
        TrainingDecoder(fast, objective=OBJECTIVES[name]),
        PlainDecoder(plain, OBJECTIVES[name]),
    )
    decoder.rows = 10
    masks = masks_of(decoder, *samples).square()
    for found, wanted in ((decoder.loss, ordinary.loss), (decoder.trial_loss, ordinary.trial_loss)):
        found = compare(found, wanted, IDS, masks, torch.float32)
        assert found.loss < 1e-4 and found.gradient < 1e-4, found


def test_the_dense_decoder_does_not_diverge_from_itself_and_every_gate_still_acts():
    _, fast = plain_and_fast()
    decoder = TrainingDecoder(fast, objective=OBJECTIVES["kl"])
    value, gradient = value_and_gradient(decoder.loss, IDS, torch.ones(sum(decoder.sizes)))
    assert abs(value) < 1e-6 and gradient.abs().max() < 1e-5
    value, _ = value_and_gradient(decoder.trial_loss, IDS, torch.ones(sum(decoder.sizes)))
    assert value > 0.01
    check_gates(problem_of(program_of("pre-norm"), objective="kl")[0])


@pytest.mark.parametrize("name", ["kl", "mix"])
def test_compiled_bodies_compute_the_dense_predictions_too(monkeypatch: pytest.MonkeyPatch, name: str):
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    plain, fast = plain_and_fast()
    trial = TrialBatch(IDS, objective=OBJECTIVES[name])
    prepared = prepare(plain, fast, trial, ComputeSettings(compile="on"))
    assert isinstance(prepared.decoder, TrainingDecoder) and prepared.decoder.compiled
    masks = masks_of(prepared.decoder)
    whole = PlainDecoder(plain, OBJECTIVES[name])
    found = compare(prepared.loss, whole.loss, IDS, masks.square(), torch.float32)
    assert found.loss < 1e-4 and found.gradient < 1e-4, found


def test_masks_learned_by_divergence_diverge_less_than_those_by_the_next_token():
    """The text is random: there is nothing in it to predict, and a decoder's behaviour can still be kept."""
    program = program_of("pre-norm")
    text = token_ids(1, 4_000)[0]
    found = {}
    for name in ("ce", "kl"):
        settings = {"steps": 60, "seq_len": 16, "batch_size": 4, "start": "uniform", "lr": 1e-2}
        plan = learn(program, text, 0.4, objective=name, **settings)
        problem, _ = problem_of(program, objective="kl")
        masks = [torch.zeros(site.size) for site in program.sites]
        for mask, kept in zip(masks, plan.for_sites(program.sites), strict=True):
            mask[kept.long()] = 1.0
        with torch.no_grad():
            found[name] = float(problem.loss(token_ids(8, 32), torch.cat(masks)))
    assert found["kl"] < found["ce"], found
