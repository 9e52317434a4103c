"""Replace causal masks by `is_causal=True`, which allows fast attention kernels.

    y = scaled_dot_product_attention(q, k, v, mask)
        →   y = scaled_dot_product_attention(q, k, v, is_causal=True)

Rules:
1. A mask is causal if it depends only on the shape of the token ids and, computed at the requested length,
   lets every token see exactly itself and all earlier tokens.  A window that is longer than the sequence is
   causal too; a shorter one, a bias by distance, or padding stays as it is.
2. Queries and keys must be as many: with a cache row i of the mask is not token i.
3. Only the operation changes, no parameter: sites and plans of the program stay valid.
The program holds at the requested length; at a longer one a window may matter again.
"""

from dataclasses import dataclass, field

import torch
from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import argument, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program

# Below every score: what an additive mask holds where a token must not be seen.
_HIDDEN = -1e4


@dataclass
class DropCausalMasks:
    """Drop masks that are causal.

    Args:
        tokens: length of the sequences that the program will be given.
        requires: the level of the program: canonical, gated or lowered.
    """

    tokens: int
    requires: str = "gated"
    ensures: str = field(init=False)

    name = "drop-causal-masks"

    def __post_init__(self) -> None:
        self.ensures = self.requires

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        causal: dict[fx.Node, bool] = {}
        dropped = 0
        for node in program.graph.nodes:
            mask = argument(node, 3, "attn_mask") if packet(node) in ops.ATTENTION else None
            if not isinstance(mask, fx.Node) or not _may_be_causal(node):
                continue
            if mask not in causal:
                causal[mask] = _is_causal(program, mask, self.tokens)
            if causal[mask]:
                _spell_causal(node)
                dropped += 1
        if dropped:
            program.rebuild(dict(program.tensors()))
        return PassResult(dropped > 0, f"{dropped} masks dropped")


def _may_be_causal(node: fx.Node) -> bool:
    """Whether queries and keys are as many, so that row i of the mask is token i."""
    query, key = node.args[0], node.args[1]
    assert isinstance(query, fx.Node) and isinstance(key, fx.Node)
    same = str(query.meta["val"].shape[-2]) == str(key.meta["val"].shape[-2])
    return same and argument(node, 5, "is_causal", False) is False


def _is_causal(program: Program, mask: fx.Node, tokens: int) -> bool:
    """Compute a mask at two sequences of that length and compare it (rule 1)."""
    # A program without values is evaluated on the CPU.
    device = torch.device("cpu") if program.device.type == "meta" else program.device
    module = _alone(program, mask, device)
    if module is None:
        return False
    ids = torch.zeros(2, tokens, dtype=torch.int64, device=device)
    with torch.no_grad():
        value = module(ids)
    if value.shape[-2:] != (tokens, tokens):
        return False
    seen = torch.ones(tokens, tokens, dtype=torch.bool, device=value.device).tril()
    if value.dtype == torch.bool:
        return bool((value == seen).all())
    return bool((value.masked_select(seen) == 0).all() & (value.masked_select(~seen) <= _HIDDEN).all())


def _alone(program: Program, value: fx.Node, device: torch.device) -> fx.GraphModule | None:
    """Return ids → value on a device, or None where it depends on more than the shape of the ids.

    A tensor of a program without values counts as such a dependence.
    """
    ids = next(iter(program.graph.nodes))
    inside: set[fx.Node] = set()
    pending = [value]
    while pending:
        node = pending.pop()
        if node in inside:
            continue
        if node.op == "placeholder" or (node.op == "get_attr" and program.device.type == "meta"):
            return None
        inside.add(node)
        pending += [below for below in node.all_input_nodes if not _only_sized(node, below, ids)]
    graph = fx.Graph()
    copies = {ids: graph.placeholder("ids")}
    for node in program.graph.nodes:
        if node in inside:
            copies[node] = graph.node_copy(node, lambda old: copies[old])
            if "device" in node.kwargs:
                copies[node].update_kwarg("device", device)
    graph.output(copies[value])
    return fx.GraphModule(program.graph_module, graph)


def _only_sized(node: fx.Node, below: fx.Node, ids: fx.Node) -> bool:
    return below is ids and packet(node) in ops.METADATA_ONLY


def _spell_causal(node: fx.Node) -> None:
    query, key, value = node.args[:3]
    dropout = argument(node, 4, "dropout_p", 0.0)
    kept = {name: node.kwargs[name] for name in ("scale", "enable_gqa") if name in node.kwargs}
    node.args, node.kwargs = (query, key, value, None, dropout, True), kept  # type: ignore[assignment]
