"""Every way to compute the loss is compared before it is used, and what does not hold is left out."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from dispfx.errors import DispfxError
from dispfx.fast_decoder import preparation
from dispfx.fast_decoder.comparison import Comparison
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.preparation import PlainDecoder, TrialBatch, _Preparation, prepare
from dispfx.settings import ComputeSettings
from tests.programs import token_ids
from tests.training.gated import plain_and_fast

IDS = token_ids(2, 24)


def loss_of(prepared, plain) -> tuple[Tensor, Tensor]:
    masks = torch.ones(sum(site.size for site in plain.sites))
    return prepared.loss(IDS, masks), PlainDecoder(plain).loss(IDS, masks)


def test_on_a_cpu_layers_run_as_they_are():
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, TrialBatch(IDS), ComputeSettings())
    assert isinstance(prepared.decoder, TrainingDecoder)
    assert not prepared.decoder.compiled and not prepared.decoder.checkpointing and prepared.notes == ()
    torch.testing.assert_close(*loss_of(prepared, plain))


def test_what_was_asked_for_is_done_and_said(monkeypatch):
    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", "aot_eager")
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, TrialBatch(IDS), ComputeSettings(compile="on", checkpointing="on"))
    assert isinstance(prepared.decoder, TrainingDecoder)
    assert prepared.decoder.compiled and prepared.decoder.checkpointing
    assert "checkpointing" in prepared.notes[0] and "1 kind(s) of layers compiled" in prepared.notes[1]


def test_short_memory_means_checkpoints_unless_they_are_off():
    plain, fast = plain_and_fast()
    for compute, expected in ((ComputeSettings(), True), (ComputeSettings(checkpointing="off"), False)):
        prepared = prepare(plain, fast, TrialBatch(IDS), compute, short_of_memory=True)
        assert isinstance(prepared.decoder, TrainingDecoder) and prepared.decoder.checkpointing == expected


def test_layers_that_compute_something_else_are_not_used():
    plain, fast = plain_and_fast()
    wrong = next(iter(fast.outline.kinds)) if fast.outline else None
    assert wrong is not None
    silu = next(node for node in wrong.graph.nodes if "silu" in str(node.target))
    silu.target = torch.ops.aten.relu.default
    prepared = prepare(plain, fast, TrialBatch(IDS), ComputeSettings())
    assert isinstance(prepared.decoder, PlainDecoder)
    assert "differ from the ordinary capture" in prepared.notes[0]
    assert torch.equal(*loss_of(prepared, plain))


def test_a_compiler_with_wrong_gradients_is_not_used(monkeypatch):
    def wrong(graph, inputs):
        def call(*operands):
            # The right values with gradients that are three times too large.
            return tuple(value + 2 * (value - value.detach()) for value in graph.forward(*operands))

        return call

    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", wrong)
    torch._dynamo.reset()
    plain, fast = plain_and_fast()
    prepared = prepare(plain, fast, TrialBatch(IDS), ComputeSettings(compile="on"))
    assert isinstance(prepared.decoder, TrainingDecoder) and not prepared.decoder.compiled
    assert "compiled ones differ from plain ones" in prepared.notes[-1]


def test_a_compiler_that_fails_is_an_error_only_where_it_was_asked_for(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr("dispfx.fast_decoder.decoder.BACKEND", broken)
    torch._dynamo.reset()
    plain, fast = plain_and_fast()
    with pytest.raises(DispfxError, match="cannot be compiled"):
        prepare(plain, fast, TrialBatch(IDS), ComputeSettings(compile="on"))


@pytest.mark.parametrize(
    ("dtype", "gradient", "noise", "expected"),
    [
        (torch.bfloat16, 0.2, None, [True]),
        (torch.bfloat16, 0.3, 0.3, [False, True]),
        (torch.bfloat16, 0.3, 0.1, [False, False]),
        (torch.float32, 0.3, None, [False]),
    ],
)
def test_what_does_not_hold_in_half_precision_is_held_against_rounding_on_every_rank(
    monkeypatch, dtype, gradient, noise, expected
):
    asked = []

    def beside(found, reference, ids_BT, masks, sizes):
        assert noise is not None, "rounding was not to be asked for"
        return replace(found, rounding=Comparison(0.0, noise, 0.9, dtype))

    monkeypatch.setattr(preparation, "beside_rounding", beside)
    plain, fast = plain_and_fast()
    made = _Preparation(
        plain,
        fast,
        TrialBatch(IDS),
        ComputeSettings(),
        print,
        lambda holds: asked.append(holds) or holds,
        None,
    )
    made.plain = SimpleNamespace(dtype=dtype)  # type: ignore[assignment]
    found = Comparison(0.0, gradient, 0.9, dtype)
    good, told = made._holds(found, made.fast, IDS, made.masks)  # type: ignore[arg-type]
    assert asked == expected and good is expected[-1]
    assert told is not None and (told.rounding is not None) is (len(expected) > 1)
    asked.clear()
    assert made._holds(None, made.fast, IDS, made.masks) == (False, None)  # type: ignore[arg-type]
    assert len(asked) == (1 if dtype == torch.float32 else 2), "as often as on ranks where there is something"


def test_a_decoder_without_an_outline_runs_whole():
    plain, fast = plain_and_fast()
    fast.outline = None
    prepared = prepare(plain, fast, TrialBatch(IDS), ComputeSettings())
    assert isinstance(prepared.decoder, PlainDecoder)
    with pytest.raises(DispfxError, match="layers, which cannot be told apart"):
        prepare(plain, fast, TrialBatch(IDS), ComputeSettings(checkpointing="on"))
