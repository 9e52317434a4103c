"""Trains a small decoder of another form than the demo on given text, to try recipes on it.

    python tools/train_small.py --text A.txt B.txt --out FOLDER
    python tools/quality.py --model FOLDER --data A.txt --split CHOOSE.txt --test TEST.txt --out DIR

It is of GPT-NeoX's class: layer norms with biases, attention and MLP side by side, rotary positions in a
part of each head, an ungated MLP, a head of its own.  Tokenizer and weights come from text and seed alone.
"""

import argparse
import time
from pathlib import Path

import torch
from demo_tokens import byte_level_bpe, wrap
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, Trainer, TrainingArguments, set_seed

CONTEXT = 512


def main() -> None:
    """Train, and write the folder."""
    args = _arguments()
    set_seed(args.seed)
    text = "\n\n".join(path.read_text(encoding="utf-8") for path in args.text)
    tokenizer = byte_level_bpe([text], args.vocabulary)
    ids = torch.tensor(tokenizer.encode(text).ids)
    rows = ids[: len(ids) // CONTEXT * CONTEXT].reshape(-1, CONTEXT)
    model = GPTNeoXForCausalLM(_config(args))
    print(f"{model.num_parameters():,} parameters, {len(ids):,} tokens of text", flush=True)
    began = time.perf_counter()
    Trainer(
        model,
        TrainingArguments(
            output_dir=str(args.out),
            max_steps=args.steps,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.lr,
            lr_scheduler_type="cosine",
            warmup_steps=args.steps // 20,
            weight_decay=0.1,
            logging_steps=100,
            save_strategy="no",
            report_to=[],
            seed=args.seed,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in rows],  # type: ignore[arg-type]
    ).train()
    model.save_pretrained(args.out)
    wrap(tokenizer, CONTEXT).save_pretrained(args.out)
    print(f"written: {args.out}, {time.perf_counter() - began:.0f} s", flush=True)


def _config(args: argparse.Namespace) -> GPTNeoXConfig:
    return GPTNeoXConfig(
        vocab_size=args.vocabulary,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.width // 32,
        max_position_embeddings=CONTEXT,
        use_parallel_residual=True,
        bos_token_id=0,
        eos_token_id=0,
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="text files to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder of the decoder")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
