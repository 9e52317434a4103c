"""Let attention share keys and values among heads, instead of repeating them in memory.

    u = unsqueeze(k, 2)
    e = expand(u, [B, heads, n, T, size])   →   a = scaled_dot_product_attention(q, k, v, enable_gqa=True)
    r = reshape(e, [B, heads · n, T, size])
    a = scaled_dot_product_attention(q, r, r')

Rules:
1. Keys and values must both be repeated so, n times each; a number that is written into the graph.
2. Query head i reads key head i // n, which is what `enable_gqa` means.
3. An attention that shares its heads already is left alone.
Each sum is over the same numbers; a kernel for shared heads may add them in another order.
"""

from dataclasses import dataclass, field

from torch import fx

from dispfx.ir import ops
from dispfx.ir.ops import argument, aten, packet
from dispfx.ir.pipeline import PassResult
from dispfx.ir.program import Program


@dataclass
class GroupHeads:
    """Read repeated keys and values once.

    Args:
        masked: attentions with a mask too; a GPU has no fast kernel for both.
        requires: the level of the program: canonical, gated or lowered.
    """

    masked: bool = True
    requires: str = "lowered"
    ensures: str = field(init=False)

    name = "group-heads"

    def __post_init__(self) -> None:
        self.ensures = self.requires

    def run(self, program: Program) -> PassResult:
        """Rewrite the graph in place."""
        attentions = [node for node in program.graph.nodes if packet(node) in ops.ATTENTION]
        changed = [
            (self.masked or argument(node, 3, "attn_mask") is None) and _share(node) for node in attentions
        ]
        if any(changed):
            program.rebuild(dict(program.tensors()))
        return PassResult(any(changed), f"{sum(changed)} of {len(changed)} attentions")


def _share(attention: fx.Node) -> bool:
    """Rewrite one attention whose keys and values are repeated; say whether it was one."""
    if attention.kwargs.get("enable_gqa"):
        return False
    repeated = [argument(attention, place, name) for place, name in ((1, "key"), (2, "value"))]
    found = [repeated_heads(value) for value in repeated if isinstance(value, fx.Node)]
    alone = [pair for pair in found if pair is not None]
    if len(alone) != 2 or alone[0][1] != alone[1][1]:
        return False
    for old, (new, _) in zip(repeated, alone, strict=True):
        assert isinstance(old, fx.Node)
        attention.replace_input_with(old, new)
    attention.kwargs = {**attention.kwargs, "enable_gqa": True}
    return True


def repeated_heads(value: fx.Node) -> tuple[fx.Node, int] | None:
    """Return x and n where a value is x (B, heads, T, size) with each head n times, else None."""
    expand = value.args[0] if packet(value) is aten.reshape else None
    unsqueeze = expand.args[0] if isinstance(expand, fx.Node) and packet(expand) is aten.expand else None
    if not isinstance(unsqueeze, fx.Node) or packet(unsqueeze) is not aten.unsqueeze:
        return None
    assert isinstance(expand, fx.Node)
    alone = unsqueeze.args[0]
    if not isinstance(alone, fx.Node) or unsqueeze.args[1] != 2 or ops.rank(alone) != 4:
        return None
    before, after, times = ops.shape_of(alone), ops.shape_of(value), ops.shape_of(expand)[2]
    is_static = not ops.is_dynamic(expand, 2) and not ops.is_dynamic(alone, 1)
    repeats = after == (before[0], before[1] * times, before[2], before[3])
    return (alone, times) if is_static and repeats else None
