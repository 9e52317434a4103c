"""Measures a trained demo decoder and writes its folder, with the card that records the figures.

Used by `train_demo.py`.  Shapes: W windows, B windows a pass, T tokens, V vocabulary.
"""

import json
import math
import platform
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import transformers
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

TOKENS_A_PASS = 16_384

CARD = """---
license: apache-2.0
pipeline_tag: text-generation
---
# The embedded decoder

A decoder of {parameters:,} parameters, made by `tools/train_demo.py` for trying dispfx without a download.
It speaks only the small language of `dispfx/demo/grammar.py`: lines to copy, facts to recall, small sums,
counts, agreement and brackets. No text from elsewhere was used, and it knows nothing else.

- Llama, tied embeddings, float32, context {config.max_position_embeddings}
- {config.num_hidden_layers} layers, width {config.hidden_size}, inner width {config.intermediate_size}
- {config.num_attention_heads} query heads, {config.num_key_value_heads} key-value heads, of width
  {config.head_dim}
- Byte-level BPE of {config.vocab_size} tokens, trained on text of the same grammar

## Training
- {steps:,} steps, {tokens:,} tokens, no text twice, final loss {loss:.3f}
- Sequences of {length} tokens, of {config.max_position_embeddings} in one step of {long_every}
- AdamW, learning rate {lr:g} with a warm-up of {warmup} steps and a cosine, bfloat16 autocast, seed {seed}
- {seconds:.0f} seconds on {hardware}, torch {torch}, transformers {transformers}

## Measured on held-out text
`generate_text({held_out_seed}, {held_out_characters})`: {held_out_tokens:,} tokens in windows that
do not overlap, float32.

| model | perplexity |
|---|---|
| this decoder, windows of {window} tokens | {perplexity:.3f} |
| this decoder, windows of {config.max_position_embeddings} tokens | {perplexity_long:.3f} |
| unigram model, add-one counts of {unigram_tokens:,} training tokens | {unigram:.1f} |

Much of what is left is chance by design: nobody can guess the next random letter. So skills are also
measured, with `skill_probe`, seed {probe_seed}, {samples} lines per skill. A line is correct if the whole
greedy answer is correct.

| skill | correct |
|---|---|
{skill_rows}
"""


@torch.no_grad()
def perplexity(decoder: LlamaForCausalLM, tokens: np.ndarray, context: int, device: str) -> float:
    """exp of the mean loss over windows of `context` tokens; the first token of a window is not predicted."""
    windows_WT = torch.from_numpy(tokens[: len(tokens) // context * context].astype(np.int64)).view(
        -1, context
    )
    loss = 0.0
    for window_BT in windows_WT.split(max(1, TOKENS_A_PASS // context)):
        logits_BTV = decoder(window_BT.to(device), use_cache=False).logits[:, :-1]
        targets_BT = window_BT[:, 1:].to(device)
        loss += float(
            functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="sum")
        )
    return math.exp(loss / (len(windows_WT) * (context - 1)))


def unigram_perplexity(train_tokens: np.ndarray, tokens: np.ndarray, vocabulary: int) -> float:
    """Perplexity of `tokens` under the add-one frequencies of `train_tokens`."""
    counts = np.bincount(train_tokens, minlength=vocabulary) + 1.0
    return float(np.exp(-np.log(counts / counts.sum())[tokens].mean()))


def card(decoder: LlamaForCausalLM, skills: Mapping[str, float], figures: Mapping[str, object]) -> str:
    device = str(figures["device"])
    return CARD.format(
        parameters=decoder.num_parameters(),
        config=decoder.config,
        hardware=torch.cuda.get_device_name()
        if device.startswith("cuda")
        else f"a CPU ({platform.machine()})",
        torch=torch.__version__,
        transformers=transformers.__version__,
        skill_rows="\n".join(f"| {skill} | {share:.3f} |" for skill, share in skills.items()),
        **figures,
    )


def write_folder(out: Path, decoder: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Writes weights, tokenizer and card to a temporary folder, then renames it to `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=out.parent, prefix=f".{out.name}."))
    fresh, replaced = scratch / "fresh", scratch / "replaced"
    try:
        decoder.float().cpu().save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        name_tokenizer_class(fresh / "tokenizer_config.json")
        (fresh / "model.safetensors").chmod(0o644)
        (fresh / "README.md").write_text(text, encoding="utf-8")
        if out.exists():
            out.rename(replaced)
        fresh.rename(out)
    finally:
        if replaced.exists() and not out.exists():
            replaced.rename(out)
        shutil.rmtree(scratch)


def name_tokenizer_class(path: Path) -> None:
    """Gives the tokenizer the class name that every version of transformers and its other readers know."""
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
