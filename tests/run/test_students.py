"""What a decoder predicts comes as the input of its head, so that logits are never whole."""

from typing import Any

import pytest
import torch

from dispfx.capturing.module_capture import module_logits
from dispfx.run.students import adapted_student
from tests.tiny_transformers import tiny_transformer


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_transformers_decoder_predicts_by_its_head(family: str):
    model: Any = tiny_transformer(family).requires_grad_(False)
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    found = adapted_student(model).predictions(ids)
    assert found.x_BTD.shape[-1] == model.get_output_embeddings().in_features
    torch.testing.assert_close(found.head(found.x_BTD), module_logits(model, ids))
