"""The demo's tokenizer, and its text as an endless stream of tokens.

Used by `train_demo.py`.
"""

import multiprocessing
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import count

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from dispfx.demo.grammar import generate_text

VOCABULARY = 512
END_TOKEN = "<|end|>"
TOKENIZER_SEED = 2**31


def wrap(tokenizer: Tokenizer, context: int) -> PreTrainedTokenizerFast:
    """The tokenizer in the form that transformers saves."""
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_TOKEN,
        eos_token=END_TOKEN,
        pad_token=END_TOKEN,
        model_max_length=context,
        # Cleaning up would take the spaces before full stops away.
        clean_up_tokenization_spaces=False,
    )


def train_tokenizer(characters: int) -> Tokenizer:
    """The demo's tokenizer, trained on so many characters of its own text."""
    return byte_level_bpe([generate_text(TOKENIZER_SEED, characters)], VOCABULARY)


def byte_level_bpe(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE, so that any UTF-8 text survives encoding and decoding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_shard(tokenizer_json: str, seed: int, characters: int) -> np.ndarray:
    tokenizer = Tokenizer.from_str(tokenizer_json)
    return np.array(tokenizer.encode(generate_text(seed, characters)).ids, dtype=np.uint16)


def training_shards(
    tokenizer: Tokenizer, first_seed: int, characters: int, workers: int
) -> Iterator[np.ndarray]:
    """Shards of tokens without end, in the order of their seeds however many processes make them."""
    serialized = tokenizer.to_str()
    seeds = count(first_seed)
    if workers == 0:
        for seed in seeds:
            yield encode_shard(serialized, seed, characters)
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        pending: deque[Future[np.ndarray]] = deque()
        try:
            while True:
                while len(pending) < 2 * workers:
                    pending.append(pool.submit(encode_shard, serialized, next(seeds), characters))
                yield pending.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)
