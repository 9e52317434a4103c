"""A replay that does not compute is recognised by the comparison that every replay has to pass."""

from contextlib import nullcontext
from unittest.mock import MagicMock

import pytest
import torch

from dispfx.api import capture
from dispfx.fast_decoder.comparison import compare, sample_masks
from dispfx.fast_decoder.preparation import PlainDecoder
from dispfx.ir.pipeline import Pipeline
from dispfx.kernels import recording as kernels
from dispfx.kernels.recording import ReplayedLoss
from dispfx.passes.insert_gates import InsertGates
from tests.plain_decoders import FORMS, build
from tests.programs import token_ids


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Let graphs capture nothing, as on a device that is not current; return where streams were made."""
    asked: list[object] = []
    monkeypatch.setattr(kernels, "_capture_stream", lambda device: torch.cuda.Stream(device))
    for name in ("current_stream", "synchronize", "empty_cache", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, MagicMock())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: asked.append(device) or MagicMock(device=device))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(
        torch.cuda, "graph", lambda graph, pool, stream: nullcontext(asked.append(stream.device))
    )
    return asked


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_graph_that_is_empty_does_not_pass_for_one_that_computes(dtype: torch.dtype, devices: list[object]):
    program = capture(build(FORMS["pre-norm"], layers=2).to(dtype))
    decoder, ids = PlainDecoder(Pipeline([InsertGates()]).run(program)), token_ids(2, 24)
    masks = sample_masks((sum(decoder.sizes),), ids.device)
    found = compare(ReplayedLoss(decoder.loss, ids, masks), decoder.loss, ids, masks, dtype, decoder.sizes)
    assert not found.holds
    assert devices == [ids.device] * 3, "warm-ups and graph are on the device of the ids"
