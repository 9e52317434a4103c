"""Every block weight is counted once: gated, or not gated for a reason that was found."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.analysis.coverage import EXPERTS, HEADS, SKIPPED, UNREAD, UNSUMMED, coverage
from dispfx.ir.program import Program
from tests import foreign_decoders
from tests.one_branch import INNER, WIDTH, Middle, one_branch, require_one_function
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
    """Rules 1, 2 and 3."""
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
    """Rule 4."""
    program = dispfx.capture(one_branch(lambda: Middle(lambda m, h: h.cumsum(-1))))
    require_sum(program)
    assert coverage(program).axes == {
        "aten.cumsum combines all features": (("mlp.up.weight", 0), ("mlp.down.weight", 1))
    }


class Compared(nn.Module):
    """An MLP that reads the stream through comparisons, alone or next to products."""

    def __init__(self, middle: Callable[["Compared", Tensor], Tensor]):
        super().__init__()
        self.up, self.other, self.down = (
            nn.Linear(WIDTH, INNER),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.middle(self, x))


@pytest.mark.parametrize(
    "middle",
    [
        lambda part, x: (part.up(x) > 0).float() * (part.other(x) > 1).float(),
        lambda part, x: torch.where(part.up(x) > 0, part.other(x), -1.0),
        lambda part, x: part.other(x).masked_fill(part.up(x).abs() < 1, 0.0),
        lambda part, x: part.other(x) * ((part.up(x) > 0).long() > 0),
    ],
    ids=["alone", "choice", "mask", "numbers"],
)
def test_a_branch_behind_comparisons_is_found_and_pruned(middle: Callable[[Compared, Tensor], Tensor]):
    """Rule 3: the weights that only comparisons read were in no branch, no site and no list."""
    model = one_branch(lambda: Compared(middle))
    program = dispfx.capture(model)
    require_sum(program)
    assert coverage(program).total == 3 * WIDTH * INNER and not coverage(program).axes
    cut = {(piece.parameter, piece.axis) for site in program.sites for piece in site.slices}
    assert {("mlp.up.weight", 0), ("mlp.up.weight", 1), ("mlp.other.weight", 1)} < cut
    require_one_function(model, program)


@pytest.mark.parametrize(
    "middle",
    [
        lambda part, x: part.other(x) * (part.up(x).argmax(-1, keepdim=True) > 3),
        lambda part, x: part.other(x) * ((part.up(x) > 0).sum(-1, keepdim=True) > INNER // 2),
        lambda part, x: part.other(x) * (part.up(x).topk(1, -1).indices > 3),
        lambda part, x: part.other(x) * ((part.up(x) > 0).cumsum(-1) > 3),
    ],
    ids=["largest", "count", "place", "running count"],
)
def test_weights_behind_compared_whole_numbers_are_found(middle: Callable[[Compared, Tensor], Tensor]):
    """Rule 3: the weights of a hard router were in no branch, no site and no list."""
    model = one_branch(lambda: Compared(middle))
    program = dispfx.capture(model)
    assert coverage(program).total == 3 * WIDTH * INNER
    cut = {(piece.parameter, piece.axis) for site in program.sites for piece in site.slices}
    assert ("mlp.up.weight", 1) in cut
    require_one_function(model, program)


class Frozen(nn.Module):
    """An MLP that has its gate as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER, bias=False), nn.Linear(INNER, WIDTH, bias=False)
        self.gate: Tensor
        self.register_buffer("gate", torch.randn(INNER, WIDTH) / WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(F.linear(x, self.gate)) * self.up(x))


def test_a_read_that_a_buffer_shares_is_refused_and_the_rest_computes_the_same():
    model = one_branch(Frozen)
    program = dispfx.capture(model)
    assert {refusal.name: refusal.reason for refusal in program.refused} == {
        "mlp.read": "a weight that is a buffer, and no parameter, is not pruned"
    }
    require_sum(program)
    require_one_function(model, program)


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


@torch.library.custom_op("coverage_tests::linear", mutates_args=())
def linear_of_a_library(x: Tensor, weight: Tensor) -> Tensor:
    return F.linear(x, weight)


@linear_of_a_library.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


