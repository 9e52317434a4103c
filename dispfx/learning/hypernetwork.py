"""From a fixed random input to one logit per feature (arXiv 2410.11988, table of the hypernetwork).

`build_hypernetwork` returns one of three modules; each takes nothing and returns flat logits over
all groups of sites, in order, one row for every knot (`dispfx.plan.knots`), of which a single ratio has one:

    full     fixed z_G32 → bidirectional GRU(32, 64) → LayerNorm → GELU → one linear per group, no bias
    linear   fixed z_G32 → one linear per group, no bias
    none     the logits are the parameters

Learning starts with nearly everything kept: heads begin small against the bias (3.0, so that
sigmoid(3) = 0.95 of all features are kept), and single logits begin at the bias.

Knots differ in z: with s the place of a knot in its range, from -1 to 1, and fixed random vectors a and b,

    z_GK32 = z_G32 + s_K · a_32 + (s_K² − 1/3) · b_32

For nested plans (`Nested`) all knots share one row, from which every group subtracts more from knot to knot.

A head's gradient is a sum of K outer products, (C, W) by (C, F), as large as the heads.  Only their factors
are stored (`Hypernetwork.outer_gradients`), and autograd does not see the heads' weights.

Legend: K knots, G groups, C groups of one width class, W their width, F inputs of a head, N features.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dispfx.plan.knots import ONE_KNOT, Knots
from dispfx.settings.learning_settings import HypernetworkName, seed_for
from dispfx.words.choices import choice


@dataclass(frozen=True, eq=False)
class OuterProduct:
    """Matrices Σ over K of left · rightᵀ, (C, W, F), stored as two factors.

    Args:
        left_KCW: contiguous.
        right_KCF: contiguous.
    """

    left_KCW: Tensor
    right_KCF: Tensor

    def written(self) -> Tensor:
        """Return the matrices themselves, (C, W, F)."""
        if len(self.left_KCW) == 1:
            return self.left_KCW[0].unsqueeze(2) * self.right_KCF[0].unsqueeze(1)
        return torch.bmm(self.left_KCW.permute(1, 2, 0), self.right_KCF.transpose(0, 1))

    def norms(self) -> Tensor:
        """Return the Frobenius norm of every matrix, (C,).

        |Σ l · rᵀ|² = Σ over pairs of (l · l') (r · r'), so one product has the product of its factors' norms.
        """
        if len(self.left_KCW) == 1:
            return self.left_KCW[0].norm(dim=1) * self.right_KCF[0].norm(dim=1)
        left_CKK, right_CKK = (
            torch.bmm(factor_CK, factor_CK.transpose(1, 2))
            for factor_CK in (self.left_KCW.transpose(0, 1), self.right_KCF.transpose(0, 1))
        )
        return (left_CKK * right_CKK).sum((1, 2)).clamp_min(0.0).sqrt()


OuterProducts = Mapping[nn.Parameter, OuterProduct]


INPUT_WIDTH = 32
RECURRENT_WIDTH = 64
# softplus of this is the first distance of two nested knots: what learned logits fall by for a tenth more.
_NESTED_START = 0.0


def build_hypernetwork(
    kind: HypernetworkName,
    sizes: Sequence[int],
    *,
    bias: float,
    seed: int,
    start_N: Tensor | None = None,
    knots: Knots = ONE_KNOT,
) -> "Hypernetwork":
    """Return a module without inputs whose output is one logit per knot and feature, (K, N) float32.

    The module depends only on `seed` and the knots; the global random state does not change.

    Args:
        sizes: number of features of every group.
        bias: added to every logit.
        start_N: also added, one number per feature: the initial logits.
        knots: of the ratios.

    Raises:
        DispfxError: if the kind is unknown.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "hypernetwork"))
        rows = ONE_KNOT if knots.nested else knots
        built = choice(HYPERNETWORKS, kind, "hypernetwork").build(sizes, bias, rows)
    if start_N is not None:
        built = FromStart(built, start_N)
    return Nested(built, sizes, knots) if knots.nested else built


