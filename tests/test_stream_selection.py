"""One selection for the whole stream, before the norms: the compiler's invariants hold for it, too."""

import copy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dispfx
from dispfx.errors import UnsupportedGraphError
from dispfx.ir.program import Program
from dispfx.ir.sites import STREAM
from dispfx.plan.hardening import hard_masks
from dispfx.plan.parameter_count import ParameterCount
from dispfx.plan.plan import Plan
from dispfx.verification.graphs import unread_lines, zeroed_tensors
from tests.one_branch import Middle
from tests.plain_decoders import FORMS, VOCABULARY, WIDTH, build, perturb
from tests.programs import relative_error, token_ids
from tests.tiny_transformers import VOCABULARY as TINY_VOCABULARY
from tests.tiny_transformers import tiny_transformer

ORDER_OF_SUMS = 1e-5
UNTRACED = ((2, 9), (1, 17), (4, 5))
# RMS norms, fused layer norms, sandwich norms, stacked experts, latent attention, a convolution, post-norm.
TINY = ("llama", "gpt2", "gemma2", "mixtral", "deepseek", "lfm2", "roberta")


@pytest.fixture(scope="module", params=sorted(FORMS))
def case(request) -> tuple[nn.Module, Program]:
    """A decoder in plain torch and its program with one site for the stream."""
    model = build(FORMS[request.param])
    return model, dispfx.capture(model, select="before-norm")


def test_one_site_holds_the_stream_and_all_others_are_inner(case):
    """Rule 7 of find_sites."""
    _, program = case
    stream, *others = program.sites
    assert (stream.name, stream.kind, stream.size) == (STREAM, "stream", WIDTH)
    assert others and all(site.kind == "inner" for site in others)
    cut = {piece.parameter for piece in stream.slices}
    assert {"embedding.weight", "positions", "norm.weight", "layers.0.attention_norm.weight"} <= cut
    assert ("head.weight" in cut) or "head.weight" in program.ties
    assert program.branches
    assert all(branch.reads == branch.writes == (STREAM,) for branch in program.branches)


def test_gates_of_ones_are_bit_identical_to_the_original(case):
    model, program = case
    gated = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
    for shape in UNTRACED:
        ids = token_ids(*shape)
        assert torch.equal(gated(ids), program.graph_module(ids))
        assert relative_error(gated(ids), model(ids)) <= 1e-6


def test_lowered_equals_hard_gated_at_untraced_shapes(case):
    """Rule 5 of insert_gates and rule 8 of lower_gates."""
    _, program = case
    for seed in range(3):
        plan = Plan.random(program, 0.4, seed)
        gated, lowered = dispfx.gated(program, plan), dispfx.lower(program, plan)
        for shape in UNTRACED:
            ids = token_ids(*shape)
            assert relative_error(lowered(ids), gated(ids)) <= ORDER_OF_SUMS


def test_lowered_equals_the_users_module_with_smaller_weights(case):
    """Cut by hand: no gate, no graph and no index is shared with the compiler."""
    model, program = case
    plan = Plan.random(program, 0.5, seed=3)
    ids = token_ids(3, 11)
    with torch.no_grad():
        expected = smaller(model, program, plan)(ids)
        assert relative_error(dispfx.lower(program, plan)(ids), expected) <= ORDER_OF_SUMS
        assert relative_error(expected, model(ids)) > 1e-3, "the plan must remove something that matters"


def smaller(model: nn.Module, program: Program, plan: Plan) -> nn.Module:
    """Return a copy of a module whose parameters are cut and whose layer norms know their new width."""
    twin = copy.deepcopy(model)
    for site in program.sites:
        for piece in site.slices:
            labels = torch.arange(site.size) if piece.labels is None else torch.tensor(piece.labels)
            stays = torch.isin(labels, torch.tensor([*plan.kept[site.name].tolist(), -1]))
            owner, _, name = piece.parameter.rpartition(".")
            parameter = twin.get_submodule(owner)._parameters[name]
            assert parameter is not None
            # In place, so that a tied weight stays one.
            parameter.data = parameter.data.index_select(piece.axis, stays.nonzero().flatten())
    for module in twin.modules():
        if isinstance(module, nn.LayerNorm):
            module.normalized_shape = (len(plan.kept[STREAM]),)
    return twin


def test_nothing_that_is_kept_hangs_on_what_is_cut(case):
    _, program = case
    plan = Plan.random(program, 0.5, seed=4)
    lines = unread_lines(program, plan, dispfx.gated(program, plan))
    assert lines and all(line.max_abs_error == 0 for line in lines)


