"""Profile the decoder's part of a step of learning by kind of kernel, compared with its products alone.

The weights are frozen, so a linear layer costs two products, forward and the gradient of its input.  Those
products, run one after the other with nothing between them, are the least that the step takes with the card's
own library; what the step takes beyond them is attention, the rest, and what the rest does to the products.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from kernels import Kernel, kernel_rows, seconds_by_kind
from torch import Tensor

from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.layered import PartModule
from dispfx.ir.ops import aten, packet

_RUNS = 5
_SHOWN = 30


@dataclass(frozen=True)
class Products:
    """The products of a decoder's part of a step, alone.

    Args:
        count: forward and backward.
        operations: of all of them, two for a multiplication and addition.
        seconds: the median of some runs.
    """

    count: int
    operations: float
    seconds: float


def products_alone(decoder: TrainingDecoder, tokens: int, wait: Callable[[], None]) -> Products:
    """Return the time of every linear layer's two products for so many tokens."""
    weights = [weight for part in decoder.layered.parts for weight in _weights_of(part)]
    widths = {width for weight in weights for width in weight.shape}
    values = {
        width: torch.randn(tokens, width, device=weights[0].device, dtype=weights[0].dtype)
        for width in sorted(widths)
    }
    times = []
    with torch.no_grad():
        for _ in range(_RUNS):
            wait()
            began = time.perf_counter()
            for weight in weights:
                F.linear(values[weight.shape[1]], weight)
            for weight in reversed(weights):
                torch.mm(values[weight.shape[0]], weight)
            wait()
            times.append(time.perf_counter() - began)
    operations = 4.0 * tokens * sum(weight.numel() for weight in weights)
    return Products(2 * len(weights), operations, statistics.median(times[1:]))


def _weights_of(part: PartModule) -> list[Tensor]:
    """Return the matrices of a part's linear layers, in the order of its body."""
    names = [node.name for node in part.part.body.graph.nodes if node.op == "placeholder"]
    given = dict(zip(names[len(part.part.values) :], part.tensors(), strict=True))
    linear = [node for node in part.part.body.graph.nodes if packet(node) is aten.linear]
    return [given[node.args[1].name] for node in linear if node.args[1].name in given]


def decoder_markdown(name: str, kernels: Sequence[Kernel], products: Products) -> str:
    """Return the decoder's part by kind of kernel, its products alone, and the slowest kernels."""
    rate = products.operations / products.seconds / 1e12
    alone = f"its {products.count} products alone take {products.seconds * 1e3:.1f} ms ({rate:.0f} TFLOP/s)"
    return _page(f"{name}, the decoder's part; {alone}", kernels)


def hypernetwork_markdown(name: str, kernels: Sequence[Kernel], milliseconds: float) -> str:
    """Return the kernels of a step without a decoder, which takes so long by the clock."""
    return _page(f"{name}, all but the decoder, {milliseconds:.1f} ms by the clock", kernels)


def _page(title: str, kernels: Sequence[Kernel]) -> str:
    total = sum(kernel.seconds for kernel in kernels)
    lines = [f"\n{title}; kernels {total * 1e3:.2f} ms:\n", "| kind | ms | share |", "| --- | --- | --- |"]
    for kind, seconds in seconds_by_kind(kernels).items():
        lines.append(f"| {kind} | {seconds * 1e3:.2f} | {seconds / total:.1%} |")
    return "\n".join([*lines, "", *kernel_rows(kernels, _SHOWN)]) + "\n"
