"""Groups of sites that share one selection.

Without a constraint every site is a separate group.  In the paper's constrained variant (S1 = S2 = S3 = S5
everywhere, arXiv 2410.11988, table of ablations) all read and write sites are one group, and every other site
is a separate one.  There is one set of logits and samples per group; `expand` repeats them for the sites.

If one site holds the whole stream, inner sites of one kind and size keep equally many features, each site its
own, so that a config with one width for all layers can describe the decoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispfx.errors import PassError
from dispfx.ir.sites import Site


@dataclass(frozen=True, eq=False)
class Groups:
    """A partition of the sites.

    Args:
        of_site: the group of every site.
        sizes: number of features of every group.
        experts: number of experts with their own features in every group; usually 1.
        names: name of every group for messages: that of its first site.
        widths: a number for every group; groups with the same number keep equally many features.
        aligned: whether the widths of a group are aligned; a head is many features already.
    """

    of_site: tuple[int, ...]
    sizes: tuple[int, ...]
    experts: tuple[int, ...]
    names: tuple[str, ...]
    widths: tuple[int, ...]
    aligned: tuple[bool, ...]
    _features: Tensor | None  # for every feature of every site the group's feature; None: the same

    @staticmethod
    def of(sites: Sequence[Site], keys: Sequence[object]) -> "Groups":
        """Group the sites with equal keys; groups are numbered by their first site.

        Raises:
            PassError: if sites of different sizes would share a selection.
        """
        numbers: dict[object, int] = {}
        of_site = tuple(numbers.setdefault(key, len(numbers)) for key in keys)
        first: dict[int, Site] = {}
        for site, group in zip(sites, of_site, strict=True):
            other = first.setdefault(group, site)
            if (other.size, other.experts) != (site.size, site.experts):
                raise PassError(
                    f"sites that share a selection need one size, but {other.name} has {other.size} features "
                    f"and this one {site.size}",
                    where=site.name,
                )
        sizes = tuple(site.size for site in first.values())
        features = None
        if len(sizes) < len(sites):
            ranges = torch.arange(sum(sizes)).split(list(sizes))
            features = torch.cat([ranges[group] for group in of_site])
        experts = tuple(site.experts for site in first.values())
        names = tuple(site.name for site in first.values())
        aligned = tuple(site.kind != "heads" for site in first.values())
        return Groups(of_site, sizes, experts, names, _equal_widths(list(first.values())), aligned, features)

    @staticmethod
    def alone(sites: Sequence[Site]) -> "Groups":
        """Give every site its own selection."""
        return Groups.of(sites, range(len(sites)))

    @staticmethod
    def constrained(sites: Sequence[Site]) -> "Groups":
        """Give all read and write sites of one width the same selection, and every other site its own."""
        return Groups.of(
            sites,
            [("stream", site.size) if site.is_gathered else index for index, site in enumerate(sites)],
        )

    @staticmethod
    def of_run(sites: Sequence[Site], *, constrained: bool) -> "Groups":
        """Group the sites of a run: all reads and writes together, or every site separately."""
        return Groups.constrained(sites) if constrained else Groups.alone(sites)

    @property
    def features(self) -> int:
        """Length of a flat vector over all groups."""
        return sum(self.sizes)

    def expand(self, values: Tensor) -> Tensor:
        """Turn values (…, N) of all groups into values of all sites; differentiable."""
        return values if self._features is None else values[..., self._features]

    def of_first(self, values: Tensor) -> Tensor:
        """Turn values (…, N) of all sites into values of all groups: those of their first sites."""
        firsts = {group: site for site, group in reversed(list(enumerate(self.of_site)))}
        parts = values.split([self.sizes[group] for group in self.of_site], -1)
        return torch.cat([parts[firsts[group]] for group in range(len(self.sizes))], -1)

    def to(self, device: torch.device | str) -> "Groups":
        """Return the same groups with their table on `device`."""
        return self if self._features is None else replace(self, _features=self._features.to(device))


def _equal_widths(sites: Sequence[Site]) -> tuple[int, ...]:
    """Number the groups by their first sites; equal numbers keep equally many features."""
    if all(site.kind != "stream" for site in sites):
        return tuple(range(len(sites)))
    numbers: dict[object, int] = {}
    keys = [(site.branch_kind, site.kind, site.size, site.experts) for site in sites]
    return tuple(numbers.setdefault(key, len(numbers)) for key in keys)
