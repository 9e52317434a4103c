"""Bytes that are a sum over the kept features: of the KV cache per token, and of the indices in a folder.

    C(s) = fixed + Σ over kept features of their bytes

Legend: N features of all sites, S samples of the masks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispfx.ir.cache_size import CacheSize
from dispfx.ir.sites import Site

# Of a kept index, int32.
_INDEX_BYTES = 4
# A safetensors header holds the name of each tensor, its type, shape and place.
_HEADER_BYTES = 96


@dataclass(frozen=True, eq=False)
class LinearCount:
    """Bytes of one decoder as a function of its masks.

    Args:
        fixed: bytes that no site cuts.
        each_N: of every feature, float64.
    """

    fixed: int
    each_N: Tensor

    @staticmethod
    def of_cache(sites: Sequence[Site], size: CacheSize) -> "LinearCount":
        """Return the bytes of the cache per token, for sites in the order of the flat mask vector."""
        each_N = torch.zeros(sum(site.size for site in sites), dtype=torch.float64)
        for site, own in zip(sites, each_N.split([site.size for site in sites]), strict=True):
            if site.name in size.by_site:
                own.copy_(torch.tensor(size.by_site[site.name], dtype=torch.float64))
        return LinearCount(size.dense - int(each_N.sum()), each_N)

    @staticmethod
    def of_indices(sites: Sequence[Site], parameters: Mapping[str, Tensor]) -> "LinearCount":
        """Return the bytes of a folder's weight file that are not weights: indices and the file's header.

        A site that keeps everything has no index, so this is an upper bound.

        Args:
            parameters: all parameters by path.
        """
        gathered = [site for site in sites if site.is_gathered]
        # Values are scattered after their projection, and the next one gathers: an index for each.
        values = [cut for site in sites if site.kind == "values" for cut in site.slices]
        writes = sum(site.size for site in gathered if site.kind == "write")
        names = [*parameters, *(site.name for site in gathered), *(cut.parameter for cut in values)]
        scattered = sum(parameters[cut.parameter].shape[cut.axis] for cut in values)
        fixed = _INDEX_BYTES * (writes + scattered) + sum(_HEADER_BYTES + len(name) for name in names)
        reads = [float(_INDEX_BYTES * (site.is_gathered and site.kind != "write")) for site in sites]
        sizes = torch.tensor([site.size for site in sites])
        return LinearCount(fixed, torch.tensor(reads, dtype=torch.float64).repeat_interleave(sizes))

    @property
    def dense(self) -> int:
        """Bytes if everything is kept."""
        return self.fixed + round(float(self.each_N.sum()))

    def to(self, device: torch.device | str) -> "LinearCount":
        """Return the same count with its table on `device`."""
        return replace(self, each_N=self.each_N.to(device))

    def times(self, number: int) -> "LinearCount":
        """Return the bytes of so many tokens."""
        return LinearCount(self.fixed * number, self.each_N * number)

    def count(self, masks: Tensor) -> Tensor:
        """Return C(s) in float64, a scalar or (S,), differentiable in the masks (N,) or (S, N)."""
        return masks.to(torch.float64) @ self.each_N + self.fixed

    def count_kept(self, masks_N: Tensor) -> int:
        """Return C(s) as an exact integer for hard masks."""
        return round(float(self.count(masks_N.detach())))
