"""LoRA on a pruned demo: adapters, and a merged folder that is one like any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dispfx
from dispfx.api import apply, evaluate, finetune, tune_settings, verify
from dispfx.capturing import module_logits
from dispfx.demo import DECODER_FOLDER
from dispfx.demo.text import generate_text
from dispfx.errors import DataError, DispfxError, OutputError
from dispfx.huggingface.modules import PrunedModule
from dispfx.huggingface.tuning import TuneSettings
from dispfx.report import Tuning, load_report
from tests.api.conftest import MODEL, Watcher
from tests.programs import token_ids

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
    told = finetune(pruned, data=str(text), out=out, merge=True, settings=SETTINGS, eval_data=str(other))
    return out, told


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_written_for_peft_and_lower_perplexity(pruned: Path, text: Path, tmp_path: Path):
    from peft import PeftModel

    watcher = Watcher()
    told = finetune(
        pruned, data=str(text), out=tmp_path / "out", settings=SETTINGS, eval_windows=2, observer=watcher
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

    def look(module: PrunedModule, inputs: Any, output: torch.Tensor) -> None:
        assert module.dispfx_write is not None
        gone = module.dispfx_write == module.dispfx_write.max()
        seen.append(int(gone.sum()))
        assert not output[..., gone].any()

    for module in model.modules():
        if isinstance(module, PrunedModule) and module.dispfx_write is not None:
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
        finetune(pruned, data=str(text), out=tmp_path / name, settings=SETTINGS, eval_windows=1)
        adapters.append(load_file(tmp_path / name / "adapter_model.safetensors"))
    assert all(torch.equal(tensor, adapters[1][name]) for name, tensor in adapters[0].items())


def test_a_merged_folder_can_be_tuned_again(
    merged: tuple[Path, Tuning], text: Path, other: Path, tmp_path: Path
):
    told = finetune(merged[0], data=str(text), out=tmp_path / "out", settings=SETTINGS, eval_data=str(other))
    assert told.before == pytest.approx(merged[1].after, rel=1e-6)


def test_too_short_a_text_a_loss_without_bounds_and_a_graph_leave_nothing(
    pruned: Path, text: Path, tmp_path: Path
):
    short = tmp_path / "short.txt"
    short.write_text("copy abc = abc\n" * 3)
    out = tmp_path / "out"
    with pytest.raises(DataError, match="a sequence has 48 tokens"):
        finetune(pruned, data=str(short), out=out, settings=SETTINGS)
    wild = TuneSettings(rank=4, lr=1e30, steps=4, batch_size=2, seq_len=16)
    with pytest.raises(DispfxError, match="the loss of step"):
        finetune(pruned, data=str(text), out=out, settings=wild, eval_windows=1)
    model = dispfx.capture(_module())
    plan = dispfx.Plan.random(model, 0.3, 0)
    apply(MODEL, plan, out=tmp_path / "graph")
    with pytest.raises(OutputError, match="this one holds a graph"):
        finetune(tmp_path / "graph", data=str(text), out=out, settings=SETTINGS)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["graph", "short.txt"]


def _module() -> Any:
    from tests.api.plain import build_decoder

    return build_decoder()


def test_settings_that_make_no_run_are_refused_and_sequences_fit_the_decoder(pruned: Path):
    for wrong in ({"rank": 0}, {"steps": 0}, {"seq_len": 1}, {"lr": 0.0}, {"alpha": float("nan")}):
        with pytest.raises(DispfxError, match=next(iter(wrong))):
            tune_settings(pruned, **wrong)
    assert tune_settings(pruned, rank=2) == TuneSettings(rank=2, seq_len=512)
    assert tune_settings(pruned, seq_len=4096).seq_len == 4096
