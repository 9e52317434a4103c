"""The rewrites of an ONNX graph one by one, on graphs of a few nodes, and what they leave alone."""

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

from dispfx.deploy.onnx.rotary import FormRotations
from dispfx.deploy.onnx.skip_norms import fuse_skip_norms
from dispfx.deploy.onnx.zeros import replace_pads
from tests.deploy.onnx.cached_models import exported

HEADER = '<ir_version: 10, opset_import: ["" : 23]>\n'


def model_of(text: str) -> ir.Model:
    """Return a model with the shapes of all values."""
    model = ir.from_onnx_text(HEADER + text)
    for node in model.graph:
        assert all(value.shape is not None and value.dtype is not None for value in node.outputs), node
    return model


def operators(model: ir.Model) -> list[str]:
    return [node.op_type for node in model.graph]


def computed(model: ir.Model, **inputs: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (result,) = session.run(None, inputs)
    return np.asarray(result)


ROTATION = """
rotation (float[B, 4, T, 8] x, float[B, T, 4] angles) => (float[B, 4, T, 8] z)
<
    int64[1] one = {1}, int64[1] zero = {0}, int64[1] middle = {MIDDLE}, int64[1] end = {8},
    int64[1] last = {-1}, float number = {1.0},
    float[B, T, 8] both, float[B, T, 8] cosine, float[B, T, 8] scaled, float[B, T, 8] sine,
    float[B, 1, T, 8] cosines, float[B, 1, T, 8] sines, float[B, 4, T, 4] first, float[B, 4, T, 4] second,
    float[B, 4, T, 4] negated, float[B, 4, T, 8] swapped, float[B, 4, T, 8] plain, float[B, 4, T, 8] turned,
    float[B, 4, T, 8] y
>
{
    both = Concat <axis: int = -1> (angles, SECOND)
    cosine = Cos (both)
    scaled = Mul (cosine, number)
    sine = Sin (both)
    cosines = Unsqueeze (scaled, one)
    sines = Unsqueeze (sine, one)
    first = Slice (x, zero, middle, last)
    second = Slice (x, middle, end, last)
    negated = Neg (second)
    swapped = Concat <axis: int = -1> (negated, first)
    plain = Mul (x, cosines)
    turned = Mul (swapped, sines)
    y = Add (plain, turned)
    z = Neg (y)
}
"""


def rotation(second: str = "angles", middle: int = 4) -> ir.Model:
    return model_of(ROTATION.replace("SECOND", second).replace("MIDDLE", str(middle)))


def test_a_rotation_of_halves_is_one_operator_that_reads_half_a_table():
    """Rules 1 and 2 of rotary."""
    model = rotation()
    assert FormRotations(model.graph).run() == 1
    (operator,) = (node for node in model.graph if node.op_type == "RotaryEmbedding")
    tables = [value.producer() for value in operator.inputs[1:] if value is not None]
    assert [table.op_type for table in tables if table is not None] == ["Slice", "Slice"]
    assert [list(value.shape or ())[2] for value in operator.inputs[1:] if value is not None] == [4, 4]
    assert operator.attributes["num_heads"].as_int() == 4


def test_layers_share_the_halves_of_their_tables():
    """Rule 2 of rotary."""
    rotations = exported("llama").nodes("RotaryEmbedding")
    assert len(rotations) == 4 and len({tuple(node.inputs[1:3]) for node in rotations}) == 1


OTHER_ANGLES = ROTATION.replace("float[B, T, 4] angles)", "float[B, T, 4] angles, float[B, T, 4] others)")


@pytest.mark.parametrize(
    "text",
    [
        OTHER_ANGLES.replace("SECOND", "others").replace("MIDDLE", "4"),
        ROTATION.replace("SECOND", "angles").replace("MIDDLE", "2"),
        ROTATION.replace("SECOND", "angles").replace("MIDDLE", "4").replace("Neg (second)", "Abs (second)"),
    ],
    ids=["halves of two tables", "another middle", "nothing is negated"],
)
def test_another_rotation_stays_as_it_is(text: str):
    """Rules 1 and 3 of rotary."""
    model = model_of(text)
    before = operators(model)
    assert FormRotations(model.graph).run() == 0 and operators(model) == before


NORM = """
norm (float[B, T, 8] a, float[SHAPE] b, float[8] w) => (float[B, T, 8] y, float[B, T, 8] total)
{
    total = Add (a, b)
    y = RMSNormalization <axis: int = AXIS> (total, w)
}
"""


def norm(shape: str = "B, T, 8", axis: int = -1, scale: str = "float[8]") -> ir.Model:
    text = NORM.replace("SHAPE", shape).replace("AXIS", str(axis)).replace("float[8] w", f"{scale} w")
    return model_of(text)


def test_an_addition_and_its_norm_are_one_operator_of_onnx_runtime():
    """Rules 1 and 2 of skip_norms."""
    model = norm()
    assert fuse_skip_norms(model) == 1
    assert operators(model) == ["SkipSimplifiedLayerNormalization"]


@pytest.mark.parametrize(
    "model",
    [norm(shape="8"), norm(shape="1, T, 8")],
    ids=["a bias is added", "one text is added to all"],
)
def test_an_addition_that_broadcasts_stays_apart(model: ir.Model):
    """Rule 1 of skip_norms."""
    assert fuse_skip_norms(model) == 0 and operators(model) == ["Add", "RMSNormalization"]


@pytest.mark.parametrize(
    "model",
    [norm(axis=1, scale="float[T, 8]"), norm(scale="float16[8]")],
    ids=["over tokens too", "a scale of another type"],
)
def test_a_norm_of_another_kind_stays_apart(model: ir.Model):
    """Rule 2 of skip_norms."""
    assert fuse_skip_norms(model) == 0 and operators(model) == ["Add", "RMSNormalization"]


PADDED = """
padded (float[2, 3] x) => (float[2, 5] y)
<int64[4] amounts = {AMOUNTS}, float filler = {FILLER}, int64[5] inverse = {0, 3, 1, 3, 2}, float[2, 4] wide>
{
    wide = Pad (x, amounts, filler)
    y = Gather <axis: int = 1> (wide, inverse)
}
"""


def padded(amounts: str = "0, 0, 0, 1", filler: str = "0.0") -> ir.Model:
    return model_of(PADDED.replace("AMOUNTS", amounts).replace("FILLER", filler))


def test_a_pruned_feature_is_zero_whatever_stands_beside_it():
    """Rules 1 and 2 of onnx.zeros: the last kept feature is not finite, and that does not spread."""
    x = np.array([[1, 2, np.inf], [4, 5, np.nan]], dtype=np.float32)
    expected = computed(padded(), x=x)
    model = padded()
    assert replace_pads(model.graph) == 1
    np.testing.assert_array_equal(computed(model, x=x), expected)
    assert expected[0].tolist() == [1, 0, 2, 0, np.inf]


@pytest.mark.parametrize(
    ("amounts", "filler"),
    [("0, 1, 0, 0", "0.0"), ("0, 0, 0, 2", "0.0"), ("0, 0, 1, 1", "0.0"), ("0, 0, 0, 1", "1.0")],
    ids=["before the first", "two columns", "rows too", "of ones"],
)
def test_another_padding_stays_as_it_is(amounts: str, filler: str):
    """Rule 1 of onnx.zeros."""
    model = padded(amounts, filler)
    assert replace_pads(model.graph) == 0 and operators(model) == ["Pad", "Gather"]


def test_attention_with_heads_that_were_split_otherwise_takes_its_cache_alone():
    """Rule 4 of onnx.attention: queries, keys and values come out of one product here."""
    nodes = exported("gpt2").nodes("Attention")
    assert len(nodes) == 2
    for layer, node in enumerate(nodes):
        assert "q_num_heads" not in node.attributes
        assert [value.name for value in node.inputs[4:] if value is not None] == [
            f"past_key_values.{layer}.key",
            f"past_key_values.{layer}.value",
        ]


def test_ranges_begin_where_they_count_from():
    """Rule 2 of mask."""
    found = exported("llama")
    ranges = found.nodes("Range")
    added = [value.producer() for node in found.nodes("Add") for value in node.inputs if value is not None]
    assert any(node.inputs[0] is not None and node.inputs[0].producer() is not None for node in ranges)
    assert not [node for node in added if node is not None and node.op_type == "Range"]
