"""The pages on extending dispfx and for researchers run from top to bottom."""

import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import dispfx
from dispfx.analysis import links
from dispfx.plan.plan_making import layer_of
from tests.docs.pages import ROOT, blocks, commands, run, run_file
from tests.trust.runs import write_tokens

LONGEST = 25


@pytest.mark.slow
def test_the_page_on_extending_works_from_top_to_bottom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "decoder", raising=False)
    monkeypatch.setattr(links, "_REGISTERED", {})
    write_tokens(tmp_path / "tokens.safetensors")
    for kind, text in blocks(ROOT / "docs" / "extending.md"):
        if kind == "python":
            (name,) = re.findall(r"^# (\w+\.py)\n", text)
            code = [line for line in text.splitlines() if line.strip()]
            assert len(code) <= LONGEST + 1, f"{name} has {len(code)} lines"
            if name in ("mine.py", "target.py", "decoder.py", "budgets.py"):
                Path(name).write_text(text, encoding="utf-8")
            else:
                run_file(name, text)
        for words in commands(text):
            run(words)
    assert Path("DIR/weights/weights.safetensors").is_file()
    scored, drawn = (dispfx.Plan.load(f"{name}.safetensors") for name in ("scored", "drawn"))
    even, fast = (dispfx.Plan.load(f"{name}.safetensors") for name in ("even", "fast"))
    assert "layers" in str(even.budget.of) and "seconds" in str(fast.budget.of)
    cache = dispfx.Plan.load("cache.safetensors")
    assert any(one.kind == "heads" and not one.full for one in cache.selections), "the cache counts most"
    shares = defaultdict(list)
    for one in even.selections:
        shares[layer_of(one.site)].append(len(one.kept) / one.size)
    assert len(shares) > 1 and all(0.5 < sum(layer) / len(layer) < 0.95 for layer in shares.values())
    inner = {one.site for one in scored.selections if one.site.endswith("inner")}
    assert inner and scored != drawn, "the operation of its own is pruned, and the functions had a say"


@pytest.mark.slow
def test_the_page_for_researchers_runs_as_one_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    known: dict = {}
    for kind, text in blocks(ROOT / "docs" / "research.md"):
        if kind == "python":
            exec(compile(text, "research.md", "exec"), known)
    assert known["error"] < 1e-5
    ratios = [known[name].achieved for name in ("one", "each", "learned", "final")]
    assert all(abs(ratio - 0.3) < 0.01 for ratio in ratios), ratios
