"""A report holds what is needed to repeat its run."""

from pathlib import Path

from dispfx.report import load_report
from tests.command_line import run
from tests.trust.runs import command, write_tokens


def completed(*words: object) -> None:
    result = run(*words)
    assert result.exit_code == 0, result.output


def test_a_run_is_repeated_from_its_report_to_the_same_bytes(tmp_path: Path):
    tokens = write_tokens(tmp_path / "tokens.safetensors")
    completed(*command(tokens, tmp_path / "first", "--steps", "10", "--lambda", "7", "--eval-windows", "1"))
    words = ["--trust-remote-code", "--quiet"]
    completed(
        "compile",
        "--config",
        str(tmp_path / "first" / "report.json"),
        "--out",
        str(tmp_path / "2"),
        *words,
    )
    first, second = (tmp_path / name for name in ("first", "2"))
    assert (first / "plan.safetensors").read_bytes() == (second / "plan.safetensors").read_bytes()
    told, again = (load_report(folder / "report.json") for folder in (first, second))
    assert "heads" in {site.kind for site in told.sites}
    assert (told.sites, told.perplexity, told.seed) == (again.sites, again.perplexity, again.seed)
    assert told.settings is not None and again.settings is not None
    assert told.settings["learning"]["adaptable"] == ["samples"]
    anew = {
        "model": {"trust_remote_code": True},
        "output": {"out": str(second), "config": again.settings["output"]["config"]},
    }
    assert again.settings == {name: section | anew.get(name, {}) for name, section in told.settings.items()}
    assert "--trust-remote-code" in again.command and "--trust-remote-code" not in told.command
