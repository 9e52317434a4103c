"""Who has only the wheel and docs/huggingface.md: load, generate, fine-tune with PEFT, evaluate with lm-eval.

The code is the page's own, run outside of the checkout.  In every run of the tests the interpreter has
the wheel and otherwise the libraries of the one that runs the tests.  Where DISPFX_CLIENTS names a folder, a
second interpreter is made there by pip, with the wheel, its extras and what they require.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

import pytest

from tests.huggingface.test_gguf import write_gguf
from tests.wheels import CHECKOUT, build, copied_checkout, declared, link_distributions

EXTRAS = "peft,lm-eval"
NAMED = re.compile(r"^```\w+\n(# ([\w/]+\.(?:py|yaml)).*?)^```", re.MULTILINE | re.DOTALL)
# Learning is cut short: that the folder can be used is shown, not what it is worth.
COMPILE = "dispfx compile demo --ratio 0.3 --out DIR"
SHORTER = ["--steps", "4", "--eval-windows", "2", "--export", "none"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", copied_checkout(folder), folder / "wheel")


def made_beside(wheel: Path, place: Path) -> Path:
    """Make an interpreter that has the wheel, and the libraries of this one."""
    for needed in ("lm_eval", "peft", "accelerate"):
        pytest.importorskip(needed)
    venv.create(place)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, timeout=300)
    (library,) = place.glob("lib/*/site-packages")
    (library / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    (entry,) = metadata.distribution("lm-eval").entry_points.select(name="lm_eval")
    script = f"#!{python}\nfrom {entry.module} import {entry.attr}\n{entry.attr}()\n"
    (place / "bin" / "lm_eval").write_text(script)
    (place / "bin" / "lm_eval").chmod(0o755)
    return python


def made_alone(wheel: Path, place: Path) -> Path:
    """Make an interpreter with the wheel and its extras alone, on first use; the wheel is renewed."""
    python = place / "bin" / "python"
    if not (place / "ready").exists():
        venv.create(place, with_pip=True, clear=True)
        pip_install(python, f"{wheel}[{EXTRAS}]")
        (place / "ready").touch()
    pip_install(python, "--force-reinstall", "--no-deps", str(wheel))
    return python


def pip_install(python: Path, *words: str) -> None:
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *words], check=True, timeout=3600)


ALONE = pytest.param(
    "alone",
    marks=[
        pytest.mark.clients,
        pytest.mark.skipif("DISPFX_CLIENTS" not in os.environ, reason="DISPFX_CLIENTS names no folder"),
    ],
)


MINE = """
from transformers import AutoModelForCausalLM

def build():
    return AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)
"""
FORMS = """
import json, sys
from dispfx.errors import SourceError
from dispfx.source import load_source

for name in ("peft", "lm_eval", "pyarrow"):
    try:
        __import__(name)
    except ImportError:
        continue
    raise SystemExit(f"{name} is no dependency, and can be imported")
for spec in json.loads(sys.argv[1]):
    source = load_source(spec)
    print(source.origin, type(source.model).__name__, source.tokenizer is not None)
try:
    load_source("sentencepiece_alone")
except SourceError as error:
    print(error)
"""


@pytest.mark.slow
def test_every_form_of_model_opens_with_the_declared_dependencies_alone(wheel: Path, tmp_path: Path):
    place = tmp_path / "venv"
    venv.create(place)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index"]
    subprocess.run([*pip, "--no-deps", str(wheel)], check=True, timeout=300)
    (library,) = place.glob("lib/*/site-packages")
    (installed,) = metadata.distributions(name="dispfx", path=[str(library)])
    link_distributions(declared(installed), tmp_path / "declared")
    (library / "declared.pth").write_text(f"{tmp_path / 'declared'}\n")
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "mine.py").write_text("from dispfx.demo import DECODER_FOLDER\n" + MINE)
    folder = Path(str(installed.locate_file("dispfx/demo/decoder")))
    cached = tmp_path / ".cache/huggingface/hub/models--somebody--tiny"
    shutil.copytree(folder, cached / "snapshots" / ("0" * 40))
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text("0" * 40)
    alone = shutil.copytree(folder, tmp_path / "sentencepiece_alone")
    for file in alone.glob("tokenizer*"):
        file.unlink()
    (alone / "tokenizer.model").write_bytes(b"")
    (alone / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "forms.py").write_text(FORMS)

    forms = json.dumps(["demo", str(folder), "tiny.gguf", "mine:build", "somebody/tiny"])
    *opened, problem, where, hint = run(python, tmp_path, f"python forms.py '{forms}'").splitlines()

    assert [line.split()[0] for line in opened] == ["demo", "folder", "gguf", "function", "hub"]
    assert [line.split()[2] for line in opened] == ["True", "True", "True", "False", "True"]
    assert "tokenizer cannot be read" in problem and "pip install" in hint, (problem, where, hint)


@pytest.fixture(scope="module", params=["beside", ALONE])
def python(request: pytest.FixtureRequest, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "beside":
        return made_beside(wheel, tmp_path_factory.mktemp("beside") / "venv")
    return made_alone(wheel, Path(os.environ["DISPFX_CLIENTS"]).expanduser() / "wheel")


def run(python: Path, folder: Path, command: str) -> str:
    """Return what a line of a shell prints, with the interpreter's programs and nothing of the checkout."""
    kept = {name: os.environ[name] for name in ("LANG", "TMPDIR") if name in os.environ}
    environment = kept | {
        "PATH": f"{python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=540
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_the_page_on_transformers_works_with_only_the_wheel_installed(python: Path, tmp_path: Path):
    page = (CHECKOUT / "docs/huggingface.md").read_text(encoding="utf-8")
    named = {name: text for text, name in NAMED.findall(page)}
    assert {"load.py", "tune.py", "tasks/copied_word.yaml"} == named.keys()
    (evaluate,) = re.findall(r"^DISPFX_AUTOLOAD=1 lm_eval .*copied_word.*$", page, re.MULTILINE)
    assert COMPILE in page
    for name, text in named.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    rows = [{"word": word, "other": word[::-1]} for word in ("abc", "xyz", "kmt", "dfg")]
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    where = run(python, tmp_path, "python -c 'import dispfx; print(dispfx.__file__)'")
    assert Path(where.strip()).is_relative_to(python.parent.parent)

    run(python, tmp_path, " ".join([COMPILE, *SHORTER]))
    assert run(python, tmp_path, "python load.py").startswith("copy abc xyz =")
    losses = [float(line.split()[1]) for line in run(python, tmp_path, "python tune.py").splitlines()]
    assert len(losses) == 4 and losses[-1] < losses[0]
    table = run(python, tmp_path, evaluate)
    (accuracy,) = re.findall(r"\|copied_word\|.*\|acc *\|[^|]*\| *([\d.]+)\|", table)
    assert 0 < float(accuracy) <= 1

    again = run(
        python, tmp_path, 'sed -i \'s/"DIR"/"TUNED"/\' load.py && cp DIR/tok* TUNED && python load.py'
    )
    assert again.startswith("copy abc xyz =")
    assert (tmp_path / "TUNED/model.safetensors").stat().st_size < 1.01 * (
        tmp_path / "DIR/model.safetensors"
    ).stat().st_size
