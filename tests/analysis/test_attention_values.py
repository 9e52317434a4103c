"""Features of values as sites: every spelling of attention, and values whose features cannot be cut."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir import ops
from dispfx.ir.program import Program
from dispfx.passes.find_sites import FindSites
from dispfx.passes.insert_gates import InsertGates
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import zeroed_decoder
from tests.analysis import test_attention_heads as heads
from tests.analysis.test_attention_heads import HEADS, SIZE, WIDTH, Projections, Sharing, decoder_of, fast
from tests.one_branch import ORDER_OF_SUMS, require_one_function
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

WORD = "attention-values"
IDS = token_ids(2, 9, vocabulary=31)


class Gated(Projections):
    """The result of attention is multiplied by a gate of its own projection."""

    def __init__(self) -> None:
        super().__init__(fast, 3)
        self.gate = nn.Linear(WIDTH, HEADS * SIZE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2) * self.gate(x).sigmoid())


class FeaturesFirst(Projections):
    """The rows of the value projection, and the columns of the output projection, go feature by feature."""

    def __init__(self) -> None:
        super().__init__(fast, HEADS)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.query, self.key))
        v = self.value(x).unflatten(-1, (SIZE, HEADS)).permute(0, 3, 1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.permute(0, 2, 3, 1).flatten(2))


class ByHead(nn.Module):
    """Weights of three dimensions: value and output projection keep heads apart."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, 3 * SIZE)
        self.value = nn.Parameter(torch.randn(WIDTH, 3, SIZE))
        self.out = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k = (part(x).unflatten(-1, (-1, SIZE)).transpose(1, 2) for part in (self.query, self.key))
        v = torch.einsum("btm,mhd->bhtd", x, self.value)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return torch.einsum("bhtd,hdm->btm", y, self.out)


