"""find-sites: reads, inner and write sites of every branch, named, shared and skipped."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.errors import UnsupportedGraphError
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.find_sites import FindSites
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch, require_one_function
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import program_before, token_ids


def found(model: nn.Module, *skip: str) -> Program:
    return Pipeline([FindSites(skip)]).run(program_before(FindSites, model))


def text_of(program: Program) -> str:
    """Return one line a site: its symbol, size, slices, and where its gates stand."""
    lines = []
    for site in program.sites:
        cuts = " ".join(f"{cut.parameter}:{cut.axis}" for cut in site.slices).replace("layers.0.", "")
        gates = " ".join(f"{point.value}→{','.join(point.users)}" for point in site.gates)
        lines.append(f"{site.symbol} {site.name.removeprefix('layers.0.')} {site.size} | {cuts} | {gates}")
    return "\n".join(lines)


def test_the_five_sites_of_a_layer():
    """Rules 1, 2 and 3."""
    assert text_of(found(build(FORMS["pre-norm"], layers=1))) == (
        "S1 attention.read 32 | attention.key.weight:1 attention.query.weight:1 attention.value.weight:1"
        " | mul_1→linear,linear_1,linear_2\n"
        "S2 attention.write 32 | attention.out.weight:0 | linear_3→add_2\n"
        "S3 mlp.read 32 | mlp.gate.weight:1 mlp.up.weight:1 | mul_3→linear_4,linear_5\n"
        "S4 mlp.inner 48 | mlp.down.weight:1 mlp.gate.weight:0 mlp.up.weight:0 | mul_4→linear_6\n"
        "S5 mlp.write 32 | mlp.down.weight:0 | linear_6→add_4"
    )


def test_heads_are_no_site():
    """The output projection of an attention contracts over heads, which stay. Rule 2."""
    program = found(build(FORMS["fused-qkv"], layers=1))
    assert not any(site.kind == "inner" and site.branch_kind == "attention" for site in program.sites)
    assert not program.refused, "heads stay by design, which is no refusal"


def test_heads_are_a_site_where_they_are_asked_for():
    """A head is cut in query, key, value and output, and gated where the output is made of it. Rule 8."""
    program = Pipeline([FindSites(sites=("heads",))]).run(
        program_before(FindSites, build(FORMS["fused-qkv"], layers=1))
    )
    assert text_of(program).splitlines()[1] == (
        "S7 attention.heads 4 | attention.out.weight:1 attention.qkv.bias:0 attention.qkv.weight:0"
        " | flatten→linear_1"
    )
    assert program.branches[0].heads == ("layers.0.attention.heads",)


def test_values_are_a_site_where_they_are_asked_for():
    """Heads and values share positions of the projections; every head has its own values. Rule 9."""
    program = Pipeline([FindSites(sites=("heads", "attention-values"))]).run(
        program_before(FindSites, build(FORMS["fused-qkv"], layers=1))
    )
    assert text_of(program).splitlines()[1:3] == [
        "S7 attention.heads 4 | attention.out.weight:1 attention.qkv.bias:0 attention.qkv.weight:0"
        " | flatten→linear_1",
        "S6 attention.values 32 | attention.out.weight:1 attention.qkv.bias:0 attention.qkv.weight:0"
        " | flatten→linear_1",
    ]
    assert program.branches[0].values == ("layers.0.attention.values",)
    assert program.site("layers.0.attention.values").experts == 4


def test_the_head_and_the_embedding_are_never_cut():
    for form in ("pre-norm", "tied-embeddings"):
        cut = {piece.parameter for site in found(build(FORMS[form])).sites for piece in site.slices}
        assert cut and not cut & {"head.weight", "embedding.weight", "positions", "norm.weight"}


class Latent(nn.Module):
    """Attention whose query, key and value come from two latents."""

    def __init__(self):
        super().__init__()
        self.query_down, self.query_up = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)
        self.latent, self.key, self.value = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH), nn.Linear(8, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        latent = self.latent(x)
        parts = self.query_up(self.query_down(x)), self.key(latent), self.value(latent)
        query, key, value = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


def test_latents_of_an_attention_are_inner_sites():
    """Rule 2."""
    model = one_branch(Latent)
    program = dispfx.capture(model)
    inner = {site.name: site.size for site in program.sites if site.kind == "inner"}
    assert inner == {"mlp.inner": 6, "mlp.inner_2": 8}
    require_one_function(model, program)


class TwoReads(nn.Module):
    """A branch that reads the stream itself and its first half."""

    def __init__(self):
        super().__init__()
        self.wide, self.part = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH // 2, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.wide(x)) * self.part(x[..., : WIDTH // 2]))


def test_reads_of_two_widths_are_two_sites():
    model = one_branch(TwoReads)
    program = dispfx.capture(model)
    assert [(s.name, s.size) for s in program.sites if s.kind == "read"] == [
        ("mlp.read", WIDTH), ("mlp.read_2", WIDTH // 2),
    ]  # fmt: skip
    require_one_function(model, program)


def test_skipped_branches_have_no_site_and_the_others_keep_theirs():
    model = build(FORMS["pre-norm"])
    every, some = found(model), found(model, "*.attention", "layers.1.*")
    assert {site.branch for site in some.sites} == {"layers.0.mlp"}
    assert some.sites == tuple(site for site in every.sites if site.branch == "layers.0.mlp")
    assert [branch.name for branch in some.branches] == ["layers.0.mlp"]


def test_skipping_everything_is_refused_with_the_word_that_does_it():
    with pytest.raises(UnsupportedGraphError, match="at least one branch must be prunable") as error:
        found(build(FORMS["pre-norm"], layers=1), "*")
    assert "`skip` leaves out *" in str(error.value)


@pytest.mark.parametrize("pattern", ["nothing.*", "layer.0.mlp", ""])
def test_a_pattern_that_names_no_branch_is_refused_with_the_names_that_there_are(pattern: str):
    """A branch that stays dense by a misspelt word would be pruned."""
    with pytest.raises(UnsupportedGraphError, match="`skip` must name a branch") as error:
        found(build(FORMS["pre-norm"], layers=1), "*.attention", pattern)
    assert repr(pattern) in str(error.value) and "layers.0.attention, layers.0.mlp" in str(error.value)


class HalfRefused(nn.Module):
    """An MLP whose inner features mix, beside one whose do not."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mixed = Middle(lambda m, h: F.layer_norm(h, (INNER,)))
        self.plain = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mixed(x)
        return self.head(x + self.plain(x))


