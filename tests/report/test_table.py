"""The table in a terminal and in a pipe."""

import dataclasses
import io
import math

from rich.console import Console

from dispfx.report import CacheRatio, MetConstraint, Report
from dispfx.report.json_form import from_json, to_json
from dispfx.report.schema import CacheBytes, SiteWidth
from dispfx.report.table import print_report, print_verifications
from dispfx.verification.equivalence import Verification


def shown(report: Report, terminal: bool, width: int = 110) -> str:
    stream = io.StringIO()
    print_report(report, Console(file=stream, force_terminal=terminal, width=width, color_system=None))
    return stream.getvalue()


def test_the_table_says_what_changed_and_by_how_much(report: Report):
    for terminal in (True, False):
        text = shown(report, terminal)
        for expected in (
            "922,112",
            "701,204",
            "-24.0%",
            "30.00% requested",
            "30.04% achieved",
            "3.200",
            "3.280",
            "+2.5%",
            "lowered = gated ✓",
            "error 1.2e-07",
            "equal bits",
            "skill: copy",
        ):
            assert expected in text, (terminal, expected)


def test_values_and_both_caches_have_rows(report: Report):
    """The row of the ONNX model's cache is there only if it differs from that of transformers."""
    sites = (*report.sites, SiteWidth("layers.0.attention.values", "values", 64, 48))
    pruned = dataclasses.replace(report, sites=sites, cache=CacheBytes(2048, 2048, 1792))
    rows = {" ".join(line.replace("│", " ").split()) for line in shown(pruned, True).splitlines()}
    assert "features of values 64 48 -25.0%" in rows
    assert "KV cache per token 2,048 bytes 2,048 bytes +0.0%" in rows
    assert "KV cache per token, ONNX 2,048 bytes 1,792 bytes -12.5%" in rows
    assert from_json(to_json(pruned)).cache == pruned.cache
    alike = dataclasses.replace(pruned, cache=CacheBytes(2048, 1024))
    assert "ONNX" not in shown(alike, True)


def test_a_pipe_gets_short_plain_lines_that_are_not_wrapped(report: Report):
    lines = shown(report, terminal=False, width=20).splitlines()
    assert len(lines) == 1 + 3 + 2 + 2
    assert all(line == line.rstrip() and line.isprintable() for line in lines)
    assert lines[1].split() == ["parameters", "922,112", "701,204", "-24.0%"]


def test_a_ratio_missed_because_of_alignment_is_said(report: Report):
    missed = dataclasses.replace(report, ratio=dataclasses.replace(report.ratio, achieved=0.304))
    assert "+0.40% by alignment" in shown(missed, terminal=False)
    assert "alignment" not in shown(report, terminal=False)


def test_a_comparison_that_fails_stands_out(report: Report):
    failed = dataclasses.replace(report, verify=(Verification("onnx = lowered", (1, 17), 1.0, 0.5, 1e-4),))
    assert "onnx = lowered ✗ FAILED" in shown(failed, terminal=False)


def test_no_text_means_no_perplexity_line(report: Report):
    assert "perplexity" not in shown(dataclasses.replace(report, perplexity=None), terminal=False)


def test_a_perplexity_that_is_not_finite_has_no_change(report: Report):
    assert report.perplexity is not None
    blown = dataclasses.replace(report.perplexity, pruned=math.inf)
    line = shown(dataclasses.replace(report, perplexity=blown), terminal=False).splitlines()[4]
    assert "inf" in line and line.endswith("—")


def test_verifications_alone_are_one_line_each(report: Report):
    stream = io.StringIO()
    print_verifications(report.verify, Console(file=stream))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1 + len(report.verify)
    assert "2 × 9" in lines[1] and "1 × 17" in lines[2]


def test_targets_are_shown_as_asked_and_as_achieved(report: Report):
    asked = dataclasses.replace(report, kv_ratio=CacheRatio(0.4, 0.5))
    assert "KV cache removed" not in shown(report, terminal=False)
    fits = dataclasses.replace(report, constraints=(MetConstraint("size: 2 MB", 4_000_000, 2e6, 1_999_000),))
    assert "size: 2 MB 4 MB 1.999 MB -50.0%" in " ".join(shown(fits, terminal=False).split())
    (line,) = [one for one in shown(asked, terminal=False).splitlines() if "KV cache removed" in one]
    assert "40.00% requested" in line and "50.00% achieved" in line
