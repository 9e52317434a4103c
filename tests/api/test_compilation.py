"""compile and apply: a whole, verified folder or none, and what is kept beside it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dispfx
from dispfx.api import apply, evaluate, load
from dispfx.deploy.digests import digests
from dispfx.errors import (
    BudgetError,
    DataError,
    DispfxError,
    OutputError,
    PlanMismatchError,
    SourceError,
    VerificationError,
)
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.settings import RunSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.verification.equivalence import Verification
from tests.api.conftest import MODEL, RATIO, SETTINGS, Compiled, Watcher, random_tokens
from tests.api.plain import another_decoder, build_decoder
from tests.learning_options import options_of
from tests.plain_decoders import FORMS, VOCABULARY, build
from tests.programs import token_ids


def compile_(out: Path, tokens: Path, **changes):
    words = {"data": tokens, **options_of(SETTINGS), "align": 1} | changes
    return dispfx.compile(words.pop("model", MODEL), words.pop("ratio", RATIO), out=out, **words)


def learn_(out: Path, tokens: Path, **changes):
    words = {"data": tokens, **options_of(SETTINGS), "align": 1} | changes
    return dispfx.api.learn_plan(MODEL, RATIO, out=out, **words)


def test_a_folder_is_whole_and_nothing_is_left_beside_it(compiled: Compiled):
    assert {path.name for path in compiled.path.iterdir()} == {
        "program.pt2", "plan.safetensors", "report.json", "metrics.jsonl", "README.md",
        "report.html", "pictures",
    }  # fmt: skip
    assert [path.name for path in compiled.path.parent.iterdir()] == ["out"], "DIR.state is removed"


def test_features_that_are_scored_once_give_a_whole_folder_too(tmp_path: Path, tokens: Path):
    report = compile_(tmp_path / "out", tokens, **options_of(replace(SETTINGS, method="magnitude")))
    assert abs(report.ratio.achieved - RATIO) <= 0.001
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_report_has_the_fields_of_the_contract(compiled: Compiled):
    report = json.loads((compiled.path / "report.json").read_text())
    assert set(report) == {
        "ratio", "parameters", "bytes", "perplexity", "behaviour", "verify", "sites", "refused", "seed",
        "versions", "device", "seconds", "command", "files", "settings", "lengths", "ungated",
    }  # fmt: skip
    assert set(report["ratio"]) == {"requested", "achieved", "of"}
    assert set(report["parameters"]) == {"dense", "pruned", "gated"}
    assert set(report["bytes"]) == {"dense", "pruned"}
    assert set(report["perplexity"]) == {"dense", "pruned", "protocol"}
    assert set(report["perplexity"]["protocol"]) == {
        "text",
        "context",
        "windows",
        "tokens",
        "held_out_share",
        "bos",
        "unknown_share",
    }
    for line in report["verify"]:
        assert set(line) == {"name", "shape", "max_abs_error", "max_rel_error", "tolerance"}
    assert all(set(site) == {"name", "kind", "size", "kept"} for site in report["sites"])
    assert (report["seed"], report["command"]) == (0, "the command")
    assert {"python", "torch", "dispfx"} <= set(report["versions"])
    assert load_report(compiled.path / "report.json") == compiled.report


def test_the_report_has_every_setting_as_the_run_had_it(tmp_path: Path, tokens: Path):
    """Of the recipe, the demo, the command and the decoder, whoever had the last word."""
    chosen = dispfx.api.learn_settings(MODEL, steps=2, batch_size=3, temperature=0.9)
    model = build(
        FORMS["pre-norm"]
    )  # its table of positions has 64 places, and the recipe has sequences of 2048
    told = dispfx.compile(model, RATIO, tokens, tmp_path / "out", align=1, **options_of(chosen)).settings
    assert told is not None
    budget, learning = told["budget"], told["learning"]
    assert (budget["align"], budget["select"], told["text"]["data_bytes"]) == (1, "after-norm", 2**27)
    assert learning == asdict(replace(chosen, seq_len=64)) | {"adaptable": list(chosen.adaptable)}
    assert (learning["samples"], learning["lr"], learning["weight_decay"]) == (3, 3e-3, 1.0)
    assert load_report(tmp_path / "out" / "report.json").settings == told


def test_a_plan_that_is_only_applied_has_no_settings(compiled: Compiled, tmp_path: Path):
    report = apply(MODEL, compiled.path / "plan.safetensors", out=tmp_path / "again")
    assert report.settings is None and '"settings"' not in (tmp_path / "again" / "report.json").read_text()


def test_the_numbers_of_the_report_are_those_of_the_files(compiled: Compiled):
    report, plan = compiled.report, Plan.load(compiled.path / "plan.safetensors")
    model = build_decoder()
    dense = sum(parameter.numel() for parameter in model.parameters())
    removed = dense - report.parameters.pruned
    assert report.parameters.dense == dense and report.bytes.dense == 4 * dense
    assert abs(report.ratio.achieved - RATIO) <= 1e-3 and report.ratio.achieved == plan.achieved
    assert removed == round(report.ratio.achieved * report.parameters.gated)
    assert {site.name: site.kept for site in report.sites} == {k: len(v) for k, v in plan.kept.items()}
    assert report.bytes.pruned == (compiled.path / "program.pt2").stat().st_size


def test_every_comparison_is_made_and_holds(compiled: Compiled):
    names = list(dict.fromkeys(line.name for line in compiled.report.verify))
    assert names == [
        "captured = model", "identity", "lowered = gated", "lowered = zeroed", "removed is unread",
        "gather-add = lowered", "reloaded = lowered",
    ]  # fmt: skip
    for line in compiled.report.verify:
        assert line.holds
    for name in names:
        shapes = [line.shape for line in compiled.report.verify if line.name == name]
        # Of forms that are not graphs of the compiler also the longest sequence that the decoder reads.
        longest = [(1, 64)] if name in ("captured = model", "lowered = zeroed", "reloaded = lowered") else []
        assert len(shapes) == 2 + len(longest) and shapes[2:] == longest, name
    exact = {line.name for line in compiled.report.verify if line.tolerance == 0.0}
    assert exact == {"identity", "removed is unread", "reloaded = lowered"}


def test_stages_steps_and_lines_are_told_in_order(compiled: Compiled):
    watcher = compiled.watcher
    assert watcher.stages == [
        "open", "capture", "check lengths", "rehearse", "learn", "lower", "verify", "write", "reload",
        "measure", "digest",
    ]  # fmt: skip
    assert list(compiled.report.seconds) == watcher.stages
    assert watcher.steps[-1] in (SETTINGS.steps, SETTINGS.steps - 1) and len(watcher.steps) == SETTINGS.steps
    shown = [line for line in compiled.report.verify if line.name != "captured = model"]
    assert watcher.verified_lines == shown
    assert watcher.reports == [compiled.report] and len(watcher.programs) == 1


class Clock(Watcher):
    """Knows which stage runs."""

    running: str | None = None

    def stage(self, name: str, seconds: float | None = None) -> None:
        self.running = name if seconds is None else None


def test_the_time_of_the_digests_is_told_as_their_own(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    clock, seen = Clock(), []

    def watched(folder: Path) -> dict[str, str]:
        seen.append(clock.running)
        return digests(folder)

    monkeypatch.setattr("dispfx.run.writing.digests", watched)
    report = apply(MODEL, compiled.path / "plan.safetensors", out=tmp_path / "again", observer=clock)
    assert seen == ["digest"] and report.seconds["digest"] > 0
    assert report.files == digests(tmp_path / "again")


def test_the_loaded_folder_is_the_lowered_decoder(compiled: Compiled):
    program = dispfx.capture(build_decoder())
    lowered = dispfx.lower(program, Plan.load(compiled.path / "plan.safetensors"))
    ids = token_ids(3, 11)
    assert torch.equal(load(compiled.path)(ids), lowered(ids))


def test_held_out_text_is_the_last_tenth_of_the_data(compiled: Compiled):
    protocol = compiled.report.perplexity.protocol  # type: ignore[union-attr]
    assert protocol.held_out_share == 0.1 and protocol.text == "tokens.safetensors"
    assert (protocol.context, protocol.windows, protocol.tokens) == (16, 4, 60 - 4)


def test_resume_with_a_complete_folder_does_nothing_and_says_so(compiled: Compiled, tokens: Path):
    watcher = Watcher()
    before = {path: path.stat().st_mtime_ns for path in compiled.path.iterdir()}
    report = compile_(compiled.path, tokens, resume=True, observer=watcher)
    assert report == compiled.report and "learn" not in watcher.stages
    assert watcher.notes[-1] == f"{compiled.path} is complete; there is nothing to do"
    assert {path: path.stat().st_mtime_ns for path in compiled.path.iterdir()} == before


def test_a_complete_folder_of_another_run_is_not_taken_for_this_one(
    compiled: Compiled, tokens: Path, tmp_path: Path
):
    for changed, said in (
        ({"ratio": 0.45}, f"ratio was {RATIO} and is 0.45 now"),
        ({"steps": 77}, r"steps was \d+ and is 77 now"),
        ({"data": tmp_path / "other.safetensors"}, "data was "),
        ({"model": "demo"}, "model was "),
    ):
        with pytest.raises(OutputError, match=f"complete and was made with other settings: {said}"):
            compile_(compiled.path, tokens, resume=True, **changed)


def test_resume_without_a_state_starts_at_step_0_and_says_so(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    compile_(tmp_path / "out", tokens, resume=True, observer=watcher)
    assert watcher.notes[-1:] == [f"no state in {tmp_path / 'out.state'}: starting at step 0"]
    assert (tmp_path / "out").is_dir()


def interrupt(out: Path, tokens: Path, step: int) -> None:
    """Compile until a step of learning is done."""

    class Impatient(Watcher):
        def learning(self, record) -> None:
            super().learning(record)
            if len(self.steps) == step:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compile_(out, tokens, observer=Impatient())


def test_an_interrupted_run_resumes_to_the_same_plan(compiled: Compiled, tmp_path: Path, tokens: Path):
    interrupt(tmp_path / "out", tokens, 2)
    assert not (tmp_path / "out").exists() and (tmp_path / "out.state").is_dir()
    with pytest.raises(OutputError, match="an unfinished run left its state") as error:
        compile_(tmp_path / "out", tokens)
    assert "`resume`" in str(error.value)
    watcher = Watcher()
    compile_(tmp_path / "out", tokens, resume=True, observer=watcher)
    assert watcher.notes[-1:] == ["going on at step 2"] and len(watcher.steps) == 1
    first, second = (Plan.load(folder / "plan.safetensors") for folder in (compiled.path, tmp_path / "out"))
    assert first == second
    assert not (tmp_path / "out.state").exists()


@pytest.mark.parametrize("resume", [False, True])
@pytest.mark.parametrize("begin", [compile_, learn_])
def test_a_second_run_with_the_same_output_is_refused_at_its_start_and_the_first_ends(
    compiled: Compiled, tmp_path: Path, tokens: Path, resume: bool, begin: Callable[..., Any]
):
    out = tmp_path / "out"

    class Twice(Watcher):
        """Begins the run once more before and after the first step."""

        refused: tuple[str, ...] = ()

        def stage(self, name: str, seconds: float | None = None) -> None:
            super().stage(name, seconds)
            self.begin_again()

        def learning(self, record) -> None:
            super().learning(record)
            self.begin_again()

        def begin_again(self) -> None:
            if len(self.refused) > 8:
                return
            second = Watcher()
            with pytest.raises(OutputError, match="another run is at work on this output") as error:
                begin(out, tokens, resume=resume, observer=second)
            assert second.stages == [] and error.value.where == str(tmp_path / "out.state")
            self.refused += (error.value.problem,)

    watcher = Twice()
    begin(out, tokens, observer=watcher)

    assert len(watcher.refused) > 2
    plan = Plan.load(out / "plan.safetensors" if out.is_dir() else out)
    assert plan == Plan.load(compiled.path / "plan.safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_whose_output_appears_meanwhile_leaves_it_alone_and_says_where_its_plan_is(
    compiled: Compiled, tmp_path: Path, tokens: Path
):
    out = tmp_path / "out"

    class Disturbed(Watcher):
        def learning(self, record) -> None:
            super().learning(record)
            out.write_text("of the user")

    with pytest.raises(OutputError, match="must not exist yet") as error:
        compile_(out, tokens, observer=Disturbed())
    kept = tmp_path / "out.state" / "plan.safetensors"
    assert str(kept) in str(error.value.hint) and out.read_text() == "of the user"
    assert Plan.load(kept) == Plan.load(compiled.path / "plan.safetensors")


def test_the_hint_for_a_module_from_python_names_no_command(
    tmp_path: Path, tokens: Path, nothing_agrees: None
):
    with pytest.raises(VerificationError) as error:
        compile_(tmp_path / "out", tokens, model=build_decoder())
    kept = tmp_path / "out.state" / "plan.safetensors"
    assert error.value.hint == (
        f"the plan is kept: dispfx.apply(model, {str(kept)!r}, out={str(tmp_path / 'out')!r})"
    )


def test_a_state_without_files_is_no_unfinished_run(tmp_path: Path, tokens: Path):
    (tmp_path / "out.state").mkdir()
    compile_(tmp_path / "out", tokens)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_scoring_does_not_take_the_place_of_a_state_of_learning(tmp_path: Path, tokens: Path):
    interrupt(tmp_path / "out", tokens, 1)
    scored = options_of(replace(SETTINGS, method="magnitude"))
    before = digests(tmp_path / "out.state", "*.safetensors")
    with pytest.raises(DataError, match="is that of learning, at step 1, and `method='magnitude'` scores"):
        compile_(tmp_path / "out", tokens, resume=True, **scored)
    assert digests(tmp_path / "out.state", "*.safetensors") == before != {}
    watcher = Watcher()
    compile_(tmp_path / "out", tokens, resume=True, observer=watcher)
    assert watcher.notes[-1:] == ["going on at step 1"]


def test_a_resumed_run_has_the_dtype_that_it_began_with(tmp_path: Path, tokens: Path):
    interrupt(tmp_path / "out", tokens, 1)
    with pytest.raises(DataError, match="dtype was 'float32' and is 'bfloat16'"):
        compile_(tmp_path / "out", tokens, resume=True, dtype="bfloat16")


@pytest.fixture
def nothing_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the comparison of the lowered with the gated decoder fail."""

    def apart(*words, **rest):
        return [Verification("lowered = gated", (2, 9), 1.0, 0.5, 1e-5)]

    monkeypatch.setattr("dispfx.run.writing.lowered_lines", apart)