def hypernetwork_parameters(kind: HypernetworkName, sizes: Sequence[int]) -> int:
    """Return the number of parameters of `build_hypernetwork(kind, sizes, …)` without building it.

    Each direction of the GRU has three gates with input weights, state weights and two biases.
    """
    made = choice(HYPERNETWORKS, kind, "hypernetwork")
    return made.shared_parameters + made.parameters_per_feature * sum(sizes)


class Hypernetwork(nn.Module):
    """A module without inputs that returns one logit per knot and feature, (K, N)."""

    def outer_gradients(self, of_logits_KN: Tensor) -> OuterProducts:
        """Return the gradients of the heads, given the gradient of the last returned logits.

        Autograd computes those of all other parameters.
        """
        return {}


class RecurrentHypernetwork(Hypernetwork):
    """The paper's hypernetwork: groups interact through a recurrent network."""

    z_GK32: Tensor

    def __init__(self, sizes: Sequence[int], bias: float, knots: Knots):
        super().__init__()
        self.register_buffer("z_GK32", _inputs(len(sizes), knots))
        self.recurrent = nn.GRU(INPUT_WIDTH, RECURRENT_WIDTH, bidirectional=True)
        self.norm = nn.LayerNorm(2 * RECURRENT_WIDTH)
        self.activation = nn.GELU()
        self.heads = GroupHeads(sizes, 2 * RECURRENT_WIDTH)
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        hidden_GKF, _ = self.recurrent(self.z_GK32)
        return self.heads(self.activation(self.norm(hidden_GKF)).transpose(0, 1)) + self.bias

    def outer_gradients(self, of_logits_KN: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.heads.outer_gradients(of_logits_KN)


class LinearHypernetwork(Hypernetwork):
    """The ablation without a recurrent network: a fixed input per group and a linear."""

    z_GK32: Tensor

    def __init__(self, sizes: Sequence[int], bias: float, knots: Knots):
        super().__init__()
        self.register_buffer("z_GK32", _inputs(len(sizes), knots))
        self.heads = GroupHeads(sizes, INPUT_WIDTH)
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        return self.heads(self.z_GK32.transpose(0, 1)) + self.bias

    def outer_gradients(self, of_logits_KN: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.heads.outer_gradients(of_logits_KN)


class ElementwiseLogits(Hypernetwork):
    """The ablation without a hypernetwork: every logit is a parameter.

    The bias is added to a parameter that begins at zero, so weight decay pulls a logit towards the
    bias and not towards one half.
    """

    def __init__(self, sizes: Sequence[int], bias: float, knots: Knots):
        super().__init__()
        self.logits_KN = nn.Parameter(torch.zeros(len(knots.ratios), sum(sizes)))
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        return self.logits_KN + self.bias


def _inputs(groups: int, knots: Knots) -> Tensor:
    """Return the fixed input of every group and knot, (G, K, 32)."""
    z_GK32 = torch.randn(groups, INPUT_WIDTH).unsqueeze(1)
    if len(knots.ratios) == 1:
        return z_GK32
    place_K1 = torch.linspace(-1.0, 1.0, len(knots.ratios)).unsqueeze(1)
    straight_32, curved_32 = torch.randn(2, INPUT_WIDTH)
    return z_GK32 + place_K1 * straight_32 + (place_K1**2 - 1 / 3) * curved_32


_DIRECTION = 3 * RECURRENT_WIDTH * (INPUT_WIDTH + RECURRENT_WIDTH + 2)


@dataclass(frozen=True)
class _Kind:
    """How a hypernetwork is built, and how many parameters it has: those per feature, and the rest."""

    build: Callable[[Sequence[int], float, Knots], Hypernetwork]
    parameters_per_feature: int
    shared_parameters: int = 0


HYPERNETWORKS = {
    "full": _Kind(RecurrentHypernetwork, 2 * RECURRENT_WIDTH, 2 * _DIRECTION + 2 * (2 * RECURRENT_WIDTH)),
    "linear": _Kind(LinearHypernetwork, INPUT_WIDTH),
    "none": _Kind(ElementwiseLogits, 1),
}


class FromStart(Hypernetwork):
    """A hypernetwork whose output is added to initial logits."""

    start_N: Tensor

    def __init__(self, change: Hypernetwork, start_N: Tensor):
        super().__init__()
        self.change = change
        self.register_buffer("start_N", start_N.detach().clone())

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        return self.change() + self.start_N

    def outer_gradients(self, of_logits_KN: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.change.outer_gradients(of_logits_KN)


class Nested(Hypernetwork):
    """One row of logits, from which every group subtracts a number that never falls from knot to knot.

    logits_KN = logits_N − Σ over knots up to K of softplus(step_KG)

    So a group keeps its features in one order at all ratios, and none comes back at a larger ratio.
    """

    def __init__(self, one: Hypernetwork, sizes: Sequence[int], knots: Knots):
        super().__init__()
        self.one = one
        self._sizes = list(sizes)
        self.steps_KG = nn.Parameter(torch.full((len(knots.ratios) - 1, len(sizes)), _NESTED_START))
        group_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(self._sizes))
        self.register_buffer("_group_N", group_N, persistent=False)
        self._group_N: Tensor

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        fallen_KG = nn.functional.softplus(self.steps_KG).cumsum(0)
        fallen_KG = torch.cat((fallen_KG.new_zeros(1, len(self._sizes)), fallen_KG))
        return self.one() - fallen_KG[:, self._group_N]

    def outer_gradients(self, of_logits_KN: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.one.outer_gradients(of_logits_KN.sum(0, keepdim=True))


class GroupHeads(nn.Module):
    """One linear without bias per group; all of one width are one parameter and one batched product.

    The values are differentiable in the inputs; `outer_gradients` gives the gradient of the weights.

    One parameter per group would cost one kernel per group in every pass.  Gathering, padding or slicing
    one common parameter would cost its whole size again in the backward pass.
    """

    _by_class_G: Tensor
    _from_class_N: Tensor
    _to_class_N: Tensor

    def __init__(self, sizes: Sequence[int], inputs: int):
        super().__init__()
        members: dict[int, list[int]] = {}
        for group, size in enumerate(sizes):
            members.setdefault(size, []).append(group)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.empty(len(groups), width, inputs)) for width, groups in members.items()
        )
        for weight in self.weights:
            nn.init.uniform_(weight, -(inputs**-0.5), inputs**-0.5)
        by_class_G = torch.tensor([group for groups in members.values() for group in groups])
        self.register_buffer("_by_class_G", by_class_G, persistent=False)
        self._class_sizes = [len(groups) for groups in members.values()]
        ranges = torch.arange(sum(sizes)).split(list(sizes))
        from_class_N = torch.cat([ranges[int(group)] for group in by_class_G])
        self.register_buffer("_from_class_N", from_class_N, persistent=False)
        self.register_buffer("_to_class_N", from_class_N.argsort(), persistent=False)
        self._inputs: list[Tensor] = []

    def forward(self, inputs_KGF: Tensor) -> Tensor:
        """Return flat values (K, N), in the order of the groups."""
        classes = inputs_KGF[:, self._by_class_G].split(self._class_sizes, 1)
        if torch.is_grad_enabled():
            self._inputs = [inputs_KCF.detach() for inputs_KCF in classes]
        values = [
            torch.bmm(inputs_KCF.transpose(0, 1), weight_CWF.detach().transpose(1, 2))
            .transpose(0, 1)
            .flatten(1)
            for weight_CWF, inputs_KCF in zip(self.weights, classes, strict=True)
        ]
        return _Permuted.apply(torch.cat(values, 1), self._to_class_N, self._from_class_N)

    def outer_gradients(self, of_values_KN: Tensor) -> OuterProducts:
        """Return the gradients of the weights, given the gradient of the last returned values."""
        shapes = [(len(of_values_KN), *weight_CWF.shape[:2]) for weight_CWF in self.weights]
        parts = of_values_KN.detach()[:, self._from_class_N].split(
            [groups * width for _, groups, width in shapes], 1
        )
        return {
            weight_CWF: OuterProduct(part.reshape(shape), inputs_KCF)
            for weight_CWF, shape, part, inputs_KCF in zip(
                self.weights, shapes, parts, self._inputs, strict=True
            )
        }


class _Permuted(torch.autograd.Function):
    """Reorder the last axis; the backward pass is a gather instead of a scatter."""

    @staticmethod
    def forward(ctx, values_KN: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return values_KN[:, order_N]

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grads[0][:, inverse_N], None, None
