"""The shell scripts: help, and messages instead of riddles where Python is missing."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
NEEDED = ("bash", "cat", "dirname", "rm")


def run(
    script: Path, *words: str, path: str | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": path or os.environ["PATH"], **variables}
    return subprocess.run(
        [script, *words], capture_output=True, text=True, env=environment, timeout=60, check=False
    )


@pytest.fixture
def bare(tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the set-up script, and a folder of commands without any Python."""
    tools, commands = tmp_path / "tools", tmp_path / "commands"
    tools.mkdir()
    commands.mkdir()
    shutil.copy(CHECKOUT / "tools" / "setup", tools / "setup")
    (tmp_path / "pyproject.toml").touch()
    for name in NEEDED:
        found = shutil.which(name)
        assert found is not None
        (commands / name).symlink_to(found)
    return tools / "setup", commands


@pytest.mark.parametrize("name", ["setup", "demo", "test", "reference", "campaigns"])
def test_every_script_has_help_that_does_nothing_else(name: str):
    done = run(CHECKOUT / "tools" / name, "--help")
    assert done.returncode == 0 and done.stdout.startswith(f"usage: tools/{name}")


@pytest.mark.parametrize("words", [["fuzz"], ["kills", "--out"], ["--kills", "3"]])
def test_a_campaign_that_there_is_not_is_refused_with_those_that_there_are(words: list[str]):
    done = run(CHECKOUT / "tools" / "campaigns", *words)
    assert done.returncode == 2 and "[kills | disks | inputs]" in done.stderr


def test_setup_without_a_python_says_what_is_needed(bare: tuple[Path, Path]):
    script, commands = bare
    done = run(script, path=str(commands))
    assert done.returncode == 2 and "Python 3.11 or newer is needed" in done.stderr
    assert not (script.parents[1] / ".venv").exists()


def test_setup_passes_over_a_python_that_does_not_run(bare: tuple[Path, Path]):
    script, commands = bare
    for name in ("python3.12", "python3"):
        (commands / name).write_text("#!/bin/sh\nexit 1\n")
        (commands / name).chmod(0o755)
    done = run(script, path=str(commands))
    assert done.returncode == 2 and "none was found" in done.stderr


def test_setup_refuses_the_python_it_is_told_where_that_is_too_old(bare: tuple[Path, Path]):
    script, commands = bare
    (commands / "old").write_text("#!/bin/sh\nexit 1\n")
    (commands / "old").chmod(0o755)
    done = run(script, path=str(commands), PYTHON=str(commands / "old"))
    assert done.returncode == 2 and f"PYTHON={commands / 'old'}" in done.stderr


def test_setup_leaves_a_broken_environment_to_its_owner(bare: tuple[Path, Path]):
    script, commands = bare
    venv = script.parents[1] / ".venv"
    venv.mkdir()
    (venv / "mine").touch()
    done = run(script, path=str(commands))
    assert done.returncode == 2 and "remove it" in done.stderr
    assert (venv / "mine").exists()
