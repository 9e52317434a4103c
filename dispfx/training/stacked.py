"""The weights of sibling projections in one storage while masks are learned, and apart again behind it.

    w_q (Q, D), w_k (K, D), w_v (K, D)   →   one storage (Q + 2K, D), of which each is some rows

One product then computes what three did (`passes/fuse_projections.py`), and no weight is there twice: the
parameters become views, those of the captured decoder too.  Their values and shapes stay what they were.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain

import torch
from torch import Tensor, nn

from dispfx.ir.program import Program
from dispfx.ir.twins import move
from dispfx.passes.fuse_projections import siblings, weight_paths


@contextmanager
def stacked_weights(program: Program) -> Iterator[int]:
    """Lay the weights of every group of siblings one above the other; each has its own storage at the end.

    Weights that share their storage with something else stay where they are.  What is needed beside the
    weights is one group of them, the largest; where that is not there at the end, the weights stay together.

    Args:
        program: gated; its parameters are moved.

    Yields:
        The number of groups that were laid so.
    """
    parameters = dict(program.graph_module.named_parameters())
    tenants = Counter(map(_storage, parameters.values()))
    moved: list[list[nn.Parameter]] = []
    try:
        for group in siblings(program.graph):
            weights = [parameters[path] for path in weight_paths(group) if path in parameters]
            if _can_move(weights, tenants):
                moved.append(weights)  # first, so that a group that was moved in part is moved back
                _stack(weights)
        yield len(moved)
    finally:
        with suppress(torch.OutOfMemoryError):  # they have the right values as they are
            for weight in chain.from_iterable(moved):
                move(weight, weight.data.clone())


def _can_move(weights: Sequence[nn.Parameter], tenants: Mapping[int, int]) -> bool:
    """Whether the weights fit together, and nothing but they themselves can notice that they move.

    Args:
        tenants: how many of the program's parameters have a storage.
    """
    fit = len({(weight.dtype, weight.device, weight.shape[1:]) for weight in weights}) == 1
    return (
        fit
        and len(weights) > 1
        and all(_fills_its_storage(weight) and tenants[_storage(weight)] == 1 for weight in weights)
    )


def _fills_its_storage(weight: nn.Parameter) -> bool:
    plain = type(weight) is nn.Parameter and not weight.is_meta and weight.is_contiguous()
    return plain and weight.untyped_storage().nbytes() == weight.nbytes


def _storage(weight: Tensor) -> int:
    return weight.untyped_storage().data_ptr()


def _stack(weights: Sequence[nn.Parameter]) -> None:
    whole = torch.cat([weight.detach() for weight in weights])
    for weight, rows in zip(weights, whole.split([len(weight) for weight in weights]), strict=True):
        move(weight, rows)
