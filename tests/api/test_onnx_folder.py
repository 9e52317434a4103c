"""`dispfx export DIR --onnx` with each of its options, and what it refuses."""

import shutil
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.activations import ACT2FN

import dispfx
from dispfx import api
from dispfx.deploy.onnx import legalize
from dispfx.errors import UnsupportedGraphError, VerificationError
from dispfx.plan.budget import Budget
from dispfx.report import load_report
from dispfx.run import onnx_folder
from dispfx.run.rehearsal import rehearse
from dispfx.source import Source
from tests.api.conftest import Watcher
from tests.api.plain import build_decoder
from tests.command_line import run
from tests.tiny_transformers import tiny_transformer


def made(folder: Path, dtype: torch.dtype) -> Path:
    """Write a pruned folder of a tiny decoder, without an ONNX model."""
    model = tiny_transformer("llama").to(dtype)
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
    api.apply(model, plan, out=folder)
    return folder


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("single") / "out", torch.float32)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("half") / "out", torch.bfloat16)


def exported(folder: Path, tmp_path: Path, **options: Any) -> onnx.ModelProto:
    """Export a copy of a folder and return the model."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (written,) = api.export(copy, onnx=True, **options)
    return onnx.load(str(written / "model.onnx"))


@pytest.mark.slow
@pytest.mark.parametrize("positions", [17, 46])
def test_a_decoder_of_few_positions_is_traced_within_them_and_keeps_its_cache(tmp_path: Path, positions: int):
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "vocab_size": 96,
        "bos_token_id": 1,
        "eos_token_id": 1,
    }
    model = GPT2LMHeadModel(GPT2Config(n_positions=positions, **sizes)).eval()
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)

    report = api.apply(model, plan, out=tmp_path / "out", export="onnx")

    inputs = onnx.load(str(tmp_path / "out/onnx/model.onnx")).graph.input
    assert "past_key_values.0.key" in [value.name for value in inputs]
    assert report.onnx_without_cache is None
    lines = [line for line in report.verify if line.name == "onnx with cache = checkpoint"]
    assert len(lines) == 4 and max(sum(line.shape[1:]) for line in lines) <= positions
    again = api.verify(tmp_path / "out")
    assert again and all(line.holds for line in again)


def test_an_onnx_model_without_a_cache_is_told_everywhere_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The decoder takes a cache that is no keys and values."""
    model = tiny_transformer("lfm2")
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
    folder = tmp_path / "out"
    observer = Watcher()

    report = api.apply(model, plan, out=folder, export="onnx", observer=observer)

    reason = report.onnx_without_cache
    assert reason is not None and "cache must be keys and values" in reason
    assert load_report(folder / "report.json") == report
    assert any("no KV cache" in note and reason in note for note in observer.notes)
    for name in ("README.md", "report.html"):
        assert "no KV cache" in (folder / name).read_text(), name
    shutil.rmtree(folder / "onnx")
    observer.notes.clear()
    api.export(folder, onnx=True, observer=observer)
    assert len(observer.notes) == 1 and reason in observer.notes[0]


