"""The bytes of the KV cache per token that remain when every site keeps a part of its features.

    C(s) = fixed + Σ over kept features of their bytes

Legend: N features of all sites, S samples of the masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dispfx.ir.cache_size import CacheSize
from dispfx.ir.sites import Site


@dataclass(frozen=True, eq=False)
class CacheCount:
    """The cache of one decoder as a function of its masks.

    Args:
        dense: bytes per token if everything is kept.
        fixed: bytes per token that no site cuts.
        bytes_N: of every feature, float64; zero for features of sites other than heads.
    """

    dense: int
    fixed: int
    bytes_N: Tensor

    @staticmethod
    def of_sites(sites: Sequence[Site], size: CacheSize) -> "CacheCount":
        """Return the count for sites in the order of the flat mask vector; other heads stay."""
        bytes_N = torch.zeros(sum(site.size for site in sites), dtype=torch.float64)
        for site, own in zip(sites, bytes_N.split([site.size for site in sites]), strict=True):
            if site.name in size.by_site:
                own.copy_(torch.tensor(size.by_site[site.name], dtype=torch.float64))
        return CacheCount(size.dense, size.dense - int(bytes_N.sum()), bytes_N)

    def to(self, device: torch.device | str) -> "CacheCount":
        """Return the same count with its table on `device`."""
        return replace(self, bytes_N=self.bytes_N.to(device))

    def count(self, masks: Tensor) -> Tensor:
        """Return C(s) in float64, a scalar or (S,), differentiable in the masks (N,) or (S, N)."""
        return masks.to(torch.float64) @ self.bytes_N + self.fixed

    def count_kept(self, masks_N: Tensor) -> int:
        """Return C(s) as an exact integer for hard masks."""
        return round(float(self.count(masks_N.detach())))
