"""Token ids → batches that depend only on the seed and the step.

A batch is a pure function of (seed, step), so the position in the text is the step number, and a resumed run
reads the same batches as an uninterrupted run.

A sequence of T tokens begins with the beginning-of-sequence token, if there is one, and so does every
document in it if documents are kept apart:

    text        a b c ⟂ d e f g h …              ⟂ ends a document
    sequences   ∧ a b c ⟂ ∧ d                    T = 7; what does not fit is left out

Legend: B batch, T tokens of a sequence.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from os import PathLike
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dispfx.errors import DataError
from dispfx.settings.learning_settings import seed_for
from dispfx.words.option_names import option

HELD_OUT_SHARE = 0.1
_DIGEST_CHUNK = 1 << 16


def count_of_tokens(number: int) -> str:
    """Return a number of tokens for messages."""
    return f"{number:,} token{'' if number == 1 else 's'}"


class Batches(Protocol):
    """Batches to learn from: one text (`TokenBatches`), or several (`dispfx.learning.mixture`)."""

    @property
    def seq_len(self) -> int:
        """T."""
        ...

    @property
    def batch_size(self) -> int:
        """B."""
        ...

    @property
    def digest(self) -> str:
        """Identify everything that the batches depend on, except T, B and the seed."""
        ...

    def batch(self, index: int) -> Tensor:
        """Return batch `index`, counted from 0 without end, as ids_BT int64 on the CPU."""
        ...

    def held_out_batches(self, most: int) -> list[Tensor]:
        """Return up to `most` batches (1, T) of text that is never learned from."""
        ...


@dataclass(eq=False)
class TokenBatches:
    """Shuffled windows of one long text, every window once per epoch.

    The text is cut into adjacent windows of T tokens; the remainder at the end is not used.
    An epoch is a permutation of the windows drawn from (seed, epoch); batches run through the
    epochs without a gap, so every batch is full.

    Args:
        tokens: 1-D integer tensor or array (a memory map too: only the windows read are loaded).
        seq_len: T.
        batch_size: B.
        seed: the same seed gives the same batches.
        held_out: tokens that are never learned from; may be empty.
        bos: tokens that every sequence begins with, included in T.
        separator: token that ends a document, if every document also begins with `bos`.
    """

    tokens: Tensor | np.ndarray
    seq_len: int
    batch_size: int
    seed: int = 0
    held_out: Tensor | np.ndarray | None = None
    bos: tuple[int, ...] = ()
    separator: int | None = None
    _order: tuple[int, Tensor] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        """Check the tokens.

        Raises:
            DataError: if they are not a vector of integers, or are shorter than one sequence.
        """
        if len(self.tokens.shape) != 1 or not _holds_integers(self.tokens):
            raise DataError(
                f"a vector of token ids was expected, found shape {tuple(self.tokens.shape)} of "
                f"{self.tokens.dtype}"
            )
        if self._stride < 1:
            raise DataError(
                f"a sequence of {self.seq_len} tokens has no room for text after the {len(self.bos)} that it "
                "begins with",
                hint=f"use a larger {option('seq_len')}, or {option('bos', 'off')}",
            )
        if self.windows < 1:
            held_out = 0 if self.held_out is None else len(self.held_out)
            aside = f" after {count_of_tokens(held_out)} to measure on" if held_out else ""
            raise DataError(
                f"one sequence needs {count_of_tokens(self._stride)}, and the text to learn from has "
                f"{len(self.tokens):,}{aside}",
                hint=f"give a longer text, or a smaller {option('seq_len')}",
            )

    @staticmethod
    def split(
        tokens: Tensor | np.ndarray,
        *,
        seq_len: int,
        batch_size: int,
        seed: int = 0,
        held_out_share: float = HELD_OUT_SHARE,
    ) -> "TokenBatches":
        """Return batches of a text whose last share is held out.

        Raises:
            DataError: as for `TokenBatches`.
        """
        first_held_out = len(tokens) - int(len(tokens) * held_out_share)
        held_out = tokens[first_held_out:] if first_held_out < len(tokens) else None
        return TokenBatches(tokens[:first_held_out], seq_len, batch_size, seed, held_out)

    @property
    def windows(self) -> int:
        """Number of sequences in the text."""
        return len(self.tokens) // self._stride

    @property
    def _stride(self) -> int:
        """Tokens of the text in a sequence."""
        return self.seq_len - len(self.bos)

    @property
    def digest(self) -> str:
        """Identify the text by its length, a sample of at most 4 MiB, and the tokens that begin sequences."""
        summary = hashlib.sha256(str(len(self.tokens)).encode())
        stride = max(_DIGEST_CHUNK, len(self.tokens) // 8)
        for start in range(0, len(self.tokens), stride):
            summary.update(_ids(self.tokens[start : start + _DIGEST_CHUNK]).numpy().tobytes())
        begins = f", each sequence after {self._named_bos}" if self.bos else ""
        return summary.hexdigest()[:16] + begins

    @property
    def _named_bos(self) -> str:
        return f"token{'s' if len(self.bos) > 1 else ''} {' '.join(map(str, self.bos))}"

    def batch(self, index: int) -> Tensor:
        """Return batch `index`, counted from 0 without end, as ids_BT int64 on the CPU."""
        return torch.stack([self._window(index * self.batch_size + row) for row in range(self.batch_size)])

    def held_out_batches(self, most: int) -> list[Tensor]:
        """Return up to `most` batches (1, T) from the start of the held-out text."""
        if self.held_out is None:
            return []
        count = min(most, len(self.held_out) // self._stride)
        return [self._sequence(self.held_out, place)[None] for place in range(count)]

    def _window(self, position: int) -> Tensor:
        epoch, place = divmod(position, self.windows)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(seed_for(self.seed, f"text:{epoch}"))
            self._order = (epoch, torch.randperm(self.windows, generator=generator))
        return self._sequence(self.tokens, int(self._order[1][place]))

    def _sequence(self, tokens: Tensor | np.ndarray, place: int) -> Tensor:
        """Return the T ids of a window."""
        start = place * self._stride
        ids_T = _ids(tokens[start : start + self._stride])
        if not self.bos:
            return ids_T
        bos = torch.tensor(self.bos)
        ends = [] if self.separator is None else (ids_T[:-1] == self.separator).nonzero().flatten() + 1
        documents = ids_T.tensor_split(ends) if len(ends) else (ids_T,)
        return torch.cat([part for document in documents for part in (bos, document)])[: self.seq_len]


def token_vector(data: object, vocabulary_size: int) -> Tensor | np.ndarray:
    """Return token ids (N,) from a tensor, an array, or a list.

    Raises:
        DataError: if they are text, not a vector of integers, or not in the decoder's vocabulary.
    """
    first = data[0] if isinstance(data, list | tuple) and data else data
    if isinstance(first, str | bytes | PathLike):
        raise DataError(
            f"learning takes token ids, but a {type(first).__name__} was given",
            hint="give tokenizer.encode(text), or let dispfx.compile read the text: data=FILE",
        )
    try:
        tokens = data if isinstance(data, Tensor | np.ndarray) else torch.as_tensor(data)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"a vector of token ids was expected, but this is not an array: {error}") from error
    if len(tokens.shape) != 1 or not _holds_integers(tokens):
        raise DataError(
            f"a vector of token ids was expected, found shape {tuple(tokens.shape)} of {tokens.dtype}",
            hint="give one long text: join the sequences of a batch with .flatten()"
            if _holds_integers(tokens)
            else "give the integers that a tokenizer returns for a text",
        )
    if isinstance(tokens, Tensor) and tokens.is_meta:
        raise DataError("token ids must have values, and are on the meta device", hint="make them on the CPU")
    # numpy is several times faster here, and supports unsigned integers.
    ids = tokens.cpu().numpy() if isinstance(tokens, Tensor) else tokens
    for found in map(int, (ids.min(), ids.max()) if len(ids) else ()):
        if not 0 <= found < vocabulary_size:
            raise DataError(f"token ids must be in [0, {vocabulary_size}) for this decoder, found {found}")
    return tokens


def _holds_integers(tokens: Tensor | np.ndarray) -> bool:
    if isinstance(tokens, Tensor):
        return not (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool)
    return tokens.dtype.kind in "iu"


def _ids(tokens: Tensor | np.ndarray) -> Tensor:
    if isinstance(tokens, Tensor):
        return tokens.to("cpu", torch.int64, copy=True)
    # Always a copy: a read-only memory map must not become a writable tensor.
    return torch.from_numpy(tokens.astype("int64"))


class Prefetcher:
    """Batches by index, on a device; a thread prepares the next batch in the meantime.

    On a GPU, batches wait in pinned memory, so that copies do not block the computation.  On a CPU there is
    nothing to overlap, so batches are made on demand.

    Args:
        batch: makes batch `index` on the CPU; called from one thread at a time.
        device: of the returned batches.
    """

    def __init__(self, batch: Callable[[int], Tensor], device: torch.device):
        self._batch = batch
        self._device = device
        self._next: tuple[int, Future[Tensor]] | None = None
        self._thread = ThreadPoolExecutor(1, "batches") if device.type == "cuda" else None

    def get(self, index: int) -> Tensor:
        """Return batch `index` on the device; re-raises errors of the thread."""
        if self._thread is None:
            return self._batch(index).to(self._device)
        ready = self._next if self._next is not None and self._next[0] == index else None
        made = ready[1] if ready else self._thread.submit(self._pinned, index)
        batch = made.result()
        self._next = (index + 1, self._thread.submit(self._pinned, index + 1))
        return batch.to(self._device, non_blocking=True)

    def _pinned(self, index: int) -> Tensor:
        return self._batch(index).pin_memory()
