"""Whether a decoder chooses among equal scores, where runtimes may choose differently.

    top-k of (0.7, 0, 0, 0, −inf) with k = 2: the second choice is any of three

torch and ONNX Runtime break such ties in different orders, so a model that is translated correctly computes
other logits.  Sparse attention with scores after a ReLU has them.
"""

from typing import Any

import torch
from torch import Tensor, fx

from dispfx.ir import ops


def tied_choice(graph: fx.GraphModule, ids: Tensor) -> fx.Node | None:
    """Return the first top-k of a graph that chooses among equal scores for some token ids, or None.

    Scores of masked places, which are infinite or the least number of their type, do not count.

    Args:
        graph: token ids (B, T) to logits (B, T, V).
    """
    search = _Search(graph)
    with torch.no_grad():
        search.run(ids)
    return search.found


class _Search(fx.Interpreter):
    found: fx.Node | None = None

    def run_node(self, n: fx.Node) -> Any:
        if self.found is None and ops.packet(n) is ops.aten.topk:
            values, k, *further = self.fetch_args_kwargs_from_env(n)[0]
            if _has_tie(values, k, further[0] if further else -1):
                self.found = n
        return super().run_node(n)


def _has_tie(values: Tensor, k: int, dim: int) -> bool:
    """Whether the last value that is chosen equals the first one that is not."""
    if k < 1 or k >= values.shape[dim]:
        return False
    ordered = values.float().sort(dim, descending=True).values
    last, next_one = ordered.select(dim, k - 1), ordered.select(dim, k)
    seen = last > torch.finfo(values.dtype).min if values.is_floating_point() else last == last
    return bool(((last == next_one) & seen).any())
