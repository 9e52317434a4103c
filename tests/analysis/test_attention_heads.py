"""Key/value heads as sites: attentions as users write them, and those whose heads cannot be cut."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.program import Program
from dispfx.passes.find_sites import FindSites
from dispfx.plan.plan import Plan
from dispfx.settings.sections import BudgetSettings
from tests.one_branch import OneBranch, require_one_function
from tests.plain_decoders import perturb
from tests.programs import relative_error, token_ids

WIDTH, HEADS, SIZE = 16, 6, 4


class Projections(nn.Module):
    """Queries, keys and values of (B, heads, T, SIZE), and what a test computes from them."""

    slopes: Tensor

    def __init__(
        self, attend: Callable[["Projections", Tensor, Tensor, Tensor], Tensor], keys: int, bias=False
    ):
        super().__init__()
        self.query, self.key, self.value = (
            nn.Linear(WIDTH, heads * SIZE, bias=bias) for heads in (HEADS, keys, keys)
        )
        self.out = nn.Linear(HEADS * SIZE, WIDTH, bias=bias)
        self.sinks = nn.Parameter(torch.randn(HEADS))
        self.scale = nn.Parameter(torch.rand(SIZE) + 0.5)
        self.register_buffer("slopes", torch.rand(HEADS))
        self.mix = nn.Parameter(torch.randn(HEADS, HEADS))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = (
            part(x).view(batch, tokens, -1, SIZE).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        return self.out(self.attend(self, q, k, v).transpose(1, 2).reshape(batch, tokens, -1))


def causal(q: Tensor) -> Tensor:
    tokens = q.shape[-2]
    return torch.ones(tokens, tokens, dtype=torch.bool).tril()


def weights(q: Tensor, k: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = q @ k.transpose(-2, -1) / SIZE**0.5 + bias
    return scores.masked_fill(~causal(q), float("-inf")).softmax(-1)


def fast(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return weights(q, k) @ v


def shared_by_argument(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def repeated(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return fast(part, q, *(one.repeat_interleave(HEADS // 3, 1) for one in (k, v))) if times else q


def expanded(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    batch, keys, tokens, size = k.shape
    n = HEADS // keys
    k, v = (
        one[:, :, None].expand(batch, keys, n, tokens, size).reshape(batch, keys * n, tokens, size)
        for one in (k, v)
    )
    return fast(part, q, k, v)


def grouped(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries of (B, key heads, n, T, SIZE) with keys of one head less a dimension."""
    batch, _, tokens, size = q.shape
    q = q.reshape(batch, k.shape[1], -1, tokens, size)
    return (weights(q, k[:, :, None]) @ v[:, :, None]).reshape(batch, -1, tokens, size)


def by_einsum(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k).masked_fill(~causal(q), float("-inf"))
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1), v)


