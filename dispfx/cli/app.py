"""The verbs in one list, and the entry point of the `dispfx` command."""

import difflib
import os
import sys
from io import TextIOWrapper
from pathlib import Path

from cyclopts import App, CycloptsError, MissingArgumentError, RepeatArgumentError

from dispfx.cli import evaluating, making, showing, using
from dispfx.cli.config_file import configured
from dispfx.cli.faults import refused
from dispfx.cli.screen import Screen
from dispfx.cli.verb import Verb
from dispfx.distributed.launcher import end_with_launcher
from dispfx.errors import EXIT_INPUT_FAULT, EXIT_INTERRUPTED, EXIT_OUR_FAULT, DispfxError, UsageError
from dispfx.settings.field import section_fields
from dispfx.settings.trees import (
    ApplySettings,
    BenchSettings,
    CompareSettings,
    CostsSettings,
    CurveSettings,
    EvalSettings,
    ExportSettings,
    GenerateSettings,
    InspectSettings,
    NoSettings,
    RecoverSettings,
    RunSettings,
    SampleSettings,
    VerifySettings,
)
from dispfx.settings.verb_settings import INSPECTED_RATIO
from dispfx.version import __version__
from dispfx.words.option_names import option
from dispfx.words.preconditions import check_current_folder

_DIR, _FOLDER = {"model": "DIR"}, {"folder": "DIR"}
_DIR_DOC = {"model": "A folder that dispfx wrote."}
_ANY_DOC = {"model": "A folder that dispfx wrote, or a MODEL as for compile."}
# These verbs read no data whose end could be held out.
_NO_DEFAULT = {"eval_data": "none"}
_LEARNING = tuple(RunSettings.settings_of("learning"))
_COMPUTE = tuple(RunSettings.settings_of("compute"))
_AFTERWARDS = tuple(RunSettings.settings_of("afterwards"))
_OPENING = ("revision", "dtype")
_LEARNED_FROM = ("data", "data_weight")
_TEXT = (*_LEARNED_FROM, "eval_data", "data_field", "data_bytes", "allow_unknown", "eval_windows")
_ESTIMATED = ("steps", "seq_len", "batch_size", "hypernetwork")

VERBS = (
    Verb(
        making.compile,
        RunSettings,
        required=(),
        defaults={"model": None},
        docs={
            "ratio": "Share of the prunable weights to remove. Needed without "
            f"{option('config')} or {option('constraint')}.",
            "out": "Folder to write; always needed. It must not exist.",
        },
        build=configured,
    ),
    Verb(
        using.inspect,
        InspectSettings,
        without=(
            *(name for name in _LEARNING if name not in _ESTIMATED),
            *_COMPUTE,
            *_TEXT,
            "bos",
            *("ratio", "kv_ratio", "constraint", "ratio_of", "align", "target", "costs"),
            *RunSettings.settings_of("output"),
            *_AFTERWARDS,
            "tokenizer",
        ),
        defaults={"ratio": INSPECTED_RATIO},
    ),
    Verb(
        making.learn,
        RunSettings,
        without=("eval_data", "eval_windows", "export", "config", *_AFTERWARDS),
        defaults={"out": Path("plan.safetensors")},
        docs={"out": "Plan file to write. It must not exist."},
    ),
    Verb(
        making.apply,
        ApplySettings,
        positional={"model": "MODEL", "plan": "PLAN"},
        required=("out",),
        without=("resume", "dry_run", "config"),
    ),
    Verb(using.verify, VerifySettings, positional=_FOLDER),
    Verb(
        evaluating.evaluate,
        EvalSettings,
        name="eval",
        without=_LEARNED_FROM,
        docs=_ANY_DOC,
        shown_defaults=_NO_DEFAULT,
    ),
    Verb(
        evaluating.curve,
        CurveSettings,
        positional={"model": "MODEL", "family": "FAMILY"},
        without=_LEARNED_FROM,
        shown_defaults={"eval_data": "demo: the last tenth of its own text"},
    ),
    Verb(
        using.export,
        ExportSettings,
        positional=_DIR,
        without=(*_OPENING, "data_weight"),
        docs=_DIR_DOC
        | {
            "data": "Text to round weights by, as for learning. May be repeated.",
            "device": "Device on which the text is read: cpu, cuda or cuda:N.",
            "eval_data": "Text to measure the loss by quantization on. May be repeated.",
        },
        shown_defaults={
            "data": "demo: its own text",
            "eval_data": "the last tenth of the data, else a short text of dispfx",
        },
    ),
    Verb(
        using.generate,
        GenerateSettings,
        required=("prompt",),
        without=(*_TEXT, *_OPENING, "device"),
        docs=_ANY_DOC,
    ),
    Verb(
        using.sample,
        SampleSettings,
        required=("out",),
        without=("eval_data", "eval_windows", "bos"),
        docs={"data": "Text to take openings from. May be repeated."},
        shown_defaults={
            "data": "none: every sequence begins with the decoder's first token; demo: its own text"
        },
    ),
    Verb(
        evaluating.bench,
        BenchSettings,
        positional=_DIR,
        without=(*_OPENING, *_LEARNED_FROM, "data_field", "data_bytes", "allow_unknown", "bos"),
        docs=_DIR_DOC
        | {"eval_data": f"Text to compare both decoders on; needs {option('dense')}. May be repeated."},
        shown_defaults=_NO_DEFAULT,
    ),
    Verb(evaluating.costs, CostsSettings, required=("out",), without=("tokenizer",)),
    Verb(
        making.recover,
        RecoverSettings,
        positional=_DIR,
        required=("dense", "data", "out"),
        docs=_DIR_DOC,
    ),
    Verb(
        making.finetune,
        RecoverSettings,
        positional=_DIR,
        required=("dense", "data", "out"),
        without=("train",),
        docs=_DIR_DOC,
    ),
    Verb(showing.report, VerifySettings, positional=_FOLDER, without=("trust_remote_code", "print_after")),
    Verb(
        showing.compare, CompareSettings, positional={"paths": "DIR... | PLAN PLAN"}, without=("print_after",)
    ),
    Verb(showing.passes, NoSettings, positional={}, without=("print_after",)),
    Verb(showing.doctor, NoSettings, positional={}, without=("print_after",)),
)