def test_a_failed_verification_keeps_the_plan_and_names_the_command(
    compiled: Compiled, tmp_path: Path, tokens: Path, nothing_agrees: None, monkeypatch: pytest.MonkeyPatch
):
    out = tmp_path / "out"
    with pytest.raises(VerificationError, match=r"lowered = gated: relative error 0\.5") as error:
        compile_(out, tokens)
    assert error.value.exit_code == 1
    kept = tmp_path / "out.state" / "plan.safetensors"
    assert [path.name for path in tmp_path.iterdir()] == ["out.state"], (
        "no output folder, nothing half-written"
    )
    assert error.value.hint == f"the plan is kept: dispfx apply {MODEL} {kept} --out {out}"
    assert Plan.load(kept) == Plan.load(compiled.path / "plan.safetensors")


def test_the_named_command_finishes_the_folder(compiled: Compiled, tmp_path: Path, tokens: Path):
    report = apply(MODEL, compiled.path / "plan.safetensors", out=tmp_path / "out", data=tokens)
    assert report.parameters == compiled.report.parameters
    assert report.perplexity is not None and report.perplexity.protocol.tokens == 59
    assert report.verify == compiled.report.verify and "learn" not in report.seconds
    ids = token_ids(2, 9)
    assert torch.equal(load(tmp_path / "out")(ids), load(compiled.path)(ids))
    assert not (tmp_path / "out" / "metrics.jsonl").exists() and not (tmp_path / "out.state").exists()


