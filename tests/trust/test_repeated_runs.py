"""A report holds what is needed to repeat its run."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dispfx.cli.app import app
from dispfx.report import load_report
from tests.trust.runs import command, write_tokens


def test_a_run_is_repeated_from_its_report_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def run(*words: str) -> None:
        monkeypatch.setattr("sys.argv", ["dispfx", *words])
        result = CliRunner().invoke(app, list(words))
        assert result.exit_code == 0, result.output

    tokens = write_tokens(tmp_path / "tokens.safetensors")
    run(*command(tokens, tmp_path / "first", "--lambda", "7", "--eval-windows", "1"))
    words = ["--trust-remote-code", "--quiet"]
    run(
        "compile",
        "--from-report",
        str(tmp_path / "first" / "report.json"),
        "--out",
        str(tmp_path / "2"),
        *words,
    )
    # The repeated run's own report is as good.
    run("compile", "--from-report", str(tmp_path / "2" / "report.json"), "--out", str(tmp_path / "3"), *words)

    for other in ("2", "3"):
        plans = [(tmp_path / folder / "plan.safetensors").read_bytes() for folder in ("first", other)]
        assert plans[0] == plans[1]
    first, third = (load_report(tmp_path / name / "report.json") for name in ("first", "3"))
    assert (first.sites, first.perplexity, first.seed) == (third.sites, third.perplexity, third.seed)
