"""A decoder for sequences of several documents that must not see each other.

    ids        a b c ⟂ d e ⟂ f          ⟂ ends a document and belongs to it
    positions  0 1 2 3 0 1 2 0

A decoder of transformers that is given positions which start again keeps attention within each run of them.
Nothing else has to be told, so the graph still takes token ids alone.

Legend: B batch, T tokens.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import CaptureError
from dispfx.words.option_names import option

_HINT = f"leave out {option('packing', 'documents')}: text is joined then"


class ApartDocuments(nn.Module):
    """A decoder that gives each document of a sequence what it gives it alone.

    Args:
        decoder: takes token ids and `position_ids`.
        separator: token that ends a document.
        arguments: that the decoder is always given.

    Raises:
        CaptureError: if it takes no positions.
    """

    def __init__(self, decoder: nn.Module, separator: int, arguments: dict[str, Any]):
        super().__init__()
        if "position_ids" not in inspect.signature(decoder.forward).parameters:
            raise CaptureError(
                "documents can be kept apart in a decoder that takes position_ids, and this one does not",
                where=type(decoder).__name__,
                hint=_HINT,
            )
        self.decoder = decoder
        self.separator = separator
        self.arguments = arguments

    def forward(self, ids: Tensor) -> Any:
        """Return the decoder's output for token ids (B, T)."""
        return self.decoder(ids, position_ids=positions_in_documents(ids, self.separator), **self.arguments)


def positions_in_documents(ids_BT: Tensor, separator: int) -> Tensor:
    """Return the position of every token in its document, (B, T) int64."""
    ends_BT = ids_BT[:, :-1] == separator
    begins_BT = torch.cat([torch.ones_like(ids_BT[:, :1], dtype=torch.bool), ends_BT], 1)
    places_T = torch.arange(ids_BT.shape[1], device=ids_BT.device)
    first_BT = torch.where(begins_BT, places_T, 0).cummax(1).values
    return places_T - first_BT


def refuse_mixing(where: str, difference: float) -> CaptureError:
    """Return the error for a decoder whose documents still see each other."""
    return CaptureError(
        f"documents cannot be kept apart: the logits of a document differ by {difference:.1e} if another "
        "document comes before it",
        where=where,
        hint=_HINT,
    )
