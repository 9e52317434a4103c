"""What a Program, a Plan and a Report show of themselves, printed and in a notebook."""

from dataclasses import replace

import torch

import dispfx
from dispfx.ir.program import Program
from dispfx.ir.sites import Refusal
from dispfx.report import Report
from tests.plain_decoders import FORMS, build
from tests.report.runs import plan_of


def test_a_program_shows_its_branches_and_what_is_left_dense():
    program = dispfx.capture(build(FORMS["pre-norm"], layers=1))
    program.refused = (Refusal("layers.0.x", "no rule for a<b"),)
    shown = program._repr_html_()
    assert "S1 32" in shown and "S4 48" in shown and "left dense" in shown and "a&lt;b" in shown
    assert shown.count("<tr>") == 1 + 2 + 1


def test_a_plan_shows_what_every_site_keeps():
    shown = plan_of()._repr_html_()
    assert "30.04% of blocks removed (30.00% requested)" in shown
    assert "<td>layers.2.mlp.inner</td><td>S4</td><td>11 of 20</td><td>55.0%</td>" in shown


def test_a_program_and_a_plan_print_in_at_most_25_lines():
    program = dispfx.capture(build(FORMS["pre-norm"], layers=12))
    program.refused = (Refusal("layers.0.x", "no rule"),)
    lines = repr(program).splitlines()
    assert lines[0].startswith(f"Program of {program.model_class}, canonical: ")
    assert "float32" in lines[0] and "residual stream 32 wide, 60 sites" in lines[0]
    assert lines[1].split() == ["layers.0.attention", "attention", "S1", "32,", "S2", "32"]
    assert lines[-2:] == ["  and 4 more branches", "  left dense: 1 (program.refused)"]
    assert len(lines) <= 25 and max(map(len, lines)) < 120
    lines = repr(dispfx.Plan.random(program, 0.3, seed=0)).splitlines()
    assert "of blocks removed (30.00% requested), 60 sites" in lines[0]
    assert lines[-1] == "  and 40 more sites" and len(lines) <= 25
    assert repr(Program(torch.fx.symbolic_trace(torch.nn.Identity()), "Empty", "")).count("\n") == 0


def test_a_report_shows_its_table_and_no_text_is_markup(report: Report):
    shown = replace(report, device="<b>")._repr_html_()
    assert "<td>922,112</td><td>701,204</td>" in shown and "lowered = gated ✓" in shown
    assert "&lt;b&gt;" in shown and "<b>" not in shown
