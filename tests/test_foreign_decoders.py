"""Decoders that no library of models knows compile through package.module:function, without registration."""

from pathlib import Path

import pytest
import torch

import dispfx
from dispfx import api
from dispfx.analysis.coverage import coverage
from dispfx.plan.plan import Plan
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source import load_source
from tests import foreign_decoders
from tests.foreign_decoders import LAYERS, VOCABULARY
from tests.learning_options import options_of
from tests.programs import relative_error, token_ids

NAMES = ("nano", "lit", "lit_in_sequence", "lit_with_one_norm", "x")
PAPER = {"S1", "S2", "S3", "S4", "S5"}


@pytest.mark.parametrize("name", NAMES)
def test_every_layer_offers_the_five_selections_and_nothing_is_refused(name: str):
    program = dispfx.capture(load_source(f"tests.foreign_decoders:{name}").model)
    assert not program.refused
    assert sorted(branch.kind for branch in program.branches) == ["attention"] * LAYERS + ["mlp"] * LAYERS
    symbols = [site.symbol for site in program.sites]
    assert all(symbols.count(symbol) == LAYERS for symbol in PAPER), symbols
    assert coverage(program).share == 1.0, coverage(program).ungated


@pytest.mark.parametrize("name", NAMES)
def test_both_spellings_compute_what_the_masks_compute(name: str):
    model = getattr(foreign_decoders, name)()
    program = dispfx.capture(model)
    everything = dispfx.gated(program, Plan.random(program, 0.0, seed=0))
    for shape in ((2, 9), (1, 17)):
        ids = token_ids(*shape, vocabulary=VOCABULARY)
        assert torch.equal(everything(ids), program.graph_module(ids))
        for seed in range(2):
            plan = Plan.random(program, 0.3, seed)
            expected = dispfx.gated(program, plan)(ids)
            assert relative_error(expected, program.graph_module(ids)) > 1e-3, "the plan must matter"
            for write in ("index-add", "gather-add"):
                assert relative_error(dispfx.lower(program, plan, write=write)(ids), expected) <= 1e-5


@pytest.mark.parametrize("name", ["nano", "lit", "x"])
def test_it_compiles_from_its_name_to_a_verified_folder(name: str, tmp_path: Path):
    tokens = torch.randint(VOCABULARY, (600,), generator=torch.Generator().manual_seed(0))
    report = api.compile(
        f"tests.foreign_decoders:{name}",
        0.3,
        data=tokens,
        out=tmp_path / "out",
        **options_of(LearnSettings(steps=3, seq_len=16)),
        align=1,
    )
    assert all(line.holds for line in report.verify) and not report.refused
    assert abs(report.ratio.achieved - 0.3) <= 1e-3
    ids = token_ids(2, 9, vocabulary=VOCABULARY)
    assert dispfx.load(tmp_path / "out")(ids).shape == (2, 9, VOCABULARY)