def turned_round(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last head is the first one that the output projection reads."""
    return fast(part, q, k, v).flip(1)


def with_mirror(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Head i meets head H - 1 - i, so both have the same features."""
    y = fast(part, q, k, v)
    return y + y.flip(1)


def with_mean(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    y = fast(part, q, k, v)
    return y + y.mean(1, keepdim=True)


def first_half_doubled(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads would keep unlike numbers of features in the first half."""
    y = fast(part, q, k, v)
    return torch.cat([y[..., : SIZE // 2] * 2, y[..., SIZE // 2 :]], -1)


def mixed_results(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A feature of the result is that of all heads."""
    y = fast(part, q, k, v)
    return y + torch.einsum("bhqd,hg->bgqd", y, part.mix)


def halves_swapped(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two halves of the features change places: those of a head are not in order."""
    return torch.cat(fast(part, q, k, v).chunk(2, -1)[::-1], -1)


def normed(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fast(part, q, k, F.rms_norm(v, (SIZE,)))


def normed_by_hand(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fast(part, q, k, v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + 1e-5))


def keys_are_values(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fast(part, q, v, v)


def same_by_hand(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return heads.weights(q, v) @ v


def found(make: Callable[[], nn.Module], *sites: str) -> tuple[nn.Module, Program]:
    model = decoder_of(make)
    return model, dispfx.capture(model, sites=sites or (WORD,))  # type: ignore[arg-type]


def values_of(program: Program) -> list:
    return [site for site in program.sites if site.kind == "values"]


def half_of_each(program: Program, seed: int) -> Plan:
    """Return a plan that keeps half of all features, drawn at random; of values for every head anew."""
    generator = torch.Generator().manual_seed(seed)
    kept = {}
    for site in program.sites:
        each = torch.rand(site.experts, site.per_expert, generator=generator).argsort(1)
        each = each[:, : -(-site.per_expert // 2)] + torch.arange(site.experts)[:, None] * site.per_expert
        kept[site.name] = each.flatten()
    return Plan.from_masks(program, kept)


# Heads with features of their own, for every spelling that has heads as sites, and more.
PATTERNS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **heads.PATTERNS,
    "gated by feature": (Gated, 3),
    "one key": (lambda: Projections(heads.shared_by_argument, 1), 1),
    "one key, written out": (lambda: Projections(heads.written_out, 1), 1),
    "one fused key": (heads.OneKey, 1),
    "slopes by number": (lambda: Projections(heads.biased_by_number, HEADS), HEADS),
    "slopes as sequences": (lambda: Projections(heads.biased_as_sequences, HEADS), HEADS),
    "heads one by one": (lambda: Projections(heads.one_by_one, HEADS), 1),
    "heads as sequences": (lambda: Projections(heads.as_sequences, HEADS), 1),
    "features before heads": (FeaturesFirst, 1),
    "weights by head": (ByHead, 1),
    "heads turned round": (lambda: Projections(turned_round, HEADS), HEADS),
    "heads and their mirror": (lambda: Projections(with_mirror, HEADS), HEADS // 2),
    "heads and their mean": (lambda: Projections(with_mean, HEADS), 1),
    "half of the features doubled": (lambda: Projections(first_half_doubled, HEADS), 1),
    "results mixed over heads": (lambda: Projections(mixed_results, HEADS), 1),
    "halves of features swapped": (lambda: Projections(halves_swapped, HEADS), 1),
    "means of values": (lambda: Projections(normed_by_hand, HEADS), 1),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_values_are_found_and_cut(name: str):
    """Rules 1, 3 and 4: gated, lowered and zeroed agree; where rule 4 does not hold, heads share features."""
    make, number = PATTERNS[name]
    model, program = found(make)
    (site,) = values_of(program)
    assert (site.size, site.experts, site.symbol) == (number * SIZE, number, "S6")
    with torch.no_grad():
        ones = {one.name: torch.ones(one.size) for one in program.sites}
        assert torch.equal(dispfx.gate(program)(IDS, ones), model(IDS))
    plans = [half_of_each(program, seed) for seed in range(2)]
    require_one_function(model, program, plans=plans)
    lowered = dispfx.lower(program, plans[0])
    after = {path: tuple(one.shape) for path, one in lowered.named_parameters()}
    before = {path: tuple(one.shape) for path, one in model.named_parameters()}
    for cut in site.slices:
        labels = range(site.size) if cut.labels is None else cut.labels
        followed = sum(label >= 0 for label in labels)
        assert after[cut.parameter][cut.axis] == before[cut.parameter][cut.axis] - followed // 2, cut


@pytest.mark.parametrize("name", heads.PATTERNS)
def test_heads_and_values_together(name: str):
    """What stays of a projection is kept by both; a removed head takes its values with it."""
    make, number = heads.PATTERNS[name]
    model, program = found(make, "heads", WORD)
    (values,) = values_of(program)
    (site,) = [one for one in program.sites if one.kind == "heads"]
    plan = half_of_each(program, 0)
    require_one_function(model, program, plans=[plan, half_of_each(program, 1)])
    out = dict(dispfx.lower(program, plan).named_parameters())["mlp.out.weight"]
    kept_heads = -(-number // 2)
    assert plan.sites == ("heads", WORD)
    assert out.shape[1] == kept_heads * (HEADS // number) * (SIZE // 2)
    assert {cut.parameter for cut in values.slices} <= {cut.parameter for cut in site.slices}


def test_soft_masks_of_heads_and_values_multiply():
    """Both gates stand before the output projection, one after the other."""
    model, program = found(lambda: Projections(fast, HEADS), "heads", WORD)
    masks = {site.name: torch.ones(site.size) for site in program.sites}
    for site in program.sites:
        if site.kind in ("heads", "values"):
            masks[site.name] = torch.full((site.size,), 0.5)
    with torch.no_grad():
        halved = dispfx.gate(program)(IDS, masks)
        model.get_parameter("mlp.out.weight").mul_(0.25)
        assert relative_error(halved, model(IDS)) < 1e-5


def test_each_gate_of_a_value_has_its_gradient():
    """The gradient of a mask is that of the masks of all users, which finite differences give."""
    _, program = found(lambda: Projections(fast, HEADS), "heads", WORD)
    gated = dispfx.gate(program)
    masks = {site.name: torch.full((site.size,), 0.9, requires_grad=True) for site in program.sites}
    gated(IDS, masks).square().mean().backward()
    for site in program.sites:
        gradient, step = masks[site.name].grad, 1e-2
        assert gradient is not None
        direction = torch.randn(site.size, generator=torch.Generator().manual_seed(1))
        values = []
        with torch.no_grad():
            for sign in (1, -1):
                moved = {**masks, site.name: masks[site.name] + sign * step * direction}
                values.append(gated(IDS, moved).square().mean())
        slope = (values[0] - values[1]) / (2 * step)
        assert float(slope) == pytest.approx(float(gradient @ direction), rel=2e-2), site.name


@pytest.mark.parametrize("axis", ["mlp.out.weight", "mlp.value.weight"])
def test_a_wrong_position_is_not_the_same_function(axis: str):
    """The comparison with zeroed weights sees labels that are off by one feature on one axis."""
    model, program = found(lambda: Projections(heads.grouped, 3))
    plan = half_of_each(program, 0)
    (site,) = values_of(program)
    wrong = tuple(
        replace(cut, labels=tuple((label + 1) % site.size for label in cut.labels or range(site.size)))
        if cut.parameter == axis
        else cut
        for cut in site.slices
    )
    other = program.clone()
    other.sites = tuple(replace(one, slices=wrong) if one is site else one for one in program.sites)
    with torch.no_grad():
        lowered = dispfx.lower(program, plan)(IDS)
        assert relative_error(zeroed_decoder(program, plan, model)(IDS), lowered) <= ORDER_OF_SUMS
        assert relative_error(zeroed_decoder(other, plan, model)(IDS), lowered) > 1e-3


SDPA = "aten.scaled_dot_product_attention"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rule 2, a norm of values": (
        lambda: Projections(normed, HEADS),
        "aten.rms_norm combines all features",
    ),
    "rule 2, a norm over heads": (
        lambda: Projections(heads.normed_over_heads, HEADS),
        "aten.rms_norm combines all features",
    ),
    "rule 2, keys are values": (
        lambda: Projections(keys_are_values, HEADS),
        f"{SDPA} sums over the features of the values and another activation",
    ),
    "rule 2, keys are values, written out": (
        lambda: Projections(same_by_hand, HEADS),
        "aten.matmul sums over the features of the values and another activation",
    ),
    "no softmax": (
        lambda: Projections(heads.rectified, HEADS),
        "aten.matmul combines tokens with weights that are no softmax",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_cannot_be_cut_are_refused_by_operation_and_line(name: str):
    """As the cases name them: the other sites of the attention stay."""
    make, reason = REFUSED[name]
    _, program = found(make)
    assert {site.kind for site in program.sites} == {"read", "write"}
    (refusal,) = [one for one in program.refused if one.name.endswith(".values")]
    assert refusal.reason == reason
    assert refusal.source is not None and "test_attention_" in refusal.source


def test_a_second_attention_on_the_same_weights_is_refused_by_name():
    """Plans know sites by the axes that they cut, and both attentions cut the same ones."""

    class Halves(Projections):
        def forward(self, x: Tensor) -> Tensor:
            parts = zip(*(part(x).chunk(2, -1) for part in (self.query, self.key, self.value)), strict=True)
            heads = [[one.unflatten(-1, (3, SIZE)).transpose(1, 2) for one in each] for each in parts]
            y = [F.scaled_dot_product_attention(*each, is_causal=True) for each in heads]
            return self.out(torch.cat([one.transpose(1, 2).flatten(2) for one in y], -1))

    model, program = found(lambda: Halves(fast, HEADS))
    (site,) = values_of(program)
    require_one_function(model, program, plans=[half_of_each(program, 0)])
    assert (site.size, site.experts) == (3 * SIZE, 3)
    (refusal,) = [one for one in program.refused if one.name.endswith(".values")]
    assert refusal.reason == f"other values of the same projection already belong to {site.name}"


def test_two_layers_that_share_keys_and_values_share_their_features():
    """One selection for both, or the second would read features that are gone."""

    torch.manual_seed(0)
    model = perturb(Sharing())
    for sites in ((WORD,), ("heads", WORD)):
        program = dispfx.capture(model, sites=sites)  # type: ignore[arg-type]
        (site,) = values_of(program)
        assert {"outs.0.weight", "outs.1.weight"} <= {cut.parameter for cut in site.slices}
        assert (site.size, site.experts) == (HEADS * SIZE, HEADS)
        assert {site.name} == {name for branch in program.branches for name in branch.values}
        require_one_function(model, program, plans=[half_of_each(program, 0)])


def test_heads_that_keep_other_numbers_are_no_plan():
    """Values of all heads are one tensor."""
    _, program = found(lambda: Projections(fast, HEADS))
    kept = {site.name: list(range(site.size)) for site in program.sites}
    kept[values_of(program)[0].name] = [0, *range(SIZE, HEADS * SIZE)]
    with pytest.raises(dispfx.DispfxError, match="every head keeps equally many"):
        Plan.from_masks(program, kept)


def test_plans_of_heads_and_values_of_one_projection_are_told_apart(tmp_path):
    """With fused projections both cut the same axes."""
    _, program = found(lambda: heads.Fused(by_head=False), "heads", WORD)
    plan = half_of_each(program, 3)
    plan.save(tmp_path / "plan.safetensors")
    again = Plan.load(tmp_path / "plan.safetensors")
    assert again == plan and again.by_site(program.sites).keys() == plan.kept.keys()
    by_kind = {one.kind: one for one in again.selections}
    assert by_kind["heads"].keys != by_kind["values"].keys
    assert (by_kind["values"].experts, by_kind["values"].symbol) == (HEADS, "S6")


def test_values_are_left_alone_unless_asked_for():
    program = dispfx.capture(decoder_of(lambda: Projections(fast, HEADS)))
    assert {site.kind for site in program.sites} == {"read", "write"}
    program = dispfx.capture(decoder_of(lambda: Projections(fast, HEADS)), sites=WORD)
    assert [site.kind for site in program.sites].count("values") == 1
    assert FindSites(sites=WORD) == FindSites(sites=(WORD,))  # type: ignore[arg-type]


def test_a_gate_may_follow_another_of_the_same_value():
    """Rule 2 of insert-gates: one gate for each site, one after the other."""
    _, program = found(lambda: Projections(fast, HEADS), "heads", WORD)
    twin = program.clone()
    InsertGates().run(twin)
    (point,) = values_of(program)[0].gates
    gate = twin.node(point.users[0]).all_input_nodes[0]
    before, value = gate.all_input_nodes[0], gate.all_input_nodes[0].all_input_nodes[0]
    assert ops.is_gate(gate) and ops.is_gate(before) and value.name == point.value
