"""Every way to compute the loss is compared before it is used, and what does not hold is left out."""

import pytest
import torch
from torch import Tensor

from dispfx.errors import DispfxError
from dispfx.training import bodies
from dispfx.training.decoder import TrainingDecoder
from dispfx.training.preparation import Compute, PlainDecoder, prepare
from tests.programs import token_ids
from tests.training.gated import plain_and_fast

IDS = token_ids(2, 24)


def loss_of(prepared, plain) -> tuple[Tensor, Tensor]:
    masks = torch.ones(sum(site.size for site in plain.sites))
    return prepared.loss(IDS, masks), PlainDecoder(plain).loss(IDS, masks)


def test_on_a_cpu_layers_run_as_they_are():
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, IDS, Compute())
    assert isinstance(prepared.decoder, TrainingDecoder)
    assert not prepared.decoder.compiled and not prepared.decoder.checkpointing and prepared.notes == ()
    torch.testing.assert_close(*loss_of(prepared, plain))


def test_what_was_asked_for_is_done_and_said(monkeypatch):
    monkeypatch.setattr(bodies, "BACKEND", "aot_eager")
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, IDS, Compute(compile="on", checkpointing="on"))
    assert isinstance(prepared.decoder, TrainingDecoder)
    assert prepared.decoder.compiled and prepared.decoder.checkpointing
    assert "checkpointing" in prepared.notes[0] and "1 kind(s) of layers compiled" in prepared.notes[1]


def test_short_memory_means_checkpoints_unless_they_are_off():
    plain, fast = plain_and_fast()
    for compute, expected in ((Compute(), True), (Compute(checkpointing="off"), False)):
        prepared = prepare(plain, fast, IDS, compute, short_of_memory=True)
        assert isinstance(prepared.decoder, TrainingDecoder) and prepared.decoder.checkpointing == expected


def test_layers_that_compute_something_else_are_not_used():
    plain, fast = plain_and_fast()
    wrong = next(iter(fast.outline.kinds)) if fast.outline else None
    assert wrong is not None
    silu = next(node for node in wrong.graph.nodes if "silu" in str(node.target))
    silu.target = torch.ops.aten.relu.default
    prepared = prepare(plain, fast, IDS, Compute())
    assert isinstance(prepared.decoder, PlainDecoder)
    assert "differ from the ordinary capture" in prepared.notes[0]
    assert torch.equal(*loss_of(prepared, plain))


def test_a_compiler_with_wrong_gradients_is_not_used(monkeypatch):
    def wrong(graph, inputs):
        def call(*operands):
            # The right values with gradients that are three times too large.
            return tuple(value + 2 * (value - value.detach()) for value in graph.forward(*operands))

        return call

    monkeypatch.setattr(bodies, "BACKEND", wrong)
    torch._dynamo.reset()
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, IDS, Compute(compile="on"))
    assert isinstance(prepared.decoder, TrainingDecoder) and not prepared.decoder.compiled
    assert "compiled ones differ from plain ones" in prepared.notes[-1]


def test_a_compiler_that_fails_is_an_error_only_where_it_was_asked_for(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(bodies, "BACKEND", broken)
    torch._dynamo.reset()
    plain, fast = plain_and_fast()
    with pytest.raises(DispfxError, match="cannot be compiled"):
        prepare(plain, fast, IDS, Compute(compile="on"))


def test_a_decoder_without_an_outline_runs_whole():
    plain, fast = plain_and_fast()
    fast.outline = None
    prepared = prepare(plain, fast, IDS, Compute())
    assert isinstance(prepared.decoder, PlainDecoder)
    with pytest.raises(DispfxError, match="layers, which cannot be told apart"):
        prepare(plain, fast, IDS, Compute(checkpointing="on"))
