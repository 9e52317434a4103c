"""Every block weight is counted once: gated, or not gated for a reason that was found."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.analysis.coverage import EXPERTS, HEADS, SKIPPED, UNREAD, coverage
from dispfx.ir.program import Program
from tests import foreign_decoders
from tests.one_branch import INNER, WIDTH, Middle, one_branch
from tests.plain_decoders import perturb


def require_sum(program: Program) -> None:
    found = coverage(program)
    assert found.gated + sum(one.size for one in found.ungated) == found.total
    paths = [path for one in found.ungated for path in one.parameters]
    assert len(paths) == len(set(paths)) and all(one.reason for one in found.ungated)
    assert sum(program.all_parameters[path].numel() for path in paths) == sum(
        one.size for one in found.ungated
    )


@pytest.mark.parametrize("name", ["nano", "lit", "x"])
def test_heads_are_the_only_axes_that_stay_of_a_usual_decoder(name: str):
    program = dispfx.capture(getattr(foreign_decoders, name)())
    require_sum(program)
    found = coverage(program)
    assert found.share == 1.0 and set(found.axes) == {HEADS["attention"]}
    layers = {path for path in program.shapes if len(program.shapes[path]) > 1}
    outside = {
        path for path in layers if any(part in path for part in ("wte", "wpe", "emb", "logits", "head"))
    }
    assert found.total == sum(program.all_parameters[path].numel() for path in layers - outside)


def test_a_branch_that_is_skipped_is_counted_as_skipped():
    program = dispfx.capture(foreign_decoders.nano(), skip=["*.mlp"])
    require_sum(program)
    (left,) = coverage(program).ungated
    assert left.reason == SKIPPED and len(left.parameters) == 4


def test_a_refused_site_gives_its_reason():
    program = dispfx.capture(one_branch(lambda: Middle(lambda m, h: h.cumsum(-1))))
    require_sum(program)
    assert coverage(program).axes == {
        "aten.cumsum combines all features": (("mlp.up.weight", 0), ("mlp.down.weight", 1))
    }


class Between(nn.Module):
    """An MLP with one more weight, which mixes what the others keep apart."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Middle(lambda m, h: F.gelu(h))
        self.table = nn.Parameter(torch.rand(3, WIDTH))
        self.unread = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * torch.softmax(x @ self.table.T, -1).sum(-1, keepdim=True)


def test_a_weight_that_the_graph_does_not_read_is_named():
    program = dispfx.capture(one_branch(Between))
    require_sum(program)
    reasons = {one.reason: one.parameters for one in coverage(program).ungated}
    assert reasons[UNREAD] == ("mlp.unread.weight",)


class Routed(nn.Module):
    """Two of four stacked experts compute each token."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, INNER, WIDTH) / 4)
        self.down = nn.Parameter(torch.randn(4, WIDTH, INNER) / 4)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        hidden = F.gelu(torch.einsum("nd,nkfd->nkf", flat, self.up[chosen]))
        out = torch.einsum("nkf,nkdf->nkd", hidden, self.down[chosen])
        return (out * weights.unsqueeze(-1)).sum(1).unflatten(0, x.shape[:2])


def test_experts_and_their_router_say_that_experts_stay():
    program = dispfx.capture(one_branch(Routed))
    require_sum(program)
    found = coverage(program)
    assert ("mlp.router.weight", 0) in found.axes[EXPERTS]


class Convolved(nn.Module):
    """A short convolution over time for each feature, before attention-like mixing."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
        self.conv = nn.Conv1d(INNER, INNER, 3, groups=INNER, padding=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(self.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        return self.down(h.unflatten(-1, (4, -1)).softmax(-1).flatten(-2))


def test_the_weight_of_a_convolution_between_heads_is_not_gated_and_says_why():
    program = dispfx.capture(perturb(one_branch(Convolved)))
    require_sum(program)
    (left,) = coverage(program).ungated
    assert left.parameters == ("mlp.conv.weight",)
    assert "combines all features" in left.reason
