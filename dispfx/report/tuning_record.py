"""The record of a fine-tuning: as sentences, as a file, and as the model card of adapters."""

import json
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

from dispfx.errors import DataError
from dispfx.files.disk import replacing
from dispfx.files.json_text import read_json
from dispfx.report.json_form import from_plain, to_plain
from dispfx.report.numbers import shown_perplexity
from dispfx.report.schema import Tuning

RECORD_FILE = "finetune.json"


def tuning_lines(told: Tuning) -> list[str]:
    """Return the trained parameters, the text, and the perplexity before and after, as sentences."""
    protocol = told.protocol
    text = protocol.text or "the given text"
    return [
        f"perplexity {shown_perplexity(told.before)} before and {shown_perplexity(told.after)} after tuning "
        f"({protocol.windows} windows of {protocol.context} tokens of {text}, {protocol.tokens:,} predicted)",
        f"LoRA of rank {told.rank} (alpha {told.alpha:g}), {told.parameters:,} trained parameters: "
        f"{told.steps:,} steps of {told.batch_size} × {told.seq_len} tokens of {told.data}, learning rate "
        f"{told.lr:g}, seed {told.seed}",
    ]


def write_record(folder: Path, told: Tuning, log: Sequence[Any]) -> None:
    """Write finetune.json: the settings, and the loss of every step."""
    plain = {**to_plain(told), "log": to_plain(list(log))}
    with replacing(folder / RECORD_FILE) as partial:
        partial.write_text(json.dumps(plain, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_record(folder: Path) -> Tuning:
    """Read the record of `write_record`, without the losses.

    Raises:
        DataError: if it is damaged, or not such a record.
    """
    path = folder / RECORD_FILE
    try:
        plain = read_json(path)
    except (OSError, ValueError) as error:
        raise DataError(f"this is not a record of a tuned decoder: {error}", where=str(path)) from error
    return from_plain(Tuning, plain, str(path))


def adapter_card(told: Tuning, name: str, *, own_code: bool = False) -> str:
    """Return the text of the README.md of adapters.

    Args:
        own_code: whether the decoder's class is code that comes with its folder.
    """
    trust = ", trust_remote_code=True" if own_code else ""
    lines = [
        "---", "library_name: peft", "tags: [pruned, dispfx, lora]", "---", "", f"# {name}", "",
        f"Adapters for `{PurePath(told.base).name}`, a decoder pruned by dispfx.", "",
        *(f"- {line}" for line in tuning_lines(told)), "", "```python", "import dispfx",
        "from peft import PeftModel", "from transformers import AutoModelForCausalLM", "",
        f'model = AutoModelForCausalLM.from_pretrained("{PurePath(told.base).name}"{trust})',
        f'model = PeftModel.from_pretrained(model, "{PurePath(name).name}")', "```",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"
