"""LoRA on a pruned demo: adapters, and a merged folder that is one like any other."""

import json
import os
import signal
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import dispfx
from dispfx.api import apply, evaluate, finetune, verify
from dispfx.api.finetuning import fitted_tuning
from dispfx.capturing.module_capture import module_logits
from dispfx.demo import DECODER_FOLDER
from dispfx.demo.grammar import generate_text
from dispfx.errors import DataError, DispfxError, OutputError
from dispfx.huggingface.adapter_training import Keeping, TuneStep, train
from dispfx.learning.state import STATE_FILE, saved_step
from dispfx.learning.text import TokenBatches
from dispfx.report import Tuning, load_report
from dispfx.run.folders import open_folder
from dispfx.settings.verb_settings import TuneSettings
from tests.api.conftest import MODEL, Watcher
from tests.programs import token_ids
from tests.pruned_modules import writers

pytest.importorskip("peft")

SETTINGS = TuneSettings(rank=4, alpha=8.0, lr=1e-2, steps=6, batch_size=4, seq_len=48)
IDS = token_ids(2, 7, vocabulary=90)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(generate_text(3, 20_000), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "demo"
    model = AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, 0)
    apply("demo", plan, out=out, export="none", eval_windows=1)
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text(generate_text(4, 3_000), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def merged(
    pruned: Path, text: Path, other: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Tuning]:
    out = tmp_path_factory.mktemp("merged") / "tuned"
    told = finetune(pruned, data=str(text), out=out, merge=True, **asdict(SETTINGS), eval_data=str(other))
    return out, told


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_written_for_peft_and_lower_perplexity(pruned: Path, text: Path, tmp_path: Path):
    from peft import PeftModel

    watcher = Watcher()
    told = finetune(
        pruned, data=str(text), out=tmp_path / "out", **asdict(SETTINGS), eval_windows=2, observer=watcher
    )
    assert told.after < told.before and told.protocol.held_out_share == 0.1
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "finetune.json", "README.md",
    }  # fmt: skip
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert told.parameters == sum(tensor.numel() for tensor in stored.values())
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())[
        "base_model_name_or_path"
    ] == str(pruned)
    record = json.loads((tmp_path / "out" / "finetune.json").read_text())
    assert [line["step"] for line in record["log"]] == list(range(1, 7)) and record["after"] == told.after
    assert watcher.stages == ["open", "measure", "tune", "measure"]

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pruned), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(pruned)
    assert not torch.equal(module_logits(model.eval(), IDS), module_logits(plain, IDS))


def test_a_merged_folder_verifies_reloads_and_says_that_it_was_tuned(
    merged: tuple[Path, Tuning], pruned: Path
):
    out, told = merged
    lines = verify(out)
    assert lines and all(line.holds for line in lines)
    report, was = load_report(out / "report.json"), load_report(pruned / "report.json")
    assert report.tuned == told and was.tuned is None
    assert {line.name for line in report.verify} == {
        "merged = adapters", "reloaded = tuned", "gather-add = checkpoint",
    }  # fmt: skip
    assert report.perplexity is None and report.skills == {}, "what was measured on other weights is left out"
    assert (report.parameters, report.bytes, report.sites) == (was.parameters, was.bytes, was.sites)
    assert (out / "plan.safetensors").read_bytes() == (pruned / "plan.safetensors").read_bytes()
    for file in ("report.html", "README.md"):
        assert "tuning" in (out / file).read_text(encoding="utf-8"), file
    assert "tuned" not in json.loads((pruned / "report.json").read_text())


def test_what_was_pruned_is_zero_to_the_bit_after_tuning(merged: tuple[Path, Tuning], pruned: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(merged[0])
    dense = dict(AutoModelForCausalLM.from_pretrained(pruned).named_parameters())
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, dense[name])]
    assert len(changed) > 10, "the weights were tuned"
    seen = []

    for module, gone in writers(model):

        def look(module: Any, inputs: Any, output: torch.Tensor, gone: torch.Tensor = gone) -> None:
            seen.append(int(gone.sum()))
            assert not output[..., gone].any()

        module.register_forward_hook(look)
    model(IDS)
    assert seen and sum(seen) > 0


