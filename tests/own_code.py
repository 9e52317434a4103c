"""Checkpoints that bring their own classes (`auto_map`), written to disk; every file of code leaves a mark.

plain        config, decoder and a part in three files; no attention, so no cache
cached       a decoder of transformers that scales its logits, with a config and a tokenizer of its own;
             it has a cache and a loss
known        the same with a config of transformers, whose class would load the weights as well
config       a config of its own that transformers has a decoder for
"""

import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.source.byte_tokenizer import byte_tokenizer

VOCABULARY = 256
_MARK = "from pathlib import Path\nPath({mark!r}).touch()\n"

_PLAIN_CONFIG = """
from transformers import PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own_plain"

    def __init__(self, vocab_size=256, hidden_size=32, num_hidden_layers=2, **kwargs):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**kwargs)
"""
_PLAIN_PARTS = """
from torch import nn
from .sums import summed

class Feed(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        return summed(x, self.down(self.up(self.norm(x)).relu()))
"""
_PLAIN_SUMS = """
def summed(x, y):
    return x + y
"""
_PLAIN_MODEL = """
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_own import OwnConfig
from .parts_own import Feed

class OwnForCausalLM(PreTrainedModel, GenerationMixin):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Feed(config.hidden_size) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embedding

    def forward(self, input_ids=None, attention_mask=None, labels=None, **kwargs):
        x = self.embedding(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutputWithPast(logits=self.head(x))
"""
_LLAMA_CONFIG = """
from transformers import LlamaConfig

class OwnConfig(LlamaConfig):
    model_type = "own_cached"
"""
_LLAMA_MODEL = """
from transformers import LlamaForCausalLM
{config}

class OwnForCausalLM(LlamaForCausalLM):
    config_class = {name}

    def forward(self, input_ids=None, past_key_values=None, labels=None, **kwargs):
        # Newer versions of transformers warn of the name.
        cache = dict() if past_key_values is None else dict(past_key_values=past_key_values)
        output = super().forward(input_ids, **cache, **kwargs)
        output.logits = output.logits * 2.0
        if labels is not None:
            output.loss = self.loss_function(output.logits, labels, vocab_size=self.config.vocab_size)
        return output
"""
# transformers finds its decoder by the name of the config's class.
_CONFIG_ALONE = """
from transformers import LlamaConfig as Theirs

class LlamaConfig(Theirs):
    model_type = "own_config"
"""
_TOKENIZER = """
from transformers import PreTrainedTokenizerFast

class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
_CODE = {
    "plain": {
        "configuration_own": _PLAIN_CONFIG, "parts_own": _PLAIN_PARTS, "sums": _PLAIN_SUMS,
        "modeling_own": _PLAIN_MODEL,
    },
    "cached": {
        "configuration_own": _LLAMA_CONFIG, "tokens_own": _TOKENIZER,
        "modeling_own": _LLAMA_MODEL.format(
            config="from .configuration_own import OwnConfig", name="OwnConfig"
        ),
    },
    "known": {
        "modeling_own": _LLAMA_MODEL.format(config="from transformers import LlamaConfig", name="LlamaConfig")
    },
    "config": {"configuration_own": _CONFIG_ALONE},
}  # fmt: skip
_CONFIG_CLASS = "configuration_own.OwnConfig"
_MODEL_CLASS = "modeling_own.OwnForCausalLM"
_LLAMA = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": None, "eos_token_id": None, "architectures": ["OwnForCausalLM"],
}  # fmt: skip
_CONFIGS = {
    "plain": {
        "model_type": "own_plain", "architectures": ["OwnForCausalLM"], "vocab_size": VOCABULARY,
        "auto_map": {"AutoConfig": _CONFIG_CLASS, "AutoModelForCausalLM": _MODEL_CLASS},
    },
    "cached": _LLAMA | {
        "model_type": "own_cached",
        "auto_map": {"AutoConfig": _CONFIG_CLASS, "AutoModelForCausalLM": _MODEL_CLASS},
    },
    "known": _LLAMA | {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": _MODEL_CLASS}},
    "config": _LLAMA | {
        "model_type": "own_config", "architectures": ["LlamaForCausalLM"],
        "auto_map": {"AutoConfig": "configuration_own.LlamaConfig"},
    },
}  # fmt: skip
KINDS = tuple(_CODE)


def write_own_code(kind: str, folder: Path, mark: Path) -> Path:
    """Write a checkpoint of one kind, and return its folder.

    Args:
        mark: file that its code makes when it runs; it is not there afterwards.
    """
    folder.mkdir(parents=True)
    for name, text in _CODE[kind].items():
        (folder / f"{name}.py").write_text(_MARK.format(mark=str(mark)) + text)
    (folder / "config.json").write_text(json.dumps(_CONFIGS[kind]))
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
    AutoModelForCausalLM.from_config(config, trust_remote_code=True).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIGS[kind]))
    byte_tokenizer().save_pretrained(folder)
    if "tokens_own" in _CODE[kind]:
        path = folder / "tokenizer_config.json"
        own = {
            "tokenizer_class": "OwnTokenizer",
            "auto_map": {"AutoTokenizer": [None, "tokens_own.OwnTokenizer"]},
        }
        path.write_text(json.dumps(json.loads(path.read_text()) | own))
    assert mark.exists(), "the code of the checkpoint has not run"
    mark.unlink()
    return folder
