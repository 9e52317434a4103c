"""`dispfx export DIR --quantize int8|int4|fp8`: checkpoints, read number by number and by transformers."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
)

from dispfx import api
from dispfx.errors import DataError, DispfxError, OutputError, PlanMismatchError, VerificationError
from dispfx.quantization import stored_weights
from dispfx.report import load_report, save_report
from tests.command_line import run
from tests.quantized_folders import copied, made, tokens
from tests.tiny_transformers import VOCABULARY, tiny_transformer

pytest.importorskip("compressed_tensors")
SCHEMES = ("int8", "int4", "fp8")
LAYER = "model.layers.0.mlp.down_proj"


def wide_llama(hidden: int = 64, inner: int = 128) -> nn.Module:
    """Return a decoder whose widths are multiples of 32, or others."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of all schemes; do not change it."""
    path = made(tmp_path_factory.mktemp("quantized") / "out", wide_llama(), 32)
    data = str(tokens(tmp_path_factory.mktemp("text") / "text.safetensors", 600))
    for scheme in SCHEMES:
        assert api.export(path, quantize=scheme, data=data) == [path / scheme]
    return path


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Return signed codes along the last axis of int32 words, the first in the lowest bits."""
    per_word = 32 // bits
    codes = torch.stack([(words >> (bits * place)) & (2**bits - 1) for place in range(per_word)], -1)
    return codes.flatten(-2)[..., :count] - 2 ** (bits - 1)


def number_by_number(path: Path, scheme: str) -> Tensor:
    """Return the weight of LAYER as its tensors define it, without the library that packed them."""
    held = load_file(path / scheme / "model.safetensors")
    scale = held[f"{LAYER}.weight_scale"].float()
    if scheme == "fp8":
        return held[f"{LAYER}.weight"].float() * scale
    outputs, inputs = held[f"{LAYER}.weight_shape"].tolist()
    codes = unpacked(held[f"{LAYER}.weight_packed"], 4 if scheme == "int4" else 8, inputs).float()
    if scheme == "int8":
        return codes * scale
    zeros = unpacked(held[f"{LAYER}.weight_zero_point"].T, 4, outputs).T.float()
    groups = torch.arange(inputs) // 32
    return (codes - zeros[:, groups]) * scale[:, groups]


def weight_at(model: nn.Module) -> Tensor:
    return model.get_parameter(f"{LAYER}.weight")


def ids() -> Tensor:
    return torch.arange(24).reshape(2, 12) % VOCABULARY


@pytest.mark.parametrize("scheme", SCHEMES)
def test_transformers_reads_the_numbers_that_the_file_defines(folder: Path, scheme: str):
    found = AutoModelForCausalLM.from_pretrained(folder / scheme)
    before = AutoModelForCausalLM.from_pretrained(folder)

    expected = number_by_number(folder, scheme)
    assert torch.equal(weight_at(found), expected)
    assert 0 < (weight_at(before) - expected).norm() < 0.2 * expected.norm()
    # Everything but the layers is equal, and the layers compute what plain ones with these numbers do.
    rounded = {
        path for path, one in found.state_dict().items() if not torch.equal(one, before.state_dict()[path])
    }
    assert len(rounded) == 14 and all(path.endswith("proj.weight") for path in rounded)
    before.load_state_dict(found.state_dict())
    assert torch.equal(before(ids()).logits, found(ids()).logits)


def test_files_are_smaller_by_what_bits_and_scales_take(folder: Path):
    size = {path: one.nbytes for path, one in load_file(folder / "model.safetensors").items()}
    weights = sum(count for path, count in size.items() if path.endswith("proj.weight"))
    rest = sum(size.values()) - weights
    for scheme, bits in (("int8", 8), ("fp8", 8), ("int4", 5.125)):
        held = sum(one.nbytes for one in load_file(folder / scheme / "model.safetensors").values())
        # And a scale of 32 bits for each output, or what fills up the last word of zero points.
        assert 0 <= held - rest - weights * bits / 32 <= 0.08 * weights, scheme


def test_verify_report_card_and_page_know_them(folder: Path):
    lines = api.verify(folder)
    names = [line.name for line in lines]
    assert all(line.holds for line in lines)
    for scheme in SCHEMES:
        assert {f"{scheme} stays near checkpoint", f"{scheme}, all else = checkpoint"} <= set(names)

    found = load_report(folder / "report.json").quantized
    assert [(one.name, one.form) for one in found] == [(scheme, "checkpoint") for scheme in SCHEMES]
    assert all(one.rounded_by == "text.safetensors" and one.quality is not None for one in found)
    assert found[0].quality.kl < 0.001 and found[1].quality.kl < 0.05  # type: ignore[union-attr]
    for name in ("README.md", "report.html"):
        assert "checkpoint, int4" in (folder / name).read_text(), name


@pytest.mark.parametrize("moment", ["save_report", "with_quantized_section", "write_page"])
def test_a_run_that_dies_before_the_report_is_completed_by_the_next(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
):
    path, data = copied(folder, tmp_path), str(tokens(tmp_path / "text.safetensors", 600))
    shutil.rmtree(path / "fp8")
    report = load_report(path / "report.json")
    save_report(replace(report, quantized=report.quantized[:2]), path / "report.json")

    class Death(BaseException):
        """Leaves the files of a process that was killed: nothing here cleans up after it."""

    def die(*args: Any) -> None:
        raise Death

    with monkeypatch.context() as patched:
        patched.setattr(f"dispfx.run.quantized_record.{moment}", die)
        with pytest.raises(Death):
            api.export(path, quantize="fp8", data=data)
    whole = sorted(one.name for one in (folder / "fp8").iterdir())
    assert sorted(one.name for one in (path / "fp8").iterdir()) == sorted([*whole, "figures.json"])
    assert torch.equal(
        weight_at(AutoModelForCausalLM.from_pretrained(path / "fp8")), number_by_number(folder, "fp8")
    )

    ended = run("export", path, "--quantize", "fp8", "--data", data)
    assert ended.exit_code == 0 and "an earlier run ended before" in ended.output
    assert sorted(one.name for one in (path / "fp8").iterdir()) == whole
    found = load_report(path / "report.json").quantized[2]
    assert replace(found, files={}) == replace(report.quantized[2], files={})
    assert all(line.holds for line in api.verify(path))
    assert all("checkpoint, fp8" in (path / name).read_text() for name in ("README.md", "report.html"))
    assert run("export", path, "--quantize", "fp8", "--data", data).exit_code == 2


def test_figures_that_are_damaged_are_named(folder: Path, tmp_path: Path):
    path = copied(folder, tmp_path)
    for text in ("nothing", "{}", '{"name": 3}'):
        (path / "fp8/figures.json").write_text(text)
        with pytest.raises(DataError) as raised:
            api.export(path, quantize="fp8")
        assert "figures.json" in str(raised.value)


def test_a_body_another_head_and_a_saved_copy_load(folder: Path, tmp_path: Path):
    path = folder / "int4"
    body = AutoModel.from_pretrained(path)
    assert torch.equal(body.layers[0].mlp.down_proj.weight, number_by_number(folder, "int4"))
    judge = AutoModelForSequenceClassification.from_pretrained(path, num_labels=3, pad_token_id=0)
    assert torch.equal(judge.model.layers[0].mlp.down_proj.weight, number_by_number(folder, "int4"))

    model = AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "saved")
    section = json.loads((tmp_path / "saved/config.json").read_text())["quantization_config"]
    assert "rounded" not in section and section["schema_version"] == 4
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert torch.equal(again(ids()).logits, model(ids()).logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_keeps_its_dtype(tmp_path: Path, dtype: torch.dtype):
    path = made(tmp_path / "out", wide_llama().to(dtype), 32)
    api.export(path, quantize="int4", data=str(tokens(tmp_path / "text.safetensors", 600)))

    found = AutoModelForCausalLM.from_pretrained(path / "int4")
    weight = weight_at(found)
    assert weight.dtype == dtype
    assert torch.equal(weight, number_by_number(path, "int4").to(dtype))
    exact = AutoModelForCausalLM.from_pretrained(path / "int4", dtype=torch.float32)
    assert torch.equal(weight_at(exact), number_by_number(path, "int4"))


def test_without_a_text_8_bits_are_rounded_to_nearest(folder: Path, tmp_path: Path):
    path = copied(folder, tmp_path)
    shutil.rmtree(path / "int8")
    found = run("export", path, "--quantize", "int8", "--json")

    assert found.exit_code == 0, found.stderr
    (one,) = json.loads(found.stdout)["quantized"]
    assert one["rounded_by"] == "" and one["form"] == "checkpoint"
    weight = load_file(path / "model.safetensors")[f"{LAYER}.weight"]
    step = load_file(path / "int8/model.safetensors")[f"{LAYER}.weight_scale"]
    assert ((weight - number_by_number(path, "int8")).abs() <= 0.501 * step).all()


def test_eval_and_generate_take_it_and_graphs_do_not(folder: Path, tmp_path: Path):
    data = str(tokens(tmp_path / "text.safetensors", 600))
    assert run("eval", folder / "int4", "--eval-data", data).exit_code == 0
    refused = run("export", folder / "int4", "--pt2")
    assert refused.exit_code == 2 and "rounded to int4" in refused.stderr
    compared = run("compare", folder / "int4", folder)
    assert compared.exit_code == 2 and "use the folder that it was made from" in compared.stderr


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_another_dtype_rounds_numbers_once(folder: Path, scheme: str, dtype: torch.dtype):
    found = AutoModelForCausalLM.from_pretrained(folder / scheme, dtype=dtype)

    assert torch.equal(weight_at(found), number_by_number(folder, scheme).to(dtype))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_rounded_weights_are_not_rounded_again(folder: Path, scheme: str, tmp_path: Path):
    refused = run(
        "export",
        folder / scheme,
        "--quantize",
        "int8",
        "--data",
        str(tokens(tmp_path / "text.safetensors", 600)),
    )
    assert refused.exit_code == 2 and f"rounded to {scheme}" in refused.stderr
    shown = run("compare", folder, folder / scheme, "--out", tmp_path / "page.html")
    assert shown.exit_code == 2 and f"rounded to {scheme}" in shown.stderr


def test_weights_on_disk_are_refused(folder: Path, tmp_path: Path):
    pytest.importorskip("accelerate")
    split = dict.fromkeys(("model.embed_tokens", "model.norm", "model.layers.0", "lm_head"), "cpu")
    places = split | {"model.rotary_emb": "cpu", "model.layers.1": "disk"}
    with pytest.raises(OutputError, match="int4 cannot be offloaded") as raised:
        AutoModelForCausalLM.from_pretrained(folder / "int4", device_map=places, offload_folder=tmp_path)
    assert "rounded from" in str(raised.value)


def test_what_cannot_be_done_is_refused_and_leaves_nothing(folder: Path, tmp_path: Path):
    odd = made(tmp_path / "odd", wide_llama())
    before = sorted(path.name for path in odd.iterdir())
    data = str(tokens(tmp_path / "text.safetensors", 600))
    narrow = run("export", made(tmp_path / "narrow", wide_llama(24, 30)), "--quantize", "int4")
    assert narrow.exit_code == 2 and "--align 32" in narrow.stderr and "groups of 32" in narrow.stderr
    blind = run("export", copied(folder, tmp_path), "--quantize", "int4")
    assert blind.exit_code == 2 and "must not exist yet" in blind.stderr
    assert sorted(path.name for path in odd.iterdir()) == before
    assert api.export(odd, quantize="int8", data=data) == [odd / "int8"]
    shutil.rmtree(tmp_path / "copy/int4")
    blind = run("export", tmp_path / "copy", "--quantize", "int4")
    assert blind.exit_code == 2 and "int4 needs a text" in blind.stderr and "--data" in blind.stderr
    assert run("export", tmp_path / "copy", "--quantize", "int4", "--data", data).exit_code == 0

    transposed = made(tmp_path / "gpt2", tiny_transformer("gpt2"), 32)
    with pytest.raises(OutputError, match="no linear layer"):
        api.export(transposed, quantize="int8")


def test_layers_whose_inputs_fill_no_groups_keep_their_weights_and_are_named(tmp_path: Path):
    path = made(tmp_path / "out", wide_llama())
    before = AutoModelForCausalLM.from_pretrained(path)
    linear = {name: one for name, one in before.named_modules() if isinstance(one, nn.Linear)}
    widths = {name: one.in_features for name, one in linear.items() if name != "lm_head"}
    unfit = sorted(name for name, width in widths.items() if width % 32)
    assert 0 < len(unfit) < len(widths)

    found = run("export", path, "--quantize", "int4", "--data", tokens(tmp_path / "text.safetensors", 600))
    assert found.exit_code == 0, found.output
    (told,) = load_report(path / "report.json").quantized
    assert list(told.unfit) == unfit and {f"{name}.weight" for name in unfit} < set(told.left)
    for shown in (found.output, (path / "README.md").read_text()):
        assert f"{len(unfit)} layers among them, such as {unfit[0]}" in " ".join(shown.split())
    after = AutoModelForCausalLM.from_pretrained(path / "int4")
    for name in widths:
        same = torch.equal(*(one.get_parameter(f"{name}.weight") for one in (before, after)))
        assert same is (name in unfit), name
    ignored = json.loads((path / "int4/config.json").read_text())["quantization_config"]["rounded"]["format"]
    assert set(unfit) < set(ignored["ignore"])
    assert all(line.holds for line in api.verify(path))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_folder_with_rounded_weights_is_not_rounded_again(folder: Path, scheme: str):
    with pytest.raises(OutputError, match=f"have been rounded to {scheme}"):
        api.export(folder / scheme, quantize="int8")
    assert not (folder / scheme / "int8").exists()


def test_a_wrong_library_is_found_and_nothing_appears(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = copied(folder, tmp_path)
    shutil.rmtree(path / "int8")
    right = stored_weights.stored_tensors

    def wrong(scheme, found, dtype):
        tensors = right(scheme, found, dtype)
        return tensors | {"weight_packed": tensors["weight_packed"] ^ 1}

    monkeypatch.setattr("dispfx.run.quantized_checkpoint.stored_tensors", wrong)
    with pytest.raises(VerificationError, match="int8 reloaded = chosen"):
        api.export(path, quantize="int8", data=str(tokens(tmp_path / "text.safetensors", 600)))
    assert not [one for one in path.iterdir() if one.name.startswith("int8")]


def test_a_config_of_another_form_is_refused(folder: Path):
    for path, other in ((folder / "int4", folder), (folder, folder / "int4")):
        with pytest.raises(PlanMismatchError, match=r"hold (rounded|plain) weights"):
            AutoModelForCausalLM.from_pretrained(path, config=AutoConfig.from_pretrained(other))


def test_damage_is_found(folder: Path, tmp_path: Path):
    path = copied(folder, tmp_path)
    file = path / "int4/model.safetensors"
    held = load_file(file)
    held[f"{LAYER}.weight_scale"] *= 2
    save_file(held, file, metadata={"format": "pt", "buffers": "[]"})
    failed = {line.name for line in api.verify(path) if not line.holds}
    assert failed >= {"int4/model.safetensors = report", "int4 stays near checkpoint"}


@pytest.mark.parametrize("layer", [LAYER, "model.layers.1.mlp.up_proj"])
def test_a_weight_that_is_no_number_is_found_without_a_report(folder: Path, tmp_path: Path, layer: str):
    path = copied(folder, tmp_path)
    (path / "report.json").unlink()
    file = path / "int4/model.safetensors"
    held = load_file(file)
    held[f"{layer}.weight_scale"][0, 0] = torch.nan
    save_file(held, file, metadata={"format": "pt", "buffers": "[]"})

    assert [line.name for line in api.verify(path) if not line.holds] == ["int4 stays near checkpoint"]


def test_without_the_library_the_message_names_it(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "compressed_tensors", None)
    with pytest.raises(DispfxError, match=r"compressed_tensors.*cannot be imported") as raised:
        AutoModelForCausalLM.from_pretrained(folder / "int4")
    assert "dispfx[quantize]" in str(raised.value)
