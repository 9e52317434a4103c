"""Tiny transformers checkpoints, written to disk once a session."""

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.source.byte_tokenizer import byte_tokenizer

VOCABULARY_SIZE = 256


@pytest.fixture(scope="session")
def decoder_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied two-layer decoder in float32 with a byte tokenizer."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder")
    config = LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder
