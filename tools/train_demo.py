"""Trains the embedded decoder from nothing and writes its folder: weights, tokenizer and card.

    python tools/train_demo.py --out FOLDER              the published run
    python tools/train_demo.py --out FOLDER --smoke      the same path in seconds, learning nothing

The text comes from `dispfx.demo.grammar`: tokenizer, training and held-out text have seeds of their own,
and no training text is used twice.  The length of a run is its number of steps, never a time.  One step in
eight sees sequences of the whole context: a decoder that sees them only at the end forgets what it had
learned.

Shapes: B sequences, T tokens, V vocabulary.
"""

import argparse
import math
import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from demo_folder import card, perplexity, unigram_perplexity, write_folder
from demo_tokens import VOCABULARY, encode_shard, train_tokenizer, training_shards, wrap
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from dispfx.demo.probe import skill_probe

CONTEXT = 1024
CARD_WINDOW = 256
# More tokens than any line has.
LONGEST_LINE = 500

# Seeds below FIRST_TRAINING_SEED are never trained on, so users and tests may take any of them.
FIRST_TRAINING_SEED = 2**32
HELD_OUT_SEED = 1
PROBE_SEED = 2


@dataclass(frozen=True)
class Settings:
    steps: int = 8000
    batch: int = 64
    length: int = 128
    long_every: int = 8
    lr: float = 3e-3
    warmup: int = 200
    weight_decay: float = 0.1
    seed: int = 0
    device: str = "cpu"
    workers: int = 0
    shard_characters: int = 2_000_000
    held_out_characters: int = 1_000_000
    samples: int = 500

    def shape(self, step: int) -> tuple[int, int]:
        """(B, T) of a step; with a batch divisible by eight, every step has the same number of tokens."""
        if (step + 1) % self.long_every:
            return self.batch, self.length
        return max(1, self.batch * self.length // CONTEXT), CONTEXT

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a hundredth."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.lr * (0.01 + 0.99 * (1 + math.cos(math.pi * done)) / 2)


SMOKE = {
    "steps": 20,
    "batch": 8,
    "warmup": 5,
    "shard_characters": 100_000,
    "held_out_characters": 20_000,
    "samples": 10,
}


def batches(
    shards: Iterator[np.ndarray], newline: int, settings: Settings
) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and targets (B, T) of each step, cut from one stream of tokens."""
    stream = np.empty(0, dtype=np.uint16)
    for step in range(settings.steps):
        rows, length = settings.shape(step)
        while len(stream) <= rows * length + LONGEST_LINE:
            stream = np.concatenate([stream, next(shards)])
        starts_B = window_starts(stream, newline, rows, length)
        windows = torch.from_numpy(stream[starts_B[:, None] + np.arange(length + 1)].astype(np.int64))
        stream = stream[rows * length :]
        yield windows[:, :-1], windows[:, 1:]


def window_starts(stream: np.ndarray, newline: int, rows: int, length: int) -> np.ndarray:
    """Places of `rows` windows; every second one moves on to the beginning of a line.

    A prompt begins with a line, but one window in twenty would: the first place, where a decoder tends to
    forget which token stands there, needs more practice.
    """
    starts_B = np.arange(rows) * length
    lines = np.flatnonzero(stream == newline) + 1
    starts_B[::2] = lines[np.searchsorted(lines, starts_B[::2])]
    return starts_B


def build_decoder(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).float()


def train(decoder: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings) -> float:
    """Trains in place; returns the mean loss of the last steps, in nats a token."""
    nn.Module.to(decoder, settings.device).train()
    if settings.device == "cpu":
        # Twice as fast in bfloat16 as the fused attention, on heads as narrow as these.
        decoder.set_attn_implementation("eager")
    matrices = [parameter for parameter in decoder.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in decoder.parameters() if parameter.ndim == 1]
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        lr=settings.lr,
        betas=(0.9, 0.95),
        fused=True,
    )
    # Runs of different seeds read different texts; no run comes near a million shards.
    first_seed = FIRST_TRAINING_SEED + settings.seed * 1_000_000
    shards = training_shards(tokenizer, first_seed, settings.shard_characters, settings.workers)
    newline = tokenizer.encode("\n").ids[0]
    started = time.perf_counter()
    losses: deque[Tensor] = deque(maxlen=50)
    for step, (inputs_BT, targets_BT) in enumerate(batches(shards, newline, settings)):
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate(step)
        losses.append(train_step(decoder, optimizer, inputs_BT, targets_BT, settings.device))
        if (step + 1) % max(1, settings.steps // 40) == 0:
            report_progress(step + 1, settings, float(torch.stack(list(losses)).mean()), started)
    return float(torch.stack(list(losses)).mean())


def train_step(
    decoder: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs_BT: Tensor,
    targets_BT: Tensor,
    device: str,
) -> Tensor:
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        logits_BTV = decoder(inputs_BT.to(device), use_cache=False).logits
    loss = functional.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.to(device).flatten())
    loss.backward()
    nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def report_progress(step: int, settings: Settings, loss: float, started: float) -> None:
    if not math.isfinite(loss):
        sys.exit(f"train_demo: the loss is {loss} at step {step}; try a lower --lr than {settings.lr:g}")
    seconds = time.perf_counter() - started
    speed = step * settings.batch * settings.length / seconds
    done = f"step {step}/{settings.steps}"
    print(f"{done}  loss {loss:.4f}  {speed:,.0f} tokens/s  {seconds:.0f} s", flush=True)


def measure(
    decoder: LlamaForCausalLM, tokenizer: Tokenizer, settings: Settings
) -> tuple[dict[str, float], dict[str, object]]:
    """Skills, and the card's other figures, on text that training never saw."""
    decoder.eval()
    serialized = tokenizer.to_str()
    held_out = encode_shard(serialized, HELD_OUT_SEED, settings.held_out_characters)
    seen = encode_shard(serialized, FIRST_TRAINING_SEED, settings.shard_characters)
    figures = {
        "held_out_seed": HELD_OUT_SEED,
        "window": CARD_WINDOW,
        "held_out_tokens": len(held_out),
        "unigram_tokens": len(seen),
        "unigram": unigram_perplexity(seen, held_out, VOCABULARY),
        "perplexity": perplexity(decoder, held_out, CARD_WINDOW, settings.device),
        "perplexity_long": perplexity(decoder, held_out, CONTEXT, settings.device),
        "probe_seed": PROBE_SEED,
    }
    skills = skill_probe(decoder, wrap(tokenizer, CONTEXT), PROBE_SEED, settings.samples)
    for name, figure in {**figures, **skills}.items():
        print(f"{name}: {figure:,.4g}", flush=True)
    return skills, figures


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="folder to write; it appears whole or not at all"
    )
    parser.add_argument("--replace", action="store_true", help="replace the folder if it exists")
    parser.add_argument("--smoke", action="store_true", help="tiny sizes, to try the script in seconds")
    parser.add_argument("--steps", type=int, help=f"training steps (default {Settings.steps})")
    parser.add_argument("--batch", type=int, help=f"sequences a step (default {Settings.batch})")
    parser.add_argument("--lr", type=float, help=f"highest learning rate (default {Settings.lr:g})")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and training text (default 0)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--workers", type=int, help="processes that make text (default: none on a CPU)")
    return parser.parse_args(arguments)


