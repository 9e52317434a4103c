"""The commands and the Python of the pages on data, learning and transformers run, in their order."""

import json
import socket
import time
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
import torch
from transformers import AutoModelForCausalLM

from dispfx.demo.grammar import generate_text
from dispfx.learning.records import MetricsLog
from dispfx.report import load_report
from tests.docs.listed import LISTED
from tests.docs.pages import ROOT, blocks, commands, end, filled, lines, run, shortened, start
from tests.learning.test_records import record

OTHER_PAGES = ("data.md", "family.md", "huggingface.md", "learning.md", "targets.md")
WIKITEXT = """---
configs:
- config_name: wikitext-2-raw-v1
  data_files:
  - {split: train, path: train.jsonl}
  - {split: test, path: test.jsonl}
---
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text(generate_text(7, 20_000))


def page_commands(name: str, checkpoint: str) -> list[list[str]]:
    """Return the commands of a page that are not listed as run elsewhere, with a real model, on a CPU."""
    page = ROOT / "docs" / name
    wanted = [line for _, text in blocks(page) for line in lines(text) if line not in LISTED]
    return [
        filled(words, {"MODEL": checkpoint, "cuda": "cpu"}) for line in wanted for words in commands(line)
    ]


def write_records(file: Path, seed: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    records = (json.dumps({"text": line}) for line in generate_text(seed, 20_000).splitlines())
    file.write_text("\n".join(records))


@pytest.mark.slow
def test_the_commands_of_the_page_on_data_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: str
):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    # A folder goes before a data set of the hub that has its name.
    for split, seed in (("train", 1), ("test", 2)):
        write_records(Path("Salesforce/wikitext") / f"{split}.jsonl", seed)
    Path("Salesforce/wikitext/README.md").write_text(WIKITEXT)
    write_records(Path("tatsu-lab/alpaca/train.jsonl"), 3)

    one_text, two_texts, sampled, own_text = page_commands("data.md", checkpoint)
    run(filled(one_text, {"DIR": "one"}))
    run(filled(two_texts, {"DIR": "two"}))
    run(sampled)
    run(filled(own_text, {"DIR": "three"}))

    measured = [load_report(Path(name) / "report.json").perplexity for name in ("one", "two")]
    assert measured[0] is not None and measured[0].protocol.held_out_share is None
    assert measured[0].protocol.text.endswith("wikitext-2-raw-v1:test")
    assert measured[1] is not None and "alpaca" in measured[1].protocol.text


@pytest.mark.slow
def test_the_commands_and_the_python_of_the_page_on_transformers_run(checkpoint: str):
    pytest.importorskip("peft")
    (narrower,) = page_commands("huggingface.md", checkpoint)
    run(narrower)
    sizes = [json.loads(Path(name, "config.json").read_text()) for name in (checkpoint, "DIR/dense")]
    assert "dispfx" not in str(sizes[1]) and sizes[1]["intermediate_size"] < sizes[0]["intermediate_size"]
    known: dict[str, Any] = {}
    for kind, text in blocks(ROOT / "docs" / "huggingface.md"):
        if kind == "python":
            exec(compile(text, "huggingface.md", "exec"), known)
    assert known["tuned"].peft_config and Path("TUNED/model.safetensors").is_file()


@pytest.mark.slow
def test_the_commands_and_the_python_of_the_page_on_families_run(checkpoint: str):
    learned, measured, applied = page_commands("family.md", checkpoint)
    run(learned)
    # Masks of two steps are far from the dense decoder.
    assert "the smallest decoder within 20 nats" in run(filled(measured, {"0.2": "20"}))
    run(applied)
    report = load_report(Path("DIR/report.json"))
    assert report.ratio.requested == 0.37 and report.verify and Path("curve.html").is_file()
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    known: dict[str, Any] = {"model": model, "tokens": torch.arange(600) % 128}
    (python,) = [text for kind, text in blocks(ROOT / "docs" / "family.md") if kind == "python"]
    exec(compile(python, "family.md", "exec"), known)
    kept = [
        {name: set(own.tolist()) for name, own in known[size].kept.items()} for size in ("small", "large")
    ]
    assert all(few <= kept[1][name] for name, few in kept[0].items())


@pytest.mark.slow
@pytest.mark.long
def test_the_commands_of_the_page_on_learning_run(checkpoint: str):
    launched, applied = page_commands("learning.md", checkpoint)
    at = launched.index("--launch")
    assert launched[at + 1] == "4"
    with start(["dispfx", *shortened([*launched[:at], "--launch", "2", *launched[at + 2 :]])]) as process:
        end(process)
    assert load_report(Path("DIR/report.json")).verify

    (hosts,) = [
        line
        for _, text in blocks(ROOT / "docs" / "learning.md")
        for line in lines(text)
        if "torchrun" in line
    ]
    words = filled(
        hosts.replace("HOST:29400", f"localhost:{free_port()}").split()[1:],
        {"MODEL": checkpoint, "cuda": "cpu"},
    )
    words[words.index("--nproc-per-node") + 1] = "1"
    here = words.index("-m") + 2
    words[here:] = shortened(words[here:])
    hosted = ["torch.distributed.run", *words]
    with start(hosted) as first, start(hosted) as second:
        end(first)
        end(second)
    run(filled(applied, {"DIR": "of-the-hosts"}))
    assert load_report(Path("of-the-hosts/report.json")).verify


@pytest.mark.slow
def test_the_commands_of_the_page_on_targets_run(checkpoint: str):
    outputs = [run(words) for words in page_commands("targets.md", checkpoint)]
    assert "KV cache: 50.00% removed, 50.00% requested" in outputs[1]


@pytest.mark.slow
def test_tensorboard_shows_the_figures_of_a_run():
    if find_spec("tensorboard") is None:
        pytest.skip("TensorBoard is not installed")
    Path("DIR.state").mkdir()
    with MetricsLog(Path("DIR.state"), 0) as log:
        log.append(record(1, loss=2.5))
    (told,) = [
        line for _, text in blocks(ROOT / "docs" / "data.md") for line in lines(text) if "logdir" in line
    ]
    port = free_port()
    with start(["tensorboard.main", *told.split()[1:], "--port", str(port)]):
        tags = polled(f"http://localhost:{port}/data/plugin/scalars/tags")
    assert "learning/loss" in tags["."]


def polled(address: str) -> Any:
    """Return what a server has, as soon as it answers with something in it."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(OSError):
            with urlopen(address, timeout=10) as answer:
                found = json.load(answer)
            if found:
                return found
        time.sleep(0.3)
    raise AssertionError(f"{address} has nothing")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
