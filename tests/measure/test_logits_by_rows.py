"""Logits a few tokens at a time: the numbers of whole logits, without their memory."""

from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

import dispfx
from dispfx.capturing.module_capture import module_logits
from dispfx.quality import logits_by_rows
from dispfx.quality.agreement import compare_on_text
from dispfx.quality.logits_by_rows import by_rows
from dispfx.quality.perplexity import TextFacts, perplexity

VOCABULARY, TOKENS = 97, 40
SMALL: dict[str, Any] = dict(
    vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1,
)  # fmt: skip


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SMALL)).eval()


def softcapped() -> nn.Module:
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=0.1)).eval()


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=2)).eval()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logits_by_rows, "CHUNK_BYTES", 4 * VOCABULARY * 6)


def text() -> Tensor:
    return torch.randint(VOCABULARY, (3 * TOKENS,), generator=torch.Generator().manual_seed(1))


@cache
def forms(build: Any) -> dict[str, Any]:
    model = build()
    graph = dispfx.capture(model).graph_module
    return {"_Replayed": partial(module_logits, model), "_Cut": graph, "_Whole": lambda ids: model(ids)}


@pytest.mark.parametrize("build", [llama, softcapped, gpt2])
@pytest.mark.parametrize("bos", [(), (1,), tuple(range(9))])
@pytest.mark.parametrize("batch_size", [1, 2])
@torch.no_grad()
def test_every_form_of_a_decoder_has_the_perplexity_of_its_whole_logits(
    build: Any, bos: tuple[int, ...], batch_size: int, monkeypatch
):
    asked: dict[str, Any] = dict(context=TOKENS, text=TextFacts(bos=bos), batch_size=batch_size)
    decoders = forms(build)
    whole = {name: perplexity(decoder, text(), **asked) for name, decoder in decoders.items()}
    monkeypatch.setattr(logits_by_rows, "CHUNK_BYTES", 4 * VOCABULARY * 6)
    for name, decoder in decoders.items():
        assert type(by_rows(decoder, text()[None, :TOKENS])).__name__ == name
        found = perplexity(decoder, text(), **asked)
        assert found.value == pytest.approx(whole[name].value, rel=1e-6)
        assert found.protocol == whole[name].protocol


@torch.no_grad()
def test_small_logits_are_those_of_the_decoder_bit_for_bit():
    model = llama()
    way = by_rows(model, text()[None, :TOKENS])
    assert type(way).__name__ == "_Whole"
    ids_BT = text()[None, :TOKENS]
    assert torch.equal(torch.cat(list(way.chunks(ids_BT)), 1), model(ids_BT).logits)


@torch.no_grad()
def test_the_body_of_a_module_runs_once_and_the_module_stays_as_it_was(small_chunks):
    model: Any = llama()
    runs: list[int] = []
    handle = model.base_model.layers[0].register_forward_hook(lambda *given: runs.append(1))
    before = {name: dict(module.__dict__) for name, module in model.named_modules()}
    ids_BT = text()[None, :TOKENS]
    way = by_rows(model, ids_BT)
    runs.clear()
    chunks = [chunk.shape[1] for chunk in way.chunks(ids_BT)]
    assert chunks == [6] * 6 + [4] and len(runs) == 1
    handle.remove()
    for name, module in model.named_modules():
        assert (
            "forward" not in module.__dict__ and not module._forward_pre_hooks and not module._forward_hooks
        )
        assert set(module.__dict__) == set(before[name])


class Mixing(LlamaForCausalLM):
    """Takes the mean over all tokens off the logits: chunks of tokens would be another decoder."""

    def forward(self, *given: Any, **options: Any) -> Any:
        output: Any = super().forward(*given, **options)
        output.logits = output.logits - output.logits.mean(1, keepdim=True)
        return output


@torch.no_grad()
def test_a_decoder_whose_logits_hang_on_other_tokens_is_read_whole(small_chunks):
    torch.manual_seed(0)
    model = Mixing(LlamaConfig(**SMALL)).eval()
    ids_BT = text()[None, :TOKENS]
    way = by_rows(model, ids_BT)
    assert torch.equal(torch.cat(list(way.chunks(ids_BT)), 1), model(ids_BT).logits)


@torch.no_grad()
@pytest.mark.parametrize("bos", [(), tuple(range(9))])
def test_the_agreement_is_that_of_whole_logits(bos: tuple[int, ...], monkeypatch):
    first, other = forms(llama), forms(softcapped)
    facts = TextFacts(bos=bos)
    whole = compare_on_text(first["_Whole"], other["_Whole"], text(), context=TOKENS, text=facts).agreement
    monkeypatch.setattr(logits_by_rows, "CHUNK_BYTES", 4 * VOCABULARY * 6)
    for one in first.values():
        for two in other.values():
            found = compare_on_text(one, two, text(), context=TOKENS, text=facts).agreement
            assert found.kl_nats == pytest.approx(whole.kl_nats, rel=1e-6)
            assert (found.tokens, found.top1) == (whole.tokens, whole.top1)


class Largest(TorchDispatchMode):
    """Keeps the bytes of the largest tensor of logits that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = function(*args, **(kwargs or {}))
        for one in tree_leaves(output):
            if isinstance(one, Tensor) and one.shape[-1:] == (VOCABULARY,):
                self.bytes = max(self.bytes, one.numel() * one.element_size())
        return output


@pytest.mark.parametrize("form", ["_Replayed", "_Cut"])
def test_no_logits_of_a_large_vocabulary_are_ever_whole(form: str, small_chunks):
    decoder = forms(softcapped)[form]
    context, chunk = 3 * TOKENS, logits_by_rows.CHUNK_BYTES
    with Largest() as seen:
        perplexity(decoder, text(), context=context)
        # Whole, they are twenty times as large.  KL is computed in float64.
        assert chunk <= seen.bytes < 6 * chunk < 4 * VOCABULARY * context
        compare_on_text(decoder, decoder, text(), context=context)
        assert seen.bytes < 6 * chunk
