"""The branches and sites of a decoder: short as text, complete as JSON.

`coverage_lines` and `coverage_plain` say which block weights the sites cut, and why the rest is not cut.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console

from dispfx.analysis.coverage import Coverage
from dispfx.ir.lengths import Lengths
from dispfx.ir.program import Program
from dispfx.ir.sites import Refusal
from dispfx.report.json_form import to_plain
from dispfx.report.table import Row, print_rows

NUMBER = re.compile(r"\d+")
_REFUSALS_SHOWN = 5


def print_sites(program: Program, console: Console) -> None:
    """Print one line for each group of equal sites, then what stays dense."""
    for line in found_lines(program):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    print_rows([site_rows(program)], console, ("site", "selection", "features", "cuts"))
    for line in refusal_lines(program.left_dense, limit=None):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def found_lines(program: Program) -> list[str]:
    """Return two lines: the stream, then branches and sites by kind."""
    width = program.stream.width if program.stream else 0
    branches = _counts(branch.kind for branch in program.branches)
    sites = _counts(site.kind for site in program.sites)
    return [
        f"residual stream {width} wide, {_millions(program.size)} parameters",
        f"{plural(len(program.branches), 'branch', 'branches')} ({branches}), "
        f"{plural(len(program.sites), 'site', 'sites')} ({sites})",
        *_length_lines(program.lengths),
    ]


def _length_lines(lengths: Lengths) -> list[str]:
    """Return the sequence lengths for which the graph holds, if it does not hold for all."""
    if lengths == Lengths():
        return []
    reasons = {
        "limit": "the decoder does not read longer ones",
        "stops": "the graph ends there",
        "changes": "the decoder computes longer ones differently",
        None: "the decoder computes shorter ones differently",
    }
    return [
        f"sequences of {lengths}: {reasons[lengths.end]}" + (f" ({lengths.where})" if lengths.where else "")
    ]


def refusal_lines(refused: Sequence[Refusal], limit: int | None = _REFUSALS_SHOWN) -> list[str]:
    """Return one line per branch or site that stays dense, at most `limit` lines."""
    shown = refused if limit is None else refused[:limit]
    lines = []
    for refusal in shown:
        place = ", ".join(part for part in (refusal.parameter, refusal.source) if part)
        lines.append(f"left dense: {refusal.name}: {refusal.reason}" + (f" ({place})" if place else ""))
    if len(shown) < len(refused):
        lines.append(f"left dense: {len(refused) - len(shown)} more; `dispfx inspect` lists them")
    return lines


def site_rows(program: Program) -> list[Row]:
    """Return one row for each group of sites that differ only in numbers in their names.

    The name shows the range of each number: `layers.{0…31}.mlp.read`; features of several experts are counted
    as experts × features of each.
    """
    groups: dict[tuple[str, str, str, int, int, int], list[str]] = {}
    for site in program.sites:
        sizes = (site.experts, site.per_expert, len(site.slices))
        key = (NUMBER.sub("#", site.name), site.symbol, site.kind, *sizes)
        groups.setdefault(key, []).append(site.name)
    return [
        (
            merged(names) + (f"  ({len(names)} sites)" if len(names) > 1 else ""),
            f"{kind} {symbol}".strip(),
            f"{each:,}" if experts == 1 else f"{experts:,} × {each:,}",
            plural(cuts, "parameter axis", "parameter axes"),
        )
        for (_, symbol, kind, experts, each, cuts), names in groups.items()
    ]


def program_plain(program: Program) -> dict[str, Any]:
    """Return everything, ready for JSON."""
    return {
        "model_class": program.model_class,
        "fingerprint": program.fingerprint,
        "measured": program.measured,
        "dtype": str(program.dtype).removeprefix("torch."),
        "parameters": program.size,
        "lengths": to_plain(program.lengths),
        "stream": {"width": program.stream.width} if program.stream else None,
        "branches": [
            {"name": branch.name, "kind": branch.kind, "sites": list(branch.sites)}
            for branch in program.branches
        ],
        "sites": [
            {
                "name": site.name,
                "branch": site.branch,
                "kind": site.kind,
                "symbol": site.symbol,
                "size": site.size,
                "experts": site.experts,
                "slices": [{"parameter": cut.parameter, "axis": cut.axis} for cut in site.slices],
            }
            for site in program.sites
        ],
        "refused": to_plain(program.left_dense),
    }


def merged(names: list[str]) -> str:
    """Return the names as one, with the range of each number that varies."""
    columns = zip(*(NUMBER.findall(name) for name in names), strict=True)
    ranges = iter([_range(sorted({int(number) for number in column})) for column in columns])
    return NUMBER.sub(lambda _: next(ranges), names[0])


def _range(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    if numbers == list(range(numbers[0], numbers[-1] + 1)):
        return f"{{{numbers[0]}…{numbers[-1]}}}"
    return "{" + ",".join(map(str, numbers)) + "}"


def _counts(kinds: Iterable[str]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in Counter(kinds).items()) or "none"


def plural(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.2f} M" if count >= 1e6 else f"{count:,}"


_PATHS_SHOWN = 4


def coverage_lines(found: Coverage) -> list[str]:
    """Return which block weights are gated, and why the rest is not."""
    lines = [f"block weights: {_share(found.gated, found.total)} of {found.total:,} are gated"]
    lines += [
        f"not gated: {_share(one.size, found.total)}: {one.reason} ({_shortened(one.parameters)})"
        for one in found.ungated
    ]
    return lines + [
        f"stays whole: {plural(len(axes), 'axis', 'axes')} of gated weights: {reason}"
        for reason, axes in found.axes.items()
    ]


def _share(size: int, total: int) -> str:
    return f"{size:,} ({size / total:.1%})" if total else "0"


def _shortened(paths: Sequence[str]) -> str:
    """Merge paths that differ only in their numbers."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(NUMBER.sub("#", path), []).append(path)
    shown = [merged(names) for names in groups.values()]
    more = f", and {len(shown) - _PATHS_SHOWN} more" if len(shown) > _PATHS_SHOWN else ""
    return ", ".join(shown[:_PATHS_SHOWN]) + more


def coverage_plain(found: Coverage) -> dict[str, Any]:
    """Return everything, ready for JSON."""
    return {
        "block_weights": {"gated": found.gated, "total": found.total},
        "ungated": [
            {"reason": one.reason, "parameters": one.size, "paths": list(one.parameters)}
            for one in found.ungated
        ],
        "axes_that_stay": [
            {"reason": reason, "axes": [{"parameter": path, "axis": axis} for path, axis in axes]}
            for reason, axes in found.axes.items()
        ],
    }