def biased_by_head(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A slope for each head, as ALiBi has."""
    return weights(q, k, part.slopes[:, None, None] * torch.arange(q.shape[2])) @ v


def biased_in_the_mask(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = part.slopes[:, None, None] * torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, bias.masked_fill(~causal(q), float("-inf"))[None])


def with_sinks(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A learned logit for each head that takes a part of the attention."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(~causal(q), float("-inf"))
    sinks = part.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[-2], 1)
    return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1] @ v


def with_norms_of_heads(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = (one * torch.rsqrt(one.pow(2).mean(-1, keepdim=True) + 1e-5) * part.scale for one in (q, k))
    return fast(part, q, k, v)


def rotated(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    angles = torch.arange(q.shape[2])[:, None] * torch.tensor([1.0, 0.1])
    cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)

    def turned(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    return fast(part, turned(q), turned(k), v)


def heads_before_sequences(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fast(part, *(one.transpose(0, 1) for one in (q, k, v))).transpose(0, 1)


def heads_after_features(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.einsum("bhqk,bkdh->bqdh", weights(q, k), v.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def halves(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Two attentions side by side, as where half of the heads see a window alone."""
    parts = zip(*(one.chunk(2, 1) for one in (q, k, v)), strict=True)
    return torch.cat([fast(part, *each) for each in parts], 1)


def one_by_one(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([fast(part, q[:, i], k[:, i], v[:, i]) for i in range(HEADS)], 1)


def broadcast(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    shape = (q.shape[0], 3, HEADS // 3, *q.shape[2:])
    return fast(part, q, *(torch.broadcast_to(one[:, :, None], shape).flatten(1, 2) for one in (k, v)))


def gated_by_head(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return fast(part, q, k, v) * part.sinks[:, None, None].sigmoid()


def mixed_scores(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that a matrix combines over heads (arXiv 2003.02436): values alone have heads."""
    scores = torch.einsum("bhqk,hg->bgqk", q @ k.transpose(-2, -1), part.mix)
    return scores.masked_fill(~causal(q), float("-inf")).softmax(-1) @ v


def normed_over_heads(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.rms_norm(fast(part, q, k, v).transpose(1, 2).flatten(2), (HEADS * SIZE,)).unflatten(
        2, (HEADS, SIZE)
    ).transpose(1, 2)  # fmt: skip


def by_exponentials(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A softmax that its author wrote out."""
    scores = (q @ k.transpose(-2, -1)).masked_fill(~causal(q), float("-inf"))
    numbers = (scores - scores.amax(-1, keepdim=True)).exp()
    return numbers / numbers.sum(-1, keepdim=True) @ v


def rectified(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1)).masked_fill(~causal(q), 0.0).relu() / q.shape[2] @ v


def shares(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Divided by their sum, as a softmax is, but not of `exp`."""
    numbers = (q @ k.transpose(-2, -1)).masked_fill(~causal(q), 0.0).square() + 1e-3
    return numbers / numbers.sum(-1, keepdim=True) @ v


def mixed_weights(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights that a matrix combines over heads, as talking heads do."""
    return torch.einsum("bhqk,hg->bgqk", weights(q, k), part.mix) @ v


def as_sequences(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads and sequences in one dimension, as for `torch.bmm`."""
    batch, heads, tokens, size = q.shape
    q, k, v = (one.reshape(batch * heads, tokens, size) for one in (q, k, v))
    return torch.bmm(weights(q, k), v).view(batch, heads, tokens, size)


def biased_as_sequences(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A slope for each head, in one dimension with sequences, as in the first Falcon."""
    slopes = part.slopes[:, None] * torch.ones_like(q[:, 0, :, 0]).cumsum(-1)[:, None]
    return weights(q, k, slopes.reshape(-1, 1, q.shape[2]).view(q.shape[0], HEADS, 1, -1)) @ v


def biased_by_number(part: Projections, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A slope that the code computes from the number of its head, as in MPT."""
    slopes = 2.0 ** -torch.arange(1, HEADS + 1)
    return weights(q, k, slopes[:, None, None] * torch.arange(q.shape[2])) @ v


class Fused(nn.Module):
    """Queries, keys and values in one weight, side by side, or head by head."""

    def __init__(self, by_head: bool):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * HEADS * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)
        self.by_head = by_head

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        parts = self.qkv(x)
        if self.by_head:
            q, k, v = parts.view(batch, tokens, HEADS, 3 * SIZE).transpose(1, 2).chunk(3, -1)
        else:
            q, k, v = (
                one.view(batch, tokens, HEADS, SIZE).transpose(1, 2) for one in parts.split(HEADS * SIZE, -1)
            )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


class OneKey(nn.Module):
    """Queries, the one key and the one value from one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, (HEADS + 2) * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split([HEADS * SIZE, SIZE, SIZE], -1)
        q = q.unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
        k, v = (one[:, None].expand(-1, HEADS, -1, -1) for one in (k, v))
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Latent(nn.Module):
    """Keys and values of all heads from one latent, and a rotated part of the key that all heads share."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, HEADS * 2 * SIZE)
        self.down, self.shared = nn.Linear(WIDTH, 10), nn.Linear(WIDTH, SIZE)
        self.up = nn.Linear(10, HEADS * 2 * SIZE)
        self.out = nn.Linear(HEADS * SIZE, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.query(x).view(batch, tokens, HEADS, 2 * SIZE).transpose(1, 2)
        k, v = self.up(self.down(x)).view(batch, tokens, HEADS, 2 * SIZE).transpose(1, 2).chunk(2, -1)
        k = torch.cat([k, self.shared(x)[:, None].expand(-1, HEADS, -1, -1)], -1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, tokens, -1))


def decoder_of(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return perturb(OneBranch(make()))


def halved(program: Program, seed: int) -> Plan:
    """Return a plan that keeps half of the features of every site, drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    kept = {
        site.name: torch.randperm(site.size, generator=generator)[: site.size // 2] for site in program.sites
    }
    return Plan.from_masks(program, kept)


def found(make: Callable[[], nn.Module]) -> tuple[nn.Module, Program]:
    model = decoder_of(make)
    return model, dispfx.capture(model, sites=("heads",))


PATTERNS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "one fast operation": (lambda: Projections(fast, HEADS), HEADS),
    "written out": (lambda: Projections(written_out, HEADS, bias=True), HEADS),
    "grouped by an argument": (lambda: Projections(shared_by_argument, 3), 3),
    "grouped by repeat_interleave": (lambda: Projections(repeated, 3, bias=True), 3),
    "grouped by expand": (lambda: Projections(expanded, 2), 2),
    "grouped by broadcast_to": (lambda: Projections(broadcast, 3), 3),
    "grouped in five dimensions": (lambda: Projections(grouped, 3), 3),
    "einsum": (lambda: Projections(by_einsum, HEADS), HEADS),
    "a bias by head": (lambda: Projections(biased_by_head, HEADS), HEADS),
    "a bias by head in the mask": (lambda: Projections(biased_in_the_mask, HEADS), HEADS),
    "sinks": (lambda: Projections(with_sinks, HEADS), HEADS),
    "norms of heads": (lambda: Projections(with_norms_of_heads, HEADS), HEADS),
    "rotations": (lambda: Projections(rotated, HEADS), HEADS),
    "heads before sequences": (lambda: Projections(heads_before_sequences, HEADS), HEADS),
    "heads after features": (lambda: Projections(heads_after_features, HEADS), HEADS),
    "gates by head": (lambda: Projections(gated_by_head, HEADS), HEADS),
    "scores mixed over heads": (lambda: Projections(mixed_scores, HEADS), HEADS),
    "a softmax written out": (lambda: Projections(by_exponentials, HEADS), HEADS),
    "fused side by side": (lambda: Fused(by_head=False), HEADS),
    "fused head by head": (lambda: Fused(by_head=True), HEADS),
    "latent": (Latent, HEADS),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_heads_are_found_and_cut(name: str):
    """Rules 1 and 2: gated, lowered and zeroed agree, and nothing of a removed head is left."""
    make, features = PATTERNS[name]
    model, program = found(make)
    (site,) = [one for one in program.sites if one.kind == "heads"]
    assert (site.size, site.symbol) == (features, "S7")
    ids = token_ids(2, 9, vocabulary=31)
    with torch.no_grad():
        ones = {one.name: torch.ones(one.size) for one in program.sites}
        assert torch.equal(dispfx.gate(program)(ids, ones), model(ids))
    require_one_function(model, program, plans=[halved(program, seed) for seed in range(2)])
    only = {one.name: [features - 1] if one is site else range(one.size) for one in program.sites}
    plan = Plan.from_masks(program, {name: list(kept) for name, kept in only.items()})
    lowered = dispfx.lower(program, plan)
    shapes = {path: tuple(one.shape) for path, one in lowered.named_parameters()}
    before = {path: tuple(one.shape) for path, one in model.named_parameters()}
    assert shapes["mlp.out.weight"] == (WIDTH, before["mlp.out.weight"][1] // features)
    for cut in site.slices:
        assert shapes[cut.parameter][cut.axis] < before[cut.parameter][cut.axis], cut


SDPA = "aten.scaled_dot_product_attention"
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rule 5, a norm over heads": (
        lambda: Projections(normed_over_heads, HEADS),
        "aten.rms_norm combines all features",
    ),
    "rule 3, one key": (
        lambda: Projections(shared_by_argument, 1),
        f"all heads of {SDPA} read one key or one value",
    ),
    "rule 3, one key, written out": (
        lambda: Projections(written_out, 1),
        "all heads of aten.matmul read one key or one value",
    ),
    "rule 4, one fused key": (OneKey, f"all heads of {SDPA} read one key or one value"),
    "rule 5, slopes by number": (
        lambda: Projections(biased_by_number, HEADS),
        "aten.arange counts the features in the model's code, and no weight holds them",
    ),
    "rule 6, heads one by one": (
        lambda: Projections(one_by_one, HEADS),
        f"no dimension of {SDPA} is of heads: it has one, or each is computed alone",
    ),
    "rule 6, heads as sequences": (
        lambda: Projections(as_sequences, HEADS),
        "dimension 0 of aten.bmm holds heads and sequences together",
    ),
    "rule 6, slopes as sequences": (
        lambda: Projections(biased_as_sequences, HEADS),
        "dimension 0 of aten.reshape holds heads and sequences together",
    ),
    "rule 6, mixed after the softmax": (
        lambda: Projections(mixed_weights, HEADS),
        "aten.einsum mixes the heads between softmax and values",
    ),
    "rule 6, shares that are no softmax": (
        lambda: Projections(shares, HEADS),
        "aten.matmul combines tokens with weights that are no softmax",
    ),
    "rule 6, no softmax": (
        lambda: Projections(rectified, HEADS),
        "aten.matmul combines tokens with weights that are no softmax",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_go_are_refused_by_operation_and_line(name: str):
    """Rules 3, 4 and 5, as the cases name them: the other sites of the attention stay."""
    make, reason = REFUSED[name]
    _, program = found(make)
    assert {site.kind for site in program.sites} == {"read", "write"}
    (refusal,) = [one for one in program.refused if one.name.endswith(".heads")]
    assert refusal.reason == reason
    assert refusal.source is not None and "test_attention_heads" in refusal.source


def test_a_convolution_over_tokens_has_no_heads_to_name():
    """Rule 6: nothing is said of a branch in which no product combines tokens."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.taps = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.taps(self.up(x).transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))

    _, program = found(Convolution)
    assert [branch.kind for branch in program.branches] == ["mixer"]
    assert not [one for one in program.refused if one.name.endswith(".heads")]


def test_a_second_attention_on_the_same_weights_is_refused_by_name():
    """Plans know sites by the axes that they cut, and both attentions cut the same ones."""
    model, program = found(lambda: Projections(halves, HEADS))
    (site,) = [one for one in program.sites if one.kind == "heads"]
    assert site.size == HEADS // 2
    (refusal,) = [one for one in program.refused if one.name.endswith(".heads")]
    assert refusal.reason == f"other heads of the same projection already belong to {site.name}"
    require_one_function(model, program, plans=[halved(program, 0)])


def test_heads_are_left_alone_unless_asked_for():
    program = dispfx.capture(decoder_of(lambda: Projections(fast, HEADS)))
    assert {site.kind for site in program.sites} == {"read", "write"}


def test_heads_need_no_alignment():
    """A head is many features already; other widths are multiples of eight."""
    _, program = found(lambda: Projections(fast, HEADS))
    plan = Plan.random(program, 0.4, 3, align=8)
    kept = {one.kind: len(one.kept) for one in plan.selections}
    assert kept["heads"] % 8 and kept["read"] % 8 == 0 == kept["write"] % 8
    assert plan.sites == ("heads",)


class Sharing(nn.Module):
    """Two layers that read the same keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(31, WIDTH), nn.Linear(WIDTH, 31, bias=False)
        self.key, self.value = nn.Linear(WIDTH, HEADS * SIZE), nn.Linear(WIDTH, HEADS * SIZE)
        self.queries = nn.ModuleList(nn.Linear(WIDTH, HEADS * SIZE) for _ in range(2))
        self.outs = nn.ModuleList(nn.Linear(HEADS * SIZE, WIDTH) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        k, v = (part(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2) for part in (self.key, self.value))
        for query, out in zip(self.queries, self.outs, strict=True):
            q = query(x).unflatten(-1, (HEADS, SIZE)).transpose(1, 2)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + out(y.transpose(1, 2).flatten(2))
        return self.head(x)


def test_two_layers_that_share_keys_and_values_share_their_heads():
    """One selection for both, or the second would read heads that are gone."""

    torch.manual_seed(0)
    model = perturb(Sharing())
    program = dispfx.capture(model, sites=("heads",))
    (site,) = [one for one in program.sites if one.kind == "heads"]
    assert {"outs.0.weight", "outs.1.weight"} <= {cut.parameter for cut in site.slices}
    require_one_function(model, program, plans=[halved(program, 0)])


def test_an_unknown_kind_of_site_is_refused():
    problem = "sites must be heads or attention-values, and 'head' was given"
    with pytest.raises(dispfx.DispfxError, match=problem):
        dispfx.capture(decoder_of(lambda: Projections(fast, HEADS)), sites=("head",))  # type: ignore[arg-type]


def test_one_kind_of_site_may_be_a_string():
    """It is not a list of letters, wherever kinds of site or branches to skip are given."""
    model = decoder_of(lambda: Projections(fast, HEADS))
    program = dispfx.capture(model, sites="heads")
    assert [site.kind for site in program.sites].count("heads") == 1
    assert FindSites(skip="mlp", sites="heads") == FindSites(skip=("mlp",), sites=("heads",))  # type: ignore[arg-type]
    assert BudgetSettings(ratio=0.3, sites="heads").sites == ("heads",)  # type: ignore[arg-type]


def test_soft_masks_of_heads_scale_them():
    """A mask of one half halves what a head adds."""
    model, program = found(lambda: Projections(fast, HEADS))
    ids = token_ids(2, 9, vocabulary=31)
    gated = dispfx.gate(program)
    masks = {site.name: torch.ones(site.size) for site in program.sites}
    name = next(site.name for site in program.sites if site.kind == "heads")
    with torch.no_grad():
        halved = gated(ids, masks | {name: torch.full((HEADS,), 0.5)})
        model.get_parameter("mlp.out.weight").mul_(0.5)
        assert relative_error(halved, model(ids)) < 1e-5
