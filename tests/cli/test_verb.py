"""A verb is generated from its settings: one option each, with its help, choices, default and range."""

from pathlib import Path

import pytest

from dispfx.settings.trees import RunSettings
from tests.cli.asked import asked
from tests.command_line import NAMED, options, run
from tests.report.runs import write_run

# What other programs may rely on.
CONTRACT = {
    "compile": (
        "ratio ratio-of data eval-data eval-windows tokenizer steps seq-len batch-size lr lambda estimator "
        "hypernetwork constrained select align skip target dtype device seed save-every resume export out "
        "dry-run config method recipe samples budget-on budget-width launch shard revision trust-remote-code "
        "costs antithetic no-antithetic sharpen start schedule weight-decay bias temperature accumulate "
        "recover recover-steps packing bos data-weight data-field data-bytes allow-unknown compile "
        "checkpointing max-bad-steps print-after"
    ),
    "learn": "ratio data out steps launch shard resume dry-run align costs skip select target device seed",
    "apply": "out data eval-data eval-windows tokenizer dtype device revision trust-remote-code export bos",
    "inspect": "config-only skip select steps seq-len batch-size hypernetwork revision dtype device",
    "verify": "trust-remote-code",
    "eval": "dense eval-data tasks task-folder shots limit batch-size context eval-windows out device",
    "export": (
        "onnx pt2 quantize eval-data eval-windows tokenizer opset write ort-fusions no-padding "
        "trust-remote-code"
    ),
    "generate": "prompt max-new-tokens temperature top-k seed runtime tokenizer bos print-after",
    "sample": "out data tokens seq-len opening batch-size temperature seed print-after",
    "bench": "dense batch prompt past mode runtime align eval-data eval-windows tokenizer device out",
    "recover": (
        "dense train data eval-data out merge rank alpha lr steps batch-size seq-len seed measure-every "
        "patience save-every resume launch print-after"
    ),
    "finetune": (
        "dense data eval-data out merge rank alpha lr steps batch-size seq-len seed resume print-after"
    ),
    "compare": "out",
}


@pytest.mark.parametrize("verb", NAMED)
def test_every_option_of_the_contract_is_there(verb: str):
    known = {word for option in options(NAMED[verb]) for word in option.words}
    asked_for = {f"--{name}" for name in f"{CONTRACT.get(verb, '')} json quiet debug".split()}
    assert not asked_for - known


@pytest.mark.parametrize("flag", ["--help", "-h"])
@pytest.mark.parametrize("verb", NAMED)
def test_help_shows_every_option_with_its_choices_default_and_range(
    dispfx, monkeypatch, verb: str, flag: str
):
    monkeypatch.setenv("COLUMNS", "300")
    result = dispfx(verb, flag)
    assert result.exit_code == 0
    shown = [line.removeprefix("│ * ").removeprefix("│ ").strip() for line in result.stdout.splitlines()]
    lines = {line.split()[0]: line for line in shown if line.startswith("--")}
    settings = NAMED[verb].tree.settings()
    for option in options(NAMED[verb]):
        line = lines[option.words[0]]
        one = settings.get(option.name)
        if one is not None:
            assert all(choice in line for choice in one.choices)
            default = NAMED[verb].shown_defaults.get(option.name, one.facts.default)
            needed = "[required]" in line
            assert needed or not default or f"[default: {default}]" in line
            assert not (needed and "[default:" in line)
            assert one.facts.below is None or "[range: between 0 and 1]" in line


def test_help_begins_with_what_most_runs_need(dispfx):
    shown = dispfx("compile", "--help").stdout
    places = [
        shown.index(word) for word in ("MODEL", "Most runs", "--ratio ", "--data ", "--out ", "Learn ─")
    ]
    assert places == sorted(places)
    groups = [line for line in shown.splitlines() if line.startswith("╭─")]
    assert len(groups) == 10, "each with a sentence"


def test_help_says_what_a_verb_takes_and_writes(dispfx):
    told = " ".join(dispfx("learn", "--help").stdout.replace("│", "").split())
    assert "Plan file to write. It must not exist. [default: plan.safetensors]" in told
    told = " ".join(dispfx("export", "--help").stdout.replace("│", "").split())
    assert "DIR A folder that dispfx wrote." in told


def test_every_setting_of_a_run_has_an_option():
    known = {option.name for option in options(NAMED["compile"])} | {"model"}
    hidden = {one.name for one in RunSettings.settings().values() if not one.facts.on_command_line}
    assert known - {"print_after", "json", "quiet", "debug"} == set(RunSettings.settings()) - hidden
    assert hidden == {"shard_on", "replay", "join", "log_every", "held_out_every"}


