"""Plans from masks and from scores that a user computed: `Plan.from_masks` and `Plan.from_scores`.

Masks and scores are numpy arrays, tensors or lists, by site name.  Everything is checked, because a silently
wrong plan looks like a bad result.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dispfx.errors import BudgetError, DispfxError, PlanMismatchError
from dispfx.ir.sites import Site
from dispfx.plan.budget import Budget, Counted, require_ratio
from dispfx.plan.hardening import harden
from dispfx.plan.parameter_count import ParameterCount
from dispfx.words.choices import closest
from dispfx.words.own_function import shown

if TYPE_CHECKING:
    from dispfx.ir.program import Program

_LAYER = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")
Ratios = float | Mapping[str, float]


def kept_of_masks(sites: Sequence[Site], masks: Mapping[str, Any]) -> list[Tensor]:
    """Return the sorted int32 indices that every site keeps.

    Args:
        masks: by site, a boolean mask (size,) or the kept indices (K,), in any order.

    Raises:
        PlanMismatchError: if a site has no mask, a mask has no site, or a mask does not fit its site.
    """
    arrays = _by_site(sites, masks, "mask")
    return [checked_indices(site, array) for site, array in zip(sites, arrays, strict=True)]


def checked_indices(site: Site, mask: Tensor) -> Tensor:
    """Return the sorted int32 indices that a mask of one site keeps, on the CPU.

    Args:
        mask: boolean (size,), or the kept indices (K,), in any order.

    Raises:
        PlanMismatchError: if the shape or type is wrong, nothing is kept, an index is out of range or appears
            twice, or the experts of the site keep different numbers of features.
    """
    if mask.dtype == torch.bool:
        if mask.shape != (site.size,):
            raise _misfit(site, f"a boolean mask has shape ({site.size},), found {tuple(mask.shape)}")
        mask = mask.nonzero().flatten()
    if mask.numel() and (mask.dtype.is_floating_point or mask.dtype.is_complex):
        raise _misfit(
            site,
            f"a mask is boolean or holds indices, found {_name(mask.dtype)}",
            hint="pass mask > 0.5 for soft masks, or scores to Plan.from_scores",
        )
    if mask.dim() != 1:
        raise _misfit(site, f"indices have shape (K,), found {tuple(mask.shape)}")
    if not mask.numel():
        raise _misfit(site, "a site keeps at least one feature, but this mask keeps none")
    kept = mask.to("cpu", torch.int64).sort().values
    _check_range(site, kept)
    _check_experts(site, kept)
    return kept.to(torch.int32)


def kept_of_scores(
    program: "Program",
    scores: Mapping[str, Any],
    ratio: Ratios,
    *,
    per_layer: bool = False,
    align: int = Budget.align,
    of: Counted = Budget.of,
) -> tuple[Budget, list[Tensor]]:
    """Return the budget of the whole decoder, and the indices that every site keeps.

    The arguments are those of `Plan.from_scores`.

    Raises:
        PlanMismatchError: if a site has no scores, scores have no site, or do not fit their site.
        BudgetError: if a ratio cannot be met, or patterns and branches do not fit together.
    """
    logits = site_scores(program.sites, scores)
    parts = _parts(program.sites, ratio, per_layer=per_layer)
    if of != "blocks" and len(parts) > 1:
        raise BudgetError(
            f"ratios per layer or per kind count the weights of the layers, but of={shown(of)!r} was given",
            hint=f"leave out of={shown(of)!r}",
        )
    kept: dict[str, Tensor] = {}
    removed, counted = 0.0, 0
    for part in parts:
        count = ParameterCount.of_sites([program.sites[index] for index in part.sites], program.shapes, of)
        found = harden(
            torch.cat([logits[index] for index in part.sites]),
            [program.sites[index] for index in part.sites],
            count,
            Budget(part.ratio, of, align),
        )
        kept |= {program.sites[index].name: indices for index, indices in zip(part.sites, found, strict=True)}
        removed, counted = removed + part.ratio * count.dense, counted + count.dense
    return Budget(removed / counted, of, align), [kept[site.name] for site in program.sites]


def site_scores(sites: Sequence[Site], scores: Mapping[str, Any]) -> list[Tensor]:
    """Return the scores (size,) of every site, in order, as float64 on the CPU.

    Raises:
        PlanMismatchError: if a site has no scores, scores have no site, or do not fit their site.
    """
    arrays = _by_site(sites, scores, "score")
    return [_checked_scores(site, array) for site, array in zip(sites, arrays, strict=True)]


def layer_of(branch: str) -> str:
    """Return the path of a branch up to its first number, such as `model.layers.3`, or the branch."""
    found = _LAYER.match(branch)
    return found.group() if found else branch


@dataclass(frozen=True)
class _Part:
    """Sites, by position, that meet a ratio together."""

    ratio: float
    sites: tuple[int, ...]


def _parts(sites: Sequence[Site], ratio: Ratios, *, per_layer: bool) -> list[_Part]:
    """Partition the sites by the pattern of their branch, and by layer."""
    patterns = ratio if isinstance(ratio, Mapping) else {"*": ratio}
    for value in patterns.values():
        require_ratio(value)
    members: dict[tuple[str, str], list[int]] = {}
    for index, site in enumerate(sites):
        pattern = next((one for one in patterns if fnmatchcase(site.branch, one)), None)
        if pattern is None:
            raise BudgetError(
                f"no pattern of ratio fits this branch; the patterns are {', '.join(patterns)}",
                where=site.branch,
                hint='add "*" as the last pattern',
            )
        members.setdefault((pattern, layer_of(site.branch) if per_layer else ""), []).append(index)
    unused = [one for one in patterns if all(one != pattern for pattern, _ in members)]
    if unused:
        raise BudgetError(
            f"no branch is left for the pattern {unused[0]!r}: the first pattern that fits a branch counts",
            hint=f"the branches are {_some([site.branch for site in sites])}",
        )
    _require_apart(sites, list(members.values()))
    return [_Part(float(patterns[key[0]]), tuple(indices)) for key, indices in members.items()]


def _require_apart(sites: Sequence[Site], parts: Sequence[Sequence[int]]) -> None:
    owner: dict[str, int] = {}
    for number, part in enumerate(parts):
        for cut in (cut for index in part for cut in sites[index].slices):
            if owner.setdefault(cut.parameter, number) != number:
                raise BudgetError(
                    "sites of two parts cut the same weight, so the parts cannot have separate ratios",
                    where=cut.parameter,
                    hint="give one ratio, or patterns that keep these branches together",
                )


def _by_site(sites: Sequence[Site], given: Mapping[str, Any], what: str) -> list[Tensor]:
    """Return the given values of every site as tensors, in the order of the sites."""
    if not isinstance(given, Mapping):
        raise DispfxError(
            f"{what}s must be a mapping from site to {what}, but a {type(given).__name__} was given"
        )
    names = [site.name for site in sites]
    for name in given:
        if name not in names:
            hint = closest(str(name), names) or f"the sites are {_some(names)}"
            raise PlanMismatchError(f"the decoder has no site {name!r}", hint=hint)
    if missing := [name for name in names if name not in given]:
        full = "torch.ones(size, dtype=torch.bool) keeps everything" if what == "mask" else None
        raise PlanMismatchError(
            f"every site needs a {what}, but {len(missing)} of {len(names)} have none",
            where=_some(missing),
            hint=full,
        )
    return [_tensor(site, given[site.name], what) for site in sites]


def _tensor(site: Site, value: Any, what: str) -> Tensor:
    try:
        return torch.as_tensor(value).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise _misfit(site, f"the {what} is not an array of numbers: {error}") from error


def _checked_scores(site: Site, scores: Tensor) -> Tensor:
    if scores.shape != (site.size,):
        raise _misfit(site, f"scores have shape ({site.size},), found {tuple(scores.shape)}")
    if scores.dtype == torch.bool or scores.dtype.is_complex:
        raise _misfit(site, f"scores are real numbers, found {_name(scores.dtype)}", hint="use from_masks")
    if not bool(scores.isfinite().all()):
        raise _misfit(site, "scores must be finite, found NaN or infinity")
    return scores.to("cpu", torch.float64)


def _check_range(site: Site, kept: Tensor) -> None:
    if int(kept[0]) < 0 or int(kept[-1]) >= site.size:
        outside = int(kept[0]) if int(kept[0]) < 0 else int(kept[-1])
        raise _misfit(site, f"indices lie in [0, {site.size}), found {outside}")
    if bool((kept[1:] == kept[:-1]).any()):
        twice = int(kept[1:][kept[1:] == kept[:-1]][0])
        zeros_and_ones = len(kept) == site.size and int(kept[-1]) <= 1
        raise _misfit(
            site,
            f"indices are distinct, found {twice} more than once",
            hint="pass mask.bool() for a mask of zeros and ones" if zeros_and_ones else None,
        )


def _check_experts(site: Site, kept: Tensor) -> None:
    counts = torch.bincount(kept // site.per_expert, minlength=site.experts)
    if bool((counts != counts[0]).any()):
        each = "head" if site.kind == "values" else "expert"
        raise _misfit(site, f"every {each} keeps equally many features, found {counts.tolist()}")


def _misfit(site: Site, problem: str, *, hint: str | None = None) -> PlanMismatchError:
    return PlanMismatchError(problem, where=site.name, hint=hint)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(names))
    return ", ".join(distinct[:3]) + (" …" if len(distinct) > 3 else "")
