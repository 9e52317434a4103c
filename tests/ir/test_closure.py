"""What is cut together: labels of every spelling of a branch, each proven by lowering it."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.program import Program
from dispfx.ir.sites import Site
from tests.one_branch import INNER, WIDTH, Middle, one_branch, require_one_function
from tests.plain_decoders import perturb

N = INNER
FEATURES = tuple(range(N))
Labels = tuple[int, ...] | None


def only(program: Program, kind: str) -> Site:
    sites = [site for site in program.sites if site.kind == kind]
    assert len(sites) == 1, (kind, program.sites, program.refused)
    return sites[0]


def cuts(site: Site) -> dict[str, Labels]:
    """Return the labels of every cut axis by `parameter:axis`, without the branch's prefix."""
    return {f"{cut.parameter.removeprefix('mlp.')}:{cut.axis}": cut.labels for cut in site.slices}


def halves(h: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


SIDE_BY_SIDE = FEATURES + FEATURES
INTERLEAVED = tuple(feature for feature in FEATURES for _ in range(2))

FUSED: dict[str, tuple[Callable[[Middle, Tensor], Tensor], Labels]] = {
    "chunk": (lambda m, h: halves(h, *h.chunk(2, -1)), SIDE_BY_SIDE),
    "split": (lambda m, h: halves(h, *h.split(N, dim=-1)), SIDE_BY_SIDE),
    "slice": (lambda m, h: halves(h, h[..., :N], h[..., N:]), SIDE_BY_SIDE),
    "glu": (lambda m, h: F.glu(h), SIDE_BY_SIDE),
    "unflatten": (lambda m, h: halves(h, *h.unflatten(-1, (2, N)).unbind(-2)), SIDE_BY_SIDE),
    "interleaved view": (lambda m, h: halves(h, *h.view(*h.shape[:-1], N, 2).unbind(-1)), INTERLEAVED),
    "interleaved slice": (lambda m, h: halves(h, h[..., ::2], h[..., 1::2]), INTERLEAVED),
    "sum over pairs": (lambda m, h: h.relu().unflatten(-1, (N, 2)).sum(-1), INTERLEAVED),
    "largest of a pair": (lambda m, h: h.unflatten(-1, (2, N)).amax(-2), SIDE_BY_SIDE),
}


@pytest.mark.parametrize("name", sorted(FUSED))
def test_fused_gate_and_up_are_cut_by_repeated_labels(name: str):
    """Rule 1 of label_map."""
    middle, labels = FUSED[name]
    model = one_branch(lambda: Middle(middle, up=2 * N))
    program = dispfx.capture(model)
    site = only(program, "inner")
    assert site.size == N
    assert cuts(site) == {"up.weight:0": labels, "up.bias:0": labels, "down.weight:1": None}
    require_one_function(model, program)


PLAIN: dict[str, tuple[Callable[[Middle, Tensor], Tensor], dict[str, Labels]]] = {
    "activation": (lambda m, h: F.gelu(h), {}),
    "norm in the middle": (
        lambda m, h: h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * m.scale,
        {"scale:0": None},
    ),
    "mean over the features": (lambda m, h: F.relu(h - h.mean(-1, keepdim=True)), {}),
    "sum over the features": (lambda m, h: F.relu(h) / (h.pow(2).sum(-1, keepdim=True) + 1), {}),
    "parts put side by side": (lambda m, h: torch.cat([h[..., :10].relu(), h[..., 10:].tanh()], -1), {}),
    "scaled features": (lambda m, h: torch.einsum("btn,n->btn", h.relu(), m.scale), {"scale:0": None}),
    "flat tokens": (lambda m, h: F.gelu(h.flatten(0, 1)).view(h.shape), {}),
    "moved features": (lambda m, h: h.transpose(1, 2).relu().permute(0, 2, 1), {}),
}


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_inner_features_are_followed_through(name: str):
    """Rule 1 of label_map."""
    middle, more = PLAIN[name]
    model = one_branch(lambda: Middle(middle))
    program = dispfx.capture(model)
    assert cuts(only(program, "inner")) == {
        "up.weight:0": None, "up.bias:0": None, "down.weight:1": None, **more,
    }  # fmt: skip
    require_one_function(model, program)


def test_a_mean_carries_its_own_gate():
    """Rule 3 of label_map."""
    program = dispfx.capture(one_branch(lambda: Middle(PLAIN["mean over the features"][0])))
    site = only(program, "inner")
    users = sorted(user for point in site.gates for user in point.users)
    assert len(users) == 2 and users[0].startswith("linear") and users[1].startswith("mean"), site.gates


class Transposed(nn.Module):
    """x @ w with w (in, out), as addmm on flat tokens and as matmul."""

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(0.3 * torch.randn(WIDTH, N))
        self.bias = nn.Parameter(0.3 * torch.randn(N))
        self.down = nn.Parameter(0.3 * torch.randn(N, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.addmm(self.bias, x.view(-1, WIDTH), self.up).view(*x.shape[:-1], N)
        return F.gelu(h) @ self.down


def test_transposed_weights_are_cut_on_their_other_axis():
    """Rule 4 of label_map."""
    model = one_branch(Transposed)
    program = dispfx.capture(model)
    assert cuts(only(program, "read")) == {"up:0": None}
    assert cuts(only(program, "inner")) == {"up:1": None, "bias:0": None, "down:0": None}
    assert cuts(only(program, "write")) == {"down:1": None}
    require_one_function(model, program)


class Joined(nn.Module):
    """Two projections side by side into one."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, 14)
        self.down = nn.Linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(torch.cat([self.a(x), self.b(x)], dim=-1)))


def test_joined_projections_share_one_site_at_their_own_places():
    model = one_branch(Joined)
    program = dispfx.capture(model)
    first, second = tuple(range(10)), tuple(range(10, 24))
    assert cuts(only(program, "inner")) == {
        "a.weight:0": first, "a.bias:0": first,
        "b.weight:0": second, "b.bias:0": second,
        "down.weight:1": None,
    }  # fmt: skip
    assert cuts(only(program, "read")) == {"a.weight:1": None, "b.weight:1": None}
    require_one_function(model, program)


class OutputNorm(nn.Module):
    """A norm on what the branch writes."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, N), nn.Linear(N, WIDTH)
        self.norm = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(x)))
        return y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + self.norm)


