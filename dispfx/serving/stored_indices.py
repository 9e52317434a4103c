"""The indices of a decoder while an engine loads them, and the names of all tensors that it loads.

1. Room for an index holds -1 until it is loaded, so that a missing one is found.
2. Modules that an engine fuses have an index each; the indices must be equal.
3. When the last layer is checked, all indices are compared with the digest of the folder's config.
4. An engine may leave a weight at random values if a file of the folder is missing (vLLM checks only formats
   without a method of their own).  So the weights of pruned and rounded modules must be among the loaded
   names.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.errors import PlanMismatchError
from dispfx.huggingface.layout import ONE_COMPILATION, Layout
from dispfx.serving.fused_layers import Gather, unserved
from dispfx.serving.rounded_weights import RoundedWeights


class StoredIndices:
    """Indices by the names under which the folder stores them.

    Args:
        layout: of the folder.
        rounded: its weights of 8 or 4 bits, which have other names.
    """

    def __init__(self, layout: Layout, rounded: RoundedWeights | None = None):
        self._layout = layout
        self._rooms: dict[tuple[str, ...], Tensor] = {}
        self._checked: dict[str, Tensor] = {}
        self._expected = {
            f"{path}.{name}" for path, module in layout.modules.items() for name in module.indices
        }
        self._weights = [
            f"{path}.{name}"
            for path, module in layout.modules.items()
            for name in module.shapes
            if rounded is None or not rounded.holds(path, name)
        ]
        self._kind = "pruned" if rounded is None else "pruned or rounded"
        self._weights += [] if rounded is None else rounded.names
        self._names: set[str] = set()

    def room(self, gather: Gather, length: int) -> Tensor:
        """Return int32 (length,) for an index, on the current device, the same for all layers that use it."""
        if gather.sources not in self._rooms:
            self._rooms[gather.sources] = torch.full((length,), -1, dtype=torch.int32)
        return self._rooms[gather.sources]

    def loader(self, gather: Gather) -> Callable[..., None]:
        """Return the function with which an engine puts a stored index into its place.

        It raises PlanMismatchError for an index of another length, and OutputError if modules that the
        engine fuses read different features (rule 2).
        """

        def load(index: Tensor, stored: Tensor, shard: Any = None) -> None:
            if index.shape != stored.shape:
                raise PlanMismatchError(
                    f"{index.numel()} indices were expected, {stored.numel()} are stored",
                    where=gather.sources[0],
                    hint=ONE_COMPILATION,
                )
            if int(index[0]) >= 0 and not torch.equal(index.detach().cpu(), stored.cpu()):
                raise unserved(gather.sources[0], f"{', '.join(gather.sources)} differ, and vLLM fuses them")
            index.data.copy_(stored)

        return load

    def note(self, name: str) -> None:
        """Remember that the engine loads a tensor, by its name in the folder."""
        self._names.add(name)

    def require_weights(self) -> None:
        """Pass if the weights of all these modules were loaded, or the engine did not say what it loads.

        Raises:
            PlanMismatchError: naming the first weight that was not (rule 4).
        """
        missing = [name for name in self._weights if name not in self._names] if self._names else []
        if missing:
            raise PlanMismatchError(
                f"{len(missing)} of {len(self._weights)} {self._kind} weights are not in the folder's files",
                where=missing[0],
                hint="copy or download the folder again",
            )

    def check(self, gather: Gather, index: Tensor) -> None:
        """Pass if an index was loaded and, with the last one, if all are those of the folder's config.

        Raises:
            PlanMismatchError: naming the index.
        """
        values = index.detach().cpu()
        if int(values.min()) < 0:
            raise PlanMismatchError("the index was not loaded", where=gather.sources[0], hint=ONE_COMPILATION)
        self._checked.update(dict.fromkeys(gather.sources, values))
        if self._checked.keys() >= self._expected:
            self._layout.check_indices(self._checked)
