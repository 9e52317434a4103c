"""The compiler from top to bottom: its pipelines, each a tuple of passes.

    module → capture → analyse → gate → learn               → plan
                     → lower → gather                        a graph on sliced weights, as ONNX gets it
                     → scale, recover                        the same with a number per kept feature, to train
                     → fuse → prefill, decode, outline       the fast path with a static cache

A pass's options are its dataclass fields; `run_pipeline` gives each pass those that it has.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from dispfx.errors import DispfxError
from dispfx.ir.cached_inputs import CacheTensor, cache_tensors
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
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
from dispfx.passes.insert_scales import InsertScales
from dispfx.passes.last_logits import LastLogits
from dispfx.passes.lower_gates import LowerGates
from dispfx.passes.outline_layers import OutlineLayers
from dispfx.passes.pad_values import PadValues
from dispfx.passes.part_projections import PartProjections
from dispfx.passes.static_cache import StaticCache
from dispfx.words.choices import choice

PIPELINES: Mapping[str, tuple[Any, ...]] = {
    "analyse": (Canonicalize, PartProjections, FoldStatistics, FindResidualStream, FindBranches, FindSites),
    "gate": (InsertGates,),
    "learn": (DropCausalMasks, GroupHeads, OutlineLayers),
    "recover": (DropCausalMasks, GroupHeads),
    "lower": (InsertGates, LowerGates, AlignGroups),
    "scale": (InsertScales,),
    "gather": (GatherAdd,),
    "fuse": (FuseProjections, GroupHeads),
    "prefill": (LastLogits, StaticCache, PadValues),
    "decode": (StaticCache,),
    "outline": (OutlineLayers,),
}
# Every pass by its name, in the order of the compiler.
PASSES: Mapping[str, Any] = {kind.name: kind for kinds in PIPELINES.values() for kind in kinds}


def run_pipeline(name: str, program: Program, *, verify: bool = True, **options: Any) -> Program:
    """Run the passes of a pipeline on a program, and return it.

    Args:
        verify: check the graph, and what each pass claims, after each pass.
        options: of the passes, by the names of their fields.

    Raises:
        DispfxError: if there is no such pipeline, or no pass of it has such an option.
        PassError: if a pass is out of place or breaks the graph.
    """
    kinds = choice(PIPELINES, name, "pipeline")
    known = {kind: [one.name for one in fields(kind) if one.init] for kind in kinds}
    unknown = set(options) - {option for names in known.values() for option in names}
    if unknown:
        raise DispfxError(f"no pass of the pipeline {name} has the option {min(unknown)!r}")
    passes = [
        kind(**{option: value for option, value in options.items() if option in known[kind]})
        for kind in kinds
    ]
    return Pipeline(passes, verify=verify).run(program)


def names_of(*pipelines: str) -> list[str]:
    """Return the names of the passes of some pipelines."""
    return [kind.name for name in pipelines for kind in PIPELINES[name]]


def described_passes() -> list[tuple[str, str, str]]:
    """Return name, pipelines and effect of every pass, in the order of the compiler."""
    return [
        (name, _pipelines(kind), (kind.__doc__ or "").partition("\n")[0]) for name, kind in PASSES.items()
    ]


def _pipelines(kind: type) -> str:
    return ", ".join(name for name, kinds in PIPELINES.items() if kind in kinds)


def gathered(lowered: Program) -> Program:
    """Return a copy of a lowered program that writes into the residual stream by gather-add."""
    return run_pipeline("gather", lowered.clone())


def for_learning(gated: Program, tokens: int, *, verify: bool = True) -> Program:
    """Return a copy of a gated program that is fast to learn on, for sequences of that length."""
    return run_pipeline("learn", gated.clone(), verify=verify, tokens=tokens, masked=False, requires="gated")


def for_recovery(program: Program, tokens: int) -> Program:
    """Return a copy of a program that is fast on sequences of that length; it shares all tensors."""
    return run_pipeline("recover", program.clone(), tokens=tokens, masked=False, requires=program.level)


@dataclass(frozen=True, eq=False)
class StaticPrograms:
    """One decoder as two graphs that share their weights.

    Args:
        prefill: takes a prompt with an empty cache and returns the logits of its last token.
        decode: takes new tokens after `start` cached ones and returns their logits.
        length: S, the places of their caches.
        padded: whether a padding mask is obeyed; without, attention runs on faster kernels.
    """

    prefill: Program
    decode: Program
    length: int
    padded: bool

    @property
    def caches(self) -> tuple[CacheTensor, ...]:
        """What the caches hold."""
        return cache_tensors(self.decode.graph)


def static_programs(program: Program, length: int, *, padded: bool = False) -> StaticPrograms:
    """Return a decoder with caches of `length` places: S of them.

        lowered program with a cache
            → fuse projections → group heads                               for dense and pruned decoders alike
            → last logits → static cache, reading new keys → pad values     (prefill)
            → static cache, reading the places in use           (decode)

    Args:
        program: lowered, with a cache (`dispfx.compiler.cached_programs.lower_cached`); it is not changed.
        length: most tokens of a text, prompt and continuation.
        padded: obey the padding mask; its tokens must stand on the left.

    Raises:
        UnsupportedGraphError: if the decoder uses its cache in a way that a fixed length does not allow.
    """
    fused = run_pipeline("fuse", program.clone())
    prefill = run_pipeline("prefill", fused.clone(), length=length, reads="mask" if padded else "new")
    decode = run_pipeline("decode", fused.clone(), length=length, reads="mask" if padded else "prefix")
    return StaticPrograms(prefill, decode, length, padded)
