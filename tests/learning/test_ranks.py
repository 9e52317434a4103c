"""Several ranks learn what one rank learns from the whole batch, and one that dies ends the others."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dispfx.distributed.ranks import Ranks
from dispfx.errors import DispfxError
from dispfx.learning.distillation import Keeping, RecoveryStep, recover
from dispfx.learning.state import saved_step
from dispfx.learning.trainer import Learned, Watch, learn
from dispfx.plan.budget import Budget
from dispfx.words.chosen_device import local_device
from tests.learning.several_ranks import TEXT_TOKENS, Scenario, decoder_of, raised, run_scenarios
from tests.learning.students import recovery_task, weights
from tests.learning.tiny_decoder import TinyDecoder, batches, markov_tokens, settings, task_of


def alone(state: Path | None = None, *, resume: bool = False, **changes: Any) -> Learned:
    chosen = settings(**changes)
    decoder, text = decoder_of(TinyDecoder), batches(markov_tokens(TEXT_TOKENS), chosen)
    return learn(task_of(decoder, text, Budget(0.3), chosen), Watch(state, resume))


STEPS: dict[str, Any] = {"steps": 6, "batch_size": 4, "accumulate": 2, "held_out_every": 3}
DYING: dict[str, Any] = {"steps": 8, "batch_size": 4, "save_every": 100}
# Ended behind the fourth step, wherever the other rank waits then.
BAD: dict[str, Any] = {"batch_size": 4, "max_bad_steps": 2, "save_every": 1}
RECOVERY: dict[str, Any] = {"steps": 9, "measure_every": 4}
SPOILED = [
    Scenario("spoiled", "spoiled", {**BAD, "steps": 6}),
    Scenario("spoiled in the last step", "spoiled", {**BAD, "steps": 4}),
    Scenario(
        "spoiled before held-out text",
        "spoiled",
        {**BAD, "steps": 6, "constrained": True, "held_out_every": 4},
    ),
    Scenario("spoiled at the end of both", "spoiled", {**BAD, "steps": 4, "held_out_every": 4}),
]
SCENARIOS = [
    Scenario("one", changes={**STEPS, "samples": 1}),
    Scenario("four", changes={**STEPS, "samples": 4}),
    Scenario("deaf", "deaf", {"steps": 3, "batch_size": 4}),
    *SPOILED,
    Scenario("other settings", changes={**STEPS, "seed": 5}, state_of="one"),
    Scenario("recovery", changes=RECOVERY, recovers=True),
    Scenario("recovery of a state", changes=RECOVERY, state_of="recovery alone", recovers=True),
    Scenario("dying", "dying", DYING),  # last: its rank is gone
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("ranks")

    def stop(step: RecoveryStep) -> None:
        if step.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        recover(recovery_task(**RECOVERY), Keeping(path / "recovery alone" / "state", on_step=stop))
    run_scenarios(path, SCENARIOS)
    return path


@pytest.mark.parametrize("scenario", SCENARIOS[:2], ids=lambda scenario: scenario.name)
def test_two_ranks_learn_what_one_learns_from_the_whole_batch(folder, scenario):
    path = folder / scenario.name
    assert raised(path) == ["", ""]
    logits = torch.load(path / "logits.pt", weights_only=True)
    expected = alone(**scenario.changes).logits
    assert not torch.equal(expected, alone(**{**scenario.changes, "steps": 5}).logits)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["recovery", "recovery of a state"])
def test_two_ranks_recover_what_one_recovers_from_the_whole_batch(folder, tmp_path, name):
    assert raised(folder / name) == ["", ""]
    first, second = (load_file(folder / name / f"rank{rank}.safetensors") for rank in range(2))
    task = recovery_task(**RECOVERY)
    before = weights(task)
    recover(task, Keeping(tmp_path))
    for key, expected in weights(task).items():
        assert torch.equal(first[key], second[key]), "all ranks do the same steps"
        torch.testing.assert_close(first[key], expected, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(before[key], expected, rtol=1e-4, atol=1e-5)


def test_a_rank_whose_decoder_no_mask_changes_says_so(folder):
    leading, following = raised(folder / "deaf")
    assert following.startswith("PassError") and "depend on no gate" in following and "rank 1" in following
    assert leading.startswith("RankLost")


def test_a_rank_that_dies_ends_the_other_and_the_run_can_be_resumed(folder):
    path = folder / "dying"
    leading, following = raised(path)
    assert following == "died" and leading.startswith("RankLost") and "`resume=True`" in leading
    step = saved_step(path / "state")
    assert step is not None and 0 < step < 8
    resumed = alone(path / "state", resume=True, **DYING)
    assert resumed.first_step == step
    torch.testing.assert_close(resumed.logits, alone(**DYING).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("scenario", SPOILED, ids=lambda scenario: scenario.name)
def test_bad_steps_end_all_ranks_with_one_message_and_keep_the_state(folder, scenario):
    path = folder / scenario.name
    leading, following = raised(path)
    assert leading.startswith("DispfxError") and "stopped at step 4" in leading and following == ""
    assert saved_step(path / "state") == 3


def test_a_state_of_other_settings_ends_all_ranks_with_one_message(folder):
    leading, following = raised(folder / "other settings")
    assert leading.startswith("DataError") and "seed was 3 and is 5" in leading and following == ""


def test_every_sequence_and_every_mask_is_on_one_rank():
    batch, masks = torch.arange(8), torch.arange(4)[:, None]
    ranks = [Ranks(rank, 2) for rank in range(2)]
    assert [rank.rows(batch).tolist() for rank in ranks] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [rank.masks(masks).flatten().tolist() for rank in ranks] == [[0, 1], [2, 3]]
    assert [Ranks(rank, 4).masks(masks).tolist() for rank in range(4)] == [[0], [1], [2], [3]]
    assert [Ranks(rank, 8).masks(masks).tolist() for rank in (0, 1, 6, 7)] == [[0], [0], [3], [3]]


@pytest.mark.parametrize(
    ("size", "batch_size", "samples", "hint"),
    [(2, 3, 1, "`batch_size=4`"), (4, 1, 1, "`batch_size=4`"), (4, 12, 3, "`samples=4`")],
)
def test_what_cannot_be_shared_is_refused_with_what_can(size, batch_size, samples, hint):
    with pytest.raises(DispfxError) as caught:
        Ranks(0, size).check(batch_size, samples)
    assert hint in str(caught.value)


def test_a_process_of_several_on_a_host_has_a_card_of_its_own(monkeypatch):
    assert local_device("cuda") == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert [local_device(name) for name in ("cuda", "cuda:1", "cpu", None)] == [
        "cuda:3",
        "cuda:1",
        "cpu",
        None,
    ]
