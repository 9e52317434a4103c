"""A killed run resumes to the same masks bit for bit; a state of another run is refused."""

import hashlib
import json
import math
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from dispfx.errors import DataError, PlanMismatchError
from dispfx.learning.learner import Learner, reading
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.learning.trainer import Learned, Watch, learn
from dispfx.plan.budget import Budget
from dispfx.settings.learning_settings import LearnSettings
from tests.learning.tiny_decoder import batches, markov_tokens, settings, task_of, untrained_decoder
from tests.processes import run_code

TEXT = markov_tokens(2_000)
CHOSEN = settings(steps=6, save_every=3)
THIRTY = Budget(0.3)
MOMENT, STEPS = "optimizer.norm.bias.exp_avg", "optimizer.norm.bias.step"

# Runs in a process of its own; "kill" ends it in the middle of the fifth step's report.
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.learning.test_state import digest, run
def kill(record):
    if record.step == 5:
        os.kill(os.getpid(), signal.SIGKILL)
action, folder = sys.argv[1:]
if action == "kill":
    run(Path(folder), on_step=kill)
print(digest(run(None)))
"""


def run(
    state_dir: Path | None,
    *,
    chosen: LearnSettings = CHOSEN,
    text: Tensor = TEXT,
    budget: Budget = THIRTY,
    decoder: Any = None,
    fingerprint: str = "tiny",
    **options: Any,
) -> Learned:
    decoder = decoder or untrained_decoder()
    task = task_of(decoder, batches(text, chosen), budget, chosen, fingerprint=fingerprint)
    return learn(task, Watch(state_dir, **options))


def digest(found: Learned) -> str:
    summary = hashlib.sha256(found.logits.numpy().tobytes())
    for kept in found.kept:
        summary.update(kept.numpy().tobytes())
    return summary.hexdigest()


def in_a_process(action: str, folder: Path) -> subprocess.CompletedProcess:
    return run_code(SCRIPT, action, str(folder), PYTHONHASHSEED="random")


def stop_at(step: int, error: BaseException):
    def on_step(record) -> None:
        if record.step == step:
            raise error

    return on_step


def test_the_same_seed_gives_the_same_masks_in_two_processes(tmp_path):
    other = in_a_process("run", tmp_path)
    assert other.returncode == 0, other.stderr
    assert other.stdout.strip() == digest(run(None))


def test_a_killed_run_resumes_to_the_same_masks_bit_for_bit(tmp_path):
    killed = in_a_process("kill", tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert saved_step(tmp_path) == 3
    resumed = run(tmp_path, resume=True)
    assert resumed.first_step == 3 and [record.step for record in resumed.records] == [4, 5, 6]
    assert digest(resumed) == digest(run(None))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    "changes",
    [
        {"estimator": "gumbel", "hypernetwork": "linear"},
        {"hypernetwork": "none", "schedule": "cosine"},
        {"constrained": True, "accumulate": 2},
        {"start": "sensitivity", "samples": 2},
        {"start": "sensitivity", "constrained": True},
    ],
)
def test_every_variant_resumes_bit_for_bit(tmp_path, changes):
    chosen = replace(CHOSEN, **changes)
    straight = run(None, chosen=chosen)
    with pytest.raises(RuntimeError, match="stop"):
        run(tmp_path, chosen=chosen, on_step=stop_at(4, RuntimeError("stop")))
    resumed = run(tmp_path, chosen=chosen, resume=True)
    assert resumed.first_step == 3
    assert digest(resumed) == digest(straight)


def test_an_interrupted_run_saves_its_last_step_and_resumes_bit_for_bit(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, on_step=stop_at(5, KeyboardInterrupt()))
    assert saved_step(tmp_path) == 5
    assert digest(run(tmp_path, resume=True)) == digest(run(None))


def test_an_interrupt_within_a_forward_pass_leaves_a_sound_state(tmp_path):
    decoder = untrained_decoder()
    calls = []

    class Interrupted(torch.nn.Module):
        sites, shapes = decoder.sites, decoder.shapes

        def forward(self, ids_BT, masks):
            calls.append(1)
            if len(calls) == 6:  # one call checks the gates, so this is the fifth step
                raise KeyboardInterrupt
            return decoder(ids_BT, masks)

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, decoder=Interrupted())
    assert saved_step(tmp_path) == 4
    assert digest(run(tmp_path, resume=True)) == digest(run(None))


@pytest.mark.parametrize(
    "place", ["before the optimizer", "behind the optimizer", "before the numbers are known"]
)
def test_an_interrupt_at_the_end_of_a_step_leaves_it_whole(tmp_path, place, monkeypatch):
    """Whatever the device was told to do is done, so the step counts: the fourth of six."""
    steps, optimize, read = [], Learner._optimize, reading

    def interrupt_at(here: str) -> None:
        if len(steps) == 4 and here == place:
            os.kill(os.getpid(), signal.SIGINT)

    def optimizing(learner, *arguments):
        steps.append(1)
        interrupt_at("before the optimizer")
        optimize(learner, *arguments)
        interrupt_at("behind the optimizer")

    def waiting(numbers: Tensor):
        wait = read(numbers)
        return lambda: (interrupt_at("before the numbers are known"), wait())[1]

    monkeypatch.setattr(Learner, "_optimize", optimizing)
    monkeypatch.setattr("dispfx.learning.learner.reading", waiting)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path)
    finally:
        signal.signal(signal.SIGINT, before)
    assert saved_step(tmp_path) == 4
    assert digest(run(tmp_path, resume=True)) == digest(run(None))


def test_resuming_without_a_state_starts_at_step_zero(tmp_path):
    assert saved_step(tmp_path) is None
    found = run(tmp_path / "new", resume=True)
    assert found.first_step == 0 and digest(found) == digest(run(None))


def test_resuming_a_finished_run_only_hardens(tmp_path):
    first = run(tmp_path)
    again = run(tmp_path, resume=True)
    assert again.records == () and again.first_step == 6
    assert digest(again) == digest(first)


def test_a_run_with_a_constant_rate_can_be_made_longer(tmp_path):
    run(tmp_path, chosen=replace(CHOSEN, steps=3))
    assert digest(run(tmp_path, resume=True)) == digest(run(None))


@pytest.mark.parametrize("falls", [{"schedule": "cosine"}, {"sharpen": 2.0}], ids=str)
def test_a_run_whose_steps_depend_on_their_number_cannot_be_made_longer(tmp_path, falls):
    run(tmp_path, chosen=replace(CHOSEN, steps=3, **falls))
    with pytest.raises(DataError, match=r"steps was 3 and is 6"):
        run(tmp_path, resume=True, chosen=replace(CHOSEN, **falls))


def test_without_resume_a_state_is_not_taken_up(tmp_path):
    run(tmp_path)
    assert run(tmp_path).first_step == 0


def test_the_folder_holds_whole_files_only_and_no_pickle(tmp_path):
    run(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir() if path.is_file())
    assert files == [STATE_FILE, "metrics.jsonl"]
    assert (tmp_path / STATE_FILE).read_bytes()[8:9] == b"{"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"chosen": replace(CHOSEN, lr=3e-3, estimator="gumbel")},
            r"estimator was 'reinmax' and is 'gumbel'",
        ),
        ({"chosen": replace(CHOSEN, lr=3e-3)}, r"lr was 0\.001 and is 0\.003"),
        ({"chosen": replace(CHOSEN, seed=4)}, r"seed was 3 and is 4"),
        ({"budget": Budget(0.4)}, r"ratio was 0\.3 and is 0\.4"),
        ({"text": markov_tokens(2_000, seed=1)}, r"text was '"),
        ({"chosen": replace(CHOSEN, steps=5)}, r"is at step 6, but only 5 steps were requested"),
    ],
)
def test_a_state_of_other_settings_is_refused_and_says_what_differs(tmp_path, changes, message):
    run(tmp_path)
    with pytest.raises(DataError, match=message):
        run(tmp_path, resume=True, **changes)


def test_a_state_of_another_decoder_is_refused(tmp_path):
    run(tmp_path)
    with pytest.raises(PlanMismatchError, match="fingerprint"):
        run(tmp_path, resume=True, fingerprint="other")
    decoder = untrained_decoder()
    decoder.sites = (replace(decoder.sites[0], name="other"), *decoder.sites[1:])
    with pytest.raises(PlanMismatchError, match="sites"):
        run(tmp_path, resume=True, decoder=decoder)


def test_a_state_of_another_dtype_is_refused_and_an_older_one_that_does_not_say_its_own_is_read(tmp_path):
    task = task_of(untrained_decoder(), batches(TEXT, CHOSEN), THIRTY, CHOSEN, fingerprint="tiny")
    learn(replace(task, dtype=torch.float32), Watch(tmp_path))
    with pytest.raises(DataError, match="dtype was 'float32' and is 'bfloat16'"):
        learn(replace(task, dtype=torch.bfloat16), Watch(tmp_path, resume=True))
    assert learn(replace(task, dtype=torch.float32), Watch(tmp_path, resume=True)).first_step == 6
    with safe_open(tmp_path / STATE_FILE, framework="pt") as file:
        header = json.loads(file.metadata()["dispfx"])
    del header["identity"]["dtype"]
    tensors = load_file(tmp_path / STATE_FILE)
    save_file(tensors, tmp_path / STATE_FILE, metadata={"dispfx": json.dumps(header)})
    assert learn(replace(task, dtype=torch.bfloat16), Watch(tmp_path, resume=True)).first_step == 6


def test_how_often_a_run_saves_is_no_difference(tmp_path):
    run(tmp_path, chosen=replace(CHOSEN, steps=3))
    assert run(tmp_path, resume=True, chosen=replace(CHOSEN, save_every=1, log_every=2)).first_step == 3


@pytest.mark.parametrize("keep_bytes", [0, 4, 100, -100])
def test_a_damaged_state_is_a_data_error(tmp_path, keep_bytes):
    run(tmp_path)
    path = tmp_path / STATE_FILE
    path.write_bytes(path.read_bytes()[:keep_bytes])
    with pytest.raises(DataError, match="cannot be read"):
        run(tmp_path, resume=True)


def change_state(folder: Path, change: Callable[[dict[str, Tensor], dict[str, Any]], None]) -> None:
    """Write a state again after `change` of its tensors and its position."""
    path = folder / STATE_FILE
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["dispfx"])
    tensors = load_file(path)
    change(tensors, header["position"])
    save_file(tensors, path, metadata={"dispfx": json.dumps(header)})


def without_optimizer(tensors: dict[str, Tensor], position: dict[str, Any]) -> None:
    for name in [name for name in tensors if name.startswith("optimizer.")]:
        del tensors[name]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda tensors, _: tensors.update({MOMENT: tensors[MOMENT][:5].clone()}),
            r"exp_avg is float32 \[5\], but this run has float32 \[128\]",
        ),
        (lambda tensors, _: tensors.pop(MOMENT), r"exp_avg is not there, but"),
        (lambda tensors, _: tensors.update({MOMENT: tensors[MOMENT].double()}), r"exp_avg is float64"),
        (lambda tensors, _: tensors.update(generator=tensors["generator"].int()), r"generator is int32"),
        (lambda tensors, _: tensors.update(more=torch.ones(2)), r"more is float32 \[2\], but .* no such"),
        (without_optimizer, r"exp_avg is not there"),
        (lambda tensors, _: tensors[MOMENT].fill_(math.nan), r"exp_avg has values that are not finite"),
        (
            lambda tensors, _: tensors[f"{MOMENT}_sq"].fill_(-1.0),
            r"the mean of squared gradients of .* is negative",
        ),
        (lambda tensors, _: tensors[STEPS].fill_(9), r"9 steps of .*, but the run 3"),
        (lambda _, position: position.update(bad_steps=7), "more bad steps than steps"),
    ],
    ids=[
        "short",
        "missing",
        "dtype",
        "generator",
        "more",
        "no-optimizer",
        "nan",
        "negative",
        "steps",
        "bad-steps",
    ],
)
def test_a_state_whose_tensors_are_not_those_of_the_run_is_refused(tmp_path, change, message):
    run(tmp_path, chosen=replace(CHOSEN, steps=3))
    change_state(tmp_path, change)
    with pytest.raises(DataError, match=message):
        run(tmp_path, resume=True)
