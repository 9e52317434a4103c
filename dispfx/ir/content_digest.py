"""Digests of what a program computes, and of texts and tensors."""

import hashlib
import re
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from dispfx.ir.program import Program

# Where a program is does not change what it computes.
_DEVICE = re.compile(r"device\(type='\w+'(, index=\d+)?\)")
_CHUNK = 2**22


def program_digest(program: Program) -> str:
    """Return the digest of what a program computes: weights, buffers, operations and their constants.

    Weights count as the fingerprint of a plan has them, whatever their dtype.

    A plan's fingerprint is of the weights alone, because other versions of torch and transformers write the
    same decoder as another graph.  This one is for a run that goes on where it was interrupted.
    """
    module = program.graph_module
    graphs = [one.graph for one in module.modules() if isinstance(one, fx.GraphModule)]
    nodes = (_DEVICE.sub("device", str(node.format_node())) for graph in graphs for node in graph.nodes)
    buffers = (part for path, one in sorted(module.named_buffers()) for part in (path, one))
    return content_digest((program.fingerprint, *nodes, *buffers))


def content_digest(parts: Iterable[str | bytes | Tensor]) -> str:
    """Return the SHA-256 of several contents in hexadecimal; a tensor without values has its shape alone."""
    found = hashlib.sha256()
    for part in parts:
        if isinstance(part, Tensor):
            found.update(f"{part.dtype}{tuple(part.shape)}".encode())
            for piece in () if part.is_meta else part.detach().reshape(-1).split(_CHUNK):
                found.update(piece.to("cpu").contiguous().view(torch.uint8).numpy().tobytes())
        else:
            found.update(part.encode() if isinstance(part, str) else part)
        found.update(b"\0")
    return found.hexdigest()