# Verbs of other programs, and their names here.
_MEANT = {
    **dict.fromkeys(("prune", "compress", "shrink", "slice", "run", "build"), "compile"),
    **dict.fromkeys(("info", "show", "analyze", "analyse", "ls"), "inspect"),
    **dict.fromkeys(("evaluate", "perplexity", "ppl", "measure"), "eval"),
    **dict.fromkeys(("benchmark", "speed", "time"), "bench"),
    **dict.fromkeys(("cost", "latency", "profile"), "costs"),
    **dict.fromkeys(("tune", "train", "heal", "distill"), "recover"),
    **dict.fromkeys(("fine-tune", "lora"), "finetune"),
    **dict.fromkeys(("check", "test", "validate"), "verify"),
    **dict.fromkeys(("onnx", "convert", "save"), "export"),
    **dict.fromkeys(("chat", "complete"), "generate"),
    "diff": "compare",
    "lower": "apply",
}


def make_app() -> App:
    """Return the command line with all its verbs."""
    app = App(
        name="dispfx",
        help="A compiler that makes a decoder language model smaller, without knowing its architecture.",
        version=f"dispfx {__version__}",
        help_flags=["--help", "-h"],
        version_flags=["--version"],
    )
    app.register_install_completion_command(add_to_startup=True)
    for number, verb in enumerate(VERBS):
        verb.add_to(app, number)
    return app


def main() -> None:
    """Run the command line and exit: 0 done, 1 our fault, 2 the input's fault, 130 interrupted."""
    end_with_launcher()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A character that the terminal's encoding lacks must not fail a finished run.
            stream.reconfigure(errors="replace")
    words = sys.argv[1:]
    try:
        check_current_folder()
    except DispfxError as error:
        raise refused(error, words) from None
    if not words:
        make_app().help_print()
        raise SystemExit(EXIT_INPUT_FAULT)
    _check_verb(words)
    try:
        make_app()(words, exit_on_error=False, print_error=False)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has closed the pipe, as in `dispfx … | head`; the interpreter would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(EXIT_OUR_FAULT) from None
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None
    except CycloptsError as error:
        verb = "" if words[0].startswith("-") else f" {words[0]}"
        hint = _instead(error) or _with_dash(error, words) or f"dispfx{verb} --help"
        raise refused(UsageError(_told(error), hint=hint), words) from None


def _told(error: CycloptsError) -> str:
    """Return a message for wrong arguments."""
    if isinstance(error, MissingArgumentError) and error.argument is not None:
        return f"{error.argument.name} is missing, or has no value"
    if isinstance(error, RepeatArgumentError):
        return f"{error.token.keyword} takes one value, and was given twice"
    return str(error)


def _instead(error: CycloptsError) -> str | None:
    """Return what to do instead of giving an option twice."""
    if not isinstance(error, RepeatArgumentError):
        return None
    settings = [one for verb in VERBS for one in verb.tree.settings().values()]
    return next((one.facts.once for one in settings if one.option == error.token.keyword), None)


def _with_dash(error: CycloptsError, words: list[str]) -> str | None:
    """Return how to give the missing value if the next word begins with a dash, as no other option does."""
    if not isinstance(error, MissingArgumentError) or error.argument is None:
        return None
    settings = [one for verb in VERBS for one in (*verb.tree.settings().values(), *section_fields(Screen))]
    name, options = error.argument.name, {one.option for one in settings}
    after = words[words.index(name) + 1 :][:1] if name in words else []
    if not after or not after[0].startswith("-") or after[0] in options:
        return None
    return f"for a value that begins with a dash, write {name}={after[0]}"


def _check_verb(words: list[str]) -> None:
    """Exit unless the first argument is a verb or an option.

    Raises:
        SystemExit: after printing the closest verb, or all verbs.
    """
    verbs = [verb.named for verb in VERBS]
    if words[0].startswith("-") or words[0] in verbs:
        return
    near = difflib.get_close_matches(words[0].lower(), [*verbs, *_MEANT], 1)
    hint = f"did you mean {_MEANT.get(near[0], near[0])}?" if near else "dispfx --help"
    problem = f"there is no verb {words[0]!r}; the verbs are {', '.join(verbs)}"
    raise refused(UsageError(problem, hint=hint), words)
