"""inspect, learn, verify, eval, export and generate on the demo and on a plain module."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dispfx.api import agree, apply, evaluate, export, generate, inspect, learn_plan, load, verify
from dispfx.errors import DataError, DispfxError, OutputError, SourceError, VerificationError
from dispfx.plan.plan import Plan
from dispfx.report import Report
from dispfx.run.timed_stages import printing
from dispfx.verification.equivalence import Verification, require
from tests.api.conftest import MODEL, RATIO, SETTINGS, Compiled, Watcher, random_tokens
from tests.api.plain import build_decoder
from tests.ended_process import left_behind
from tests.learning_options import options_of
from tests.programs import token_ids


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Report]]:
    """The demo with a random plan, written as a checkpoint and as a program."""
    folder = tmp_path_factory.mktemp("demo")
    program = inspect("demo")
    plan = Plan.random(program, 0.2, 0, align=8)
    text = folder / "text.txt"
    text.write_text("the cats see the dog . " * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dispfx.run.folder_report.PROBE_SAMPLES", 1)
        report = apply("demo", plan, out=folder / "out", eval_data=text, eval_windows=1, export="pt2")
    yield folder / "out", report


def test_inspect_says_what_can_be_pruned_in_any_model():
    program = inspect(MODEL)
    assert [site.symbol for site in program.sites] == ["S1", "S2", "S3", "S4", "S5"]
    watcher = Watcher()
    with printing(["find-sites"], watcher):
        inspect(build_decoder(), skip=["*.mlp"])
    assert watcher.printed_names == ["find-sites"]


def test_learn_plan_writes_the_plan_alone(tmp_path: Path, tokens: Path, compiled: Compiled):
    path, watcher = tmp_path / "plan.safetensors", Watcher()
    plan = learn_plan(MODEL, RATIO, out=path, data=tokens, **options_of(SETTINGS), align=1, observer=watcher)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.safetensors"]
    assert plan == Plan.load(path) == Plan.load(compiled.path / "plan.safetensors")
    assert watcher.stages == ["open", "capture", "check lengths", "rehearse", "learn"]
    with pytest.raises(OutputError, match="must not exist yet"):
        learn_plan(MODEL, RATIO, out=path, data=tokens, **options_of(SETTINGS))
    # As a run leaves it that is killed between its last two steps.
    (tmp_path / f"{path.name}.state").mkdir()
    left_behind(path).write_text("left")
    given = {**options_of(SETTINGS), "align": 1, "resume": True, "observer": watcher}
    again = learn_plan(MODEL, RATIO, out=path, data=tokens, **given)
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.safetensors"]
    assert again == plan and watcher.notes[-1] == f"{path} is complete; there is nothing to do"


def test_a_ratio_below_one_step_of_the_widths_removes_nothing_and_says_so(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    given = {"out": tmp_path / "plan.safetensors", "method": "magnitude", "seq_len": 16, "observer": watcher}
    plan = learn_plan(MODEL, 0.0001, tokens, **given)
    assert plan.achieved == 0.0
    assert [note for note in watcher.notes if "nothing is removed: 0.0001 of the counted" in note]


def test_a_plan_does_not_take_the_place_of_a_file_that_appeared_while_it_was_learned(
    tmp_path: Path, tokens: Path, compiled: Compiled
):
    path = tmp_path / "plan.safetensors"

    class Meddling(Watcher):
        def stage(self, name: str, seconds: float | None = None) -> None:
            super().stage(name, seconds)
            if name == "learn":
                path.write_text("theirs")

    with pytest.raises(OutputError, match="the new file is"):
        learn_plan(MODEL, RATIO, tokens, path, **options_of(SETTINGS), align=1, observer=Meddling())
    assert path.read_text() == "theirs"
    assert Plan.load(tmp_path / "plan-2.safetensors") == Plan.load(compiled.path / "plan.safetensors")


def test_sites_that_would_keep_nothing_keep_one_feature_and_a_line_says_so(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    settings = replace(SETTINGS, method="random")
    plan = learn_plan(
        MODEL, 0.97, out=tmp_path / "p", data=tokens, **options_of(settings), align=1, observer=watcher
    )
    assert plan.emptied and all(len(selection.kept) >= 1 for selection in plan.selections)
    told = f"{len(plan.emptied)} of {len(plan.selections)} sites keep the allowed minimum, 1 of their "
    assert any(note.startswith(f"{told}features: {plan.emptied[0]}") for note in watcher.notes)


def test_the_minimum_of_heads_is_one_at_any_alignment(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    given = {"align": 4, "method": "random", "seq_len": 16, "sites": "heads", "seed": 1, "observer": watcher}
    plan = learn_plan(MODEL, 0.8, tokens, tmp_path / "p", **given)
    assert {one.kind: len(one.kept) for one in plan.selections if one.site in plan.emptied} == {"heads": 1}
    assert any("keep the allowed minimum, 1 of their features: " in note for note in watcher.notes)


def test_the_demo_is_written_as_a_checkpoint(demo: tuple[Path, Report]):
    path, report = demo
    names = {entry.name for entry in path.iterdir()}
    assert {"config.json", "model.safetensors", "plan.safetensors", "report.json", "program.pt2"} <= names
    assert {"tokenizer.json", "README.md"} <= names and "metrics.jsonl" not in names
    assert set(report.skills) and report.parameters.pruned < report.parameters.dense
    assert "program.pt2 = checkpoint" in {line.name for line in report.verify}


def test_verify_compares_every_form_that_is_there(demo: tuple[Path, Report]):
    lines = verify(demo[0])
    assert {line.name for line in lines} == {
        "files = report", "gather-add = checkpoint", "program.pt2 = checkpoint",
    }  # fmt: skip
    assert all(line.holds for line in lines)
    # At two shapes, and at the longest sequence that the demo reads.
    assert {line.shape for line in lines} == {(), (2, 9), (1, 17), (1, 1024)} and len(lines) == 7


@pytest.mark.slow
def test_verify_sees_a_weight_that_was_changed_in_one_form(demo: tuple[Path, Report], tmp_path: Path):
    copy = tmp_path / "out"
    shutil.copytree(demo[0], copy)
    tensors = load_file(copy / "model.safetensors")
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name] = tensors[name] * 2
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    lines = {line.name: line.holds for line in verify(copy)}
    assert lines["program.pt2 = checkpoint"] is False and lines["gather-add = checkpoint"] is True
    assert lines["model.safetensors = report"] is False and "files = report" not in lines


@pytest.mark.slow
def test_verify_names_a_file_whose_form_can_no_longer_be_compared(demo: tuple[Path, Report], tmp_path: Path):
    copy = tmp_path / "out"
    shutil.copytree(demo[0], copy)
    tensors = {
        name: one.half() if one.is_floating_point() else one
        for name, one in load_file(copy / "model.safetensors").items()
    }
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    assert [line.name for line in verify(copy) if not line.holds] == ["model.safetensors = report"]


@pytest.mark.slow
def test_a_folder_that_lost_its_plan_is_not_taken_for_a_compressed_checkpoint(
    demo: tuple[Path, Report], tmp_path: Path
):
    copy = tmp_path / "out"
    shutil.copytree(demo[0], copy)
    (copy / "plan.safetensors").unlink()
    for use in (lambda: generate(str(copy), "the cats"), lambda: inspect(str(copy))):
        with pytest.raises(SourceError, match="a pruned decoder, but not its plan") as error:
            use()
        assert "copy plan.safetensors from the folder" in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of", "name", "figure"),
    [("parameters", "pruned", 7), ("bytes", "pruned", 7), ("ratio", "achieved", 0.7)],
)
def test_verify_counts_what_the_report_tells_of_the_folder(
    demo: tuple[Path, Report], compiled: Compiled, tmp_path: Path, of: str, name: str, figure: float
):
    for folder in (demo[0], compiled.path):  # a checkpoint, and a graph alone
        copy = tmp_path / folder.name
        shutil.copytree(folder, copy)
        told = json.loads((copy / "report.json").read_text(encoding="utf-8"))
        told[of][name] = figure
        (copy / "report.json").write_text(json.dumps(told), encoding="utf-8")
        assert [line.name for line in verify(copy) if not line.holds] == [f"{of}.{name} = report"]
        shutil.rmtree(copy)


@pytest.mark.slow
def test_verify_sees_weights_that_were_changed_where_there_is_one_form(compiled: Compiled, tmp_path: Path):
    names = [path.name for path in compiled.path.iterdir()]
    assert "program.pt2" in names and "model.safetensors" not in names
    assert [(line.name, line.holds) for line in verify(compiled.path)] == [("files = report", True)]
    copy = tmp_path / "out"
    shutil.copytree(compiled.path, copy)
    program = torch.export.load(copy / "program.pt2")
    weight = next(path for path in program.state_dict if path.endswith("down.weight"))
    program.state_dict[weight].mul_(1.001)
    torch.export.save(program, copy / "program.pt2")
    before, after = (load(path)(token_ids(2, 9)) for path in (compiled.path, copy))
    assert not torch.equal(before, after), "it is another decoder, and runs"
    lines = verify(copy)
    assert [(line.name, line.holds) for line in lines] == [("program.pt2 = report", False)]
    with pytest.raises(
        VerificationError, match=r"^program.pt2: missing, or changed since it was written"
    ) as failure:
        require(*lines)
    assert failure.value.exit_code == 1


def test_verify_refuses_what_is_no_output(tmp_path: Path):
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(DispfxError) as error:
            verify(path)
        assert error.value.exit_code == 2


@pytest.mark.slow
def test_evaluate_takes_a_model_and_an_output_folder(demo: tuple[Path, Report], tmp_path: Path):
    text = tmp_path / "text.txt"
    text.write_text("the cats see the dog . " * 40)
    dense, pruned = (
        evaluate("demo", eval_data=text, eval_windows=1),
        evaluate(str(demo[0]), eval_data=text, eval_windows=1),
    )
    assert demo[1].perplexity is not None
    assert dense.value == pytest.approx(demo[1].perplexity.dense, rel=1e-5)
    assert dense.protocol["text"] == "text.txt" and dense.protocol["windows"] == 1
    assert pruned.value != dense.value


def test_evaluate_names_a_token_that_a_plain_module_does_not_know(tmp_path: Path):
    save_file({"tokens": torch.tensor([1, 2, 90, 3])}, tmp_path / "tokens.safetensors")
    with pytest.raises(DataError, match=r"must be in \[0, 61\) .* holds 90"):
        evaluate(build_decoder(), eval_data=tmp_path / "tokens.safetensors", context=4)


@pytest.mark.parametrize(("context", "notes"), [(32, 0), (64, 1), (100_000, 1)])
def test_a_window_beyond_the_positions_of_the_config_is_noted(tokens: Path, context: int, notes: int):
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    watcher = Watcher()
    evaluate(LlamaForCausalLM(config).eval(), eval_data=tokens, context=context, observer=watcher)
    told = [line for line in watcher.notes if "longer than the 32" in line]
    assert len(told) == notes and all(line.startswith(f"windows of {min(context, 600)} ") for line in told)


def test_evaluate_measures_a_plain_module_on_tokens_of_a_given_window(tokens: Path):
    found = evaluate(build_decoder(), eval_data=tokens, context=32)
    assert found.protocol["context"] == 32 and found.protocol["windows"] == 19
    with pytest.raises(DataError, match="runs on windows of 2048 tokens"):
        evaluate(MODEL, eval_data=tokens)


def test_a_folder_of_a_plain_module_is_measured_in_the_windows_of_its_report(
    compiled: Compiled, tokens: Path
):
    measured = compiled.report.perplexity
    assert measured is not None
    found = evaluate(str(compiled.path), eval_data=tokens, eval_windows=1)
    assert found.protocol["context"] == measured.protocol.context < 2048
    compared = agree(compiled.path, dense=MODEL, eval_data=tokens, eval_windows=1).tokens
    assert measured.protocol.context - 1 <= compared <= measured.protocol.context


def test_evaluate_needs_a_text():
    with pytest.raises(DataError, match="text to measure on is needed"):
        evaluate(MODEL)


@pytest.mark.slow
def test_generate_continues_a_prompt_of_the_demo(demo: tuple[Path, Report]):
    first, second = (generate(str(demo[0]), "the cats ", max_new_tokens=6, seed=seed) for seed in (1, 2))
    assert first == second and len(first) > 0, "greedy by default, so no seed matters"
    assert generate("demo", "the cats ", max_new_tokens=6, temperature=5.0, seed=1) != first


def test_generate_needs_a_tokenizer():
    with pytest.raises(DataError, match="text needs a tokenizer"):
        generate(MODEL, "the")


@pytest.mark.slow
def test_export_writes_a_program_that_agrees_and_no_other(
    demo: tuple[Path, Report], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    copy = tmp_path / "out"
    shutil.copytree(demo[0], copy)
    with pytest.raises(OutputError, match="must not exist yet"):
        export(copy, pt2=True)
    (copy / "program.pt2").unlink()
    with monkeypatch.context() as patch:
        line = Verification("program.pt2 = checkpoint", (2, 9), 1.0, 1.0, 1e-5)

        def compared(folder: Path, *others: Any) -> list[Verification]:
            assert (folder / "program.pt2").is_file() and not (copy / "program.pt2").exists()
            return [line]

        patch.setattr("dispfx.api.commands.exported_lines", compared)
        with pytest.raises(VerificationError):
            export(copy, pt2=True)
    assert not (copy / "program.pt2").exists()
    assert export(copy, pt2=True) == [copy / "program.pt2"] and (copy / "program.pt2").is_file()


def test_a_folder_of_a_plain_module_holds_its_final_form(compiled: Compiled):
    with pytest.raises(OutputError, match=r"the folder holds only program\.pt2"):
        export(compiled.path, onnx=True)
    assert load(compiled.path)(token_ids(2, 9)).shape == (2, 9, 61)


def test_the_module_of_the_user_is_never_changed(tmp_path: Path, compiled: Compiled):
    model = build_decoder().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    apply(model, compiled.path / "plan.safetensors", out=tmp_path / "out")
    evaluate(model, eval_data=_stored(tmp_path), context=16, eval_windows=1)
    assert model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert isinstance(model, nn.Module)


def _stored(folder: Path) -> Path:
    save_file({"tokens": random_tokens(40)}, folder / "t.safetensors")
    return folder / "t.safetensors"


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_where_the_state_would_be_is_left_alone_with_all_that_is_in_it(
    tmp_path: Path, tokens: Path, resume: bool
):
    mine = tmp_path / "plan.safetensors.state" / "letters.txt"
    mine.parent.mkdir()
    mine.write_text("mine")
    with pytest.raises(OutputError, match="it holds something else") as error:
        learn_plan(
            MODEL,
            RATIO,
            out=tmp_path / "plan.safetensors",
            data=tokens,
            **options_of(SETTINGS),
            resume=resume,
        )
    assert mine.read_text() == "mine" and "remove" not in str(error.value)


def test_export_names_a_folder_that_does_not_exist(tmp_path: Path):
    with pytest.raises(OutputError, match="the folder does not exist"):
        export(tmp_path / "none", onnx=True)
