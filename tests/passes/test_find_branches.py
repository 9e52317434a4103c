"""find-branches: what writes into the stream, of which kind, under which name."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.passes.find_branches import FindBranches
from tests.one_branch import INNER, VOCABULARY, WIDTH, Middle, one_branch, require_one_function
from tests.plain_decoders import FORMS, build, perturb
from tests.programs import program_before, token_ids


def found(model: nn.Module) -> Program:
    return Pipeline([FindBranches()]).run(program_before(FindBranches, model))


def text_of(program: Program) -> str:
    """Return one line a leaf: what it reads, what it writes, and into what."""
    return "\n".join(
        f"{leaf.branch} ({leaf.kind}): {leaf.entry} → {leaf.top} → {leaf.user}" for leaf in program.leaves
    )


EXPECTED = {
    "pre-norm": (
        "layers.0.attention (attention): add → linear_3 → add_2\n"
        "layers.0.mlp (mlp): add_2 → linear_6 → add_4"
    ),
    "parallel-one-add": (
        "layers.0.attention (attention): add → linear_3 → add_1\n"
        "layers.0.mlp (mlp): add → linear_5 → add_1"
    ),
    "parallel-two-adds": (
        "layers.0.attention (attention): add → linear_3 → add_1\n"
        "layers.0.mlp (mlp): add → linear_5 → add_2"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", sorted(EXPECTED))
def test_leaves_of_every_arrangement_are_split_and_named(form: str):
    """Rules 2 and 5."""
    assert text_of(found(build(FORMS[form], layers=1))) == EXPECTED[form]


def test_the_cone_of_a_leaf_ends_at_the_stream():
    """Rule 1."""
    program = found(build(FORMS["parallel-one-add"], layers=1))
    attention, mlp = program.leaves
    assert program.stream is not None
    assert not (attention.nodes | mlp.nodes) & set(program.stream.values)
    assert attention.nodes and mlp.nodes and not attention.nodes & mlp.nodes


class Experts(nn.Module):
    """Two MLPs whose sum is written."""

    def __init__(self):
        super().__init__()
        self.shared, self.routed = Middle(lambda m, h: F.gelu(h)), Middle(lambda m, h: F.silu(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(x) + self.routed(x)


def test_leaves_of_one_kind_under_one_addition_are_one_branch():
    """Rule 4."""
    program = found(one_branch(Experts))
    assert [(leaf.branch, leaf.kind) for leaf in program.leaves] == [("mlp", "mlp")]
    assert program.leaves[0].user == "add_1" and program.leaves[0].top == "add"


class Towards(nn.Module):
    """Moves the stream a part of the way to what the branch computes."""

    def __init__(self):
        super().__init__()
        self.body = Middle(lambda m, h: F.gelu(h))

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * (self.body(x) - x)


def test_a_branch_that_is_mixed_with_the_stream_is_the_leaf_alone():
    """Rule 2."""
    model = one_branch(Towards)
    assert text_of(found(model)) == "mlp.body (mlp): embedding → linear_1 → sub"
    require_one_function(model, dispfx.capture(model))


class Explicit(nn.Module):
    """Attention spelled out: two products of activations with a softmax between."""

    def __init__(self, mix):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mix = mix

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(1, 2)
        return self.out(self.mix(scores.tril()) @ self.value(x))


class Scan(nn.Module):
    """A running sum over time."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).cumsum(1))


class Router(nn.Module):
    """An MLP scaled by a softmax that no product of activations takes."""

    def __init__(self):
        super().__init__()
        self.route, self.body = nn.Linear(WIDTH, 2), Middle(lambda m, h: F.gelu(h))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.route(x).softmax(-1)[..., :1]


KINDS = {
    "attention": lambda: Explicit(lambda scores: scores.softmax(-1)),
    "mixer": lambda: Explicit(lambda scores: scores / scores.shape[-1]),
}


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_product_of_activations_is_attention_only_with_a_softmax_between(kind: str):
    """Rule 3."""
    assert [leaf.kind for leaf in found(one_branch(KINDS[kind])).leaves] == [kind]


def test_a_scan_over_time_is_a_mixer():
    """Rule 3."""
    assert [leaf.kind for leaf in found(one_branch(Scan)).leaves] == ["mixer"]


def test_a_softmax_that_scales_an_mlp_makes_it_no_attention():
    """Rule 3."""
    assert [leaf.kind for leaf in found(one_branch(Router)).leaves] == ["mlp"]


class SameModule(nn.Module):
    """One module used by two layers."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        x = x + self.mlp(x)
        return self.head(x + self.mlp(x))


def test_names_are_unique_where_layers_share_a_module():
    """Rule 5."""
    torch.manual_seed(0)
    names = [leaf.branch for leaf in found(perturb(SameModule())).leaves]
    assert names == ["mlp.mlp.1", "mlp.mlp.2"]


class TwoVersions(nn.Module):
    """The second branch reads the stream before and after the first."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = Middle(lambda m, h: F.gelu(h)), Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        y = x + self.first(x)
        return self.head(y + self.second(x - 2 * y))


def two_versions() -> nn.Module:
    torch.manual_seed(0)
    return perturb(TwoVersions())


def test_a_branch_that_reads_two_versions_of_the_stream_selects_from_what_its_product_reads():
    """Rule 1."""
    program = found(two_versions())
    assert [leaf.branch for leaf in program.leaves] == ["first", "second"] and not program.refused
    assert program.leaves[1].entry == "add"
    model = two_versions()
    require_one_function(model, dispfx.capture(model))


class Remembers(nn.Module):
    """The second branch takes over a state of the first, as routers of some mixtures do."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.state, self.up_1, self.up_2 = (nn.Linear(WIDTH, INNER) for _ in range(3))
        self.down_1, self.down_2 = nn.Linear(INNER, WIDTH), nn.Linear(INNER, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        state = torch.sigmoid(self.state(x))
        x = x + self.down_1(self.up_1(x) * state)
        return self.head(x + self.down_2(self.up_2(x) * state))


def test_a_state_that_layers_hand_on_is_cut_for_all_of_them():
    torch.manual_seed(0)
    model = perturb(Remembers())
    program = dispfx.capture(model)
    assert not program.refused
    (inner,) = [site for site in program.sites if site.kind == "inner"]
    assert {cut.parameter for cut in inner.slices if cut.parameter.endswith("weight")} == {
        "state.weight", "up_1.weight", "up_2.weight", "down_1.weight", "down_2.weight",
    }  # fmt: skip
    require_one_function(model, program)


@pytest.mark.parametrize(
    "model",
    [lambda: build(FORMS["pre-norm"], layers=1), two_versions],
    ids=["plain layers", "two versions of the stream"],
)
def test_a_second_run_changes_nothing_and_the_graph_is_not_touched(model):
    program = program_before(FindBranches, model())
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    before = program.graph_module(ids)
    pipeline = Pipeline([FindBranches(), FindBranches()])
    pipeline.run(program)
    assert [ran.result.changed for ran in pipeline.ran] == [True, False]
    assert torch.equal(program.graph_module(ids), before)
