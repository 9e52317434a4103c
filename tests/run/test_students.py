"""What a decoder predicts comes as the input of its head, so that logits are never whole."""

from typing import Any

import pytest
import torch

import dispfx
from dispfx.capturing.module_capture import module_logits
from dispfx.compiler.pipelines import for_recovery
from dispfx.compiler.programs import lower_program
from dispfx.errors import DispfxError
from dispfx.learning.divergence import stream_distance
from dispfx.run.students import adapted_student, graph_predictions, has_stream
from dispfx.settings.recovery_settings import RecoverySettings
from tests.programs import relative_error
from tests.tiny_transformers import tiny_transformer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_transformers_decoder_predicts_by_its_head(family: str):
    model: Any = tiny_transformer(family).requires_grad_(False)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    found = adapted_student(model).predictions(ids)
    assert found.x_BTD.shape[-1] == model.get_output_embeddings().in_features
    torch.testing.assert_close(found.head(found.x_BTD), module_logits(model, ids))


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "neox"])
def test_the_streams_of_a_decoder_and_of_what_was_cut_from_it_are_compared_value_by_value(family: str):
    model = tiny_transformer(family).requires_grad_(False)
    program = dispfx.capture(model)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    dense = graph_predictions(for_recovery(program, 5), with_stream=True)(ids)
    hidden = model(ids, output_hidden_states=True).hidden_states
    # The last one of transformers is behind the final norm.
    for layer, wanted in enumerate(hidden[1:-1], start=1):
        assert any(relative_error(value, wanted) < 1e-5 for value in dense.stream), layer
    assert len(dense.stream) >= len(hidden)

    little, half = (lower_program(program, dispfx.Plan.random(program, ratio, 0)) for ratio in (1e-3, 0.5))
    near, far = (graph_predictions(for_recovery(one, 5), with_stream=True)(ids) for one in (little, half))
    distances = [stream_distance(dense, one).item() for one in (dense, near, far)]
    assert distances[0] == 0.0 and distances == sorted(distances) and distances[2] > 0.01
    assert has_stream(program) and has_stream(half)


def test_a_narrower_stream_is_not_compared():
    program = dispfx.capture(tiny_transformer("llama"), select="before-norm")
    assert not has_stream(program)
    settings = RecoverySettings()
    assert settings.fitted(64, stream=False).stream_weight == 0.0 != settings.fitted(64).stream_weight
    with pytest.raises(DispfxError, match="residual stream of both decoders, and this one is narrower"):
        RecoverySettings(stream_weight=2.0).fitted(64, stream=False)
    with pytest.raises(DispfxError, match="adapters are trained without it"):
        RecoverySettings(train="lora", stream_weight=2.0).fitted(64)
