"""Whether the mask of an attention is the plain causal one, found by computing it.

A mask is a part of the graph that depends on sizes, the padding mask and positions, and on no
parameter and no token.  `is_causal` runs that part at the first and at the last tokens of a text of full
length, without padding.  A sliding window, a chunk or a prefix shows there, if it shows at all.

Shape legend: B batch, T new tokens, P cached tokens.
"""

import copy

import torch
from torch import Tensor, fx

from dispfx.ir import ops
from dispfx.ir.cached_inputs import CachedShape, CacheTensor, cache_tensors, positions_of
from dispfx.ir.program import INDEX_PREFIX, Program, with_tensors

_TOKENS = 64
# Additive masks hide a key by the lowest number of their dtype, or by minus infinity.
_HIDDEN = 0.5


def is_causal(program: Program, mask: fx.Node, length: int) -> bool:
    """Return whether query t sees the cached and new keys up to itself, whatever the tokens are.

    Args:
        program: with a cache, before it is made static.
        mask: (B or 1, heads or 1, T, P + T), boolean or additive.
        length: most tokens that a text will have.
    """
    part = _part_of(program, mask)
    if part is None:
        return False
    tokens = min(_TOKENS, length)
    shapes = [
        CachedShape(2, tokens, 0),
        CachedShape(2, tokens, length - tokens),
        CachedShape(1, 1, length - 1),
    ]
    caches = cache_tensors(program.graph)
    with torch.no_grad():
        return all(_holds(part(*_inputs(caches, shape, program.device)), shape) for shape in shapes)


def _part_of(program: Program, mask: fx.Node) -> fx.GraphModule | None:
    """Return the graph of the mask alone; None where it depends on tokens or parameters."""
    graph = copy.deepcopy(program.graph)
    (twin,) = (node for node in graph.nodes if node.name == mask.name)
    output = graph.output_node()
    output.args = (twin,)
    for node in reversed(list(graph.nodes)):
        if not node.users and node.op not in ("placeholder", "output"):
            graph.erase_node(node)
    ids = next(iter(graph.nodes))
    reads_tokens = any(ops.packet(user) not in ops.METADATA_ONLY for user in ids.users)
    parameters = dict(program.graph_module.named_parameters())
    read = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
    if reads_tokens or any(path in parameters or path.startswith(INDEX_PREFIX) for path in read):
        return None
    return with_tensors(graph, {path: tensor for path, tensor in program.tensors() if path in read})


def _inputs(caches: tuple[CacheTensor, ...], shape: CachedShape, device: torch.device) -> tuple[Tensor, ...]:
    """Return inputs without padding; the caches have a shape and next to no memory."""
    batch, tokens, past = shape
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device=device)
    mask = torch.ones(batch, past + tokens, dtype=torch.int64, device=device)
    keys = [
        torch.zeros(1, dtype=cache.dtype, device=device).expand(batch, cache.heads, past, cache.size)
        for cache in caches
    ]
    return (ids, mask, positions_of(mask, tokens), *keys)


def _holds(mask: Tensor, shape: CachedShape) -> bool:
    keys = torch.arange(shape.past + shape.tokens, device=mask.device)
    queries = torch.arange(shape.tokens, device=mask.device) + shape.past
    causal = keys <= queries[:, None]
    if mask.shape[-2:] != causal.shape:
        return False
    if mask.dtype == torch.bool:
        return bool((mask == causal).all())
    hidden = mask <= _HIDDEN * torch.finfo(mask.dtype).min
    return bool((hidden == ~causal).all()) and bool((mask.masked_fill(hidden, 0) == 0).all())
