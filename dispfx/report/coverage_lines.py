"""Which block weights the sites cut, and why the rest is not cut: as text and as JSON."""

from collections.abc import Sequence
from typing import Any

from dispfx.analysis.coverage import Coverage
from dispfx.report.site_tables import NUMBER, merged, plural

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
