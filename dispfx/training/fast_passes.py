"""The passes that make a gated program fast to learn on."""

from dispfx.passes.drop_causal_masks import DropCausalMasks
from dispfx.passes.group_heads import GroupHeads
from dispfx.passes.outline_layers import OutlineLayers
from dispfx.pipeline import Pass


def training_passes(tokens: int) -> list[Pass]:
    """Return the passes that make a gated program fast to learn on, for sequences of that length."""
    return [DropCausalMasks(tokens), GroupHeads(masked=False, requires="gated"), OutlineLayers()]
