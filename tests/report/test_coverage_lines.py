"""What is gated and what is not, in lines and as JSON."""

from dispfx.analysis.coverage import Coverage, Ungated
from dispfx.report.site_tables import coverage_lines, coverage_plain

HEADS = "heads are not pruned"
FOUND = Coverage(
    9_000,
    10_000,
    (Ungated("aten.conv1d combines all features", 1_000, ("layers.0.conv.weight", "layers.1.conv.weight")),),
    {HEADS: (("layers.0.q.weight", 0), ("layers.1.q.weight", 0))},
)


def test_the_lines_add_up_and_put_like_paths_together():
    assert coverage_lines(FOUND) == [
        "block weights: 9,000 (90.0%) of 10,000 are gated",
        "not gated: 1,000 (10.0%): aten.conv1d combines all features (layers.{0…1}.conv.weight)",
        "stays whole: 2 axes of gated weights: heads are not pruned",
    ]


def test_more_than_four_paths_are_counted():
    paths = tuple(f"layers.0.{name}" for name in "abcdef")
    line = coverage_lines(Coverage(0, 6, (Ungated("a reason", 6, paths),)))[1]
    assert (
        line == "not gated: 6 (100.0%): a reason (layers.0.a, layers.0.b, layers.0.c, layers.0.d, and 2 more)"
    )


def test_a_decoder_without_block_weights_has_no_share():
    assert coverage_lines(Coverage(0, 0)) == ["block weights: 0 of 0 are gated"]


def test_the_json_names_every_path_and_axis():
    plain = coverage_plain(FOUND)
    assert plain["block_weights"] == {"gated": 9_000, "total": 10_000}
    assert plain["ungated"][0]["paths"] == ["layers.0.conv.weight", "layers.1.conv.weight"]
    assert plain["axes_that_stay"][0]["axes"][1] == {"parameter": "layers.1.q.weight", "axis": 0}
