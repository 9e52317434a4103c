"""A module is refused before learning where its folder's decoder could not run."""

from pathlib import Path

import pytest
import torch
from transformers import BambaConfig, BambaForCausalLM

import dispfx
from dispfx.errors import SourceError
from tests.api.conftest import Watcher


def without_attention() -> BambaForCausalLM:
    """Return a decoder whose cache asks for an attention layer that it does not have."""
    torch.manual_seed(0)
    config = BambaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=8, mamba_n_groups=1, mamba_d_state=16,
        attn_layer_indices=[],
    )  # fmt: skip
    return BambaForCausalLM(config).eval()


def test_a_decoder_that_runs_without_a_cache_alone_is_refused_before_learning(tmp_path: Path, tokens: Path):
    watcher = Watcher()
    with pytest.raises(SourceError, match="the model cannot run on token ids"):
        dispfx.compile(
            without_attention(),
            0.3,
            data=tokens,
            method="magnitude",
            seq_len=32,
            out=tmp_path / "out",
            observer=watcher,
        )
    assert not watcher.steps and not list(tmp_path.iterdir())
