"""The documentation: commands have only options that exist, links lead somewhere, and its pass is right."""

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dispfx.capturing.module_capture import capture
from dispfx.ir.pipeline import Pipeline
from dispfx.passes.canonicalize import Canonicalize
from tests.command_line import check
from tests.docs.listed import ELSEWHERE, LISTED
from tests.docs.pages import FENCED, PAGES, ROOT, blocks, commands, lines, spans
from tests.docs.test_other_pages import OTHER_PAGES

ALL = [(page.name, words) for page in PAGES for _, text in blocks(page) for words in commands(text)]


@pytest.mark.parametrize(("page", "words"), ALL, ids=[f"{page}: {' '.join(words)}" for page, words in ALL])
def test_every_command_has_a_verb_and_options_that_exist(page: str, words: list[str]):
    synopsis = [word for word in words if word not in ("…", "[--out", "page.html]")]
    check(synopsis)


def test_every_command_is_run_by_a_test_or_listed_with_the_reason():
    by_page = {"README.md", "commands.md", "guide.md", "extending.md", *OTHER_PAGES}
    run = set(LISTED)
    for page in PAGES:
        for line in [line for kind, text in blocks(page) if kind in ("", "sh") for line in lines(text)]:
            run |= {line} if page.name in by_page and line.startswith("dispfx ") else set()
            assert line in run, f"{page.name}: no test runs `{line}`"
    for page in PAGES:
        for line in spans(page):
            assert line in run, f"{page.name}: no test runs `{line}`"


def test_the_list_names_commands_of_the_pages_and_tests_that_exist():
    written = {line for page in PAGES for _, text in blocks(page) for line in lines(text)}
    assert written | {line for page in PAGES for line in spans(page)} >= LISTED
    for place in ELSEWHERE.values():
        file, _, name = place.partition("::")
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), place


def test_python_stands_on_pages_whose_tests_run_it():
    with_python = {page.name for page in PAGES if any(kind == "python" for kind, _ in blocks(page))}
    assert with_python == {
        "README.md", "guide.md", "contributing.md", "huggingface.md", "onnx.md",
        "extending.md", "family.md", "research.md",
    }  # fmt: skip


def test_the_readme_the_guide_and_the_overview_have_commands_to_check():
    assert sum(page == "guide.md" for page, _ in ALL) >= 15
    assert sum(page == "commands.md" for page, _ in ALL) >= 10
    assert sum(page == "README.md" for page, _ in ALL) >= 3


def test_the_readme_can_be_read_in_five_minutes():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) < 700


def test_links_between_pages_lead_to_files():
    for page in [*PAGES, ROOT / "CHANGELOG.md"]:
        prose = FENCED.sub("", page.read_text(encoding="utf-8"))
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)", prose):
            leads_to = page.parent / target if target else page
            assert leads_to.exists(), f"{page.name}: {target}"
            assert not anchor or anchor in headings(leads_to), f"{page.name}: {target}#{anchor}"


def headings(page: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


class TimesOne(nn.Module):
    """A decoder with a product by one, and one by a tensor of ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.up = nn.Linear(8, 8)
        self.ones = nn.Parameter(torch.ones(8))

    def forward(self, ids):
        x = self.embedding(ids)
        x = x + self.up(x * 1) * self.ones
        return self.head(x)


def test_the_pass_of_the_page_for_contributors_is_right():
    source = next(text for kind, text in blocks(ROOT / "docs" / "contributing.md") if kind == "python")
    assert len([line for line in source.splitlines() if line.strip()]) <= 40
    namespace: dict = {"__name__": "drop_ones"}
    sys.modules["drop_ones"] = type(sys)("drop_ones")
    exec(compile(source, "drop_ones", "exec"), namespace)
    program = Pipeline([Canonicalize()]).run(capture(TimesOne().eval()))
    ids = torch.randint(11, (2, 5))
    expected = program.graph_module(ids)
    before = len(program.graph.nodes)
    pipeline = Pipeline([namespace["DropOnes"](), namespace["DropOnes"]()])
    pipeline.run(program)
    first, second = (ran.result.changed for ran in pipeline.ran)
    assert (first, second) == (True, False) and len(program.graph.nodes) == before - 1
    assert torch.equal(program.graph_module(ids), expected)
