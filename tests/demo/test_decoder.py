"""The committed decoder: an ordinary folder that loads offline and has really learned."""

import math
import re
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer

from dispfx.demo import DECODER_FOLDER
from dispfx.demo.grammar import SKILLS, draw_lines, generate_text
from dispfx.demo.probe import encode_lines, skill_probe

# Training used seeds of 2**32 and above, the card seeds 1 and 2.
FRESH_SEED = 90_001
CONTEXT = 256
# Measured: 4.13 against 137 for the unigram model.
PERPLEXITY_BOUND = 4.6
# Recall stands lower (measured: 0.86): `who has` and `how looks` are answered hardly better than by chance.
SKILL_BOUNDS = {"copy": 0.97, "recall": 0.75, "arithmetic": 0.95, "counting": 0.95, "agreement": 0.95}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DECODER_FOLDER, local_files_only=True)


@pytest.fixture(scope="module")
def decoder() -> Any:
    return AutoModelForCausalLM.from_pretrained(DECODER_FOLDER, local_files_only=True).eval()


@pytest.fixture(scope="module")
def windows_WT(tokenizer: Any) -> torch.Tensor:
    ids = torch.tensor(tokenizer.encode(generate_text(FRESH_SEED, 60_000), add_special_tokens=False))
    return ids[: len(ids) // CONTEXT * CONTEXT].view(-1, CONTEXT)


@pytest.fixture(scope="module")
def perplexity(decoder: Any, windows_WT: torch.Tensor) -> float:
    with torch.no_grad():
        logits_WTV = decoder(windows_WT).logits[:, :-1]
    return math.exp(functional.cross_entropy(logits_WTV.flatten(0, 1), windows_WT[:, 1:].flatten()).item())


def test_the_folder_is_small_and_complete():
    files = [path for path in DECODER_FOLDER.rglob("*") if path.is_file()]
    expected = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "README.md"}
    assert expected <= {path.name for path in files}
    assert sum(path.stat().st_size for path in files) <= 4 * 2**20


def test_the_decoder_has_the_sizes_of_the_demo(decoder: Any):
    config = decoder.config
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (128, 4, 384)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 32)
    assert config.tie_word_embeddings and config.max_position_embeddings >= 1024
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}
    assert 0.8e6 < decoder.num_parameters() < 1e6


@pytest.mark.parametrize(
    "text",
    [
        "copy abc = abc .\n",
        "  two  spaces , and a stop .",
        "Grüße — 日本語 🙂\t\r\n\x00end",
        generate_text(6, 5000),
    ],
)
def test_the_tokenizer_gives_any_text_back(tokenizer: Any, text: str):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert max(ids) < 512


def test_the_tokenizer_adds_no_tokens_of_its_own(tokenizer: Any):
    text = generate_text(8, 500)
    assert tokenizer.encode(text) == tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer("many cup ->")["input_ids"] == tokenizer.encode("many cup ->", add_special_tokens=False)


@pytest.mark.parametrize("skill", SKILLS)
def test_prompt_and_answer_are_split_as_the_whole_line_is(tokenizer: Any, skill: str):
    lines = draw_lines(skill, FRESH_SEED, 50)
    assert len(lines) == 50
    for line in lines:
        ids_BT, _ = encode_lines(tokenizer, [line])
        assert ids_BT[0].tolist() == tokenizer.encode(line.prompt + line.answer, add_special_tokens=False)


def test_perplexity_on_fresh_text_is_far_below_that_of_a_unigram_model(
    perplexity: float, tokenizer: Any, windows_WT: torch.Tensor
):
    seen = torch.tensor(tokenizer.encode(generate_text(FRESH_SEED + 1, 200_000), add_special_tokens=False))
    counts_V = torch.bincount(seen, minlength=512) + 1.0
    unigram = math.exp(-(counts_V / counts_V.sum()).log()[windows_WT[:, 1:]].mean().item())
    assert perplexity < PERPLEXITY_BOUND
    assert perplexity < unigram / 25


def test_the_card_tells_the_perplexity_that_is_measured(perplexity: float):
    card = (DECODER_FOLDER / "README.md").read_text(encoding="utf-8")
    told = re.search(r"this decoder, windows of 256 tokens \| ([\d.]+) \|", card)
    assert told
    # 24,000 tokens here and 406,000 there: a standard error of about 1% in the mean loss.
    assert perplexity == pytest.approx(float(told[1]), rel=0.05)


def test_every_skill_was_learned(decoder: Any, tokenizer: Any):
    told = skill_probe(decoder, tokenizer, FRESH_SEED, 100)
    missed = {skill: told[skill] for skill, bound in SKILL_BOUNDS.items() if told[skill] < bound}
    assert set(told) == set(SKILL_BOUNDS) and missed == {}


def test_generation_continues_a_prompt_with_its_answer(decoder: Any, tokenizer: Any):
    line = draw_lines("copy", FRESH_SEED, 1)[0]
    prompt = torch.tensor([tokenizer.encode(line.prompt, add_special_tokens=False)])
    answer = tokenizer.encode(line.answer, add_special_tokens=False)
    ids_BT = decoder.generate(prompt, max_new_tokens=len(answer), do_sample=False)
    assert tokenizer.decode(ids_BT[0]) == line.prompt + line.answer
