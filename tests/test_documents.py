"""Documents of one sequence get the loss and the gradients that each has alone, or the decoder is refused."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dispfx.capturing.document_masks import positions_in_documents
from dispfx.compiler.pipelines import for_learning
from dispfx.compiler.programs import capture, lower, separate_documents
from dispfx.errors import CaptureError, DispfxError
from dispfx.fast_decoder.comparison import sample_masks, value_and_gradient
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.preparation import PlainDecoder
from dispfx.ir.pipeline import Pipeline
from dispfx.learning.objective import NO_TARGET, next_tokens
from dispfx.learning.text import TokenBatches
from dispfx.passes.insert_gates import InsertGates
from dispfx.run.mask_learning import learn
from dispfx.settings.learning_settings import LearnSettings
from tests.plain_decoders import FORMS, build
from tests.tiny_transformers import VOCABULARY, tiny_transformer

END = 7
LENGTHS = (9, 1, 6, 8)


def documents() -> list[Tensor]:
    """Return documents (1, T), each with its end but the last, which the sequence cuts off."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for length in LENGTHS:
        ids = torch.randint(END + 1, VOCABULARY, (1, length), generator=generator)
        ids[0, -1] = END
        found.append(ids)
    found[-1][0, -1] = END + 1
    return found


def test_positions_start_again_behind_an_end():
    ids = torch.tensor([[3, 4, END, 5, END, END, 6], [END, 1, 2, 3, 4, 5, 6]])
    assert positions_in_documents(ids, END).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_no_token_is_asked_of_another_document():
    ids = torch.tensor([[3, 4, END, 5, 6]])
    assert next_tokens(ids, END).tolist() == [[4, END, NO_TARGET, 6, NO_TARGET]]
    assert next_tokens(ids).tolist() == [[4, END, 5, 6, NO_TARGET]]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "mixtral"])
def test_packed_documents_have_the_loss_and_the_gradients_of_each_alone(name):
    model = tiny_transformer(name)
    program = capture(model)
    twin = separate_documents(model, program, END)
    gated = Pipeline([InsertGates()]).run(twin.clone())
    packed = torch.cat(documents(), 1)
    fast = TrainingDecoder(for_learning(gated, packed.shape[1]))
    alone = PlainDecoder(Pipeline([InsertGates()]).run(program.clone()))
    masks = sample_masks((sum(site.size for site in program.sites),), torch.device("cpu"))
    counts = [ids.shape[1] - 1 for ids in documents()]
    each = [
        value_and_gradient(alone.loss, ids, masks)
        for ids, count in zip(documents(), counts, strict=True)
        if count
    ]
    weights = torch.tensor([count for count in counts if count]) / sum(counts)
    expected, of_expected = (
        sum(weight * value for weight, value in zip(weights, of, strict=True))
        for of in zip(*each, strict=True)
    )
    for decoder in (fast, PlainDecoder(gated)):
        value, gradient = value_and_gradient(decoder.loss, packed, masks)
        torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(gradient, of_expected, rtol=1e-4, atol=1e-6)
    # Joined, they see each other.
    assert abs(float(value - alone.loss(packed, masks))) > 1e-4


def test_a_plan_learned_on_documents_cuts_the_ordinary_program():
    model = tiny_transformer("llama")
    program = capture(model)
    settings = LearnSettings(steps=3, seq_len=24, batch_size=2, packing="documents")
    tokens = torch.cat(documents() * 40, 1)[0]
    text = TokenBatches.split(tokens, seq_len=24, batch_size=2)
    with pytest.raises(DispfxError, match=r"dispfx\.api\.separate_documents"):
        learn(program, text, 0.3, settings=settings)
    twin = separate_documents(model, program, END)
    with pytest.raises(DispfxError, match="scores features once"):
        learn(twin, text, 0.3, settings=replace(settings, method="magnitude"))
    plan = learn(twin, text, 0.3, settings=settings)
    assert plan.fingerprint == program.fingerprint
    smaller = lower(program, plan)
    assert sum(p.numel() for p in smaller.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_decoder_without_positions_is_refused_by_name():
    model = build(FORMS["pre-norm"])
    with pytest.raises(CaptureError, match=r"takes position_ids.*\n?.*Decoder"):
        separate_documents(model, capture(model), END)


def test_a_decoder_that_mixes_neighbours_all_the_same_is_refused():
    model = tiny_transformer("lfm2")
    with pytest.raises(CaptureError, match="documents cannot be kept apart: the logits"):
        separate_documents(model, capture(model), END)