@pytest.mark.parametrize(
    ("words", "found"), [((), True), (("--antithetic",), True), (("--no-antithetic",), False)]
)
def test_a_flag_that_is_on_by_itself_can_be_turned_off(
    dispfx, replaced, report, tmp_path, words, found: bool
):
    compile_ = replaced("run_compile", report)
    dispfx("compile", "demo", "--ratio", 0.3, "--out", tmp_path / "out", *words)
    assert asked(compile_)["antithetic"] is found


@pytest.mark.parametrize("words", [("--prompt", "- a list"), ("--prompt=- a list",)])
def test_a_text_may_begin_with_a_hyphen(dispfx, replaced, words: tuple[str, ...]):
    generate = replaced("generate", "longer")
    assert dispfx("generate", "demo", *words, "--temperature", "1e-1").exit_code == 0
    assert asked(generate)["prompt"] == "- a list" and asked(generate)["temperature"] == 0.1


def test_a_value_that_begins_with_a_dash_is_told_with_the_way_to_give_it(dispfx):
    result = dispfx("sample", "demo", "--out", "-x.safetensors")
    assert result.exit_code == 2 and result.stdout == ""
    assert "for a value that begins with a dash, write --out=-x.safetensors" in result.stderr


def test_a_run_needs_a_ratio_or_a_constraint(dispfx):
    result = dispfx("learn", "demo")
    assert result.exit_code == 2 and "--ratio is needed, or --constraint" in result.stderr


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("compile", "demo", "--ratios", "1"), "Unknown option: --ratios. Did you mean --ratio?"),
        (("compile", "demo", "--out"), "--out is missing, or has no value"),
        (("compile", "demo", "--out", "--quiet"), "dispfx compile --help"),
        (("inspect",), "MODEL is missing"),
        (("generate", "demo"), "--prompt is missing"),
        (("compile", "demo", "--ratio", "1", "--out", "x"), '"1.0" for --ratio. It must be between 0 and 1'),
        (("compile", "demo", "--ratio", "30", "--out", "x"), "between 0 and 1. 0.3 is 30%."),
        (("compile", "demo", "--ratio", "0.3", "--lr", "many"), 'convert "many" into float'),
        (("compile", "demo", "--bias", "inf", "--ratio", "0.3"), "It must be a finite number"),
        (("bench", "out", "--batch", "8", "--batch", "0"), "for --batch. It must be at least 1"),
        (("compile", "demo", "more", "--ratio", "0.3"), "Unused Tokens: ['more']"),
        (("compile", "--out", "x"), "MODEL is needed"),
        (("compile", "demo", "--out", "x"), "--ratio is needed"),
        (("compile", "demo", "--ratio", "0.3"), "--out is needed"),
    ],
)
def test_wrong_arguments_are_told_with_the_way_to_the_help(dispfx, words: tuple[str, ...], told: str):
    result = dispfx(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert told in result.stderr and f"dispfx {words[0]} --help" in result.stderr
    assert len(result.stderr.splitlines()) == 2


@pytest.mark.parametrize("verb", ["compile", "apply"])
def test_two_forms_in_one_run_are_refused_with_a_way_to_have_both(verb: str):
    words = {"compile": ("demo", "--ratio", "0.3"), "apply": ("demo", "plan.safetensors")}[verb]

    found = run(verb, *words, "--out", "out", "--export", "dense", "--export", "onnx")

    assert found.exit_code == 2
    assert "--export takes one value, and was given twice" in found.stderr
    assert "`dispfx export` adds another one to the folder later" in found.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("report", ""), ("verify", ""), ("compare", "a", ""), ("bench", ""), ("inspect", ""), ("eval", ""),
        ("apply", "demo", ""), ("compile", "demo", "--ratio", "0.3", "--out", ""),
        ("compile", "demo", "--ratio", "0.3", "--data", "", "--out", "new"),
        ("compile", "demo", "--ratio", "0.3", "--costs", "", "--out", "new"),
        ("compile", "demo", "--config", "", "--out", "new"), ("bench", ".", "--dense", ""),
        ("eval", "demo", "--eval-data", "text.txt", "--out", ""),
    ],
)  # fmt: skip
def test_an_empty_path_is_not_the_current_folder(dispfx, tmp_path: Path, monkeypatch, words: tuple[str, ...]):
    monkeypatch.chdir(write_run(tmp_path / "run"))
    before = sorted(Path().iterdir())
    result = dispfx(*words)
    assert result.exit_code == 2 and "must not be empty" in " ".join(result.stderr.split()), result.stderr
    assert sorted(Path().iterdir()) == before
