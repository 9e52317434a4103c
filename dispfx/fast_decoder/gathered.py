"""A whole gated graph whose weights lie in parts: each is gathered for the operations that read it.

It is what layers with shards are compared with: nothing of it knows layers.  Autograd would keep every weight
that a gradient needs; it keeps its path instead, and the weight is gathered again on the way back.

Legend: B batch, T tokens, V vocabulary.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dispfx.fast_decoder.shards import Shards
from dispfx.ir.program import Program
from dispfx.learning.objective import NEXT_TOKEN, MaskedLosses, Objective, loss_of_logits


class GatheredDecoder(MaskedLosses):
    """A gated program, computed operation by operation; slow, and as small as one weight and its values.

    Args:
        program: gated, on the device of the shards.
        shards: of its weights.
        objective: what is learned.
    """

    def __init__(self, program: Program, shards: Shards, objective: Objective = NEXT_TOKEN):
        self.objective = objective
        self._program, self._shards = program, shards
        self._sizes = [site.size for site in program.sites]

    def _loss(self, ids_BT: Tensor, masks: Tensor, objective: Objective, shift: int) -> Tensor:
        def logits(as_dense: bool) -> Tensor:
            given = torch.ones_like(masks) if as_dense else masks
            return _Gathering(self._program, self._shards).run(ids_BT, *given.split(self._sizes, -1))

        separator = self._program.separator
        return loss_of_logits(objective, logits, ids_BT, separator=separator, shift=shift)


class _Gathering(fx.Interpreter):
    """Runs a graph once; values are freed after their last use."""

    def __init__(self, program: Program, shards: Shards):
        super().__init__(program.graph_module, garbage_collect_values=True)
        self._shards = shards
        # Values that are a weight or a view of one -> its path.
        self._paths: dict[fx.Node, str] = {}
        # Memory of the weights that the operation reads -> path.
        self._read: dict[int, str] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            whole = self._gather(str(n.target))
            if whole is not None:
                self._paths[n] = str(n.target)
                return whole
        weights = {node: self.env[node] for node in n.all_input_nodes if node in self._paths}
        self._read = {_memory(weight): self._paths[node] for node, weight in weights.items()}
        with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            result = super().run_node(n)
        if isinstance(result, Tensor) and _memory(result) in self._read:
            self._paths[n] = self._read[_memory(result)]
        return result

    @torch.no_grad()
    def _gather(self, path: str) -> Tensor | None:
        return self._shards.whole(path)

    def _pack(self, tensor: Tensor) -> Any:
        path = self._read.get(_memory(tensor))
        if path is None:
            return tensor
        return path, tensor.shape, tensor.stride(), tensor.storage_offset()

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        path, shape, stride, offset = packed
        whole = self._gather(path)
        assert whole is not None
        return whole.as_strided(shape, stride, offset)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