def test_apply_needs_no_text_and_then_measures_nothing(compiled: Compiled, tmp_path: Path):
    report = apply(build_decoder(), Plan.load(compiled.path / "plan.safetensors"), out=tmp_path / "out")
    assert report.perplexity is None and (tmp_path / "out" / "report.json").is_file()


def test_apply_refuses_the_plan_of_another_decoder_and_writes_nothing(compiled: Compiled, tmp_path: Path):
    with pytest.raises(PlanMismatchError, match="made for a decoder with fingerprint"):
        apply(another_decoder(), compiled.path / "plan.safetensors", out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def tuned_a_little(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for tensor in model.parameters():
        tensor.data *= 1 + 1e-4 * torch.randn(tensor.shape, generator=generator)


def layers_exchanged(model: nn.Module) -> None:
    first, second = (list(layer.parameters()) for layer in list(model.layers)[:2])  # type: ignore[arg-type]
    for one, other in zip(first, second, strict=True):
        one.data, other.data = other.data, one.data


@pytest.mark.parametrize("change", [tuned_a_little, layers_exchanged])
def test_another_revision_and_another_order_of_layers_are_refused(tmp_path: Path, change):
    model = build(FORMS["pre-norm"], layers=2)
    plan = Plan.random(dispfx.capture(model), RATIO, seed=0)
    change(model)
    with pytest.raises(PlanMismatchError, match="made for a decoder with fingerprint"):
        apply(model, plan, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_plan_of_the_decoder_in_bfloat16_fits_it_in_float32(tmp_path: Path):
    plan = Plan.random(dispfx.capture(build_decoder().to(torch.bfloat16)), 0.3, seed=0)
    report = apply(build_decoder(), plan, out=tmp_path / "out")
    assert report.ratio.achieved == plan.achieved


def test_a_gate_that_changes_nothing_is_never_written(tmp_path: Path, tokens: Path, monkeypatch):
    """Identity is asked for bit by bit: one wrong bit ends the run."""

    def one_bit(program):
        return [Verification("identity", (2, 9), 1e-9, 1e-9, 0.0)]

    monkeypatch.setattr("dispfx.run.writing.identity_lines", one_bit)
    with pytest.raises(VerificationError, match="identity"):
        compile_(tmp_path / "out", tokens)
    assert not (tmp_path / "out").exists()


REFUSED = {
    "a ratio of one": ({"ratio": 1.0}, BudgetError, "between 0 and 1"),
    "a ratio of zero": ({"ratio": 0.0}, BudgetError, "between 0 and 1"),
    "a ratio out of reach": ({"ratio": 0.999}, BudgetError, "the sites can remove at most"),
    "no text": ({"data": None}, DataError, "text to learn from is needed"),
    "a text shorter than a sequence": ({"data": random_tokens(12)}, DataError, "16"),
    "sequences longer than it reads": (
        {"seq_len": 65},
        DataError,
        "the decoder's table of positions ends after 64",
    ),
    "ids of another vocabulary": ({"data": torch.full((600,), 61)}, DataError, "must be in [0, 61)"),
    "one token to measure on": (
        {"data": random_tokens(18)},
        DataError,
        "the last tenth of a text is measured on, so 20 tokens or more are needed, and it has 18 tokens",
    ),
    "no such function": ({"model": "tests.api.plain:nothing"}, SourceError, "has no nothing"),
    "every branch skipped": ({"skip": ["*"]}, DispfxError, "`skip` leaves out"),
    "an unknown export": (
        {"export": "tensorrt"},
        DispfxError,
        "`export` must be none or onnx or pt2 or dense",
    ),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_used_is_refused_without_a_folder(name: str, tmp_path: Path, tokens: Path):
    changes, kind, words = REFUSED[name]
    with pytest.raises(kind) as error:
        compile_(tmp_path / "out", tokens, **changes)
    assert words in str(error.value) and error.value.exit_code == 2
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.state").exists(), "nothing was learned, and the next run is not refused"


@pytest.mark.parametrize("settings", [SETTINGS, dispfx.api.learn_settings(MODEL)])
def test_text_that_is_missing_is_said_before_a_decoder_is_opened(
    tmp_path: Path, settings: LearnSettings, monkeypatch: pytest.MonkeyPatch
):
    """Also where nobody chose the length of a sequence, which the graph of a module without a config says."""
    monkeypatch.setattr("dispfx.run.readiness.open_model", lambda settings: pytest.fail("it was opened"))
    runs: tuple[Any, ...] = (dispfx.api.run_compile, dispfx.api.run_learn, dispfx.api.preview)
    for model in (MODEL, build_decoder()):
        watcher, common = Watcher(), {"model": model, "ratio": RATIO, "out": tmp_path / "out"}
        for run in runs:
            with pytest.raises(DataError, match="text to learn from is needed"):
                run(RunSettings.of(**options_of(settings), **common), watcher)
        assert watcher.stages == [] and list(tmp_path.iterdir()) == []


def test_a_text_of_one_token_is_refused_before_the_capture(tmp_path: Path):
    watcher = Watcher()
    for tokens in (random_tokens(1), random_tokens(0)):
        with pytest.raises(DataError, match=r"to learn from has \d tokens?, and 2 or more are needed"):
            dispfx.compile(MODEL, RATIO, out=tmp_path / "out", data=tokens, eval_data=None, observer=watcher)
    assert watcher.programs == [] and list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused_before_anything(tmp_path: Path, tokens: Path):
    (tmp_path / "mine").write_text("keep")
    watcher = Watcher()
    with pytest.raises(OutputError, match="must not exist yet"):
        compile_(tmp_path, tokens, observer=watcher)
    assert not watcher.stages and (tmp_path / "mine").read_text() == "keep"


def test_text_to_measure_on_is_not_taken_from_the_data(tmp_path: Path, tokens: Path):
    report = compile_(tmp_path / "out", tokens, data=random_tokens(500, seed=1), eval_data=tokens)
    assert report.perplexity is not None
    protocol = report.perplexity.protocol
    assert protocol.held_out_share is None and protocol.text == "tokens.safetensors"
    # 600 tokens in windows of 16, the length that was learned at; the last window holds 8.
    assert (protocol.context, protocol.windows, protocol.tokens) == (16, 38, 600 - 38)


def test_a_decoder_is_measured_in_windows_that_it_can_read(compiled: Compiled, tmp_path: Path, tokens: Path):
    """The plain decoder has 64 positions, and no config that says so."""
    report = apply(MODEL, compiled.path / "plan.safetensors", out=tmp_path / "out", data=random_tokens(2000))
    assert report.perplexity is not None and report.perplexity.protocol.context == 64
    with pytest.raises(DataError, match="runs on windows of 2048 tokens") as error:
        evaluate(MODEL, eval_data=tokens)
    assert error.value.exit_code == 2


def test_alignment_and_skipped_branches_reach_the_plan(tmp_path: Path, tokens: Path):
    report = compile_(tmp_path / "out", tokens, align=8, skip=["*.attention"], ratio=0.4)
    assert {site.name.split(".")[2] for site in report.sites} == {"mlp"}
    assert all(site.kept % 8 == 0 for site in report.sites)
    ids = token_ids(2, 9)
    assert load(tmp_path / "out")(ids).shape == (2, 9, VOCABULARY)


def test_passes_are_printed_where_asked(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    with dispfx.api.printing(["canonicalize", "lower-gates", "find-sites"], watcher):
        compile_(tmp_path / "out", tokens, observer=watcher)
    assert watcher.printed_names[:3] == ["canonicalize", "find-sites", "lower-gates"]


_PLAN_SCRIPT = """
import sys, torch
torch.set_num_threads(1)
from dataclasses import asdict
import dispfx
from tests.api.conftest import SETTINGS, random_tokens
from tests.api.plain import build_decoder
plan = dispfx.learn(dispfx.capture(build_decoder()), random_tokens(), 0.3, settings=SETTINGS, seed=11)
plan.save(sys.argv[1])
"""


@pytest.mark.slow
def test_the_same_seed_gives_the_same_plan_in_two_processes(tmp_path: Path):
    root = Path(__file__).parents[2]
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": str(root)}
    words = [sys.executable, "-c", _PLAN_SCRIPT, str(tmp_path / "there")]
    subprocess.run(words, check=True, env=environment, cwd=root)
    program = dispfx.capture(build_decoder())
    dispfx.learn(program, random_tokens(), RATIO, settings=SETTINGS, seed=11).save(tmp_path / "here")
    assert (tmp_path / "here").read_bytes() == (tmp_path / "there").read_bytes()
    other = dispfx.learn(program, random_tokens(), RATIO, settings=SETTINGS)
    assert other.selections != Plan.load(tmp_path / "here").selections
