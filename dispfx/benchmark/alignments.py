"""A plan made again at other alignments, to see what each costs in speed and in perplexity.

A plan says what is kept and not by how much.  Where a width has to grow or shrink, those features come next
whose gates the loss is most sensitive to while the plan's masks are on, for their parameters; or, where
nothing is measured, those with the largest weights.  A run of `compile --align N` has the logits themselves,
and does as well or better.

Legend: N features of all sites, T tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dispfx.compiler.cached_programs import WholeTexts
from dispfx.compiler.programs import gate, lower_program
from dispfx.errors import DataError
from dispfx.ir.program import Program
from dispfx.learning.objective import next_token_loss
from dispfx.learning.scores import magnitudes
from dispfx.plan.budget import Budget
from dispfx.plan.hardening import Groups, ParameterCount, hard_masks, harden
from dispfx.plan.plan import Plan, require_same_decoder
from dispfx.quality.perplexity import TextFacts, measure, windows_of
from dispfx.source import read_text
from dispfx.source.text import bos_tokens
from dispfx.source.text.reading import Reading, Words
from dispfx.words.option_names import option

# Beside ranks from -1 to 1: what a plan keeps stays ahead of what it drops.
_KEPT = 4.0
_WINDOWS = 16
_FEWEST = 16


def realigned(
    program: Program, plan: Plan, alignments: Sequence[int], scores_N: Tensor | None = None
) -> list[Plan]:
    """Return the plan with widths that are multiples of each alignment, removing as much.

    Args:
        program: of the decoder that the plan was made for, with its weights.
        scores_N: what says which features come or go first; by default the size of their weights.

    Raises:
        BudgetError: if no such widths come close to the ratio.
        PlanMismatchError: if the plan was made for another decoder.
    """
    sites = program.sites
    scores_N = magnitudes(gate(program).graph, sites) if scores_N is None else scores_N
    logits_N = _ranks(scores_N.cpu()) + _KEPT * hard_masks(sites, plan.for_sites(sites)).to(scores_N)
    count = ParameterCount.of_sites(sites, program.shapes, plan.budget.of)
    # Sites of a plan with one selection for all keep sharing it.
    groups = Groups.of_run(sites, constrained=plan.select == "before-norm")
    found = []
    for align in alignments:
        budget = Budget(plan.achieved, plan.budget.of, align)
        kept = harden(_of_groups(logits_N, groups), sites, count, budget, groups=groups)
        found.append(Plan.of(program, budget, kept, plan.seed))
    return found


def _ranks(scores_N: Tensor) -> Tensor:
    """Return the scores' ranks, spread over -1 to 1."""
    ranks_N = scores_N.argsort(stable=True).argsort().float()
    return 2.0 * ranks_N / max(len(ranks_N) - 1, 1) - 1.0


def _of_groups(logits_N: Tensor, groups: Groups) -> Tensor:
    """Return the mean of what the sites of a group say of the feature that they share."""
    group_of = groups.expand(torch.arange(groups.features))
    sums = logits_N.new_zeros(groups.features).index_add(0, group_of, logits_N)
    return sums / torch.bincount(group_of, minlength=groups.features)


@dataclass(frozen=True, eq=False)
class MeasuredOn:
    """A text to measure plans on.

    Args:
        tokens: (T,) ids that the plans are measured on.
        windows_chosen: ids of windows that say which features come or go.
        about: the text.
        context: tokens a window.
        most: how many windows are measured at most.
    """

    tokens: Tensor
    windows_chosen: tuple[Tensor, ...]
    about: TextFacts
    context: int
    most: int | None = None

    @staticmethod
    def read(words: Words, tokenizer: object, context: int, most: int | None = None) -> "MeasuredOn":
        """Read a text as --eval-data names it; its end, sixteen windows or half of it, is to choose on.

        Raises:
            DataError: if it is not a text, or too short.
        """
        text = read_text(words, tokenizer, Reading())
        held = min(_WINDOWS * context, len(text.tokens) // 2)
        if held < _FEWEST:
            raise DataError(
                f"{2 * _FEWEST} tokens or more are needed, and there are {len(text.tokens)}: the end of the "
                "text says which features come or go, and the plans are measured on the rest",
                where=text.name,
            )
        bos = bos_tokens("auto", tokenizer, given_ids=text.given_ids)
        chosen = tuple(windows_of(text.tokens[-held:], context, None, 1, bos))
        about = TextFacts(text.name, None, bos)
        return MeasuredOn(text.tokens[:-held], chosen, about, context, most)


def measured_plans(
    program: Program, plan: Plan, alignments: Sequence[int], on: MeasuredOn
) -> list[tuple[Plan, float]]:
    """Return the plan as it is, and as it is at each alignment, with the perplexity of the decoder cut by it.

    Args:
        program: of the decoder with its cache and its weights, with the sites of the plan.

    Raises:
        BudgetError: if no widths of an alignment come close to the ratio.
        DataError: if the decoder does not run on such windows.
        PlanMismatchError: if the plan was made for another decoder, or for other weights.
    """
    require_same_decoder(program, plan)
    fitted = plan.fitted(program.sites)
    aligned = realigned(program, fitted, alignments, _sensitivity(program, fitted, on.windows_chosen))
    found = []
    for one in (fitted, *aligned):
        lowered = lower_program(program, one, write="gather-add")
        value = measure(
            WholeTexts(lowered.graph_module, lowered),
            on.tokens,
            context=on.context,
            windows=on.most,
            device=program.device,
            text=on.about,
        ).value
        found.append((one, value))
    return found


def _sensitivity(program: Program, plan: Plan, windows: Sequence[Tensor]) -> Tensor:
    """Return every feature's Fisher information a parameter, with the plan's masks on, (N,)."""
    sites, sizes = program.sites, [site.size for site in program.sites]
    masks_N = hard_masks(sites, plan.for_sites(sites)).to(program.device)
    decoder, total_N = WholeTexts(gate(program), program), torch.zeros_like(masks_N)
    for window_BT in windows:
        ids_BT, leaf = window_BT.to(program.device, torch.int64), masks_N.clone().requires_grad_()
        loss = next_token_loss(decoder(ids_BT, leaf.split(sizes)), ids_BT)
        total_N += torch.autograd.grad(loss, leaf)[0] ** 2
    count = ParameterCount.of_sites(sites, program.shapes, plan.budget.of)
    return total_N.cpu() / count.feature_costs(Groups.alone(sites))


def check_alignments(alignments: Sequence[int], *, has_text: bool, has_dense: bool, in_torch: bool) -> None:
    """Pass if alignments, a text and a decoder to take features from are given together, and torch runs them.

    Raises:
        DataError: saying what is missing.
    """
    if alignments and not in_torch:
        raise DataError(
            "alignments are timed in torch",
            hint=f"leave out {option('align')}, or use {option('runtime', 'torch')}",
        )
    if has_text and not (alignments and has_dense):
        missing = option("align") if has_dense else f"{option('dense')}, whose features the folder lacks,"
        raise DataError(
            f"the text is for measuring plans at other alignments, and {missing} is not given",
            hint="dispfx bench DIR --dense MODEL --align 8 --align 16 --eval-data text.txt",
        )
