import collections
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, fx, nn
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from dispfx.capturing.module_capture import capture
from dispfx.deploy.onnx.exporting import OPSET, full_sequence_model
from dispfx.deploy.onnx.files import load_model, save_model
from dispfx.deploy.onnx.session import OnnxDecoder
from dispfx.errors import DataError, OutputError, UnsupportedGraphError
from dispfx.verification.equivalence import Verification, compare_decoders
from tests.deploy.conftest import WIDTH, tiny_llama

SAMPLE_BT = torch.zeros(3, 13, dtype=torch.int64)
# Sizes that no exporter was shown, a batch of one and a sequence of one among them.
SHAPES_BT = ((2, 9), (1, 17), (1, 1), (4, 60))
# float32 on another runtime: the order of sums differs, 2e-7 was seen.
TOLERANCE = 2e-6


class Branch(nn.Module):
    """A decoder with one more branch, whose read and write are spelled as lowering spells them."""

    read: Tensor
    kept: Tensor
    inverse: Tensor

    def __init__(self, write: str) -> None:
        super().__init__()
        self.model: PreTrainedModel = tiny_llama(num_hidden_layers=1)
        self.write = write
        self.linear = nn.Linear(7, 5)
        kept = torch.tensor([1, 2, 6, 9, 15])
        inverse = torch.full((WIDTH,), 5).index_copy(0, kept, torch.arange(5))
        self.register_buffer("read", torch.tensor([0, 2, 3, 5, 7, 8, 11], dtype=torch.int32))
        self.register_buffer("kept", kept.to(torch.int32))
        self.register_buffer("inverse", inverse.to(torch.int32))

    def forward(self, input_ids: Tensor) -> Tensor:
        x_BTD = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        y_BTK = self.linear(x_BTD.index_select(-1, self.read))
        if self.write == "index-add":
            x_BTD = x_BTD.index_add(-1, self.kept, y_BTK)
        else:
            x_BTD = x_BTD + nn.functional.pad(y_BTK, (0, 1)).index_select(-1, self.inverse)
        return self.model.lm_head(x_BTD)


def export_onnx(
    lowered: fx.GraphModule, path: Path, *, opset: int = OPSET, max_inline_bytes: int = 2**20
) -> None:
    save_model(full_sequence_model(lowered, SAMPLE_BT, opset=opset), path, max_inline_bytes=max_inline_bytes)


def compared(
    path: Path, reference: Callable[[Tensor], Tensor], tolerance: float, shapes: Any = ((2, 9), (1, 17))
) -> list[Verification]:
    decoder = OnnxDecoder(path)
    return compare_decoders(
        "onnx = lowered", reference, decoder, tolerance, vocabulary_size=40, shapes=shapes
    )


def graph_of(module: nn.Module) -> fx.GraphModule:
    return capture(module.eval(), vocabulary_size=40).graph_module


@pytest.fixture(scope="module")
def lowered() -> fx.GraphModule:
    return graph_of(Branch("gather-add"))


@pytest.fixture(scope="module")
def exported(lowered: fx.GraphModule, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("onnx") / "model.onnx"
    export_onnx(lowered, path, max_inline_bytes=0)
    return path


def operators(path: Path) -> collections.Counter[str]:
    return collections.Counter(node.op_type for node in onnx.load(path).graph.node)


def holds_everywhere(path: Path, reference: fx.GraphModule, tolerance: float = TOLERANCE) -> bool:
    lines = compared(path, reference, tolerance, SHAPES_BT)
    assert [line.shape for line in lines] == list(SHAPES_BT)
    return all(line.holds for line in lines)


def test_gather_add_becomes_a_gather_and_no_scatter(exported: Path, lowered: fx.GraphModule) -> None:
    assert holds_everywhere(exported, lowered)
    # One for the embedding, one a read, one a write.
    assert operators(exported)["Gather"] == 3
    assert not {"ScatterND", "ScatterElements"} & operators(exported).keys()


def test_index_add_becomes_an_adding_scatter(tmp_path: Path) -> None:
    lowered = graph_of(Branch("index-add"))
    export_onnx(lowered, tmp_path / "model.onnx")

    assert holds_everywhere(tmp_path / "model.onnx", lowered)
    scatters = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "ScatterND"]
    assert [[a.s for a in node.attribute if a.name == "reduction"] for node in scatters] == [[b"add"]]


def test_batch_and_sequence_have_their_names(exported: Path) -> None:
    graph = onnx.load(exported).graph

    def dims(value: onnx.ValueInfoProto) -> list[str | int]:
        return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]

    assert [(value.name, dims(value)) for value in graph.input] == [("input_ids", ["batch", "sequence"])]
    assert [(value.name, dims(value)) for value in graph.output] == [("logits", ["batch", "sequence", 40])]


def test_norms_attention_and_rotation_come_out_as_operators(exported: Path) -> None:
    assert {"Attention", "RMSNormalization", "RotaryEmbedding"} <= operators(exported).keys()


@pytest.mark.slow
def test_an_older_operator_set_computes_the_same(lowered: fx.GraphModule, tmp_path: Path) -> None:
    export_onnx(lowered, tmp_path / "model.onnx", opset=20)

    assert holds_everywhere(tmp_path / "model.onnx", lowered)
    assert "Attention" not in operators(tmp_path / "model.onnx")


