"""A name that nobody knows is an error: no keyword is swallowed, and no choice has a silent default."""

import ast
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest

import dispfx.api
from dispfx.api import learn_settings
from dispfx.compiler.programs import analyse, lower
from dispfx.errors import DispfxError, UnknownSettingError
from dispfx.learning.estimators import ESTIMATORS, estimator
from dispfx.learning.hypernetwork import HYPERNETWORKS, build_hypernetwork, hypernetwork_parameters
from dispfx.learning.objective import OBJECTIVES
from dispfx.learning.scores import SCORES, score
from dispfx.passes.find_sites import FindSites
from dispfx.passes.static_cache import StaticCache
from dispfx.plan.budget import Budget
from dispfx.plan.plan import Plan
from dispfx.run.mask_learning import learn
from dispfx.settings import BudgetSettings, ComputeSettings, RunSettings
from dispfx.settings.learning_settings import (
    RECIPES,
    EstimatorName,
    HypernetworkName,
    LearnSettings,
    Method,
    ObjectiveName,
    RecipeName,
)
from dispfx.settings.sections import ALIGNMENT, RatioOf, Select
from dispfx.settings.verb_settings import WriteSpelling
from dispfx.words.choices import check_choices, choice
from dispfx.words.text_origin import Bos
from tests.api.plain import build_decoder
from tests.command_line import NAMED

ROOT = Path(dispfx.__file__).parents[1]
# Who may take any keyword, and where it goes.
TAKES_ANY = {
    **{
        f"dispfx/api/{place}": "checked against the settings of its tree"
        for place in (
            "benching.py:bench",
            "commands.py:agree",
            "commands.py:evaluate",
            "commands.py:export",
            "commands.py:generate",
            "inspection.py:inspect",
            "compilation.py:apply",
            "compilation.py:compile",
            "compilation.py:learn_plan",
            "compilation.py:run_settings",
            "recovery.py:recover",
            "sampling.py:sample",
            "costing.py:costs",
            "family_sizes.py:curve",
            "tasks.py:score_tasks",
        )
    },
    "dispfx/compiler/pipelines.py:run_pipeline": "checked against the fields of the passes of the pipeline",
    "dispfx/run/mask_learning.py:learn": "checked against the settings of learning and budget",
    "dispfx/run/mask_learning.py:learn_family": "checked against the settings of learning and budget",
    "dispfx/settings/field.py:required": "handed on whole to the constructor of Setting",
    "dispfx/settings/field.py:setting": "handed on whole to the constructor of Setting",
    "dispfx/settings/learning_settings.py:learn_settings": "checked against the fields of LearnSettings",
    "dispfx/settings/tree.py:changed": "checked against the settings of the tree",
    "dispfx/settings/tree.py:of": "checked against the settings of the tree",
    "dispfx/settings/trees.py:changed": "checked against the settings of the tree",
    "dispfx/cli/verb.py:command": "bound to the signature of the verb by cyclopts",
    "dispfx/capturing/graph_export.py:traced": "handed on whole to torch.export",
    "dispfx/deploy/checkpoint.py:_without_weights": "handed on whole to transformers",
    "dispfx/huggingface/model_loading.py:load_model": "handed on whole to transformers",
    "dispfx/huggingface/guards.py:guarded": "handed on whole to the function of transformers that it guards",
    "dispfx/huggingface/quantizer.py:__init__": "the section of a config, checked where it is read",
    "dispfx/huggingface/quantizer.py:_process_model_before_weight_loading": "called by transformers",
    "dispfx/huggingface/quantizer.py:_process_model_after_weight_loading": "called by transformers",
    "dispfx/learning/tensorboard.py:_write": "handed on whole to the constructor of an event",
    "dispfx/quality/logits_by_rows.py:lambda": "called by a decoder in place of a part that has run already",
    "dispfx/deploy/onnx/lifting.py:run_decompositions": "called by torch; its arguments change nothing here",
    "dispfx/serving/linear_method.py:create_weights": "vLLM's own, which it passes on to the parameter",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda]]:
    """Yield every function of the product with `path:name`."""
    for path in sorted([*ROOT.glob("dispfx/**/*.py"), *ROOT.glob("passes/*.py")]):
        place = path.relative_to(ROOT)
        if place.parts[:2] == ("dispfx", "passes"):
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                yield f"{place.as_posix()}:{getattr(node, 'name', 'lambda')}", node