def test_a_norm_on_the_output_is_cut_with_the_write_and_divides_by_the_full_width():
    """Rule 3 of label_map."""
    model = one_branch(OutputNorm)
    program = dispfx.capture(model)
    site = only(program, "write")
    assert cuts(site) == {"down.weight:0": None, "down.bias:0": None, "norm:0": None}
    assert any(user.startswith("mean") for point in site.gates for user in point.users)
    require_one_function(model, program)


class SharedWeight(nn.Module):
    """One down projection used twice."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(WIDTH, N), nn.Linear(WIDTH, N)
        self.down = nn.Linear(N, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))) + self.down(torch.tanh(self.gate(x)))


def test_a_weight_used_twice_belongs_to_one_site_that_cuts_both_producers():
    """Rule 2 of label_map, and rule 4 of find_sites."""
    model = one_branch(SharedWeight)
    program = dispfx.capture(model)
    site = only(program, "inner")
    assert cuts(site) == {
        "up.weight:0": None, "up.bias:0": None, "gate.weight:0": None, "gate.bias:0": None,
        "down.weight:1": None,
    }  # fmt: skip
    assert len(site.gates) == 2, "each product has a gate of its own"
    require_one_function(model, program)


class SharedOfHeld(SharedWeight):
    """As above, but what the second product sums over cannot be cut."""

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x))) + self.down(self.gate(x).softmax(-1))


def test_a_producer_that_cannot_be_cut_is_selected_from():
    """Rule 4 of label_map."""
    model = one_branch(SharedOfHeld)
    program = dispfx.capture(model)
    site = only(program, "inner")
    assert cuts(site) == {"up.weight:0": None, "up.bias:0": None, "down.weight:1": None}
    assert len(site.gates) == 2, "each product has a gate of its own"
    require_one_function(model, program)


class BesideItsNorm(nn.Module):
    """A product over a latent and the latent's own norm, side by side."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, N), nn.Linear(2 * N, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        normed = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.down(torch.cat([normed, h], dim=-1))


def test_a_feature_that_a_product_sums_over_twice_is_one_feature():
    """Rule 6 of label_map."""
    model = one_branch(BesideItsNorm)
    program = dispfx.capture(model)
    site = only(program, "inner")
    assert site.size == N
    assert cuts(site) == {"up.weight:0": None, "up.bias:0": None, "down.weight:1": 2 * tuple(range(N))}
    require_one_function(model, program)


class AllAlike(nn.Module):
    """Each feature is compared with its neighbour, so that all are one."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, N), nn.Linear(N, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h + torch.cat([h[..., 1:], h[..., :1]], dim=-1))


def test_where_every_feature_would_be_one_there_is_no_site():
    """Rules 6 and 7 of label_map."""
    model = one_branch(AllAlike)
    program = dispfx.capture(model)
    assert "inner" not in {site.kind for site in program.sites}
    assert [refusal.reason for refusal in program.refused] == ["one position would follow two features"]
    require_one_function(model, program)


class Beginning(nn.Module):
    """Zeros stand for what was before the first token, and the same weight is multiplied with them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, N), nn.Linear(N, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        earlier = torch.cat([self.up(x.new_zeros(x.shape[0], 1, WIDTH)), self.up(x[:, :-1])], dim=1)
        return self.down(F.gelu(earlier))


def test_a_constant_that_a_weight_is_multiplied_with_is_gated_too():
    """Rule 2 of label_map."""
    model = one_branch(Beginning)
    program = dispfx.capture(model)
    assert cuts(only(program, "read")) == {"up.weight:1": None} and not program.refused
    require_one_function(model, program)


class TwoLayersOneMLP(nn.Module):
    """Two layers that share every weight of their branch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, WIDTH)
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, 31, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for _ in range(2):
            x = x + self.mlp(x)
        return self.head(x)


def test_layers_that_share_a_branch_share_its_sites():
    """Rule 4 of find_sites."""
    torch.manual_seed(0)
    model = perturb(TwoLayersOneMLP())
    program = dispfx.capture(model)
    assert sorted(site.kind for site in program.sites) == ["inner", "read", "write"]
    require_one_function(model, program)


class TwoReaders(nn.Module):
    """An inner value that feeds two products."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.extra = nn.Linear(WIDTH, N), nn.Linear(N, WIDTH), nn.Linear(N, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        return self.down(h) * torch.sigmoid(self.extra(h))


def test_both_products_of_an_inner_value_are_cut():
    """Rule 2 of label_map."""
    model = one_branch(TwoReaders)
    program = dispfx.capture(model)
    site = only(program, "inner")
    assert {"down.weight:1", "extra.weight:1", "up.weight:0", "up.bias:0"} == set(cuts(site))
    assert sum(len(point.users) for point in site.gates) == 2
    require_one_function(model, program)