def test_norms_do_not_divide_by_the_full_width(case):
    """Zeros in the removed places are another function, so the check with a zeroed module is left out.

    Rule 3 of label_map.
    """
    model, program = case
    plan = Plan.random(program, 0.5, seed=5)
    zeroed = copy.deepcopy(model)
    for path, tensor in zeroed_tensors(program, plan).items():
        owner, _, name = path.rpartition(".")
        zeroed.get_submodule(owner)._parameters[name] = nn.Parameter(tensor)
    ids = token_ids(2, 9)
    with torch.no_grad():
        assert relative_error(dispfx.lower(program, plan)(ids), zeroed(ids)) > 1e-3


def test_a_full_selection_lowers_to_the_captured_graph(case):
    _, program = case
    lowered = dispfx.lower(program, Plan.random(program, 0.0, seed=0))
    targets = [[node.target for node in graph.nodes] for graph in (lowered.graph, program.graph)]
    assert targets[0] == targets[1]
    ids = token_ids(2, 9)
    assert torch.equal(lowered(ids), program.graph_module(ids))


def test_lowering_leaves_no_index_and_the_count_is_that_of_the_weights(case):
    _, program = case
    plan = Plan.random(program, 0.4, seed=1)
    lowered = dispfx.lower(program, plan)
    assert not any(str(node.target).startswith("aten.index") for node in lowered.graph.nodes)
    count = ParameterCount.of_sites(program.sites, program.shapes, "total")
    masks = hard_masks(program.sites, plan.for_sites(program.sites))
    assert count.count_kept(masks) == sum(parameter.numel() for parameter in lowered.parameters())


@pytest.mark.parametrize("name", TINY)
def test_lowered_equals_hard_gated_for_decoders_of_transformers(name: str):
    program = dispfx.capture(tiny_transformer(name), select="before-norm")
    plan = Plan.random(program, 0.4, seed=1)
    gated, lowered = dispfx.gated(program, plan), dispfx.lower(program, plan)
    inner = [selection for selection in plan.selections if selection.site != STREAM]
    assert len(plan.kept[STREAM]) < program.sites[0].size and inner
    for shape in UNTRACED[:2]:
        ids = token_ids(*shape, vocabulary=TINY_VOCABULARY)
        assert relative_error(lowered(ids), gated(ids)) <= ORDER_OF_SUMS


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_plan_for_the_stream_lowers_a_capture_with_a_cache(name: str):
    from dispfx.compiler.cached_programs import lower_cached
    from dispfx.ir.cached_inputs import CachedDecoder

    model = tiny_transformer(name)
    program = dispfx.capture(model, select="before-norm")
    plan = Plan.random(program, 0.4, seed=1)
    decoder = CachedDecoder(lower_cached(model, plan).graph_module)
    ids = token_ids(2, 9, vocabulary=TINY_VOCABULARY)

    with torch.no_grad():
        found = torch.cat([decoder(ids[:, :5]), decoder(ids[:, 5:8]), decoder(ids[:, 8:])], dim=1)
        assert relative_error(found, dispfx.lower(program, plan)(ids)) <= ORDER_OF_SUMS


def test_a_plan_says_how_it_selects_also_after_it_was_saved(tmp_path: Path):
    model = build(FORMS["pre-norm"])
    whole = Plan.random(dispfx.capture(model, select="before-norm"), 0.3, 0)
    whole.save(tmp_path / "plan")

    assert Plan.load(tmp_path / "plan").select == whole.select == "before-norm"
    assert Plan.random(dispfx.capture(model), 0.3, 0).select == "after-norm"


def test_masks_of_the_stream_are_learned():
    model = build(FORMS["pre-norm"])
    program = dispfx.capture(model, select="before-norm")
    tokens = torch.randint(VOCABULARY, (4096,), generator=torch.Generator().manual_seed(0))

    plan = dispfx.learn(
        program, tokens, 0.3, steps=4, seq_len=16, batch_size=4, samples=2, constrained=True, save_every=2
    )

    assert abs(plan.achieved - 0.3) <= 0.01 and plan.select == "before-norm"
    ids = token_ids(2, 9)
    lowered, gated = dispfx.lower(program, plan)(ids), dispfx.gated(program, plan)(ids)
    assert relative_error(lowered, gated) <= ORDER_OF_SUMS


class _SoftmaxOfTheStream(nn.Module):
    """A layer that normalises the stream by a softmax over its features."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 16)
        self.mlp = Middle(lambda m, h: F.gelu(h))
        self.head = nn.Linear(16, VOCABULARY, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.mlp(x.softmax(-1)))


def test_what_is_no_norm_over_the_features_refuses_the_decoder_by_its_name():
    """Rule 7 of find_sites."""
    torch.manual_seed(0)
    model = perturb(_SoftmaxOfTheStream())

    with pytest.raises(
        UnsupportedGraphError, match=r"whole stream does not fit.*softmax combines all features"
    ):
        dispfx.capture(model, select="before-norm")
    assert dispfx.capture(model).sites, "every branch for itself can be pruned"
