"""How many bytes of the KV cache every token takes, and what of them goes with each feature."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class CacheSize:
    """The keys and values that a decoder keeps for each token, in bytes of the type that it computes in.

    Args:
        fixed: of attentions, or parts of them, that follow no site.
        by_site: for every site of heads, the bytes of each of its features.
        unknown: why the size is not known; empty if it is.
        unaffected: why no feature takes a part of it, where that is not because of the sites.
    """

    fixed: int = 0
    by_site: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    unknown: str = ""
    unaffected: str = ""

    @property
    def dense(self) -> int:
        """Bytes per token if everything is kept."""
        return self.fixed + sum(map(sum, self.by_site.values()))
