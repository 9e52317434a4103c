"""The text of a command: text to learn from, and text to measure on that is never learned from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dispfx.demo.grammar import generate_text
from dispfx.errors import DataError
from dispfx.ir.program import Program
from dispfx.learning.mixture import Mixture, quotas
from dispfx.learning.text import HELD_OUT_SHARE, Batches, TokenBatches, count_of_tokens
from dispfx.quality.agreement import Comparison, compare_on_text
from dispfx.quality.perplexity import TextFacts
from dispfx.quality.second_text import NAME, second_text
from dispfx.settings import LearnSettings, TextSettings
from dispfx.settings.learning_settings import seed_for
from dispfx.settings.recovery_settings import RecoverySettings
from dispfx.settings.sections import Reading
from dispfx.source import Source
from dispfx.source.text import (
    ReadText,
    bos_tokens,
    check_readable,
    encode,
    joined_tokens,
    largest_id,
    listed,
    read_apart,
    read_text,
    tokens_in_front,
)
from dispfx.source.text.legibility import WARNED, unknown_share
from dispfx.words.model_origin import origin_of
from dispfx.words.option_names import option
from dispfx.words.text_origin import LINE_BREAK, check_texts, repeated_texts, tables_as_text

_DEMO_CHARACTERS = 1_500_000
_DEMO_SEED = 2024
# Perplexity on the held-out end of a large text would take longer than learning.
_MOST_MEASURED = 2**22


@dataclass(frozen=True, eq=False)
class TextChoice:
    """The texts of a run.

    Args:
        settings: what a user chose.
        between: separator of two texts or records.
        separator: token that ends a document, where documents are kept apart.
    """

    settings: TextSettings = field(default_factory=TextSettings)
    between: str = LINE_BREAK
    separator: int | None = None

    @property
    def reading(self) -> Reading:
        """How the texts are read."""
        return Reading.of(self.settings, self.between)

    def of_documents(self, source: Source, separator: int) -> "TextChoice":
        """Return the same with an end-of-document token between documents, if there is a tokenizer."""
        end = getattr(source.tokenizer, "eos_token", None)
        return replace(self, between=self.between if end is None else str(end), separator=separator)

    def check(self) -> None:
        """Check all texts before a decoder is loaded.

        Raises:
            DataError: if one is missing, empty or broken, or the weights do not fit.
        """
        data, weights = self.settings.data, self.settings.data_weight
        if weights and isinstance(data, Tensor | None):
            raise DataError(
                f"{option('data_weight')} needs {option('data')}: no text to learn from was named"
            )
        words, evaluated = self._words
        check_texts(words, weights)
        check_texts(evaluated)
        if weights:
            quotas(weights, len(words))
        for one in (words, evaluated):
            if one:
                check_readable(one, self.reading)

    @property
    def doubtful(self) -> list[str]:
        """A warning for every text that is named twice, and every table that is read as text."""
        words, evaluated = self._words
        return [*repeated_texts(words, evaluated), *tables_as_text([*words, *evaluated])]

    @property
    def _words(self) -> tuple[list, list]:
        """The texts to learn from and to measure on, as lists."""
        data, evaluated = self.settings.data, self.settings.eval_data
        words = [] if not _named(data) or isinstance(data, Tensor) else listed(data)
        return words, listed(evaluated) if _named(evaluated) else []

    def require_data(self, model: object) -> None:
        """Raise if there is no text to learn from; the demo has its own.

        Args:
            model: MODEL, or a module.

        Raises:
            DataError: if there is no text.
        """
        if not _named(self.settings.data) and not (isinstance(model, str) and origin_of(model) == "demo"):
            raise _no_text()


def _named(texts: object) -> bool:
    """Whether there is a text: token ids, a name, or a non-empty list of names."""
    return isinstance(texts, Tensor) or bool(texts)


@dataclass(frozen=True, eq=False)
class MeasuredText:
    """A text to measure on: (K,) token ids, and what they are."""

    tokens: Tensor
    about: TextFacts


@dataclass(frozen=True, eq=False)
class Text:
    """Tokens of a command.

    Args:
        learn: (N,) ids to learn from, one vector per part; empty if no text was given.
        held_out: (M,) ids that are never learned from: the end of each part, or one separate text.
        weights: of the parts, if there are several.
        measure: (K,) ids to measure on, or None.
        about: the text to measure on, for the protocol.
        further: texts of other kinds to measure on, each separately.
        learned_name: name of the text to learn from.
        bos: tokens that every sequence to learn from begins with.
        separator: token that ends a document, where documents are kept apart.
        largest: largest token id.
        notes: notes about the texts for the user.
    """

    learn: tuple[Tensor, ...] = ()
    held_out: tuple[Tensor, ...] = ()
    weights: tuple[float, ...] = ()
    measure: Tensor | None = None
    about: TextFacts = field(default_factory=TextFacts)
    further: tuple[MeasuredText, ...] = ()
    learned_name: str = ""
    bos: tuple[int, ...] = ()
    separator: int | None = None
    largest: int = 0
    notes: tuple[str, ...] = ()

    @property
    def measured(self) -> tuple[MeasuredText, ...]:
        """All texts to measure on, the first one first."""
        if self.measure is None:
            return ()
        return (MeasuredText(self.measure, self.about), *self.further)

    def compared(
        self, program: Program, decoder: Callable[[Tensor], Any], *, context: int, windows: int | None
    ) -> tuple[Comparison, ...]:
        """Compare a decoder with the dense one, a program, on all texts to measure on.

        Args:
            context, windows: as for `dispfx.quality.agreement.compare_on_text`.
        """
        return tuple(
            compare_on_text(
                program.graph_module,
                decoder,
                one.tokens,
                context=context,
                windows=windows,
                device=program.device,
                text=one.about,
            )
            for one in self.measured
        )

    def require_measurable(self) -> None:
        """Raise if there are too few tokens to measure on, unless nothing will be measured.

        Raises:
            DataError: with the tokens that are needed and those that there are.
        """
        for one in self.measured:
            found, needed = len(one.tokens), max(1, 2 - len(one.about.bos))
            if found >= needed:
                continue
            if one.about.held_out_share is None:
                problem = (
                    f"the text to measure on has {count_of_tokens(found)}, and {needed} or more are needed"
                )
            else:
                whole = found + sum(map(len, self.learn))
                problem = (
                    f"the last tenth of a text is measured on, so {round(needed / HELD_OUT_SHARE)} tokens or "
                    f"more are needed, and it has {count_of_tokens(whole)}"
                )
            raise DataError(
                problem,
                where=one.about.name,
                hint=f"use a longer text, or name another one to measure on with {option('eval_data')}",
            )

    def require_learnable(self) -> None:
        """Raise if a part has too few tokens for the shortest possible sequence.

        Raises:
            DataError: if a part has too few tokens.
        """
        fewest = min((len(part) for part in self.learn), default=0)
        if fewest < 2:
            raise DataError(
                f"the text to learn from has {count_of_tokens(fewest)}, and 2 or more are needed",
                where=self.learned_name,
                hint="use a longer text",
            )

    def batches(self, settings: LearnSettings | RecoverySettings) -> Batches:
        """Cut the tokens to learn from into batches.

        Raises:
            DataError: if there are no tokens, or a part is shorter than one sequence.
        """
        if not self.learn:
            raise _no_text()
        begun = partial(TokenBatches, bos=self.bos, separator=self.separator)
        if not self.weights:
            sizes = settings.seq_len, settings.batch_size
            return begun(self.learn[0], *sizes, settings.seed, self.held_out[0])
        parts = [
            begun(tokens, settings.seq_len, 1, seed_for(settings.seed, f"part {index}"), held_out)
            for index, (tokens, held_out) in enumerate(
                zip(self.learn, [*self.held_out, *[None] * len(self.learn)], strict=False)
            )
        ]
        return Mixture(parts, self.weights, settings.batch_size)


def _no_text() -> DataError:
    return DataError("text to learn from is needed", hint=f"name a text file with {option('data')}")


def open_text(source: Source, chosen: TextChoice) -> Text:
    """Read the text of a command; the demo has its own.

    Raises:
        DataError: if a text cannot be used, has no tokenizer, or holds ids that the decoder does not know.
    """
    settings = chosen.settings
    parts = _parts(source, chosen)
    name = ", ".join(part.name for part in parts)
    others: list[ReadText] = []
    if _named(settings.eval_data):
        # The text to measure on does not depend on how the other one is learned from.
        reading = replace(chosen.reading, between=LINE_BREAK)
        others = read_apart(settings.eval_data, source.tokenizer, reading)
    read = [*parts, *others]
    of_parts = bos_tokens(settings.bos, source.tokenizer, given_ids=any(part.given_ids for part in parts))
    measured = [_by_itself(source, chosen, one) for one in others]
    of_other = measured[0].about.bos if measured else of_parts
    largest = max((part.largest for part in read), default=0)
    largest = max([largest, *of_parts, *of_other])
    require_known(largest, vocabulary_of(source.config), source.name)
    if not read:
        return Text()
    learn = tokens = tuple(part.tokens for part in parts)
    if measured:
        measure, about = measured[0].tokens, measured[0].about
        held_out = (measure,)
    else:
        learn, held_out = zip(*map(split_held_out, tokens), strict=True)
        measure, about = _measured(held_out), TextFacts(name, HELD_OUT_SHARE, of_parts, _unknown_share(parts))
    return Text(
        learn=learn,
        held_out=held_out,
        weights=tuple(settings.data_weight or ()),
        measure=measure,
        about=about,
        further=tuple(measured[1:] or [_by_itself(source, chosen, one) for one in _own(source)]),
        learned_name=name,
        bos=of_parts,
        separator=chosen.separator,
        largest=largest,
        notes=(
            *chosen.doubtful,
            *(note for one in read for note in one.notes),
            *_notes_on_bos(source, read, {of_parts, of_other}),
        ),
    )


def texts_to_measure(source: Source, chosen: TextChoice) -> tuple[MeasuredText, ...]:
    """Return the texts to measure on: those that were named, or the demo's own, and the project's text.

    Raises:
        DataError: as `open_text`.
    """
    measured = open_text(source, chosen).measured
    return measured or tuple(_by_itself(source, chosen, one) for one in _own(source))


def _by_itself(source: Source, chosen: TextChoice, text: ReadText) -> MeasuredText:
    bos = bos_tokens(chosen.settings.bos, source.tokenizer, given_ids=text.given_ids)
    return MeasuredText(text.tokens, TextFacts(text.name, None, bos, text.unknown_share))


def _own(source: Source) -> list[ReadText]:
    """Return the project's text of another kind, where the decoder's tokenizer knows it."""
    if source.tokenizer is None or source.origin == "demo":
        return []  # the demo knows its own little language and nothing else
    text = second_text()
    tokens = encode(text, source.tokenizer)
    share = unknown_share(tokens, text, source.tokenizer)
    largest, known = int(tokens.max()), vocabulary_of(source.config)
    if (share is not None and share > WARNED) or (known is not None and largest >= known):
        return []
    return [ReadText(tokens, NAME, largest, unknown_share=share)]


def _unknown_share(parts: Sequence[ReadText]) -> float | None:
    """Return the largest share of one part that the tokenizer does not know."""
    return max((part.unknown_share for part in parts if part.unknown_share is not None), default=None)


def _notes_on_bos(source: Source, read: Sequence[ReadText], begins: set[tuple[int, ...]]) -> list[str]:
    """Note what sequences begin with, and that given token ids are left as they are."""
    tokenizer = source.tokenizer
    notes = [
        f"sequences begin with {tokenizer.decode(list(bos))!r} (token {' '.join(map(str, bos))})"
        for bos in sorted(begins - {()})
        if tokenizer is not None
    ]
    could_add = tokenizer is None or bool(tokens_in_front(tokenizer))
    if () in begins and could_add and any(part.given_ids for part in read):
        notes.append("token ids are taken as they are: no beginning-of-sequence token is added")
    return notes


def require_one_tokenizer(ours: Any | None, theirs: Any | None, *, ours_of: str, theirs_of: str) -> None:
    """Raise if two decoders read the project's text of many kinds as other tokens.

    Raises:
        DataError: if they do; what one predicts means something else for the other.
    """
    if ours is None or theirs is None:
        return
    text = second_text()
    if not torch.equal(encode(text, ours), encode(text, theirs)):
        raise DataError(
            f"the tokenizers of {ours_of} and {theirs_of} read a text as other tokens, so their predictions "
            "cannot be compared",
            where=ours_of,
            hint="use the decoder that the folder was compiled from, with its own tokenizer",
        )


def separator_of(source: Source) -> int:
    """Return the token that ends a document.

    Raises:
        DataError: if neither tokenizer nor config names it.
    """
    for known in (source.tokenizer, source.config):
        token = getattr(known, "eos_token_id", None)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    raise DataError(
        f"{option('packing', 'documents')} needs an end-of-document token, "
        "but neither tokenizer nor config names one",
        where=source.name,
        hint=f"leave out {option('packing', 'documents')}",
    )


def require_tokens(source: Source, text: Text, vocabulary_size: int) -> None:
    """Raise if a token does not exist in the decoder.

    Raises:
        DataError: naming the largest token that does not exist.
    """
    require_known(text.largest, vocabulary_size, source.name)


def require_known(largest: int, vocabulary_size: int | None, decoder: str) -> None:
    """Raise if a token does not exist in the decoder; an unknown vocabulary passes.

    Raises:
        DataError: naming the largest token that does not exist.
    """
    if vocabulary_size is not None and largest >= vocabulary_size:
        raise DataError(
            f"token ids must be in [0, {vocabulary_size}) for this decoder, but the text holds {largest}",
            where=decoder,
            hint="use the decoder's own tokenizer",
        )


def vocabulary_of(config: Any | None) -> int | None:
    """Return the vocabulary size of a transformers config, or None."""
    size = getattr(config, "vocab_size", None)
    return size if isinstance(size, int) else None


def split_held_out(tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Split (N,) token ids into the first nine tenths and the last tenth."""
    first_held_out = len(tokens) - int(len(tokens) * HELD_OUT_SHARE)
    return tokens[:first_held_out], tokens[first_held_out:]


