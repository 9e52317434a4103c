"""The record of a recovery: as sentences, as a file, and as the model card of adapters."""

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

RECORD_FILE = "recovery.json"
_TRAINED = {
    "scales": "Trained one scale per kept feature",
    "weights": "Trained all weights",
    "lora": "Trained LoRA adapters",
}


def tuning_lines(told: Tuning) -> list[str]:
    """Return KL and perplexity before and after, the trained parameters and the text, as sentences."""
    protocol = told.protocol
    text = protocol.text or "the given text"
    unchanged = "" if told.kept else "; the weights were left as they were, because KL had not fallen"
    adapters = f" of rank {told.rank} (alpha {told.alpha:g})" if told.train == "lora" else ""
    stream = f" + {told.stream_weight:g} × distance of the residual streams" if told.stream_weight else ""
    return [
        f"KL to the dense decoder {told.kl_before:.4f} before and {told.kl_after:.4f} after recovery, "
        f"in nats per token ({told.kl_tokens:,} tokens of {told.kl_text or 'the given text'}){unchanged}",
        f"perplexity {shown_perplexity(told.before)} before and {shown_perplexity(told.after)} after "
        f"recovery ({protocol.windows} windows of {protocol.context} tokens of {text}, "
        f"{protocol.tokens:,} predicted)",
        f"{_TRAINED[told.train]}{adapters}, {told.parameters:,} numbers, by KL{stream}: {told.steps_done:,} "
        f"of {told.steps:,} steps of {told.batch_size} × {told.seq_len} tokens of {told.data}, learning rate "
        f"{told.lr:g}, seed {told.seed}",
    ]


def write_record(folder: Path, told: Tuning, log: Sequence[Any]) -> None:
    """Write recovery.json: the settings, and the KL of every step."""
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
