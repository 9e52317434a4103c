"""`dispfx export DIR --onnx --quantize int8|int4`: what is written, checked, measured and refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper

from dispfx import api
from dispfx.deploy.onnx import quantize
from dispfx.errors import VerificationError
from dispfx.report import load_report
from tests.api.conftest import Watcher
from tests.command_line import run
from tests.quantized_folders import copied, made, tokens
from tests.tiny_transformers import tiny_transformer


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with its ONNX model and one of 4 bits; do not change it."""
    folder = made(tmp_path_factory.mktemp("quantized") / "out", tiny_transformer("llama"))
    data = tokens(tmp_path_factory.mktemp("text") / "text.safetensors", 400)
    written = api.export(folder, onnx=True, quantize="int4", data=str(data))
    assert written == [folder / "onnx", folder / "onnx-int4"]
    return folder


def logits_of(path: Path, ids: np.ndarray) -> np.ndarray:
    """Run a model on whole texts (B, T) with onnxruntime alone."""
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    batch, count = ids.shape
    feed = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.broadcast_to(np.arange(count), ids.shape),
    }
    for one in session.get_inputs():
        if one.name.startswith("past_key_values"):
            feed[one.name] = np.zeros((batch, one.shape[1], 0, one.shape[3]), np.float32)
    given = {one.name: feed[one.name] for one in session.get_inputs()}
    return np.asarray(session.run(["logits"], given)[0])


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def test_the_folder_opens_as_the_one_of_the_float_model(quantized: Path):
    names = {path.name for path in (quantized / "onnx").iterdir()}
    assert names == {path.name for path in (quantized / "onnx-int4").iterdir()}
    for name in ("genai_config.json", "config.json"):
        assert (quantized / "onnx-int4" / name).read_bytes() == (quantized / "onnx" / name).read_bytes()
    model = onnx.load(str(quantized / "onnx-int4/model.onnx"))
    packed = [node for node in model.graph.node if node.op_type == "MatMulNBits"]
    widths = [at.i for node in packed for at in node.attribute if at.name == "K"]
    assert len(packed) == 15 and any(width % 2 for width in widths)
    assert {node.op_type for node in model.graph.node}.isdisjoint({"MatMul", "Gemm"})


def test_every_layer_has_4_bits_and_the_head_8(quantized: Path):
    model = onnx.load(str(quantized / "onnx-int4/model.onnx"))

    bits = {
        node.output[0]: at.i
        for node in model.graph.node
        for at in node.attribute
        if node.op_type == "MatMulNBits" and at.name == "bits"
    }
    assert {name for name, count in bits.items() if count == 8} == {"logits"}
    assert sorted(bits.values()) == [4] * 14 + [8]


def test_verify_checks_rounding_cache_padding_and_digests(quantized: Path):
    lines = api.verify(quantized)

    names = [line.name for line in lines if line.name.startswith("onnx-int4")]
    assert names.count("onnx-int4 rounds onnx") == names.count("onnx-int4 stays near onnx") == 1
    assert names.count("onnx-int4 = dequantized") == 3
    assert names.count("onnx-int4 with cache = dequantized") == 4
    assert names.count("onnx-int4, integer products = dequantized") == 3
    assert names.count("onnx-int4, integer products with cache = dequantized") == 1
    assert all(line.holds for line in lines)


def test_report_card_and_page_give_the_sizes(quantized: Path):
    (found,) = load_report(quantized / "report.json").quantized

    assert found.name == "int4" and found.left == () and found.rounded_by == "text.safetensors"
    assert found.quality is not None and found.quality.protocol.text == "text.safetensors"
    assert found.bytes_before == (quantized / "onnx/model.onnx").stat().st_size
    assert found.bytes_after == (quantized / "onnx-int4/model.onnx").stat().st_size
    assert found.bytes_after < 0.8 * found.bytes_before
    assert "onnx-int4/model.onnx" in found.files
    for name in ("README.md", "report.html"):
        assert "ONNX model, int4" in (quantized / name).read_text(), name
    assert "ONNX model, int4" in load_report(quantized / "report.json")._repr_html_()
    assert run("report", quantized).exit_code == 0
    assert "ONNX model, int4" in (quantized / "report.html").read_text()


@pytest.mark.parametrize("name", ["up", "scale", "norm"])
def test_verify_finds_a_changed_model(quantized: Path, tmp_path: Path, name: str):
    folder = copied(quantized, tmp_path)
    path = folder / "onnx-int4/model.onnx"
    model = onnx.load(str(path))
    ends = {"up": "_Q4", "scale": "_scales", "norm": "norm.weight"}
    tensor = next(one for one in model.graph.initializer if one.name.endswith(ends[name]))
    numbers = numpy_helper.to_array(tensor).copy()
    numbers.flat[0] = numbers.flat[0] + 8
    tensor.CopyFrom(numpy_helper.from_array(numbers, tensor.name))
    onnx.save(model, str(path))

    failed = {line.name for line in api.verify(folder) if not line.holds}

    assert "onnx-int4/model.onnx = report" in failed
    # One number of 4 bits may be several steps from its original; the digest finds it.
    assert ("onnx-int4 rounds onnx" in failed) == (name == "norm")


