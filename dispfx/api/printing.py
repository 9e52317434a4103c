"""`--print-after`: the graph after a pass, wherever a command runs this pass.

with printing(["lower-gates"], observer):
    ...                                 # every pipeline in here prints after lower-gates
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from dispfx.choices import require_choice
from dispfx.passes.align_groups import AlignGroups
from dispfx.passes.canonicalize import Canonicalize
from dispfx.passes.drop_causal_masks import DropCausalMasks
from dispfx.passes.find_branches import FindBranches
from dispfx.passes.find_residual_stream import FindResidualStream
from dispfx.passes.find_sites import FindSites
from dispfx.passes.fold_statistics import FoldStatistics
from dispfx.passes.fuse_projections import FuseProjections
from dispfx.passes.gather_add import GatherAdd
from dispfx.passes.group_heads import GroupHeads
from dispfx.passes.insert_gates import InsertGates
from dispfx.passes.last_logits import LastLogits
from dispfx.passes.lower_gates import LowerGates
from dispfx.passes.outline_layers import OutlineLayers
from dispfx.passes.static_cache import StaticCache
from dispfx.pipeline import printing_after
from dispfx.report import NullObserver, Observer

# Every pass, in the order of the compiler.
KINDS = (
    Canonicalize,
    FoldStatistics,
    FindResidualStream,
    FindBranches,
    FindSites,
    InsertGates,
    DropCausalMasks,
    LowerGates,
    AlignGroups,
    GatherAdd,
    FuseProjections,
    GroupHeads,
    LastLogits,
    StaticCache,
    OutlineLayers,
)
PASSES = tuple(kind.name for kind in KINDS)


@contextmanager
def printing(names: Sequence[str], observer: Observer | None = None) -> Iterator[None]:
    """Give graphs after the passes of these names to an observer; note which of them did not run.

    Raises:
        DispfxError: if there is no pass of a name, listing the passes that there are.
    """
    for name in names:
        require_choice(PASSES, name, "--print-after")
    watcher = observer or NullObserver()
    with printing_after(names, watcher.printed) as printer:
        yield
    for name in dict.fromkeys(names):
        if name not in printer.printed:
            watcher.note(f"{name} did not run in this command, so there is no graph to print after it")


def described_passes() -> list[tuple[str, str, str]]:
    """Return name, stage and effect of every pass, in the order of the compiler."""
    return [(kind.name, _stage(kind), (kind.__doc__ or "").partition("\n")[0]) for kind in KINDS]


def _stage(kind: type) -> str:
    """Return what a pass needs and gives; one that works at several stages leaves the stage as it is."""
    before, after = vars(kind)["requires"], vars(kind).get("ensures")
    return before if after in (None, before) or not isinstance(after, str) else f"{before} → {after}"
