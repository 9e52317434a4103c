"""A tokenizer of one token a byte, built without a file."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def byte_tokenizer(bos: bool = False) -> Any:
    """A tokenizer of one token a byte; with `bos` it starts every text with a special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.add_special_tokens(["<s>"])
        template = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", len(alphabet))])
        tokenizer.post_processor = template
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=8)
