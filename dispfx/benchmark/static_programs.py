"""The fast path of a decoder with a cache: fused projections, a cache in place, one graph a kind of step.

    lowered program with a cache
        → fuse projections → group heads                               for dense and pruned decoders alike
        → last logits → static cache, reading new keys      (prefill)
        → static cache, reading the places in use           (decode)

Shape legend: B batch, T tokens, S places of a cache, V vocabulary.
"""

from dataclasses import dataclass

from dispfx.compiler.pipelines import run_pipeline
from dispfx.ir.cached_inputs import CacheTensor, cache_tensors
from dispfx.ir.program import Program


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
    """Return a decoder with caches of `length` places.

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
