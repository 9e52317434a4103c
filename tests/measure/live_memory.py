"""The memory that torch holds, counted storage by storage while a step really runs."""

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dispfx.compiler.stages import for_learning, run_stage
from dispfx.estimate.cuda_memory import block_bytes, workspaces_bytes
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.preparation import SHORT
from dispfx.ir.ops import ATTENTION
from dispfx.ir.program import Program
from dispfx.learning.hypernetwork import build_hypernetwork
from dispfx.plan.hardening import Groups
from dispfx.run.learning_setup import prepared_loss
from dispfx.run.mask_learning import batches_of
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from tests.measure.caching_allocator import Block, CachingAllocator
from tests.programs import token_ids


class LiveMemory(TorchDispatchMode):
    """Counts the bytes of all storages that operations return, until each is freed.

    Args:
        there: tensors that are not counted.
        taken: from the bytes of a storage to those that an allocator gives it.
    """

    def __init__(self, there: Iterable[Tensor], taken: Callable[[int], int] = lambda size: size):
        super().__init__()
        self._taken = taken
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata: 0 for tensor in there}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = self._taken(storage.nbytes())
            self.now += self._known[key]
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._freed, key)

    def _freed(self, key: int) -> None:
        self.now -= self._known.pop(key)


def peak_of_a_step(program: Program, settings: LearnSettings) -> int:
    """Return the most bytes that one forward and backward pass of learning holds beside the weights."""
    ids = token_ids(settings.batch_size, settings.seq_len, vocabulary=program.vocabulary_size)
    text = batches_of(ids.repeat(1, 2).flatten(), settings, held_out=ids.flatten())
    prepared = prepared_loss(program, text, settings, ComputeSettings("off", "off"))
    features = sum(site.size for site in program.sites)
    masks = torch.ones(settings.samples, features) if settings.samples > 1 else torch.ones(features)
    masks.requires_grad_()
    there = [masks, ids, *dict(program.tensors()).values()]
    there += [*prepared.decoder.parameters(), *prepared.decoder.buffers()]
    with LiveMemory(there) as memory:
        prepared.loss(ids, masks).backward()
    assert masks.grad is not None and bool(masks.grad.any())
    return memory.peak


class AllocatedMemory(LiveMemory):
    """Gives every storage a block of an allocator."""

    def __init__(self, there: Iterable[Tensor], allocator: CachingAllocator):
        super().__init__(there)
        self._allocator = allocator

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = 0
            if storage.nbytes():
                block = self._allocator.take(storage.nbytes())
                weakref.finalize(storage, self._allocator.give, block)
            weakref.finalize(storage, self._known.pop, key)


class _AsOnHopper(TorchFunctionMode):
    """Attention by the operation that torch takes on Hopper, which says what it keeps without a GPU too."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "overloadpacket", None) not in ATTENTION:
            return func(*args, **kwargs)
        operands: tuple[Any, ...] = (*args, *(None, 0.0, False)[len(args) - 3 :])
        query, key, value, mask, dropout, causal = operands
        if mask is not None and mask.dtype == torch.bool:  # kernels take one that is added
            mask = torch.zeros_like(mask, dtype=query.dtype)
        operation = torch.ops.aten._scaled_dot_product_cudnn_attention
        scale = kwargs.get("scale")
        return operation(query, key, value, mask, True, dropout, causal, False, scale=scale)[0]


def peak_of_a_step_on_a_gpu(program: Program, settings: LearnSettings) -> int:
    """Return the most bytes of blocks that a step holds on a GPU, what kernels take inside left out.

    Args:
        program: on the meta device, so that no value is there and any size can be tried.
    """
    decoder, there = _learned(program, settings)
    with _AsOnHopper(), LiveMemory(there, block_bytes) as memory:
        _step(decoder, settings.batch_size, settings.seq_len)
    return memory.peak


def learning_on_a_gpu(program: Program, settings: LearnSettings) -> CachingAllocator:
    """Return the allocator of a GPU after two steps of learning, with all that is done before them.

    The hypernetwork is there as blocks of its size; of kernels the workspaces of cuBLAS are.
    """
    allocator = CachingAllocator()
    decoder, there = _learned(program, settings)
    groups = Groups.of_run(program.sites, constrained=settings.constrained)
    built = build_hypernetwork(settings.hypernetwork, groups.sizes, bias=3.0, seed=0)
    sizes = [parameter.nbytes for parameter in built.parameters()]
    workspace = workspaces_bytes(torch.device("cuda")) // 6

    def take(sizes: Iterable[int]) -> list[Block]:
        return [allocator.take(size) for size in sizes]

    def give(blocks: list[Block]) -> None:
        for block in blocks:
            allocator.give(block)

    with _AsOnHopper(), AllocatedMemory(there, allocator):
        _step(decoder, 1, min(SHORT, settings.seq_len))  # the comparison of the layers with the graph
        take([workspace] * 2)
        _step(decoder, settings.batch_size, settings.seq_len)  # the check of all gates
        take(sizes)
        allocator.place = "warm-up"
        take([workspace] * 2)
        give(take(sizes))
        allocator.empty_cache()
        allocator.place = "graph"
        take([workspace] * 2 + sizes)
        allocator.place = "usual stream"
        allocator.empty_cache()
        give(take(sizes))  # what a replay is compared with
        _step(decoder, settings.batch_size, settings.seq_len)
        take(sizes * 2)  # AdamW's moments
        _step(decoder, settings.batch_size, settings.seq_len)
    return allocator


def _learned(program: Program, settings: LearnSettings) -> tuple[TrainingDecoder, list[Tensor]]:
    """Return the decoder that learning calls, and its tensors."""
    gated = run_stage("gate", program.clone(), verify=False)
    decoder = TrainingDecoder(for_learning(gated, settings.seq_len, verify=False))
    decoder.in_chunks = True  # what a decoder with values is asked
    return decoder, [*dict(program.tensors()).values(), *decoder.parameters(), *decoder.buffers()]


def _step(decoder: TrainingDecoder, batch: int, tokens: int) -> None:
    ids = torch.zeros(batch, tokens, dtype=torch.long, device="meta")
    masks = torch.ones(sum(decoder.sizes), device="meta").requires_grad_()
    decoder.loss(ids, masks).backward()