def test_a_refused_site_leaves_the_other_sites_of_its_branch():
    """Rule 6."""
    torch.manual_seed(0)
    model = perturb(HalfRefused())
    program = dispfx.capture(model)
    assert [site.name for site in program.sites] == [
        "mixed.read", "mixed.write", "plain.read", "plain.inner", "plain.write",
    ]  # fmt: skip
    (refusal,) = program.refused
    assert (refusal.name, refusal.reason) == ("mixed.inner", "aten.layer_norm combines all features")
    assert program.branches[0].sites == ("mixed.read", "mixed.write")
    require_one_function(model, program)


@pytest.mark.parametrize(
    "model", [lambda: build(FORMS["fused-gate-up"]), HalfRefused], ids=["all", "one refused"]
)
def test_a_second_run_changes_nothing_and_the_graph_is_not_touched(model):
    torch.manual_seed(0)
    program = program_before(FindSites, model())
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    pipeline = Pipeline([FindSites(), FindSites()])
    pipeline.run(program)
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
    assert torch.equal(program.graph_module(ids), before)


def test_sites_and_gates_name_what_exists():
    program = found(build(FORMS["parallel-two-adds"]))
    names = [site.name for site in program.sites]
    assert len(set(names)) == len(names)
    nodes = program.nodes
    for site in program.sites:
        for point in site.gates:
            assert all(nodes[user] in nodes[point.value].users for user in point.users)
        for cut in site.slices:
            labels = range(site.size) if cut.labels is None else cut.labels
            assert len(labels) == program.shapes[cut.parameter][cut.axis]
