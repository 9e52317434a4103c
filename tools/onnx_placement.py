"""Which nodes of a model ran on the CPU, read from what ONNX Runtime recorded of a run on CUDA.

Arithmetic about shapes belongs on the CPU: a handful of integers that say how large something is.  Anything
else there (a product, a norm, a gather of features) means that the GPU waits for it, and so does a copy
between the two inside the layers.

Rules:
1. A node is arithmetic about shapes if all it reads and gives are at most `SHAPE_NUMBERS` integers or
   booleans.
2. A copy is inside the layers if it runs after the first product with weights and before the last.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dispfx.errors import DataError, VerificationError

SHAPE_NUMBERS = 16
_PRODUCTS = ("MatMul", "Gemm", "FusedMatMul", "MatMulNBits")
_COPIES = ("MemcpyToHost", "MemcpyFromHost")
_INTEGERS = ("int32", "int64", "bool", "uint8")


@dataclass(frozen=True)
class PlacedNode:
    """One node of a run.

    Args:
        name: of the node.
        operator: its type.
        provider: what ran it.
        sizes: of all it read and gave.
        types: of all it read and gave.
    """

    name: str
    operator: str
    provider: str
    sizes: tuple[int, ...]
    types: tuple[str, ...]

    @property
    def counts_shapes(self) -> bool:
        """Whether the node is arithmetic about shapes (rule 1)."""
        small = all(size <= SHAPE_NUMBERS for size in self.sizes)
        return self.operator == "Shape" or (small and all(kind in _INTEGERS for kind in self.types))


@dataclass(frozen=True)
class Placement:
    """Where the nodes of a run were.

    Args:
        on_cpu: every node that ran on the CPU, once each.
        copies: copies between CPU and GPU outside the layers.
        copies_inside: such copies inside the layers.
        nodes: how many nodes there were in all.
    """

    on_cpu: tuple[PlacedNode, ...]
    copies: tuple[PlacedNode, ...]
    copies_inside: tuple[PlacedNode, ...]
    nodes: int

    @property
    def misplaced(self) -> tuple[PlacedNode, ...]:
        """Nodes on the CPU that do more than count shapes."""
        return tuple(node for node in self.on_cpu if not node.counts_shapes)

    def require(self) -> None:
        """Pass if nothing but arithmetic about shapes ran on the CPU.

        Raises:
            VerificationError: naming what did.
        """
        wrong = [*self.misplaced, *self.copies_inside]
        if wrong:
            shown = ", ".join(f"{node.operator} ({node.name})" for node in wrong[:3])
            raise VerificationError(
                f"on a GPU only arithmetic about shapes may run on the CPU; {len(wrong)} other node(s) did: "
                f"{shown}"
            )


def read_placement(profile: Path) -> Placement:
    """Return where the nodes of the last run in a profile were.

    Args:
        profile: JSON that a session with `SessionOptions.profile` wrote.

    Raises:
        DataError: if the file is no profile.
    """
    try:
        events = json.loads(profile.read_text(encoding="utf-8"))
        nodes = list(_nodes(events))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"ONNX Runtime's profile cannot be read: {error}", where=str(profile)) from error
    return _placement(nodes)


def _placement(nodes: Sequence[PlacedNode]) -> Placement:
    products = [place for place, node in enumerate(nodes) if node.operator in _PRODUCTS]
    first, last = (products[0], products[-1]) if products else (len(nodes), 0)
    copies = [(place, node) for place, node in enumerate(nodes) if node.operator in _COPIES]
    inside = {node for place, node in copies if first < place < last}
    on_cpu = {
        node for node in nodes if node.provider == "CPUExecutionProvider" and node.operator not in _COPIES
    }
    return Placement(
        tuple(sorted(on_cpu, key=lambda node: node.name)),
        tuple(sorted({node for _, node in copies} - inside, key=lambda node: node.name)),
        tuple(sorted(inside, key=lambda node: node.name)),
        len({node.name for node in nodes}),
    )


def _nodes(events: Sequence[dict[str, Any]]) -> Iterator[PlacedNode]:
    """Yield the nodes of the last run, in the order in which they ran."""
    runs = [event["ts"] for event in events if event.get("name") == "model_run"]
    start = runs[-1] if runs else 0
    # A run is recorded with the time at which it began.
    kernels = [
        event
        for event in events
        if event.get("cat") == "Node" and event["name"].endswith("_kernel_time") and event["ts"] >= start
    ]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        arguments = event["args"]
        kinds, sizes = [], []
        for tensor in [*arguments.get("input_type_shape", []), *arguments.get("output_type_shape", [])]:
            for kind, shape in tensor.items():
                kinds.append(kind)
                sizes.append(_product(shape))
        yield PlacedNode(
            event["name"].removesuffix("_kernel_time"),
            arguments["op_name"],
            arguments.get("provider", ""),
            tuple(sizes),
            tuple(kinds),
        )


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total