class TwoBranches(nn.Module):
    """A usual MLP, and one that is spelt by the products that are given."""

    def __init__(self, *products: Callable[[Tensor, Tensor], Tensor]):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.usual, self.products = Middle(lambda m, h: F.gelu(h)), products
        self.up, self.down = (
            nn.Parameter(torch.randn(size) / 6) for size in ((WIDTH, 2, 12), (2, 12, WIDTH))
        )

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.usual(x)
        up, down = self.products
        return self.head(x + down(F.gelu(up(x, self.up)), self.down))


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "aten.tensordot": (lambda x, w: torch.tensordot(x, w, 1), lambda h, w: torch.tensordot(h, w, 2)),
    "aten.einsum": (
        lambda x, w: torch.einsum("...d,dkf->...kf", x, w),
        lambda h, w: torch.einsum("...kf,kfd->...d", h, w),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_that_sums_over_two_dimensions_is_named_and_its_weights_are_counted(name: str):
    torch.manual_seed(0)
    model = perturb(TwoBranches(*PRODUCTS[name]))
    program = dispfx.capture(model)
    require_sum(program)
    require_one_function(model, program)
    found, reason = coverage(program), f"{name} sums over several dimensions at once"
    assert found.total == 4 * WIDTH * 24 and found.share == 1.0
    assert found.axes == {reason: (("up", 1), ("up", 2), ("down", 0), ("down", 1))}
    (refusal,) = program.refused
    assert refusal.reason == reason and "test_coverage.py:" in str(refusal.source)
    assert [site.kind for site in program.sites].count("read") == 2


def test_weights_that_only_an_operation_of_a_library_reads_are_counted():
    model = TwoBranches(
        lambda x, w: linear_of_a_library(x, w.flatten(1).T),
        lambda h, w: linear_of_a_library(h, w.flatten(0, 1).T),
    )
    program = dispfx.capture(perturb(model))
    require_sum(program)
    (left,) = coverage(program).ungated
    assert left.parameters == ("down", "up") and left.size == 2 * WIDTH * 24
    assert left.reason == "no rule is known for coverage_tests.linear"
    assert [refusal.reason for refusal in program.refused] == [left.reason]


class Own(nn.Module):
    """A usual MLP, and a branch that a test writes with weights u (WIDTH, INNER) and d (INNER, WIDTH)."""

    def __init__(self, branch: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.embedding, self.head = nn.Embedding(61, WIDTH), nn.Linear(WIDTH, 61)
        self.usual, self.branch = Middle(lambda m, h: F.gelu(h)), branch
        self.own = nn.ParameterDict({"u": torch.randn(WIDTH, INNER) / 6, "d": torch.randn(INNER, WIDTH) / 6})

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.usual(x)
        return self.head(x + self.branch(x, self.own["u"], self.own["d"]))


SILENT: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], str]] = {
    "three operands share the sum": (
        lambda x, u, d: torch.einsum("btf,fd,f->btd", x @ u, d, u[0]),
        "aten.einsum combines all features",
    ),
    "three operands in a chain": (
        lambda x, u, d: torch.einsum("btd,df,fe->bte", x, u, d),
        "two weights are multiplied along the features",
    ),
    "a diagonal": (
        lambda x, u, d: torch.einsum("btd,dd->btd", x, u @ d),
        "aten.einsum combines all features",
    ),
    "distances": (lambda x, u, d: torch.cdist(x, u.T).neg().exp() @ d, "no rule is known for aten.cdist"),
    "similarities": (
        lambda x, u, d: F.cosine_similarity(x.unsqueeze(-2), u.T, dim=-1) @ d,
        "no rule is known for aten.cosine_similarity",
    ),
    "dot products": (
        lambda x, u, d: torch.linalg.vecdot(x.unsqueeze(-2), u.T) @ d,
        "no rule is known for aten.linalg_vecdot",
    ),
    "a bilinear form": (
        lambda x, u, d: F.bilinear(x @ u, x, d.T[:, :, None] * d),
        "no rule is known for aten.bilinear",
    ),
    "channels in groups": (
        lambda x, u, d: F.conv1d((x @ u).transpose(1, 2), d[: INNER // 2].mT.unsqueeze(-1), groups=2).mT,
        "aten.conv1d combines all features",
    ),
    "a sum without a product": (
        lambda x, u, d: (F.gelu(x @ u).unsqueeze(-1) * d).sum(-2),
        "no product of a branch sums over it",
    ),
    "images": (
        lambda x, u, d: F.conv2d(x.mT.unsqueeze(-1), (u @ d)[..., None, None]).squeeze(-1).mT,
        "no rule is known for aten.conv2d",
    ),
    "a transposed convolution": (
        lambda x, u, d: F.conv_transpose1d(x.mT, (u @ d).unsqueeze(-1)).mT,
        "no rule is known for aten.conv_transpose1d",
    ),
}


@pytest.mark.parametrize("name", SILENT)
def test_what_is_not_gated_is_refused_by_name_with_its_line(name: str):
    """Rule 5, and rule 6 of find_sites."""
    branch, reason = SILENT[name]
    torch.manual_seed(0)
    model = perturb(Own(branch))
    program = dispfx.capture(model)
    require_sum(program)
    found = coverage(program)
    refusals = {refusal.reason: refusal for refusal in program.refused}
    assert reason in refusals
    assert refusals[reason].name.startswith("own.")
    if reason != UNSUMMED:
        assert "test_coverage.py:" in str(refusals[reason].source)
    reasons = [*found.axes, *(part for one in found.ungated for part in one.reason.split("; "))]
    assert set(reasons) <= refusals.keys(), "nothing is left out without a word"
    assert found.total == 4 * WIDTH * INNER
    require_one_function(model, program)
