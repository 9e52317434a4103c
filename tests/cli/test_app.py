"""The verbs, and how fast the command answers."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from dispfx import __version__
from dispfx.cli.app import make_app
from tests.command_line import NAMED, options

ROOT = Path(__file__).parents[2]

# What takes long to import.  The module that imports one of them is imported by the verb that needs it.
HEAVY = {
    "datasets", "gguf", "lm_eval", "matplotlib", "onnx", "onnx_ir", "onnxruntime", "onnxscript", "pandas",
    "peft", "pyarrow", "tensorboard", "torch", "transformers",
}  # fmt: skip

VERBS = [
    "compile",
    "inspect",
    "learn",
    "apply",
    "verify",
    "eval",
    "export",
    "generate",
    "recover",
    "finetune",
    "bench",
    "report",
    "compare",
    "doctor",
]


def python(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=timeout
    )


def test_help_names_every_verb(dispfx):
    result = dispfx("--help")
    assert result.exit_code == 0
    assert all(verb in result.stdout for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_and_the_three_common_flags(dispfx, verb: str):
    result = dispfx(verb, "--help")
    assert result.exit_code == 0
    assert all(flag in result.stdout for flag in ("--json", "--quiet", "--debug"))


def test_every_option_that_a_message_names_is_one():
    known = {word for verb in NAMED.values() for option in options(verb) for word in option.words}
    assert not [word for word in known if word.endswith("-")]
    named = set()
    for file in (ROOT / "dispfx").rglob("*.py"):
        # The pages of a report have variables that are spelled the same; the plugin names vLLM's options.
        if not {"report", "serving"} & set(file.parts):
            named |= set(re.findall(r"(?<![-\w])--[a-z][a-z0-9-]*", file.read_text(encoding="utf-8")))
    assert named - known <= {
        "--help",
        "--version",
        "--nproc-per-node",
        "--upgrade",
    }  # torchrun's and pip's own


def test_no_verb_and_an_unknown_verb_are_wrong_arguments(dispfx):
    assert dispfx().exit_code == 2
    assert dispfx("shrink").exit_code == 2


def test_the_version_is_that_of_the_package(dispfx):
    result = dispfx("--version")
    assert result.exit_code == 0 and result.stdout == f"dispfx {__version__}\n"


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["compile", "--help"], 0),
        (["--version"], 0),
        (["nonsense"], 2),
        (["compile", "demo", "--ratio", "7", "--out", "absent"], 2),
        (["compile", "demo", "--config", "absent.json", "--out", "absent"], 2),
    ],
)
def test_help_and_wrong_words_are_answered_without_importing_torch(words: list[str], code: int):
    script = (
        "import sys\n"
        "from dispfx.cli import main\n"
        f"sys.argv = ['dispfx', *{words!r}]\n"
        f"try:\n    main()\nexcept SystemExit as stop:\n    assert (stop.code or 0) == {code}, stop.code\n"
        "slow = {'torch', 'transformers', 'onnx', 'matplotlib', 'numpy'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    result = python("-c", script)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("words", "needed"),
    [
        (["passes"], {"torch"}),
        (["doctor"], {"torch"}),
        (["inspect", "demo", "--quiet"], {"torch", "transformers"}),
    ],
    ids=lambda words: words[0] if isinstance(words, list) else "",
)
def test_a_verb_imports_no_library_that_it_does_not_need(words: list[str], needed: set[str]):
    script = (
        "import sys\n"
        "from dispfx.cli import main\n"
        f"sys.argv = ['dispfx', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"print('loaded', *sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    result = python("-W", "ignore", "-c", script, timeout=300)
    assert result.returncode == 0, result.stderr
    assert set(result.stdout.splitlines()[-1].split()[1:]) == needed


def test_the_module_is_the_command():
    result = python("-m", "dispfx", "compile", "demo", "--ratio", "7", "--out", "absent")
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and "--ratio" in result.stderr
    assert "between 0 and 1" in result.stderr


def test_a_shell_is_told_the_verbs_and_their_options(tmp_path: Path):
    """By a script that `--install-completion` writes, so that a shell starts no Python for it."""
    script = tmp_path / "dispfx.bash"
    script.write_text(make_app().generate_completion(shell="bash"), encoding="utf-8")
    for words, told in (
        (["dispfx", "comp"], ["compile", "compare"]),
        (
            ["dispfx", "learn", "--ratio-"],
            ["--ratio-of"],
        ),
    ):
        code = (
            f"source {script}; COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}; "
            "$(complete -p dispfx | sed 's/.*-F //; s/ .*//'); printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.split() == told, done


@pytest.mark.parametrize(
    ("word", "variables"), [("--help", {}), ("doctor", {}), ("--help", {"NO_COLOR": "1"})]
)
def test_what_goes_into_a_pipe_has_no_colours(word: str, variables: dict[str, str]):
    plain = {
        name: value for name, value in os.environ.items() if name not in ("FORCE_COLOR", "CLICOLOR_FORCE")
    }
    done = subprocess.run(
        [sys.executable, "-m", "dispfx", word],
        capture_output=True, text=True, env=plain | variables, timeout=120, check=False,
    )  # fmt: skip
    assert done.stdout and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize("words", [["--help"], ["compile", "--help"], ["passes"]])
def test_a_reader_that_ends_early_is_told_nothing(words: list[str]):
    process = subprocess.Popen(
        [sys.executable, "-m", "dispfx", *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    with process.stderr:
        assert process.stderr.read() == ""
    assert process.wait(timeout=60) == 1


def test_the_word_none_is_no_value_of_a_number_or_a_choice(dispfx):
    """It used to mean that the option was not given: `--seed none`, `--bos null`, `--dtype None` ran."""
    for words in (("--seed", "none"), ("--bos", "null"), ("--dtype", "None"), ("--target", "none")):
        result = dispfx("compile", "demo", "--ratio", "0.3", *words)
        assert result.exit_code == 2 and f"for {words[0]}" in result.stderr, words
    for verb in NAMED.values():
        for one in verb.signature().parameters.values():
            assert type(None) not in get_args(one.annotation.__origin__), (verb.named, one.name)


def test_a_library_that_was_loaded_before_changes_no_option(dispfx):
    """cyclopts checks defaults with pydantic where that is there, and the default of an option is None."""
    pytest.importorskip("pydantic")
    result = dispfx("passes")
    assert result.exit_code == 0 and "find-sites" in result.stdout