def test_only_named_functions_take_any_keyword_each_for_a_reason():
    found = {name for name, function in functions() if function.args.kwarg is not None}
    assert found == set(TAKES_ANY)


def unread(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    given = function.args
    names = {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
    names |= {given.kwarg.arg} if given.kwarg else set()
    return names - {
        node.id for step in function.body for node in ast.walk(step) if isinstance(node, ast.Name)
    }


def test_every_argument_of_a_public_function_is_read():
    public = {
        f"{Path(inspect.getfile(inspect.unwrap(found))).resolve().relative_to(ROOT.resolve()).as_posix()}:{name}"
        for name in dispfx.api.__all__
        if inspect.isfunction(found := getattr(dispfx.api, name))
    }
    checked = 0
    for name, function in functions():
        overload = not isinstance(function, ast.Lambda) and "overload" in map(
            ast.unparse, function.decorator_list
        )
        if name in public and not isinstance(function, ast.Lambda) and not overload:
            assert not unread(function), name
            checked += 1
    assert checked == len(public) > 20


@pytest.mark.parametrize("name", sorted(dispfx.api.__all__))
def test_a_misspelt_keyword_of_a_public_function_is_an_error(name: str):
    function = getattr(dispfx.api, name)
    if not callable(function):
        return
    needed = [
        None
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind == parameter.POSITIONAL_OR_KEYWORD and parameter.default is parameter.empty
    ]
    with pytest.raises((TypeError, DispfxError), match="aling"):
        function(*needed, aling=16)


@pytest.mark.parametrize(
    ("function", "hint"),
    [
        (learn_settings, "did you mean steps?"),
        (dispfx.api.recover, "did you mean steps?"),
        (dispfx.api.inspect, "did you mean steps, sites?"),
        (RunSettings.of(model="demo", ratio=0.3).changed, "did you mean steps, sites?"),
    ],
)
def test_a_misspelt_setting_is_told_the_closest_one(function: Callable[..., Any], hint: str):
    words = () if inspect.ismethod(function) else ("demo",)
    with pytest.raises(UnknownSettingError, match="there is no setting 'stesp'") as error:
        function(*words, stesp=3)
    assert error.value.hint == hint


def test_a_misspelt_setting_is_told_before_anything_is_learned():
    program = analyse(build_decoder())
    with pytest.raises(DispfxError, match="no setting 'stesp'"):
        learn(program, None, 0.3, stesp=3)  # type: ignore[arg-type]
    with pytest.raises(DispfxError, match="no setting 'stesp'"):
        learn(program, None, 0.3, settings=LearnSettings(), stesp=3)  # type: ignore[arg-type]


def test_an_unknown_name_lists_the_known_ones_and_the_closest():
    with pytest.raises(DispfxError, match="colour must be red or blue, and 'bleu' was given") as error:
        choice({"red": 1, "blue": 2}, "bleu", "colour")
    assert error.value.hint == "did you mean blue?" and error.value.exit_code == 2
    assert choice({"red": 1, "blue": 2}, "blue", "colour") == 2
    with pytest.raises(DispfxError) as far:
        choice({"red": 1}, "xyzzy", "colour")
    assert far.value.hint is None


def plan_and_program() -> tuple[Any, Any]:
    program = analyse(build_decoder())
    return program, Plan.random(program, 0.3, 0)


UNKNOWN: dict[str, Callable[[], Any]] = {
    "estimator": lambda: estimator("reinmx", 1.0),  # type: ignore[arg-type]
    "hypernetwork": lambda: build_hypernetwork("ful", [2], bias=0.0, seed=0),  # type: ignore[arg-type]
    "parameters of a hypernetwork": lambda: hypernetwork_parameters("ful", [2]),  # type: ignore[arg-type]
    "score": lambda: score(None, None, "magnitud"),  # type: ignore[arg-type]
    "counted": lambda: Budget(0.3, "block"),  # type: ignore[arg-type]
    "compile": lambda: ComputeSettings(compile="always"),  # type: ignore[arg-type]
    "checkpointing": lambda: ComputeSettings(checkpointing="onn"),  # type: ignore[arg-type]
    "select": lambda: dispfx.api.capture(build_decoder(), select="before-norms"),  # type: ignore[arg-type]
    "experts": lambda: dispfx.api.capture(build_decoder(), experts="batchd"),  # type: ignore[arg-type]
    "spelling of writes": lambda: lower(*plan_and_program(), write="gather_add"),  # type: ignore[arg-type]
    "target": lambda: BudgetSettings(0.3, target="gpu"),  # type: ignore[arg-type]
    "export": lambda: RunSettings.of(model="demo", ratio=0.3, export="onx"),
    "counted, of a run": lambda: BudgetSettings(0.3, ratio_of="block"),  # type: ignore[arg-type]
    "reads of a cache": lambda: StaticCache(8, "masks"),  # type: ignore[arg-type]
    "select, of the pass": lambda: FindSites(select="before"),  # type: ignore[arg-type]
    "dtype": lambda: dispfx.api.inspect("demo", dtype="float8"),
    "runtime of bench": lambda: dispfx.api.bench("there-is-none", runtime="onx"),  # type: ignore[arg-type]
    "mode of bench": lambda: dispfx.api.bench("there-is-none", mode="eagr"),  # type: ignore[list-item]
    "runtime of generate": lambda: dispfx.api.generate("demo", "a", runtime="onx"),  # type: ignore[arg-type]
    "recipe": lambda: learn_settings("demo", recipe="papers"),
}


@pytest.mark.parametrize("name", sorted(UNKNOWN))
def test_an_unknown_choice_is_refused_and_never_taken_for_another(name: str):
    with pytest.raises(DispfxError, match=r" must be .+, and '.+' was given"):
        UNKNOWN[name]()


def test_tables_hold_what_the_names_of_a_choice_say():
    assert {"learned", *SCORES} == set(get_args(Method))
    assert set(ESTIMATORS) == set(get_args(EstimatorName))
    assert set(HYPERNETWORKS) == set(get_args(HypernetworkName))
    assert set(RECIPES) == set(get_args(RecipeName))
    assert set(OBJECTIVES) == set(get_args(ObjectiveName))


def literals(function: Callable[..., Any]) -> dict[str, set[str]]:
    """Return the names that each argument with a fixed set of names may have."""
    found = {}
    for name, hint in get_type_hints(function).items():
        for part in (hint, *get_args(hint)):
            if get_origin(part) is Literal:
                found[name] = set(get_args(part))
    return found


def choices_of(verb: str) -> dict[str, set[str]]:
    """Return the names that each option of a verb with a fixed set of names may have."""
    parameters = NAMED[verb].signature().parameters
    hints = {name: one.annotation.__origin__ for name, one in parameters.items()}
    parts = [(name, part) for name, hint in hints.items() for part in (hint, *get_args(hint))]
    return {name: set(get_args(part)) for name, part in parts if get_origin(part) is Literal}


def test_the_command_line_offers_the_names_that_the_compiler_knows():
    compile_, settings = choices_of("compile"), literals(LearnSettings)
    shared = compile_.keys() & settings.keys()
    assert {"method", "estimator", "hypernetwork", "start", "schedule"} <= shared
    assert {name: compile_[name] for name in shared} == {name: settings[name] for name in shared}
    assert compile_["ratio_of"] == set(get_args(RatioOf)) and compile_["select"] == set(get_args(Select))
    assert choices_of("export")["write"] == set(get_args(WriteSpelling))
    assert compile_["checkpointing"] == literals(ComputeSettings)["checkpointing"]
    assert compile_["dtype"] == {"float32", "bfloat16", "float16"}
    assert compile_["target"] == set(ALIGNMENT) and compile_["export"] == {"none", "onnx", "pt2", "dense"}
    assert {verb: choices_of(verb)["bos"] for verb in ("compile", "eval", "generate")} == {
        verb: set(get_args(Bos)) for verb in ("compile", "eval", "generate")
    }


def test_every_known_name_is_let_pass():
    check_choices(LearnSettings())
    for name in get_args(Method):
        assert LearnSettings(method=name).method == name
