"""Which of the tensors that a decoder returns are its logits.

Entry points: `logits_of`, and `widths_of` for what it goes by.

Logits are floats of shape (B, T, V).  In this order:
1. An attribute, key or field `logits`.
2. The one tensor of that shape, unless it looks like a hidden state: its width is that of the token
   embedding, and the embedding has another number of rows.
3. Of several, the first whose width is the number of the embedding's rows, or the config's vocabulary.
4. Of several otherwise, the first that is no hidden state, if all those have one width.  A head may have
   fewer rows than a padded embedding.
5. Otherwise the module is refused, also where a hidden state may have the width of logits.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn

from dispfx.errors import CaptureError

_WIDTHS, _VOCABULARIES = ("hidden_size", "n_embd", "d_model"), ("vocab_size",)


@dataclass(frozen=True)
class Widths:
    """The sizes that tell logits from hidden states.

    Args:
        rows: of the token embedding, and the vocabulary of the config; empty if both are unknown.
        hidden: length of the embedding's rows, and the config's hidden size.
        decoder: its class, to be named in errors.
    """

    rows: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    decoder: str | None = None

    def is_hidden(self, width: int) -> bool:
        """Whether a tensor of this width is a hidden state and no logits."""
        return width in self.hidden and width not in self.rows


def widths_of(model: nn.Module) -> Widths:
    """Return what is known of a decoder's widths; the first embedding in the module is that of its tokens."""
    embedding = next((part for part in model.modules() if isinstance(part, nn.Embedding)), None)
    if embedding is None:
        return Widths(decoder=type(model).__name__)
    config = next((part.config for part in model.modules() if hasattr(part, "config")), None)
    return Widths(
        (embedding.num_embeddings, *_numbers(config, _VOCABULARIES)),
        (embedding.embedding_dim, *_numbers(config, _WIDTHS)),
        type(model).__name__,
    )


def _numbers(config: Any, names: tuple[str, ...]) -> Iterator[int]:
    found = (getattr(config, name, None) for name in names)
    return (number for number in found if isinstance(number, int))


def logits_of(output: Any, ids: Tensor, widths: Widths) -> Tensor:
    """Return the logits (B, T, V) in what a decoder returned for token ids (B, T).

    Args:
        widths: of the decoder.

    Raises:
        CaptureError: if the output has no logits, or it cannot be told which tensor they are.
    """
    named = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if isinstance(named, Tensor):
        if not _fits(named, ids):
            raise _no_logits([named], ids, widths)
        return named
    tensors = tensors_in(output)
    fitting = [leaf for leaf in tensors if _fits(leaf, ids)]
    if not fitting:
        raise _no_logits(tensors, ids, widths)
    left = [leaf for leaf in fitting if not widths.is_hidden(leaf.shape[-1])]
    if not left:
        raise _hidden_state(fitting[0].shape[-1], widths)
    if len(fitting) == 1:
        return left[0]
    of_rows = [leaf for leaf in left if leaf.shape[-1] in widths.rows] or left
    found = {leaf.shape[-1] for leaf in of_rows}
    if len(found) > 1 or found & set(widths.hidden):
        raise _several(fitting, widths)
    return of_rows[0]


def tensors_in(output: Any) -> list[Tensor]:
    """Return the tensors of a module's output, in order."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


def _fits(leaf: Tensor, ids: Tensor) -> bool:
    return leaf.is_floating_point() and leaf.dim() == 3 and leaf.shape[:-1] == ids.shape


def _no_logits(tensors: list[Tensor], ids: Tensor, widths: Widths) -> CaptureError:
    longer = [
        leaf.shape[1] - ids.shape[1]
        for leaf in tensors
        if leaf.is_floating_point()
        and leaf.dim() == 3
        and (leaf.shape[0], leaf.shape[2] in widths.rows) == (ids.shape[0], True)
    ]
    if longer and longer[0] > 0:
        return CaptureError(
            f"the module returns logits for {longer[0]} more tokens than it is given, as prompt tuning does",
            where=widths.decoder,
            hint="give the decoder without the tokens that it adds, or return the logits of the given tokens",
        )
    return CaptureError(
        f"logits of shape {(*ids.shape, 'V')} were expected, the module returns tensors of "
        f"{[tuple(tensor.shape) for tensor in tensors]}",
        where=widths.decoder,
        hint="use a causal language model with its head",
    )


def _hidden_state(width: int, widths: Widths) -> CaptureError:
    return CaptureError(
        f"logits were expected, and what the module returns looks like a hidden state: its width is {width}, "
        f"and the token embedding has {widths.rows[0]} rows",
        where=widths.decoder,
        hint="give the decoder with its head; if these are logits, return them as `logits`",
    )


def _several(fitting: list[Tensor], widths: Widths) -> CaptureError:
    sizes = ", ".join(str(leaf.shape[-1]) for leaf in fitting)
    rows = f", and the token embedding has {widths.rows[0]} rows" if widths.rows else ""
    return CaptureError(
        f"it cannot be told which output holds the logits: their widths are {sizes}{rows}",
        where=widths.decoder,
        hint="return the logits alone, or as the attribute or key `logits`",
    )