def test_a_wrong_packing_is_found_and_nothing_appears(
    quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = copied(quantized, tmp_path)
    right = quantize._in_bytes

    def wrong(codes: np.ndarray, bits: int) -> np.ndarray:
        data = right(codes, bits)
        return data >> 4 | data << 4 if bits == 4 and codes.ndim == 3 else data

    monkeypatch.setattr(quantize, "_in_bytes", wrong)
    shutil.rmtree(folder / "onnx-int4")
    before = (folder / "report.json").read_bytes()

    with pytest.raises(VerificationError, match="onnx-int4 stays near onnx"):
        api.export(folder, onnx=True, quantize="int4", data=str(tokens(tmp_path / "text.safetensors")))

    assert not [path for path in folder.iterdir() if path.name.startswith("onnx-")]
    assert (folder / "report.json").read_bytes() == before


def test_a_model_that_is_there_is_quantized_as_it_is_and_measured(quantized: Path, tmp_path: Path):
    folder = copied(quantized, tmp_path)
    before = (folder / "onnx/model.onnx").read_bytes()
    text = tokens(tmp_path / "text.safetensors")
    observer = Watcher()

    written = api.export(
        folder, onnx=True, quantize="int8", eval_data=str(text), eval_windows=1, observer=observer
    )

    assert written == [folder / "onnx-int8"]
    assert (folder / "onnx/model.onnx").read_bytes() == before
    first, second = load_report(folder / "report.json").quantized
    assert (first.name, second.name) == ("int4", "int8")
    quality = second.quality
    assert quality is not None and (quality.protocol.windows, quality.protocol.tokens) == (1, 79)
    # The same figures from onnxruntime and numpy alone.
    ids = _ids(text)
    p, q = (
        log_softmax(logits_of(folder / name / "model.onnx", ids)[0, :-1]) for name in ("onnx", "onnx-int8")
    )
    assert quality.kl == pytest.approx((np.exp(p) * (p - q)).sum(-1).mean(), rel=1e-3)
    assert 0 < quality.kl < 0.01
    for found, expected in ((quality.perplexity_before, p), (quality.perplexity_after, q)):
        likelihood = expected[np.arange(79), ids[0, 1:]].mean()
        assert found == pytest.approx(np.exp(-likelihood), rel=1e-5)
    assert any("KL per token, ONNX int8" in note for note in observer.notes)
    assert (folder / "README.md").read_text().count("## Quantized") == 1
    assert all(line.holds for line in api.verify(folder))


def _ids(text: Path) -> np.ndarray:
    from safetensors.numpy import load_file

    return load_file(text)["tokens"].astype(np.int64)[None]


def test_what_makes_no_sense_is_refused(quantized: Path, tmp_path: Path):
    folder = copied(quantized, tmp_path)

    unknown = run("export", folder, "--onnx", "--quantize", "int3")
    assert unknown.exit_code == 2 and '"int8", "int4"' in unknown.stderr
    nowhere = run("export", folder, "--onnx", "--quantize", "fp8")
    assert nowhere.exit_code == 2 and "leave out --onnx" in nowhere.stderr
    again = run("export", folder, "--onnx", "--quantize", "int4")
    assert again.exit_code == 2 and "onnx-int4" in again.stderr
    # Options on how the float model is written cannot apply to one that is there.
    other = run("export", folder, "--onnx", "--quantize", "int8", "--no-padding")
    assert other.exit_code == 2 and "must not exist yet" in other.stderr
    shutil.rmtree(folder / "onnx-int4")
    blind = run("export", folder, "--onnx", "--quantize", "int4")
    assert blind.exit_code == 2 and "int4 needs a text" in blind.stderr and "--data" in blind.stderr
    assert not [path for path in folder.iterdir() if path.name.startswith("onnx-")]


def test_json_output_gives_the_figures(quantized: Path, tmp_path: Path):
    folder = copied(quantized, tmp_path)
    text = tokens(tmp_path / "text.safetensors")

    found = run("export", folder, "--onnx", "--quantize", "int8", "--eval-data", text, "--json")

    assert found.exit_code == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["files"] == [str(folder / "onnx-int8")]
    (one,) = document["quantized"]
    assert one["bytes_after"] < one["bytes_before"] and one["quality"]["kl"] > 0


@pytest.mark.slow
def test_a_decoder_in_half_precision_runs_on_the_cpu_in_float32(tmp_path: Path):
    folder = made(tmp_path / "out", tiny_transformer("llama").to(torch.bfloat16), 4)

    api.export(folder, onnx=True, quantize="int4", data=str(tokens(tmp_path / "text.safetensors")))

    ids = np.arange(12, dtype=np.int64).reshape(2, 6)
    logits = logits_of(folder / "onnx-int4/model.onnx", ids)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()
    assert all(line.holds for line in api.verify(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gpt2", "lfm2"])
def test_products_with_biases_and_a_model_without_a_cache_are_quantized(tmp_path: Path, kind: str):
    folder = made(tmp_path / "out", tiny_transformer(kind))

    api.export(folder, onnx=True, quantize="int4", data=str(tokens(tmp_path / "text.safetensors")))

    model = onnx.load(str(folder / "onnx-int4/model.onnx"))
    bits = [at.i for node in model.graph.node for at in node.attribute if at.name == "bits"]
    # Layers that a text has rounded, also those that keep their weights transposed; and the head.
    assert bits.count(4) >= 7 and bits.count(8) >= 1
    cached = any(value.name.startswith("past") for value in model.graph.input)
    assert cached == (kind == "gpt2")
    lines = [line for line in api.verify(folder) if line.name.startswith("onnx-int4")]
    assert len(lines) == (13 if cached else 8) and all(line.holds for line in lines)
