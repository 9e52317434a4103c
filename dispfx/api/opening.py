"""What a command starts from: the decoder, and the tokens to learn from and to measure on."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dispfx.demo.text import generate_text
from dispfx.errors import DataError
from dispfx.learning.settings import LearnSettings
from dispfx.learning.text import HELD_OUT_SHARE
from dispfx.source import Source, encode, load_source, read_tokens

Paths = Sequence[str | Path] | str | Path

DEMO_CONTEXT = 256
LONGEST_CONTEXT = 2048

_DEMO_SETTINGS: dict[str, Any] = {"steps": 400, "seq_len": 128, "batch_size": 8, "lr": 3e-3}
_DEMO_CHARACTERS = 1_500_000
_DEMO_SEED = 2024


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens of a command.

    Args:
        learn: (N,) int64 to learn from, or None where nothing was given.
        measure: (M,) int64 to measure on, never learned from, or None.
        name: of what is measured on, for the protocol.
        held_out_share: share of the learning text that `measure` is the end of, or None.
    """

    learn: Tensor | None
    measure: Tensor | None
    name: str
    held_out_share: float | None


def learn_settings(model: str | nn.Module, **chosen: Any) -> LearnSettings:
    """Return the settings a user chose over the defaults for MODEL: the paper's, or the demo's own."""
    return LearnSettings(**({**_DEMO_SETTINGS, **chosen} if model == "demo" else chosen))


@dataclass(frozen=True, eq=False)
class Opening:
    """MODEL and how to open it."""

    model: str | nn.Module
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None
    trust_remote_code: bool = False
    tokenizer: str | None = None

    def open(self) -> Source:
        """Return MODEL as a `Source`; a module is taken as it is.

        Raises:
            SourceError: if there is no such decoder, or it is none.
        """
        if isinstance(self.model, nn.Module):
            return _source_of(self.model)
        return load_source(
            self.model,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device or "cpu",
            trust_remote_code=self.trust_remote_code,
            tokenizer=self.tokenizer,
        )


def _source_of(model: nn.Module) -> Source:
    config = getattr(model, "config", None)
    return Source(
        model=model,
        tokenizer=None,
        config=config if hasattr(config, "save_pretrained") else None,
        name=type(model).__name__,
        origin="function",
        generation_config=getattr(model, "generation_config", None),
    )


def open_text(source: Source, data: Paths | Tensor | None, eval_data: Paths | None) -> Text:
    """Read the text of a command; the demo brings its own.

    Raises:
        DataError: if a file is missing, empty or unreadable, or there is no tokenizer for it.
    """
    if source.origin == "demo" and data is None:
        learn = _demo_tokens(source)
        name = "the demo's own text"
    elif data is None:
        learn, name = None, ""
    else:
        learn = data if isinstance(data, Tensor) else read_tokens(_listed(data), source.tokenizer)
        name = "tokens" if isinstance(data, Tensor) else names_of(data)
    if eval_data is not None:
        return Text(learn, read_tokens(_listed(eval_data), source.tokenizer), names_of(eval_data), None)
    if learn is None:
        return Text(None, None, "", None)
    first_held_out = len(learn) - int(len(learn) * HELD_OUT_SHARE)
    return Text(learn[:first_held_out], learn[first_held_out:], name, HELD_OUT_SHARE)


def require_tokens(source: Source, text: Text, vocabulary_size: int) -> None:
    """Pass if every token exists in the decoder, and there are enough to measure on.

    Raises:
        DataError: naming the largest token that does not exist, or how many there are.
    """
    for tokens in (text.learn, text.measure):
        if tokens is not None and len(tokens):
            _require_known(source, tokens, vocabulary_size)
    if text.measure is not None and len(text.measure) < 2:
        raise DataError(
            f"two tokens or more are needed to measure on, and there are {len(text.measure)}",
            where=text.name,
            hint="use a longer text, or name another one to measure on with --eval-data",
        )


def _require_known(source: Source, tokens: Tensor, vocabulary_size: int) -> None:
    largest = int(tokens.max())
    if largest >= vocabulary_size or int(tokens.min()) < 0:
        raise DataError(
            f"token ids must be in [0, {vocabulary_size}) for this decoder, the text holds {largest}",
            where=source.name,
            hint="use the decoder's own tokenizer",
        )


def context_of(source: Source) -> int:
    """Return the window that perplexity is measured with: 2048 tokens, or what the decoder can read."""
    if source.origin == "demo":
        return DEMO_CONTEXT
    return longest_context(source.config)


def longest_context(config: Any) -> int:
    """Return 2048 tokens, or what a transformers config says that the decoder can read."""
    longest = getattr(config, "max_position_embeddings", None)
    return min(LONGEST_CONTEXT, longest) if isinstance(longest, int) and longest > 1 else LONGEST_CONTEXT


def _demo_tokens(source: Source) -> Tensor:
    return encode(generate_text(_DEMO_SEED, _DEMO_CHARACTERS), source.tokenizer)


def _listed(paths: Paths) -> list[Path]:
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def names_of(paths: Paths) -> str:
    return ", ".join(path.name for path in _listed(paths))
