"""Which linear layers of an engine have weights of 8 or 4 bits, from the dispfx section of a folder.

1. The section names the rounded modules.  Kinds and names of layers decide nothing.
2. An engine may fuse modules: either all of them are rounded, or no one.
3. A layer of the engine must stand for every rounded module, and all tensors of a module must be loaded.
4. Codes lie in words of 32 bits, in files or in kernels.  The inputs of a rank fill whole words.  Where zero
   points are stored, the outputs of a rank and of each fused module do, too: a loader would otherwise take
   the zero points of a neighbour.

Nothing here imports an engine.
"""

import copy
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from dispfx.errors import OutputError
from dispfx.quantization.stored_weights import SCHEMES, WEIGHT, empty_tensors
from dispfx.serving.fused_layers import unserved

_WORD = 32
_OWN_MODULES = "serve with --model-impl transformers, which takes the modules of the decoder itself"


class RoundedWeights:
    """The rounded layers of a folder.

    Args:
        scheme: of all of them.
        layers: their paths.
        format: of their tensors, as compressed-tensors says it.
    """

    def __init__(self, scheme: str, layers: Collection[str], format: Mapping[str, Any]):
        self.scheme = scheme
        self.layers = frozenset(layers)
        self._format = dict(format)
        self._served: set[str] = set()

    @staticmethod
    def of_section(section: Mapping[str, Any]) -> "RoundedWeights | None":
        """Read the dispfx section of a config; None if all weights are plain.

        Raises:
            OutputError: if the weights are of a kind that this version does not know.
        """
        entry = section.get("rounded")
        if entry is None:
            return None
        if entry["scheme"] not in SCHEMES:
            raise OutputError(
                f"the folder has weights of the kind {entry['scheme']!r}, but this version reads "
                f"{', '.join(SCHEMES)}",
                hint="use the version of dispfx that wrote it",
            )
        return RoundedWeights(entry["scheme"], entry["layers"], entry["format"])

    @property
    def names(self) -> list[str]:
        """The stored tensors of all rounded layers."""
        tensors = empty_tensors(self.scheme, torch.empty(_WORD, _WORD, device="meta"))
        return [f"{path}.{name}" for path in sorted(self.layers) for name in tensors]

    def holds(self, path: str, name: str) -> bool:
        """Return whether a parameter is stored as codes instead."""
        return name == WEIGHT and path in self.layers

    def format(self) -> dict[str, Any]:
        """Return the format for an engine that is asked for rounded layers only (rule 1)."""
        return copy.deepcopy(self._format) | {"ignore": []}

    def fused(self, paths: Sequence[str]) -> bool:
        """Return whether the layer that stands for some modules is rounded.

        Raises:
            OutputError: if only some of them are (rule 2).
        """
        plain = [path for path in paths if path not in self.layers]
        if plain and len(plain) < len(paths):
            raise unserved(plain[0], f"it is fused in {', '.join(paths)}, and only some of these are rounded")
        self._served.update(paths)
        return not plain

    def require_all_served(self) -> None:
        """Pass if a layer stands for every rounded module.

        Raises:
            OutputError: naming the first one that has none (rule 3).
        """
        for path in sorted(self.layers - self._served):
            raise unserved(
                path, "its class in vLLM does not say which layer stands for this module", hint=_OWN_MODULES
            )

    def fills_words(self, inputs: int, outputs: Sequence[int]) -> bool:
        """Return whether the codes of a layer fill whole words (rule 4).

        Args:
            inputs: of one rank.
            outputs: of one rank, for each part of the product.
        """
        grid = SCHEMES[self.scheme].grid
        codes = _WORD // grid.bits
        zeros = () if grid.floating or grid.symmetric else outputs
        return not any(width % codes for width in (inputs, *zeros))