@pytest.mark.slow
def test_learned_positions_and_layer_norms_export_too(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    lowered = graph_of(GPT2LMHeadModel(config))

    export_onnx(lowered, tmp_path / "model.onnx")

    assert holds_everywhere(tmp_path / "model.onnx", lowered)


@pytest.mark.slow
def test_half_precision_runs_on_the_cpu(tmp_path: Path) -> None:
    lowered = graph_of(Branch("gather-add").half())
    export_onnx(lowered, tmp_path / "model.onnx")

    # float16 carries 11 bits, and the two runtimes round at different places.
    assert holds_everywhere(tmp_path / "model.onnx", lowered, tolerance=1e-2)


@pytest.mark.parametrize("opset", [1, 17, 99])
def test_an_operator_set_that_the_exporter_does_not_write_is_refused(
    lowered: fx.GraphModule, tmp_path: Path, opset: int
) -> None:
    with pytest.raises(UnsupportedGraphError, match="`opset` must be at least 18 and at most 24"):
        export_onnx(lowered, tmp_path / "model.onnx", opset=opset)

    assert os.listdir(tmp_path) == []


def test_tied_weights_are_stored_once_beside_the_model(exported: Path, lowered: fx.GraphModule) -> None:
    sizes = {file.name: file.stat().st_size for file in exported.parent.iterdir()}
    weights = sum(parameter.nbytes for parameter in lowered.parameters())

    assert sizes.keys() == {"model.onnx", "model.onnx.data"}
    # Entries are aligned, which costs less than another embedding of 40 × 16 would.
    assert weights <= sizes["model.onnx.data"] < weights + 40 * 16 * 4


def test_a_model_is_found_again_when_its_folder_moves(
    exported: Path, lowered: fx.GraphModule, tmp_path: Path
) -> None:
    for file in exported.parent.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())

    ids_BT = torch.arange(18).reshape(2, 9)
    assert torch.equal(OnnxDecoder(tmp_path / "model.onnx")(ids_BT), OnnxDecoder(exported)(ids_BT))


def test_the_file_holds_no_path_of_this_machine(exported: Path) -> None:
    content = exported.read_bytes()

    for path in (Path(__file__).parent, Path(torch.__file__).parent):
        assert str(path).encode() not in content


def test_a_model_is_written_in_silence_and_the_graph_stays_as_it_was(
    lowered: fx.GraphModule, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = {name: tensor.clone() for name, tensor in lowered.state_dict().items()}
    code = lowered.code

    export_onnx(lowered, tmp_path / "model.onnx")
    OnnxDecoder(tmp_path / "model.onnx")(SAMPLE_BT)

    assert capfd.readouterr() == ("", "")
    # A small model is one file.
    assert os.listdir(tmp_path) == ["model.onnx"]
    assert lowered.code == code
    assert all(torch.equal(before[name], tensor) for name, tensor in lowered.state_dict().items())


def test_verification_finds_another_function(exported: Path, lowered: fx.GraphModule) -> None:
    lines = compared(exported, lambda ids: lowered(ids) * 1.0001, 1e-5)

    assert not any(line.holds for line in lines)
    assert all(line.max_rel_error == pytest.approx(1e-4, rel=0.05) for line in lines)


@pytest.mark.parametrize("location", ["../model.onnx.data", "/etc/passwd", "", "a/../../b", "link/b"])
def test_weights_outside_the_folder_are_refused(exported: Path, tmp_path: Path, location: str) -> None:
    model = onnx.load(exported, load_external_data=False)
    entries = [entry for tensor in model.graph.initializer for entry in tensor.external_data]
    entry = next(entry for entry in entries if entry.key == "location")
    entry.value = location
    (tmp_path / "link").symlink_to("/etc")
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(DataError, match="in the folder of the model"):
        OnnxDecoder(tmp_path / "model.onnx")


def test_weights_outside_the_folder_are_found_inside_a_subgraph_too(tmp_path: Path) -> None:
    tensor = onnx.helper.make_tensor("w", onnx.TensorProto.FLOAT, [1], [0.0])
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../w")
    branch = onnx.helper.make_graph([], "branch", [], [], [tensor])
    node = onnx.helper.make_node("If", ["c"], ["y"], then_branch=branch, else_branch=branch)
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "graph", [], []))
    (tmp_path / "model.onnx").write_bytes(model.SerializeToString())

    with pytest.raises(DataError, match="in the folder of the model"):
        OnnxDecoder(tmp_path / "model.onnx")


def test_a_damaged_or_missing_model_is_a_data_error(exported: Path, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(exported.read_bytes()[:5000])
    (tmp_path / "text.onnx").write_text("not a model")

    for name in ("model.onnx", "text.onnx", "none.onnx"):
        with pytest.raises(DataError):
            OnnxDecoder(tmp_path / name)


@pytest.mark.parametrize("content", [b"", b"x\n"])
def test_an_empty_model_is_a_data_error_that_names_the_file(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(DataError) as found:
        load_model(path)
    assert found.value.where == str(path)


def test_a_folder_that_is_gone_is_an_output_error(lowered: fx.GraphModule, tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        export_onnx(lowered, tmp_path / "gone" / "model.onnx")
