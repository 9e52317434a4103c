"""What `save_pretrained` writes from a pruned decoder is a folder that commands of dispfx open."""

import copy
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import dispfx
from dispfx.api import recover, verify
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan
from dispfx.settings.recovery_settings import RecoverySettings, Train
from dispfx.words.preconditions import check_folder
from tests.command_line import run
from tests.huggingface.conftest import write_unverified
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY, tiny_transformer

IDS = token_ids(2, 9, vocabulary=VOCABULARY)
Folders = Callable[[str], Path]


def saved(folder: Path, target: Path) -> Path:
    """Change a weight of the decoder in a folder, and write it as any program of transformers would."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).mul_(0.5)
    model.save_pretrained(target)
    return target


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("name", ("llama", "gpt2", "mixtral"))
def test_a_saved_folder_has_the_plan_and_its_forms_agree(
    unverified: Folders, name: str, tmp_path: Path
) -> None:
    folder = saved(unverified(name), tmp_path / "saved")

    lines = verify(folder)

    assert lines and all(line.holds for line in lines)
    expected = Plan.load(unverified(name) / "plan.safetensors")
    assert Plan.load(folder / "plan.safetensors") == expected
    loaded, before = dispfx.load(folder), dispfx.load(unverified(name))
    # Experts may be computed in another form, which rounds otherwise.
    assert relative_error(logits(loaded), logits(AutoModelForCausalLM.from_pretrained(folder))) < 1e-6
    assert relative_error(logits(loaded), logits(before)) > 1e-2


def test_a_saved_folder_without_indices_is_opened_too(tmp_path: Path) -> None:
    def inner_alone(program: Program) -> Plan:
        kept = {site.name: site.size // 2 if site.kind == "inner" else site.size for site in program.sites}
        return Plan.from_masks(program, {name: range(number) for name, number in kept.items()})

    folder = saved(write_unverified(tmp_path / "pruned", "llama", inner_alone), tmp_path / "saved")

    assert "dispfx_pruned" in load_file(folder / "model.safetensors")
    assert all(line.holds for line in verify(folder))


def test_a_folder_that_is_saved_twice_keeps_the_plan(unverified: Folders, tmp_path: Path) -> None:
    once = saved(unverified("llama"), tmp_path / "once")

    twice = saved(once, tmp_path / "twice")

    lines = verify(twice)
    assert lines and all(line.holds for line in lines)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", ["lora", "weights"])
def test_a_mixture_of_experts_is_recovered_from_a_saved_folder(
    train: Train, unverified: Folders, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    folder = saved(unverified("mixtral"), tmp_path / "saved")
    tokens = torch.randint(VOCABULARY, (1200,), generator=torch.Generator().manual_seed(0))
    save_file({"tokens": tokens}, tmp_path / "text.safetensors")
    settings = RecoverySettings(train=train, rank=2, lr=2e-3, steps=12, batch_size=8, seq_len=16)

    told = recover(
        folder, dense=tiny_transformer("mixtral"), data=str(tmp_path / "text.safetensors"),
        out=tmp_path / "tuned", merge=True, **asdict(settings), eval_windows=2,
    )  # fmt: skip

    assert told.after != told.before
    lines = verify(tmp_path / "tuned")
    assert lines and all(line.holds for line in lines)
    experts = [
        dict(AutoModelForCausalLM.from_pretrained(place).named_parameters())[
            "model.layers.0.mlp.experts.down_proj"
        ]
        for place in (folder, tmp_path / "tuned")
    ]
    assert experts[0].shape == experts[1].shape and not torch.equal(*experts)


def test_verify_says_that_there_is_no_report_and_report_says_what_opens_the_folder(
    unverified: Folders, tmp_path: Path
) -> None:
    folder = saved(unverified("llama"), tmp_path / "saved")

    verified = run("verify", folder)
    with pytest.raises(OutputError, match="save_pretrained") as refused:
        check_folder(folder, report=True)

    assert verified.exit_code == 0 and "it has no report" in verified.output
    assert "recover open it" in str(refused.value)


@pytest.mark.parametrize("relative", [True, False])
def test_the_plan_is_kept_when_the_folder_is_moved_or_the_program_changes_directory(
    unverified: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, relative: bool
) -> None:
    shutil.copytree(unverified("llama"), tmp_path / "source")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("source" if relative else tmp_path / "source")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")

    model.save_pretrained("first")
    (tmp_path / "source").rename(tmp_path / "moved")
    model.save_pretrained("second")

    before = (unverified("llama") / "plan.safetensors").read_bytes()
    for name in ("first", "second"):
        assert (tmp_path / "elsewhere" / name / "plan.safetensors").read_bytes() == before
        assert all(line.holds for line in verify(tmp_path / "elsewhere" / name))


def test_a_copy_of_a_decoder_keeps_the_plan(unverified: Folders, tmp_path: Path) -> None:
    shutil.copytree(unverified("llama"), tmp_path / "source")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")
    shutil.rmtree(tmp_path / "source")

    copy.deepcopy(model).save_pretrained(tmp_path / "copied")

    assert Plan.load(tmp_path / "copied" / "plan.safetensors")


def test_a_plan_of_another_compilation_is_not_taken_along(unverified: Folders, tmp_path: Path) -> None:
    shutil.copytree(unverified("llama"), tmp_path / "source")
    shutil.copyfile(unverified("gpt2") / "plan.safetensors", tmp_path / "source" / "plan.safetensors")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "source")

    with pytest.warns(UserWarning, match=r"saved without plan\.safetensors"):
        model.save_pretrained(tmp_path / "saved")

    assert not (tmp_path / "saved" / "plan.safetensors").exists()
    with pytest.raises(DataError, match=r"copy plan\.safetensors"):
        verify(tmp_path / "saved")


@pytest.mark.parametrize("kind", [AutoModel, AutoModelForSequenceClassification])
def test_a_model_without_the_head_is_named_and_gets_no_head(
    unverified: Folders, kind: Any, tmp_path: Path
) -> None:
    kind.from_pretrained(unverified("llama")).save_pretrained(tmp_path / "body")
    for opened in (dispfx.load, verify):
        with pytest.raises(OutputError, match=r"holds a Llama.*, which has no language-model head") as error:
            opened(tmp_path / "body")
        assert "AutoModelForCausalLM" in str(error.value.hint)


def test_a_weight_that_is_not_stored_is_not_made_up(unverified: Folders, tmp_path: Path) -> None:
    folder = saved(unverified("llama"), tmp_path / "saved")
    tensors = load_file(folder / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(PlanMismatchError, match=r"lm_head.weight is not stored \(1 tensors are missing\)"):
        dispfx.load(folder)
