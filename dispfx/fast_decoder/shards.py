"""The weights of a layered decoder in parts, one on each rank.

    shards = Shards(layered, sharding)      the weights lie in parts from now on

A layer's weights are gathered when it computes, forward and backward, and freed afterwards; those of the next
layer are prefetched (FSDP2, `torch.distributed.fsdp.fully_shard`).  The weights are frozen, so no gradient is
reduced.  `PartModule.lend` gathers the weights before and after the layers while they are used, those of the
head once for all chunks of a batch.

Rules:
1. A rank reads its own rows of every weight and no other: `fetch` is asked for nothing else.
2. A weight of one number cannot be cut; every rank has it.
3. Two layers that read one weight are refused: each would gather and free it under the other's hands.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from dispfx.errors import UnsupportedGraphError
from dispfx.fast_decoder.layered import LayeredDecoder, PartModule
from dispfx.ir.outline import Outline
from dispfx.ir.program import Program
from dispfx.words.option_names import option

Fetch = Callable[[str, slice], Tensor]


@dataclass(frozen=True, eq=False)
class Sharding:
    """How weights are cut into parts.

    Args:
        fetch: (path, rows) -> those rows of a weight, on any device; a number for a weight of one number.
        size: of the run, in ranks.
        device: of this rank.
    """

    fetch: Fetch
    size: int
    device: torch.device


class Shards:
    """Who has which part of a decoder's weights, and the windows in which a part module has them all.

    Args:
        layered: made of `hollow` tensors; its weights become real here.
        sharding: of all ranks.

    Raises:
        UnsupportedGraphError: if several layers share a weight, or a gate acts before the first.
    """

    def __init__(self, layered: LayeredDecoder, sharding: Sharding):
        self._fetch, self._device = sharding.fetch, sharding.device
        self._mesh = init_device_mesh(sharding.device.type, (sharding.size,))
        self._lent: list[_Lent] = []
        self._places = layered.places()
        check_gradients(layered.outline)
        weights = {path for path, places in self._places.items() if _is_weight(places)}
        check_shareable(layered.outline, weights)
        for layer in layered.layers:
            self._cut(layer)
        fully_shard(layered.layers, mesh=self._mesh)
        for parts in _ends(layered):
            end = nn.Module()
            for index, part in enumerate(parts):
                end.add_module(str(index), part)
            if any(parameter.dim() for parameter in end.parameters()):
                self._lent.append(_Lent(self._cut(end)))
                for part in parts:
                    part.lend = self._lent[-1].window  # type: ignore[assignment]

    def keep_ends(self) -> None:
        """Gather the weights before and after the layers permanently."""
        for lent in self._lent:
            lent.window().__enter__()

    def whole(self, path: str) -> Tensor | None:
        """Return a whole tensor, gathered from all ranks, or None if the decoder has none of that path."""
        if path not in self._places:
            return None
        owner, name = self._places[path][0]
        found = getattr(owner, name)
        return found.full_tensor() if isinstance(found, DTensor) else found

    def _cut(self, module: nn.Module) -> FSDPModule:
        scalars = {parameter for parameter in module.parameters() if not parameter.dim()}
        fully_shard(module, mesh=self._mesh, reshard_after_forward=True, ignored_params=scalars)
        own = set(module.modules())
        for path, places in self._places.items():
            inside = [(owner, name) for owner, name in places if owner in own]
            if inside and isinstance(getattr(*inside[0]), nn.Parameter):
                self._fill(path, inside)
        assert isinstance(module, FSDPModule)
        return module

    def _fill(self, path: str, places: Sequence[tuple[nn.Module, str]]) -> None:
        """Give a weight its values; FSDP looks for them when it first runs."""
        hollow = getattr(*places[0])
        if isinstance(hollow, DTensor):
            values = self._fetch(path, self._rows(hollow.shape[0])).to(self._device, copy=True)
            value = DTensor.from_local(
                values, self._mesh, hollow.placements, shape=hollow.shape, stride=hollow.stride()
            )
        else:
            value = self._fetch(path, slice(None)).to(self._device, copy=True)
        filled = nn.Parameter(value, requires_grad=False)
        for owner, name in places:
            setattr(owner, name, filled)

    def _rows(self, count: int) -> slice:
        """Return this rank's rows of a weight with so many: as torch.chunk cuts them."""
        most = -(-count // self._mesh.size())
        start = min(self._mesh.get_local_rank() * most, count)
        return slice(start, min(start + most, count))


class _Lent:
    """Gathers weights when a first window opens, and frees them when the last one closes."""

    def __init__(self, module: FSDPModule):
        self._module = module
        self._open = 0

    @contextmanager
    def window(self) -> Iterator[None]:
        """Have the weights whole inside."""
        if not self._open:
            self._module.unshard()
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if not self._open:
                self._module.reshard()


def hollow(program: Program) -> dict[str, Tensor]:
    """Return the program's tensors by path, parameters without values and buffers as they are."""
    return {
        path: nn.Parameter(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), requires_grad=False)
        if isinstance(tensor, nn.Parameter)
        else tensor
        for path, tensor in program.tensors()
    }


def rows_of(tensors: Mapping[str, Tensor]) -> Fetch:
    """Return a `Fetch` of tensors that are there as a whole, on a host or in a mapped file."""

    def fetch(path: str, rows: slice) -> Tensor:
        tensor = tensors[path].detach()
        return tensor[rows] if tensor.dim() else tensor

    return fetch


def check_gradients(outline: Outline) -> None:
    """Pass if no gate acts before the first layer, where no gradient is computed.

    Raises:
        UnsupportedGraphError: if one does.
    """
    if len(outline.prologue.values) > 1:
        raise UnsupportedGraphError(
            "the weights cannot lie in parts: a gate acts before the first layer",
            where=outline.prologue.values[1],
            hint=f"leave out {option('shard')}",
        )


def check_shareable(outline: Outline, weights: set[str]) -> None:
    """Pass if no two layers read one of the weights (rule 3).

    Raises:
        UnsupportedGraphError: naming one that several do.
    """
    readers = Counter(path for layer in outline.layers for path in set(layer.tensors) & weights)
    ends = {*outline.prologue.tensors, *outline.epilogue.tensors}
    shared = [path for path, count in readers.items() if count > 1 or path in ends]
    if shared:
        raise UnsupportedGraphError(
            "the weights cannot lie in parts: several layers read one",
            where=", ".join(shared[:3]) + (" …" if len(shared) > 3 else ""),
            hint=f"leave out {option('shard')}",
        )


def _is_weight(places: Sequence[tuple[nn.Module, str]]) -> bool:
    tensor = getattr(*places[0])
    return isinstance(tensor, nn.Parameter) and tensor.dim() > 0


def _ends(layered: LayeredDecoder) -> list[list[PartModule]]:
    """Return prologue and epilogue, together where they share a weight such as a tied embedding."""
    first, last = layered.prologue, layered.epilogue
    if set(first.part.tensors) & set(last.part.tensors):
        return [[first, last]]
    return [[first], [last]]