def settings_from(options: argparse.Namespace) -> Settings:
    chosen = {name: getattr(options, name) for name in ("steps", "batch", "lr", "seed", "device", "workers")}
    if options.workers is None:
        chosen["workers"] = os.cpu_count() if options.device.startswith("cuda") else 0
    given = {name: value for name, value in chosen.items() if value is not None}
    return Settings(**{**(SMOKE if options.smoke else {}), **given})


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    settings = settings_from(options)
    if options.out.exists() and not options.replace:
        sys.exit(f"train_demo: {options.out} exists; name another folder or pass --replace")
    if settings.steps < 1 or settings.batch < 1 or settings.seed < 0:
        sys.exit("train_demo: --steps and --batch must be at least 1, and --seed at least 0")
    started = time.perf_counter()
    tokenizer = train_tokenizer(settings.shard_characters)
    decoder = build_decoder(settings.seed)
    print(f"{decoder.num_parameters():,} parameters, {settings}", flush=True)
    loss = train(decoder, tokenizer, settings)
    seconds = time.perf_counter() - started
    skills, figures = measure(decoder, tokenizer, settings)
    tokens = settings.steps * settings.batch * settings.length
    figures |= {**asdict(settings), "tokens": tokens, "loss": loss, "seconds": seconds}
    write_folder(options.out, decoder, wrap(tokenizer, CONTEXT), card(decoder, skills, figures))
    print(f"wrote {options.out}", flush=True)


if __name__ == "__main__":
    main()