class InverseErrorFunction(torch.nn.Module):
    """An activation without an ONNX form."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.erfinv(0.9 * torch.tanh(x))


def test_a_folder_with_an_operation_that_onnx_lacks_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(ACT2FN, "inverse_error_function", InverseErrorFunction)
    config: Any = tiny_transformer("llama").config
    config.hidden_act = "inverse_error_function"
    model = type(tiny_transformer("llama"))(config).eval()
    folder = tmp_path / "out"
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
    api.apply(model, plan, out=folder)
    before = sorted(folder.rglob("*"))

    result = run("export", folder, "--onnx")

    assert result.exit_code == 2 and "no ONNX form for aten.erfinv" in result.stderr
    assert "test_onnx_folder.py:" in result.stderr
    assert sorted(folder.rglob("*")) == before
    with pytest.raises(UnsupportedGraphError, match="erfinv"):
        rehearse(source_of(folder, model), dispfx.capture(model), Budget(0.4), "onnx")


def source_of(folder: Path, model: Any) -> Source:
    return Source(model, None, model.config, str(folder), "folder")


def domains(model: onnx.ModelProto) -> set[str]:
    return {node.domain for node in model.graph.node}


def test_no_padding_and_fusions_go_together(single: Path, tmp_path: Path):
    model = exported(single, tmp_path, no_padding=True, ort_fusions=True)

    masks = [node.input[3] for node in model.graph.node if node.op_type == "Attention"]
    assert masks and not any(masks)
    assert "com.microsoft" in domains(model)
    # The folder's own verification sees that the mask is not read, and asks nothing about padding.
    lines = [line for line in api.verify(tmp_path / "copy") if line.name.startswith("onnx")]
    assert len(lines) == 6 and all(line.holds for line in lines)


def test_fusions_that_do_not_verify_are_left_out(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = legalize.fuse_skip_norms

    def wrong(model: Any) -> int:
        fused = right(model)
        for node in model.graph:
            if node.domain == "com.microsoft":
                node.replace_input_with(1, node.inputs[0])
        return fused

    monkeypatch.setattr(legalize, "fuse_skip_norms", wrong)
    model = exported(single, tmp_path, ort_fusions=True)

    assert domains(model) == {""}


def test_a_model_that_computes_something_else_is_not_written(
    single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    right = onnx_folder.cached_model

    def wrong(*args: Any, **options: Any) -> Any:
        model = right(*args, **options)
        node = next(node for node in model.graph if node.op_type == "Sigmoid")
        node.op_type = "Tanh"
        return model

    monkeypatch.setattr(onnx_folder, "cached_model", wrong)
    with pytest.raises(VerificationError, match="onnx"):
        exported(single, tmp_path)

    assert not (tmp_path / "copy" / "onnx").exists()
    assert not [path for path in (tmp_path / "copy").iterdir() if "partial" in path.name]


def test_index_add_scatters_with_an_older_operator_set(single: Path, tmp_path: Path):
    model = exported(single, tmp_path, write="index-add", opset=18)

    assert {entry.domain: entry.version for entry in model.opset_import}[""] == 18
    operators = {node.op_type for node in model.graph.node}
    assert "ScatterND" in operators or "ScatterElements" in operators
    assert "RMSNormalization" not in operators


def test_index_add_is_refused_in_half_precision(half: Path, tmp_path: Path):
    with pytest.raises(UnsupportedGraphError, match="no adding scatter for bfloat16"):
        exported(half, tmp_path, write="index-add")
    assert not (tmp_path / "copy" / "onnx").exists()


@pytest.mark.parametrize("opset", [17, 25])
def test_an_operator_set_that_cannot_be_written_is_refused(single: Path, tmp_path: Path, opset: int):
    with pytest.raises(UnsupportedGraphError, match=f"at least 18 and at most 24, and {opset} was given"):
        exported(single, tmp_path, opset=opset)
    assert not (tmp_path / "copy" / "onnx").exists()


def test_a_bfloat16_model_is_verified_as_its_float32_twin(half: Path, tmp_path: Path):
    model = exported(half, tmp_path)

    types = {tensor.data_type for tensor in model.graph.initializer}
    assert onnx.TensorProto.BFLOAT16 in types
    lines = [line for line in api.verify(tmp_path / "copy") if line.name.startswith("onnx")]
    # Three whole texts, three with a cache, one padded; at the tolerance of float32.
    assert len(lines) == 7 and all(line.holds and line.tolerance == 1e-4 for line in lines)


def mixed() -> nn.Module:
    """Return a decoder of no class of transformers with norms in float32 and all else in bfloat16."""
    torch.manual_seed(0)
    model = build_decoder().bfloat16()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.float()
            module.register_forward_pre_hook(lambda norm, given: (given[0].float(),))
            module.register_forward_hook(lambda norm, given, x: x.bfloat16())
    return model


@pytest.mark.parametrize("build", [lambda: build_decoder().bfloat16(), mixed])
def test_a_graph_in_bfloat16_is_verified_as_its_float32_twin(build: Any, tmp_path: Path):
    model = build()
    plan = dispfx.Plan.random(dispfx.capture(model), 0.4, seed=1, align=4)
    report = api.apply(model, plan, out=tmp_path / "out", export="onnx")
    lines = [line for line in report.verify if line.name.startswith("onnx")]
    assert lines and all(line.holds and line.tolerance == 1e-4 for line in lines)
    assert {line.name for line in report.verify} >= {
        "lowered = gated in float32",
        "gather-add = lowered in float32",
    }
