"""The embedded decoder, the text it was trained on, and a probe of what it can do.

`text` generates the text, `probe` measures skills, `decoder/` holds the weights and the tokenizer as an
ordinary folder.  `tools/train_demo.py` makes that folder again from nothing.
"""

from pathlib import Path

DECODER_FOLDER = Path(__file__).parent / "decoder"
