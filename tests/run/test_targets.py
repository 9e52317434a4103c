"""Export targets: those of the table, and one from a user's own file with the comparison that proves it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dispfx
import dispfx.api
from dispfx.errors import DispfxError, SourceError, VerificationError
from dispfx.run.targets import TARGETS, Form, target_named
from dispfx.settings import OutputSettings
from tests.api.plain import build_decoder
from tests.command_line import run
from tests.programs import token_ids
from tests.trust.runs import write_tokens

MINE = """
import torch
from safetensors.torch import load_file, save_file

def arrays(form):
    path = form.folder / "weights.safetensors"
    save_file(form.decoder.state_dict(), path)
    read = load_file(path)
    return form.compare(lambda ids: torch.func.functional_call(form.decoder, read, (ids,)))

def unproved(form):
    (form.folder / "something").write_text("")

def wrong(form):
    return form.compare(lambda ids: 1.1 * form.decoder(ids))

def fails(form):
    return 1 / 0
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)


@pytest.fixture
def plan() -> dispfx.Plan:
    return dispfx.Plan.random(dispfx.capture(build_decoder()), 0.3, seed=0)


def applied(plan: dispfx.Plan, export: Any) -> Any:
    from dispfx.api import apply

    return apply(
        build_decoder(), plan=plan, data=token_ids(1, 400)[0], export=export, out="DIR", eval_windows=1
    )


def test_a_target_of_ones_own_is_written_read_back_and_reported(plan: dispfx.Plan):
    report = applied(plan, "mine.py:arrays")
    found = [line for line in report.verify if line.name == "arrays = lowered"]
    assert len(found) >= 2 and all(line.holds for line in found)
    assert "arrays/weights.safetensors" in report.files and Path("DIR/arrays/weights.safetensors").is_file()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("unproved", VerificationError, "must return comparisons of its output, but returned None"),
        ("wrong", VerificationError, "wrong = lowered"),
        ("fails", SourceError, "mine.py:fails raised ZeroDivisionError"),
        ("absent", SourceError, "has no function absent"),
    ],
)
def test_a_target_that_proves_nothing_leaves_no_folder(
    plan: dispfx.Plan, name: str, error: type[DispfxError], message: str
):
    with pytest.raises(error, match=message):
        applied(plan, f"mine.py:{name}")
    assert not Path("DIR").exists()


def test_the_table_of_targets_is_what_the_setting_allows():
    kinds = OutputSettings(out=Path("DIR"))
    assert kinds.export is None
    for name in TARGETS:
        assert OutputSettings(out=Path("DIR"), export=name).export == name  # type: ignore[arg-type]
        assert target_named(name)[0] == name
    with pytest.raises(
        DispfxError, match="`export` must be none or onnx or pt2 or dense, and 'onx' was given"
    ):
        OutputSettings(out=Path("DIR"), export="onx")  # type: ignore[arg-type]


def test_a_function_is_a_target_too(plan: dispfx.Plan):
    def saved(form: Form) -> Any:
        torch.save(form.decoder.state_dict(), form.folder / "weights")
        weights = torch.load(form.folder / "weights", weights_only=True)

        def read_back(ids: Tensor) -> Tensor:
            return torch.func.functional_call(form.decoder, weights, (ids,))

        return form.compare(read_back, tolerance=0.0)

    report = applied(plan, saved)
    assert Path("DIR/saved/weights").is_file() and "saved = lowered" in {line.name for line in report.verify}


def test_the_command_line_takes_a_target(plan: dispfx.Plan, tmp_path: Path):
    plan.save("plan.safetensors")
    tokens = write_tokens(tmp_path / "tokens.safetensors")
    words = [
        "apply",
        "tests.api.plain:build_decoder",
        "plan.safetensors",
        "--data",
        tokens,
        "--quiet",
        "--out",
        "DIR",
    ]
    found = run(*words, "--export", "mine.py:wrong")
    assert found.exit_code == 1 and "wrong = lowered" in found.stderr
