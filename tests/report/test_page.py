"""report.html and its pictures."""

import json
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dispfx.report.layers import layers_of
from dispfx.report.page import page, write_page
from dispfx.report.pictures import COLOURS, pictures_of, smoothed, thinned
from dispfx.report.run import read_run
from dispfx.report.speed import write_speed
from tests.report.runs import with_weights, write_run
from tests.report.test_speed import DECODE, FACTS, row

pytestmark = pytest.mark.pictures

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Outline(HTMLParser):
    """Collects ids, texts and what is left open."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.loads: list[str] = []
        self.labels: list[str] = []
        self.cells: list[str] = []

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        if tag not in VOID:
            self.open.append(tag)
        if "id" in values:
            self.ids.append(values["id"] or "")
        if values.get("role") == "img":
            self.labels.append(values.get("aria-label") or "")
        for name in ("src", "href", "xlink:href"):
            if name in values:
                self.loads.append(values[name] or "")

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("td", "th"):
            self.cells.append(data)


def outline(text: str) -> Outline:
    found = Outline()
    found.feed(text)
    assert not found.open
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run") / "a<b")
    write_page(folder)
    return folder


def test_the_page_is_whole_and_loads_nothing(written: Path):
    text = (written / "report.html").read_text(encoding="utf-8")
    found = outline(text)
    assert found.loads and all(load.startswith(("#", "data:image/png")) for load in found.loads)
    assert "@import" not in text and "<script" not in text
    # Names of XML vocabularies are no addresses that a browser fetches.
    addresses = re.findall(r'(?<!xmlns=")(?<!xlink=")https?://[^"\s<]+', text)
    assert not addresses
    assert len(set(found.ids)) == len(found.ids)


def test_every_drawing_has_a_text_and_follows_the_theme(written: Path):
    text = (written / "report.html").read_text(encoding="utf-8")
    labels = outline(text).labels
    assert len(labels) == text.count("<svg") == 8
    assert all(len(label) > 40 for label in labels)
    assert any("1 features are kept in no layer" in label for label in labels)
    assert "prefers-color-scheme: dark" in text
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert "var(--ink)" in drawings and not any(light in drawings for light, _ in COLOURS.values())


def test_the_numbers_of_the_report_are_in_tables(written: Path):
    cells = outline((written / "report.html").read_text(encoding="utf-8")).cells
    for figure in (
        "922,112",
        "701,204",
        "3.280",
        "+2.5%",
        "7 of 12",
        "11 of 20",
        "30.04% achieved",
        "2.13.0",
    ):
        assert figure in cells, figure
    assert "a softmax over a labelled dimension" in cells
    assert "lowered = gated ✓" in cells


def test_a_name_is_never_markup(written: Path):
    text = (written / "report.html").read_text(encoding="utf-8")
    assert "<h1>a&lt;b</h1>" in text and "a<b" not in text


def test_pictures_are_files_of_their_own(written: Path):
    names = {path.stem for path in (written / "pictures").glob("*.png")}
    assert names == {
        "features-s1", "features-s2", "features-s3", "features-s5", "widths", "feature-use", "losses",
        "ratio",
    }  # fmt: skip
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (written / "pictures").iterdir())


def test_the_same_run_gives_the_same_page(written: Path):
    run = read_run(written)
    layers = layers_of(run.plan, run.report.sites)
    assert page(run, layers, pictures_of(run, layers)) == (written / "report.html").read_text(
        encoding="utf-8"
    )


def test_a_run_that_learned_nothing_has_no_curves(tmp_path: Path):
    write_page(write_run(tmp_path, steps=0))
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "Learning</h2>" not in text and not (tmp_path / "pictures" / "ratio.png").exists()


def test_measured_speed_is_shown_and_slowdowns_are_flagged(tmp_path: Path):
    folder = write_run(tmp_path, steps=0)
    row = {
        "kind": "prefill", "shape": {"batch": 1, "tokens": 128, "past": 0}, "mode": "eager", "bound": 1.4,
        "dense": {"seconds": 0.01}, "pruned": {"seconds": 0.02}, "speedup": 0.5, "slower": True, "note": "",
    }  # fmt: skip
    failed = {**row, "dense": None, "pruned": None, "speedup": None, "note": "out of memory"}
    table = {"facts": {"device": "cpu"}, "rows": [row, failed], "decoder": with_weights(folder)}
    (folder / "speed.json").write_text(json.dumps(table))
    write_page(folder)
    cells = outline((folder / "report.html").read_text(encoding="utf-8")).cells
    assert "0.50 ⚠" in cells and "10.00 ms" in cells and "out of memory" in cells


def test_what_bench_writes_is_what_the_page_shows(tmp_path: Path):
    folder = write_run(tmp_path, steps=0)
    rows = [row(), row(shape=DECODE), replace(row(), dense=None, note="no room")]
    write_speed(folder, rows, FACTS, decoder=with_weights(folder))
    write_page(folder)
    cells = outline((folder / "report.html").read_text(encoding="utf-8")).cells
    for figure in ("prefill", "decode", "1024", "4.00 ms", "2.50 ms", "1.60", "2.00", "no room"):
        assert figure in cells, figure
    assert "a card" in (folder / "report.html").read_text(encoding="utf-8")


def test_thousands_of_steps_become_means_of_neighbours():
    at, values = thinned(range(10_000), [float(number % 5) for number in range(10_000)])
    assert len(at) == len(values) == 400 and set(values) == {2.0}
    assert at[:2] == [12.0, 37.0]
    assert thinned([1, 2], [3.0, 4.0]) == ([1.0, 2.0], [3.0, 4.0])


def test_drawing_takes_little_of_a_compilation(tmp_path: Path):
    folder = write_run(tmp_path)
    write_page(folder)
    start = time.process_time()
    write_page(folder)
    assert time.process_time() - start < 10.0, "seconds of work, several times what it takes"


def test_a_running_mean_has_every_place_and_forgets_no_value():
    values = [0.0] * 50 + [1.0] * 50
    means = smoothed(values)
    assert len(means) == 100 and means[:48] == [0.0] * 48 and means[-48:] == [1.0] * 48
    assert means[49] == 2 / 5 and means == sorted(means)
    assert smoothed([3.0, 1.0]) == [3.0, 1.0] and smoothed([]) == []


def test_words_of_the_page_say_what_is_counted_and_stand_once(tmp_path: Path):
    run = read_run(write_run(tmp_path / "run"))
    layers = layers_of(run.plan, run.report.sites)
    text = page(run, layers, pictures_of(run, layers))
    assert "of the prunable weights removed" in text and "of blocks removed" not in text
    cells = outline(text).cells
    assert "tolerance" in cells and not any(cell.startswith(("error ", "at most ")) for cell in cells)
