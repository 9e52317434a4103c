"""A plan as layers × features: which features each selection of each layer keeps.

Selections of one kind form a series: S1 … S7 if the plan names them, otherwise the site's name without
its number, as in `layers.#.latent.inner`.

Shape legend: L layers, F features.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dispfx.plan.plan import Plan, Selection
from dispfx.report.schema import SiteWidth

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
_MEANINGS = {
    "S1": "attention read",
    "S2": "attention write",
    "S3": "MLP read",
    "S4": "MLP inner",
    "S5": "MLP write",
    "S6": "attention values",
    "S7": "key/value heads",
}


@dataclass(frozen=True, eq=False)
class Series:
    """The selections of one kind, over the layers.

    Args:
        name: S1 … S7, or the sites' common name.
        kind: read, inner, heads, values, write or stream.
        sites: by row of the decoder's layers; a layer may have none, or several.
    """

    name: str
    kind: str
    sites: tuple[tuple[Selection, ...], ...]

    @property
    def title(self) -> str:
        """The name with its meaning."""
        return f"{self.name}: {_MEANINGS[self.name]}" if self.name in _MEANINGS else self.name

    def widths(self) -> list[tuple[int, int] | None]:
        """Return (kept, size) for each layer, None if it has no such site."""
        return [
            (sum(len(site.kept) for site in row), sum(site.size for site in row)) if row else None
            for row in self.sites
        ]

    def masks_LF(self, features: int) -> Tensor:
        """Return, for each of `size` features, the share of a layer's sites that keep it."""
        rows = [[mask_F(site) for site in row if site.size == features] for row in self.sites]
        empty_F = torch.full((features,), torch.nan)
        return torch.stack([torch.stack(row).mean(0) if row else empty_F for row in rows])


@dataclass(frozen=True, eq=False)
class Layers:
    """All series of a plan.

    Args:
        names: of the layers, in order, as rows of every picture.
        series: in the order S1 … S7, then others.
        width: of the residual stream.
    """

    names: tuple[str, ...]
    series: tuple[Series, ...]
    width: int

    @property
    def on_stream(self) -> list[Series]:
        """The series that read or write the stream's features."""
        return [one for one in self.series if any(site.size == self.width for site in _stream_sites(one))]

    @cached_property
    def uses_F(self) -> Tensor:
        """How many sites read or write each feature of the stream."""
        sites = [site for one in self.on_stream for site in _stream_sites(one) if site.size == self.width]
        return torch.stack([mask_F(site) for site in sites]).sum(0).to(torch.int64)

    @property
    def stream_sites(self) -> int:
        """Number of sites on the stream."""
        return sum(site.size == self.width for one in self.on_stream for site in _stream_sites(one))


def mask_F(selection: Selection) -> Tensor:
    """Return 1.0 where a feature is kept and 0.0 elsewhere."""
    mask = torch.zeros(selection.size)
    mask[selection.kept.long()] = 1.0
    return mask


def layers_of(plan: Plan, sites: Sequence[SiteWidth] = ()) -> Layers:
    """Order a plan's selections by layer and series.

    Args:
        sites: of the report, which knows each site's kind; the last word of its name by default.
    """
    known = {site.name: site for site in sites}
    column = _layer_column([selection.site for selection in plan.selections])
    rows: dict[str, int] = {}
    grouped: dict[tuple[str, str], dict[int, list[Selection]]] = {}
    for selection in plan.selections:
        row = rows.setdefault(_layer_name(selection.site, column), len(rows))
        site = known.get(selection.site)
        kind = site.kind if site else selection.site.rsplit(".", 1)[-1]
        name = selection.symbol or _NUMBER.sub("#", selection.site)
        grouped.setdefault((name, kind), {}).setdefault(row, []).append(selection)
    series = [
        Series(name, kind, tuple(tuple(found.get(row, ())) for row in range(len(rows))))
        for (name, kind), found in grouped.items()
    ]
    series.sort(key=lambda one: (one.name not in _MEANINGS, one.name if one.name in _MEANINGS else ""))
    return Layers(tuple(rows), tuple(series), _stream_width(series))


def _stream_sites(series: Series) -> list[Selection]:
    return (
        [] if series.kind in ("inner", "heads", "values") else [site for row in series.sites for site in row]
    )


def _stream_width(series: Sequence[Series]) -> int:
    sizes = Counter(site.size for one in series for site in _stream_sites(one))
    return sizes.most_common(1)[0][0] if sizes else 0


def _layer_column(names: Sequence[str]) -> int | None:
    """Return which dotted part of the names is the layer's number: the first number that varies."""
    parts = [name.split(".") for name in names]
    for column in range(max((len(part) for part in parts), default=0)):
        numbers = {part[column] for part in parts if column < len(part) and part[column].isdigit()}
        if len(numbers) > 1:
            return column
    return None


def _layer_name(name: str, column: int | None) -> str:
    parts = name.split(".")
    if column is None or column >= len(parts) or not parts[column].isdigit():
        return name.rsplit(".", 1)[0]
    return parts[column]
