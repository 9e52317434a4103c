"""Decoders with a KV cache: captured, lowered by a plan of any capture, run step by step.

    module → capture with a cache → canonicalize → … → find sites      (capture_cached)
           → lower gates by a plan → gather-add                        (lower_cached)

Shape legend: B batch, T new tokens, P cached tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dispfx.capturing.cached_capture import capture_cached as capture_prepared
from dispfx.capturing.module_capture import require_decoder
from dispfx.compiler.pipelines import run_pipeline
from dispfx.compiler.programs import lower_program, only_planned
from dispfx.ir.cached_inputs import cache_tensors, positions_of
from dispfx.ir.program import Program
from dispfx.plan.plan import Plan, require_plan, require_same_decoder
from dispfx.settings.sections import BudgetSettings, FurtherSites, Select
from dispfx.settings.verb_settings import WriteSpelling
from dispfx.source.cached_forward import cached_forward
from dispfx.source.experts import Experts, experts_as
from dispfx.source.source import named_context
from dispfx.words.given import whole_number_given


def capture_cached(
    model: nn.Module,
    *,
    skip: Sequence[str] | str = (),
    select: Select = BudgetSettings.select,
    sites: Sequence[FurtherSites] | FurtherSites = BudgetSettings.sites,
    vocabulary_size: int | None = None,
    experts: Experts = "batched",
) -> Program:
    """Return the program of a transformers decoder with its cache; the decoder is not changed.

    Its graph takes `program.inputs` by position and returns a tuple of `program.outputs`; both are
    described in `dispfx.ir.cached_inputs`.  Its sites cut the same parameters as those of a capture
    without a cache, so `Plan.for_sites` finds what a plan made on either keeps here.

    Args:
        model, skip, select, sites, vocabulary_size: as for `dispfx.compiler.programs.analyse`.
        experts: `batched` to export, or for one or two tokens; `grouped` for steps of many tokens, where
            `batched` would gather the weights of its experts for every token.

    Raises:
        CaptureError: if the decoder does not support a cache, or torch.export cannot capture it with one.
        UnsupportedGraphError: if its cache does not consist of keys and values, or nothing can be pruned.
    """
    require_decoder(model)
    if vocabulary_size is not None:
        whole_number_given(vocabulary_size, 1, "vocabulary_size")
    context = named_context(getattr(model, "config", None))
    with experts_as(model, experts):
        program = capture_prepared(cached_forward(model), vocabulary_size=vocabulary_size, context=context)
    program.context = context
    return run_pipeline("analyse", program, skip=skip, select=select, sites=sites)


def lower_cached(
    model: nn.Module,
    plan: Plan,
    *,
    write: WriteSpelling = "gather-add",
    vocabulary_size: int | None = None,
) -> Program:
    """Return the lowered program, with its cache, for a plan made on any capture of the decoder.

    Raises:
        CaptureError, UnsupportedGraphError: as `capture_cached`.
        PlanMismatchError: if the plan was made for another decoder.
    """
    require_plan(plan)
    program = capture_cached(model, select=plan.select, sites=plan.sites, vocabulary_size=vocabulary_size)
    require_same_decoder(program, plan)
    return lower_program(only_planned(program, plan), plan, write=write)


class WholeTexts(nn.Module):
    """A decoder with a cache, run on new texts: token ids (B, T) to logits (B, T, V).

    Args:
        decoder: a graph with a cache, or one with gates (`dispfx.compiler.programs.gate`).
        program: of the graph.
    """

    def __init__(self, decoder: nn.Module, program: Program):
        super().__init__()
        self.decoder = decoder
        self._caches = cache_tensors(program.graph)

    def forward(self, ids: Tensor, masks: Sequence[Tensor] | None = None) -> Tensor:
        """Return the logits; a gated decoder also takes one mask (N,) per site."""
        seen = torch.ones_like(ids)
        further = (
            seen,
            positions_of(seen, ids.shape[1]),
            *(c.empty(len(ids), ids.device) for c in self._caches),
        )
        return self.decoder(ids, *further)[0] if masks is None else self.decoder(ids, masks, *further)[0]
