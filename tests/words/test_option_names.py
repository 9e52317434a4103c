"""Messages name settings as Python does; the command line shows their flags."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import dispfx
from dispfx import passes
from dispfx.cli.screen import spelled
from dispfx.errors import BudgetError, DispfxError
from dispfx.settings.trees import TREES
from dispfx.words.chosen_device import check_device
from dispfx.words.option_names import option
from tests.command_line import run

ROOT = Path(dispfx.__file__).parent
PASSES = Path(passes.__file__).parent
PRODUCT = sorted({*ROOT.rglob("*.py"), *PASSES.glob("*.py")} - {*(ROOT / "cli").rglob("*.py")})
SETTINGS = {name for tree in TREES for name in tree.settings()}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
# A whole command may be quoted; a style sheet and another program's commands have words of their own.
COMMAND = re.compile(r"dispfx (?:[a-z]+|…) [^`\n]*")
# Pages, a library's words, and options of vLLM.
NO_MESSAGES = {
    ROOT / name
    for name in (
        "report/page.py",
        "report/card.py",
        "source/quiet.py",
        "serving/fused_layers.py",
        "serving/kernel_widths.py",
        "serving/rounded_weights.py",
        "serving/weight_format.py",
    )
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (option("seq_len"), "--seq-len"),
        (option("seq_len", 512), "--seq-len 512"),
        (option("dtype", "bfloat16"), "--dtype bfloat16"),
        (option("device", "cuda:1"), "--device cuda:1"),
        (option("trust_remote_code", True), "--trust-remote-code"),
        (option("lambda_", 0.5), "--lambda 0.5"),
        (f"use {option('lr')}, or {option('bos', 'off')}", "use --lr, or --bos off"),
        ("`layers.0.mlp`, `no_setting=3` and `dispfx doctor`",) * 2,
    ],
)
def test_the_command_line_shows_a_setting_as_its_flag(text: str, shown: str):
    assert spelled(text) == shown


def test_a_setting_is_named_as_python_takes_it():
    assert option("seq_len") == "`seq_len`" and option("dtype", "float32") == "`dtype='float32'`"


def test_one_error_both_ways():
    with pytest.raises(BudgetError, match=r"^`ratio` must be between 0 and 1, and 30 was given"):
        dispfx.compile("demo", ratio=30, out="out")
    with pytest.raises(DispfxError, match=r"^`device` must be cpu") as error:
        check_device("cuda-0")
    assert "--" not in str(error.value)
    for more, name in ((["--device", "cuda-0"], "--device"), (["--ratio", "30"], "--ratio")):
        words = ["compile", "demo", "--ratio", "0.3", "--out", "out", *more]
        result = run(*words)
        assert result.exit_code == 2 and name in result.stderr and "`dev" not in result.stderr
    assert '"message": "--device must be cpu' in run("inspect", "demo", "--device", "cuda-0", "--json").stdout


def test_every_setting_that_messages_name_exists():
    named = [
        (path, node.args[0].value)
        for path in PRODUCT
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "option"
        if node.args and isinstance(node.args[0], ast.Constant)
    ]
    assert len(named) > 90
    assert not [(path, name) for path, name in named if name not in SETTINGS]


def test_no_message_outside_the_command_line_names_a_flag():
    texts = [(path, text) for path in PRODUCT for text in messages(path)]
    assert len(texts) > 5000
    found = [(path, text) for path, text in texts if FLAG.search(COMMAND.sub("", text))]
    assert not [(path, text) for path, text in found if path not in NO_MESSAGES]
    assert {path for path, _ in found} == NO_MESSAGES


def messages(path: Path) -> Iterator[str]:
    """Yield every string of a module that is no docstring, with … for what is formatted into it."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    passed = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values}
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.value
