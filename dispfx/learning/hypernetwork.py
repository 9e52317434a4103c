"""From a fixed random input to one logit per feature (arXiv 2410.11988, table of the hypernetwork).

`build_hypernetwork` returns one of three modules; each takes nothing and returns flat logits over
all groups of sites, in order (those of a range of ratios come from `Falling`, around one of these):

    full     fixed z_G32 → bidirectional GRU(32, 64) → LayerNorm → GELU → one linear per group, no bias
    linear   fixed z_G32 → one linear per group, no bias
    none     the logits are the parameters

Learning starts with nearly everything kept: heads begin small against the bias (3.0, so that
sigmoid(3) = 0.95 of all features are kept), and single logits begin at the bias.

A head's gradient is an outer product, (C, W) by (C, F), as large as the heads.  Only its factors are stored
(`Hypernetwork.outer_gradients`), and autograd does not see the heads' weights.

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
    """Matrices left · rightᵀ (C, W, F), stored as two factors.

    Args:
        left_CW: contiguous.
        right_CF: contiguous.
    """

    left_CW: Tensor
    right_CF: Tensor

    def written(self) -> Tensor:
        """Return the matrices themselves, (C, W, F)."""
        return self.left_CW.unsqueeze(2) * self.right_CF.unsqueeze(1)

    def norms(self) -> Tensor:
        """Return the Frobenius norm of every matrix, (C,): the product of the norms of its factors."""
        return self.left_CW.norm(dim=1) * self.right_CF.norm(dim=1)


OuterProducts = Mapping[nn.Parameter, OuterProduct]


INPUT_WIDTH = 32
RECURRENT_WIDTH = 64
# Of the logits of a range of ratios.
STRETCH = 3.0
# softplus of it is how far logits fall between the first two knots at first: 1.8.
_FIRST_STEP = 1.6


def build_hypernetwork(
    kind: HypernetworkName,
    sizes: Sequence[int],
    *,
    bias: float,
    seed: int,
    start_N: Tensor | None = None,
    knots: Knots = ONE_KNOT,
) -> "Hypernetwork":
    """Return a module without inputs whose output is one logit per feature, flat, (N,) float32.

    For a range of ratios it is (K, N), one row per knot.  The module depends only on `seed` and the knots.
    The global random state does not change.

    Args:
        sizes: number of features of every group.
        bias: added to every logit.
        start_N: also added, one number per feature: the initial logits.
        knots: of the range of ratios.

    Raises:
        DispfxError: if the kind is unknown.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_for(seed, "hypernetwork"))
        built = choice(HYPERNETWORKS, kind, "hypernetwork").build(sizes, bias)
    if start_N is not None:
        built = FromStart(built, start_N)
    return Falling(built, sizes, knots, bias) if knots.is_range else built


def hypernetwork_parameters(kind: HypernetworkName, sizes: Sequence[int]) -> int:
    """Return the number of parameters of `build_hypernetwork(kind, sizes, …)` without building it.

    Each direction of the GRU has three gates with input weights, state weights and two biases.
    """
    made = choice(HYPERNETWORKS, kind, "hypernetwork")
    return made.shared_parameters + made.parameters_per_feature * sum(sizes)


class Hypernetwork(nn.Module):
    """A module without inputs that returns one logit per feature."""

    def outer_gradients(self, of_logits_N: Tensor) -> OuterProducts:
        """Return the gradients of the heads, given the gradient of the last returned logits.

        Autograd computes those of all other parameters.
        """
        return {}


