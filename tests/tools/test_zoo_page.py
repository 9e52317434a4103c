"""The page of a sweep: totals from rows, rows of another state marked, sections that keep apart."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[2]
MADE = {
    "date": "2026-11-28",
    "torch": "2.14.1",
    "transformers": "5.24.0",
    "python": "3.11.7",
    "compiler": "a",
}


@pytest.fixture(scope="module")
def zoo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("zoo_page", CHECKOUT / "tools" / "zoo_page.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["zoo_page"] = module
    spec.loader.exec_module(module)
    return module


def compiled(zoo: ModuleType, name: str, **changes: Any) -> Any:
    row = {"identity": 0.0, "lowered": 2e-7, "zeroed": 1e-7, "share": 1.0, "sites": 10, "made": MADE}
    return zoo.Row(name, "compiled", branches={"attention": 2}, **(row | changes))


def section(zoo: ModuleType, *rows: Any, cached: bool = False, dtype: str = "float32") -> Any:
    return zoo.Section(cached, dtype, 1e-4, {row.name: row for row in rows})


def test_totals_are_counted_from_the_rows(zoo):
    rows = [
        compiled(zoo, "a"),
        compiled(zoo, "b", identity=3e-7, share=0.9),
        compiled(zoo, "c", experts=5e-7, own_experts=2, refused=[["c.write", "no rule"]]),
        zoo.Row("d", "refused", "it loops [here]"),
        zoo.Row("e", "not built", "unknown"),
        zoo.Row("f", "wrong"),
    ]
    lines = zoo.totals(rows)
    assert lines[0] == "**6 architectures**"
    assert lines[1].startswith("**3 compile**, 1 of them with no refusal and at least 95%")
    assert "2 captured graphs are bit-identical to the module, the rest within 3e-07" in lines[2]
    assert lines[4].startswith(
        "1 mixtures of experts were lowered by one plan in both captures, within 5e-07"
    )
    assert lines[4].endswith("in 1 every expert keeps features of its own")
    assert lines[5:] == [
        "**1 are refused by name**: d",
        "1 cannot be built with these versions: e",
        "1 gave a wrong result: f",
        "None failed with an error",
    ]


def test_a_section_is_written_and_read_back_and_leaves_the_others_alone(zoo, tmp_path: Path):
    plain = section(zoo, compiled(zoo, "b"), compiled(zoo, "a"))
    cached = section(zoo, zoo.Row("a", "cached", cached=1e-7, cached_lowered=2e-7, identity=0.0, made=MADE))
    sections = zoo.with_rows({}, "float32", plain)
    sections = zoo.with_rows(sections, "with a cache", zoo.replace(cached, cached=True))
    zoo.write_sections(sections, tmp_path / "zoo")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["zoo.json", "zoo.md"]
    read = zoo.read_sections(tmp_path / "zoo.json")
    assert read == sections and list(read["float32"].rows) == ["a", "b"]
    changed = zoo.with_rows(read, "float32", section(zoo, compiled(zoo, "b", sites=12)))
    assert (
        changed["float32"].rows["b"].sites == 12 and changed["float32"].rows["a"] == read["float32"].rows["a"]
    )
    assert changed["with a cache"] == read["with a cache"]


def test_the_page_has_a_part_for_every_section_and_a_line_for_every_row(zoo):
    sections = {
        "float32": section(zoo, compiled(zoo, "a"), zoo.Row("d", "refused", "a | b [here]", made=MADE)),
        "bfloat16": section(zoo, compiled(zoo, "a"), dtype="bfloat16"),
    }
    text = zoo.page(sections)
    assert text.startswith(zoo.TITLE) and text.count("\n## ") == 2
    assert "All rows are from one state of the compiler" in text and "2⁻⁶" in text.split("## bfloat16")[1]
    (line,) = [line for line in text.splitlines() if line.startswith("| d |")]
    assert line.startswith("| d | refused: a / b |")
    widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
    assert len(widths) == 1, "every line of a table has the same number of cells"


def test_rows_of_another_state_are_marked_and_counted(zoo):
    other = compiled(zoo, "b", made=MADE | {"compiler": "b"})
    later = compiled(zoo, "c", made=MADE | {"date": "2026-11-29"})
    found = section(zoo, compiled(zoo, "a"), other, later)
    assert found.earlier() == ["b"]
    text = zoo.page({"float32": found})
    assert "| b ¹ |" in text and "| c |" in text and "2026-11-28 to 2026-11-29" in text
    assert "The 1 rows marked ¹ are from another state" in text


def test_a_file_from_before_there_were_sections_is_left_out(zoo, tmp_path: Path):
    (tmp_path / "zoo.json").write_text(json.dumps([{"name": "a", "status": "compiled"}]))
    assert zoo.read_sections(tmp_path / "zoo.json") == {} == zoo.read_sections(tmp_path / "none.json")


def test_the_state_of_the_compiler_follows_its_source(zoo, tmp_path: Path):
    for path in ("dispfx/ir/a.py", "passes/b.py", "dispfx/cli/c.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("1")
    before = zoo.state_of_compiler(tmp_path)
    (tmp_path / "dispfx/cli/c.py").write_text("2")
    assert zoo.state_of_compiler(tmp_path) == before
    (tmp_path / "passes/b.py").write_text("2")
    assert zoo.state_of_compiler(tmp_path) != before
