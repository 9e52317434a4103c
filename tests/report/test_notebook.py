"""What a Program, a Plan and a Report show of themselves in a notebook."""

from dataclasses import replace

import dispfx
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
    assert "30.04% of blocks removed (30.00% asked)" in shown
    assert "<td>layers.2.mlp.inner</td><td>S4</td><td>11 of 20</td><td>55.0%</td>" in shown


def test_a_report_shows_its_table_and_no_text_is_markup(report: Report):
    shown = replace(report, device="<b>")._repr_html_()
    assert "<td>922,112</td><td>701,204</td>" in shown and "lowered = gated ✓" in shown
    assert "&lt;b&gt;" in shown and "<b>" not in shown
