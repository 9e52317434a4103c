"""The guide works from top to bottom: the demo, a checkpoint folder, and a module of one's own."""

import re
import shlex
import sys
from pathlib import Path

import pytest

import dispfx.run.run_text
from dispfx.demo.grammar import generate_text
from tests.docs.listed import LISTED
from tests.docs.pages import ROOT, blocks, commands, filled, printed, run, run_file
from tests.local_tasks import write_tasks

MADE = (
    "out/demo/report.html", "out/pruned/speed.json", "out/mine/program.pt2", "out/half/onnx/model.onnx",
    "out/both.html", "out/cards/report.json",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.long
def test_the_guide_works_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(dispfx.run.run_text, "_DEMO_CHARACTERS", 40_000)
    monkeypatch.setattr("dispfx.run.folder_report.PROBE_SAMPLES", 5)
    for module in ("mine", "odd"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    pytest.importorskip("lm_eval")
    datasets = pytest.importorskip("datasets")
    write_tasks(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    Path("text.txt").write_text(generate_text(7, 40_000))
    ran, output = [], ""
    for kind, text in blocks(ROOT / "docs" / "guide.md"):
        named = re.match(r"# (\w+\.py)\n", text)
        if kind == "python" and named:
            run_file(named.group(1), text)
        for words in commands(text) if kind in ("", "sh") else ():
            if shlex.join(["dispfx", *words]) in LISTED:
                continue
            here = filled(words, {"ORGANISATION/MODEL": checkpoint})
            if "--launch" in here:
                at = here.index("--launch")
                del here[at : at + 2]
            output = run(here)
            ran.append(here[0])
        if kind == "text":
            assert printed(text, output), f"{text}\nis not in\n{output}"
    for made in MADE:
        assert (tmp_path / made).is_file(), made
    assert {"inspect", "compile", "learn", "apply", "bench", "export", "generate", "compare"} <= set(ran)