def test_the_perplexity_told_is_that_of_the_folder_read_back(
    merged: tuple[Path, Tuning], pruned: Path, other: Path
):
    values = [evaluate(str(folder), eval_data=str(other)).value for folder in (pruned, merged[0])]
    assert [merged[1].before, merged[1].after] == pytest.approx(values, rel=1e-6)


def test_the_same_seed_gives_the_same_bits(pruned: Path, text: Path, tmp_path: Path):
    adapters = []
    for name in ("first", "second"):
        finetune(pruned, data=str(text), out=tmp_path / name, **asdict(SETTINGS), eval_windows=1)
        adapters.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())


class Stopped(Watcher):
    """Interrupts a run when a step is shown, once or several times."""

    def __init__(self, *steps: int):
        super().__init__()
        self.at = list(steps)

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        if name == "tuning" and self.at and done == self.at[0]:
            self.at.pop(0)
            os.kill(os.getpid(), signal.SIGTERM if self.at else signal.SIGINT)


def test_a_run_that_was_stopped_twice_goes_on_to_the_same_bits(pruned: Path, text: Path, tmp_path: Path):
    words: dict[str, Any] = {"data": str(text), **asdict(SETTINGS), "eval_windows": 1}
    whole = finetune(pruned, out=tmp_path / "whole", **words)
    out, state = tmp_path / "out", tmp_path / "out.state"
    for stop, told in ((2, "no state in"), (5, "going on at step 2")):
        watcher = Stopped(stop, 9) if stop == 2 else Stopped(stop)
        with pytest.raises(KeyboardInterrupt):
            finetune(pruned, out=out, resume=True, observer=watcher, **words)
        assert saved_step(state) == stop and not out.exists()
        assert any(told in note for note in watcher.notes)
    with pytest.raises(OutputError, match="an unfinished run left its state"):
        finetune(pruned, out=out, **words)
    assert finetune(pruned, out=out, resume=True, **words) == whole
    assert not state.exists()
    for name in ("adapter_model.safetensors", "finetune.json"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name

    watcher = Watcher()
    assert finetune(pruned, out=out, resume=True, observer=watcher, **words) == whole
    assert watcher.notes == [f"{out} is complete; there is nothing to do"] and not watcher.stages


def test_dropout_goes_on_where_it_was(tmp_path: Path):
    expected = train_dropped(tmp_path / "whole", None)
    with pytest.raises(KeyboardInterrupt):
        train_dropped(tmp_path / "cut", 3)
    assert train_dropped(tmp_path / "cut", None) == expected


def train_dropped(folder: Path, stop: int | None) -> list[TuneStep]:
    """Train a layer behind dropout, interrupted when a step is shown, or going on."""
    settings = TuneSettings(lr=0.1, steps=6, batch_size=2, seq_len=4)
    torch.manual_seed(1)
    text = TokenBatches(torch.randint(8, (200,)), 4, 2)

    def on_step(step: TuneStep) -> None:
        if step.step == stop:
            raise KeyboardInterrupt

    return train(Dropped(), text, settings, torch.device("cpu"), on_step, Keeping(folder, "one", resume=True))


class Dropped(torch.nn.Module):
    """Stands for a decoder: the loss of predicting each token from itself, features dropped in between."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(torch.nn.functional.dropout(self.table(input_ids), 0.5, self.training))
        return SimpleNamespace(loss=torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class WithoutLoss(Dropped):
    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        return SimpleNamespace(logits=self.head(self.table(input_ids)), loss=None)


def test_a_decoder_that_returns_no_loss_is_refused_by_its_class(tmp_path: Path):
    text = TokenBatches(torch.randint(8, (200,)), 4, 2)
    settings, keeping = TuneSettings(steps=2, batch_size=2, seq_len=4), Keeping(tmp_path, "one")
    with pytest.raises(DispfxError, match="returns none") as caught:
        train(WithoutLoss(), text, settings, torch.device("cpu"), lambda step: None, keeping)
    assert caught.value.where == "WithoutLoss" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda tensors: tensors.pop("losses"), "losses"),
        (lambda tensors: tensors.update(losses=torch.zeros(2, dtype=torch.float64)), "2 losses of 3 steps"),
        (lambda tensors: tensors.update({"adapter.table.weight": torch.zeros(3)}), "size"),
        (lambda tensors: tensors.update({"optimizer.exp_avg.head.bias": torch.zeros(3)}), "has the shape"),
        (lambda tensors: tensors.update({"generator.cpu": torch.zeros(3, dtype=torch.uint8)}), "RNG state"),
    ],
)
def test_a_damaged_state_is_refused(damage: Any, said: str, tmp_path: Path):
    with pytest.raises(KeyboardInterrupt):
        train_dropped(tmp_path, 3)
    file = tmp_path / STATE_FILE
    with safe_open(file, "pt") as opened:
        header = opened.metadata()
    tensors = load_file(file)
    damage(tensors)
    save_file(tensors, file, metadata=header)
    with pytest.raises(DataError, match=f"(?s)the state to resume from is damaged: .*{said}"):
        train_dropped(tmp_path, None)


def test_a_state_of_another_decoder_or_other_settings_is_refused(
    merged: tuple[Path, Tuning], pruned: Path, text: Path, tmp_path: Path
):
    words: dict[str, Any] = {"data": str(text), "out": tmp_path / "out", "eval_windows": 1, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        finetune(pruned, **asdict(SETTINGS), observer=Stopped(1), **words)
    with pytest.raises(DispfxError, match="another decoder: its fingerprint differ"):
        finetune(merged[0], **asdict(SETTINGS), **words)
    with pytest.raises(DataError, match="rank was 4 and is 2"):
        finetune(pruned, **asdict(replace(SETTINGS, rank=2)), **words)
    with pytest.raises(DispfxError, match="`save_every` must be at least 1"):
        finetune(pruned, **asdict(SETTINGS), save_every=0, **words)
    assert saved_step(tmp_path / "out.state") == 1 and not (tmp_path / "out").exists()


def test_a_merged_folder_can_be_tuned_again(
    merged: tuple[Path, Tuning], text: Path, other: Path, tmp_path: Path
):
    told = finetune(merged[0], data=str(text), out=tmp_path / "out", **asdict(SETTINGS), eval_data=str(other))
    assert told.before == pytest.approx(merged[1].after, rel=1e-6)


def test_too_short_a_text_a_loss_without_bounds_and_a_graph_leave_nothing(
    pruned: Path, text: Path, tmp_path: Path
):
    short = tmp_path / "short.txt"
    short.write_text("copy abc = abc\n" * 3)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="one sequence needs 48 tokens"):
        finetune(pruned, data=str(short), out=out, **asdict(SETTINGS))
    wild = TuneSettings(rank=4, lr=1e30, steps=4, batch_size=2, seq_len=16)
    with pytest.raises(DispfxError, match="the loss of step"):
        finetune(pruned, data=str(text), out=out, **asdict(wild), eval_windows=1)
    model = dispfx.capture(_module())
    plan = dispfx.Plan.random(model, 0.3, 0)
    apply(MODEL, plan, out=tmp_path / "graph")
    with pytest.raises(OutputError, match="this one holds a graph"):
        finetune(tmp_path / "graph", data=str(text), out=out, **asdict(SETTINGS))
    assert sorted(file.name for file in tmp_path.iterdir()) == ["graph", "short.txt"]


def _module() -> Any:
    from tests.api.plain import build_decoder

    return build_decoder()


def test_settings_that_make_no_run_are_refused_and_sequences_fit_the_decoder(pruned: Path):
    wrong: dict[str, Any]
    for wrong in ({"rank": 0}, {"steps": 0}, {"seq_len": 1}, {"lr": 0.0}, {"alpha": float("nan")}):
        with pytest.raises(DispfxError, match=next(iter(wrong))):
            finetune(pruned, data="absent", out="absent", **wrong)
    opened = open_folder(pruned)
    assert fitted_tuning(TuneSettings(rank=2), opened) == TuneSettings(rank=2, seq_len=512)
    assert fitted_tuning(TuneSettings(seq_len=4096), opened).seq_len == 4096
