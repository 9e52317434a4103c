"""Load decoders, tokenizers and text.

`load_source` turns MODEL into a `Source`, `load_config` builds one without weights from a config, and
`read_text` turns text into token ids.  Only this package and the checkpoint writer know transformers.

    pretrained  folder, GGUF file, hub id → module, config and tokenizer
    function    package.module:function → module
    loaded_size MODEL → bytes of its weights, before they are read
    loading     MODEL → Source; rejects models whose logits depend on later tokens
    drawn_tokens  text that a decoder of transformers writes itself
    text        files and data sets of text, and token files → one vector of token ids
"""

from dispfx.source.loading import config_alone, dtype_of, load_config, load_source
from dispfx.source.source import Source
from dispfx.source.text import ReadText, check_readable, encode, read_text
from dispfx.source.tokenizer import load_folder_tokenizer
from dispfx.words.model_origin import Origin

__all__ = [
    "Origin", "ReadText", "Source", "check_readable", "config_alone", "dtype_of", "encode", "load_config",
    "load_folder_tokenizer", "load_source", "read_text",
]  # fmt: skip
