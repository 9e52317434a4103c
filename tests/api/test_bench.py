"""bench: the folder's decoder beside the dense one, and what it refuses."""

from pathlib import Path

import pytest

import dispfx
from dispfx.api import bench
from dispfx.api.opening import Opening
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.plan import Plan
from dispfx.measure.speed_row import SpeedRow
from tests.api.conftest import Compiled
from tests.tiny_transformers import tiny_transformer


@pytest.fixture(scope="module")
def pruned_folder(tmp_path_factory: pytest.TempPathFactory, decoder_folder: Path) -> Path:
    """A transformers decoder, pruned at random and written."""
    model = Opening(str(decoder_folder)).open().model
    plan = Plan.random(dispfx.capture(model), 0.4, seed=0)
    out = tmp_path_factory.mktemp("bench") / "out"
    dispfx.api.apply(str(decoder_folder), plan, out=out, export="none")
    return out


def test_every_step_is_timed_dense_and_pruned(pruned_folder: Path, decoder_folder: Path):
    seen: list[SpeedRow] = []
    benched = bench(
        pruned_folder,
        dense=str(decoder_folder),
        batches=(1, 3),
        prompts=(5,),
        pasts=(4, 9),
        modes=("eager",),
        on_row=seen.append,
    )
    assert list(benched.rows) == seen
    assert [tuple(row.shape) for row in seen] == [
        (1, 5, 0), (3, 5, 0), (1, 1, 4), (3, 1, 4), (1, 1, 9), (3, 1, 9),
    ]  # fmt: skip
    for row in seen:
        assert row.note == "" and row.dense is not None and row.pruned is not None and row.speedup is not None
        assert row.dense.seconds > 0 < row.pruned.seconds and 1.0 < row.bound < 1 / 0.6
        assert row.dense.least_seconds <= row.dense.seconds
    assert "40.0% of the layers' weights removed" in benched.facts["parameters"]


def test_without_a_dense_model_its_class_is_timed_with_random_weights(pruned_folder: Path):
    benched = bench(pruned_folder, batches=(1,), prompts=(4,), pasts=(3,), modes=("eager",))
    assert len(benched.rows) == 2 and all(row.speedup for row in benched.rows)
    assert benched.facts["dense"] == "the same class with random weights"


def test_a_dense_model_of_other_shapes_is_refused(pruned_folder: Path):
    with pytest.raises(PlanMismatchError, match="shapes"):
        bench(pruned_folder, dense=tiny_transformer("llama"), batches=(1,), prompts=(4,), pasts=(3,))


def test_a_length_that_the_decoder_cannot_read_is_refused(pruned_folder: Path):
    with pytest.raises(DataError, match="2049 tokens"):
        bench(pruned_folder, prompts=(2049,))
    with pytest.raises(DataError, match="2049 tokens"):
        bench(pruned_folder, pasts=(2048,))


@pytest.mark.slow
def test_onnx_models_of_both_decoders_are_timed(pruned_folder: Path):
    seen: list[SpeedRow] = []
    benched = bench(pruned_folder, batches=(1,), prompts=(4,), pasts=(3,), runtime="onnx", on_row=seen.append)
    assert list(benched.rows) == seen and [tuple(row.shape) for row in seen] == [(1, 4, 0), (1, 1, 3)]
    assert all(row.speedup and row.speedup > 0 and row.note == "" for row in seen)


def test_a_folder_with_a_graph_alone_is_refused(compiled: Compiled):
    with pytest.raises(OutputError, match="holds a graph alone"):
        bench(compiled.path, batches=(1,), prompts=(4,), pasts=(3,))