def _parts(source: Source, chosen: TextChoice) -> list[ReadText]:
    """Return the texts to learn from, joined, or separate if they have weights."""
    data = chosen.settings.data
    if isinstance(data, Tensor):
        _require_ids(data)
        largest = largest_id(data, where="tokens") if len(data) else 0
        return [ReadText(data, "tokens", largest, given_ids=True)]
    if not _named(data):
        return [_demo_text(source)] if source.origin == "demo" else []
    if not chosen.settings.data_weight:
        return [read_text(data, source.tokenizer, chosen.reading)]
    return read_apart(data, source.tokenizer, chosen.reading)


def _require_ids(tokens: Tensor) -> None:
    """Raise unless token ids that were given in Python are a vector of integers.

    Raises:
        DataError: otherwise.
    """
    whole = not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    if tokens.dim() != 1 or not whole:
        kind = str(tokens.dtype).removeprefix("torch.")
        raise DataError(
            f"token ids must be a vector of integers, and {option('data')} is {kind} {tuple(tokens.shape)}"
        )


def _demo_text(source: Source) -> ReadText:
    tokens = encode(generate_text(_DEMO_SEED, _DEMO_CHARACTERS), source.tokenizer)
    return ReadText(tokens, "the demo's own text", int(tokens.max()))


def _measured(held_out: Sequence[Tensor]) -> Tensor:
    """Return the text to measure on: the beginnings of all held-out parts."""
    return joined_tokens([tokens[:_MOST_MEASURED] for tokens in held_out])