class RecurrentHypernetwork(Hypernetwork):
    """The paper's hypernetwork: groups interact through a recurrent network."""

    z_G32: Tensor

    def __init__(self, sizes: Sequence[int], bias: float):
        super().__init__()
        self.register_buffer("z_G32", torch.randn(len(sizes), INPUT_WIDTH))
        self.recurrent = nn.GRU(INPUT_WIDTH, RECURRENT_WIDTH, bidirectional=True)
        self.norm = nn.LayerNorm(2 * RECURRENT_WIDTH)
        self.activation = nn.GELU()
        self.heads = GroupHeads(sizes, 2 * RECURRENT_WIDTH)
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (N,)."""
        hidden_GF, _ = self.recurrent(self.z_G32)
        return self.heads(self.activation(self.norm(hidden_GF))) + self.bias

    def outer_gradients(self, of_logits_N: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.heads.outer_gradients(of_logits_N)


class LinearHypernetwork(Hypernetwork):
    """The ablation without a recurrent network: a fixed input per group and a linear."""

    z_G32: Tensor

    def __init__(self, sizes: Sequence[int], bias: float):
        super().__init__()
        self.register_buffer("z_G32", torch.randn(len(sizes), INPUT_WIDTH))
        self.heads = GroupHeads(sizes, INPUT_WIDTH)
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (N,)."""
        return self.heads(self.z_G32) + self.bias

    def outer_gradients(self, of_logits_N: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.heads.outer_gradients(of_logits_N)


class ElementwiseLogits(Hypernetwork):
    """The ablation without a hypernetwork: every logit is a parameter.

    The bias is added to a parameter that begins at zero, so weight decay pulls a logit towards the
    bias and not towards one half.
    """

    def __init__(self, sizes: Sequence[int], bias: float):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(sum(sizes)))
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (N,)."""
        return self.logits + self.bias


_DIRECTION = 3 * RECURRENT_WIDTH * (INPUT_WIDTH + RECURRENT_WIDTH + 2)


@dataclass(frozen=True)
class _Kind:
    """How a hypernetwork is built, and how many parameters it has: those per feature, and the rest."""

    build: Callable[[Sequence[int], float], Hypernetwork]
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
        """Return logits (N,)."""
        return self.change() + self.start_N

    def outer_gradients(self, of_logits_N: Tensor) -> OuterProducts:
        """Return the gradients of the heads."""
        return self.change.outer_gradients(of_logits_N)


class Falling(Hypernetwork):
    """Logits for a range of ratios: every group's fall from knot to knot, by a number of its own.

    logits_KN = bias + stretch · (logits_N − bias) − Σ over knots up to K of softplus(step_KG)

    So a group has one order of its features at all ratios, and none comes back at a larger ratio.  Every
    feature must be decided at every ratio, with the logits of one row, so these spread further than for a
    single ratio: with a stretch of 1, KL is larger by 1.5 to 6% (docs/log/2026-12-family.md).
    """

    _group_N: Tensor

    def __init__(self, one: Hypernetwork, sizes: Sequence[int], knots: Knots, bias: float):
        super().__init__()
        self.one = one
        self.steps_KG = nn.Parameter(torch.full((len(knots.ratios) - 1, len(sizes)), _FIRST_STEP))
        group_N = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(list(sizes)))
        self.register_buffer("_group_N", group_N, persistent=False)
        self.bias = bias

    def forward(self) -> Tensor:
        """Return logits (K, N)."""
        fallen_KG = nn.functional.softplus(self.steps_KG).cumsum(0)
        fallen_KG = torch.cat((torch.zeros_like(fallen_KG[:1]), fallen_KG))
        return self.bias + STRETCH * (self.one() - self.bias) - fallen_KG[:, self._group_N]

    def outer_gradients(self, of_logits_N: Tensor) -> OuterProducts:
        """Return the gradients of the heads, given that of the last returned logits, (K, N)."""
        return self.one.outer_gradients(STRETCH * of_logits_N.sum(0))


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

    def forward(self, inputs_GF: Tensor) -> Tensor:
        """Return flat values (N,), in the order of the groups."""
        classes = inputs_GF[self._by_class_G].split(self._class_sizes)
        if torch.is_grad_enabled():
            self._inputs = [inputs_CF.detach() for inputs_CF in classes]
        values = [
            torch.bmm(inputs_CF.unsqueeze(1), weight_CWF.detach().transpose(1, 2)).flatten()
            for weight_CWF, inputs_CF in zip(self.weights, classes, strict=True)
        ]
        return _Permuted.apply(torch.cat(values), self._to_class_N, self._from_class_N)

    def outer_gradients(self, of_values_N: Tensor) -> OuterProducts:
        """Return the gradients of the weights, given the gradient of the last returned values."""
        sizes = [weight_CWF.shape[:2].numel() for weight_CWF in self.weights]
        parts = of_values_N.detach()[self._from_class_N].split(sizes)
        return {
            weight_CWF: OuterProduct(part.view(weight_CWF.shape[:2]), inputs_CF)
            for weight_CWF, part, inputs_CF in zip(self.weights, parts, self._inputs, strict=True)
        }


class _Permuted(torch.autograd.Function):
    """Reorder a vector; the backward pass is a gather instead of a scatter."""

    @staticmethod
    def forward(ctx, values_N: Tensor, order_N: Tensor, inverse_N: Tensor) -> Tensor:
        ctx.save_for_backward(inverse_N)
        return values_N[order_N]

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        (inverse_N,) = ctx.saved_tensors
        return grads[0][inverse_N], None, None
