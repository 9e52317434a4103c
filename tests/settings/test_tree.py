"""Every setting stands once: its name, doc, choices and range; trees are built from flat names."""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from dispfx.errors import BudgetError, DispfxError, OutputError, SourceError, UnknownSettingError
from dispfx.settings import BudgetSettings, RunSettings, trees
from dispfx.settings.field import Section, section_fields, setting
from dispfx.settings.stored import stored_sections
from dispfx.settings.tree import Tree
from dispfx.settings.trees import TREES

RUN = RunSettings.of(model="demo", ratio=0.3, data=["a.txt"], out=Path("out"), steps=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data": np.zeros(9, int)},
            "`data` must be a file or data set, or a list of them, but a ndarray was given",
        ),
        ({"data": [1, 2]}, "`data` must be a file or data set, or a list of them, but a list was given"),
        (
            {"data": [torch.zeros(9)]},
            "`data` must be a file or data set, or a list of them, but a list was given",
        ),
        ({"data": b"a.txt"}, "`data` must be a file or data set, or a list of them, but a bytes was given"),
        ({"data": torch.tensor(5)}, "a vector (N,) of token ids is needed, but a Tensor was given"),
        (
            {"eval_data": torch.zeros(9)},
            "`eval_data` must be a file or data set, or a list of them, but a Tensor was given",
        ),
        ({"steps": 1.5}, "`steps` must be a whole number, and 1.5 was given"),
        ({"steps": "7"}, "`steps` must be a whole number, and '7' was given"),
        ({"steps": True}, "`steps` must be a whole number, and True was given"),
        ({"lr": "1e-3"}, "`lr` must be a number, and '1e-3' was given"),
        ({"resume": "no"}, "`resume` must be True or False, and 'no' was given"),
        ({"constrained": 1}, "`constrained` must be True or False, and 1 was given"),
        ({"eval_windows": "2"}, "`eval_windows` must be a whole number, and '2' was given"),
        *(
            ({name: ""}, f"`{name}` must not be empty")
            for name in ("model", "data", "eval_data", "tokenizer")
        ),
        *(({name: ""}, f"`{name}` must not be empty") for name in ("out", "config", "costs")),
        ({"data": ["text.txt", ""]}, "`data` must not be empty"),
        ({"ratio": None}, "`ratio` is needed, or `constraint`"),
        ({"seq_len": None}, "`seq_len` must be a whole number, and None was given"),
        ({"ratio": "0.3"}, "`ratio` must be a share between 0 and 1, or a range, and '0.3' was given"),
        ({"steps": np.float64(2)}, "`steps` must be a whole number, and 2.0 was given"),
        ({"data_bytes": 3}, "`data_bytes` must be at least 1,048,576, and 3 was given"),
    ],
)
def test_a_number_of_another_type_is_refused_when_it_is_given(changes: dict[str, object], message: str):
    """A report of the run could not be written, or not be read."""
    with pytest.raises(DispfxError) as error:
        RunSettings.of(**{"model": "demo", "ratio": 0.3, "out": Path("out"), **changes})
    assert error.value.problem == message


def test_numbers_of_numpy_and_tensors_become_pythons_own():
    given = {
        "ratio": np.float32(0.25),
        "steps": np.int64(7),
        "lr": torch.tensor(0.5),
        "shard": np.bool_(True),
    }
    run = RunSettings.of(model="demo", out=Path("out"), **given)
    found = [run.budget.ratio, run.learning.steps, run.learning.lr, run.compute.shard]
    assert found == [0.25, 7, 0.5, True] and [type(one) for one in found] == [float, int, float, bool]
    json.dumps(run.plain())


def test_every_tree_is_listed():
    own = {kind for kind in vars(trees).values() if isinstance(kind, type) and issubclass(kind, Tree)}
    assert own - {Tree} == set(TREES)


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_every_setting_is_described_and_its_section_too(tree: type[Tree]):
    for section in tree.sections().values():
        assert (section.__doc__ or "").partition("\n")[0].endswith((".", "?")), section
        for one in section_fields(section):
            assert (
                one.facts.doc.endswith((".", ")")) and not one.facts.doc[0].islower()
            ) or one.name == "model", one
            assert not one.choices or one.typed is not str


@pytest.mark.parametrize("tree", TREES, ids=lambda tree: tree.__name__)
def test_no_two_sections_of_a_tree_share_a_name(tree: type[Tree]):
    names = [one.name for section in tree.sections().values() for one in section_fields(section)]
    assert len(names) == len(set(names)) == len(tree.settings())
    assert len({one.option for one in tree.settings().values()}) == len(names)


@dataclass(frozen=True)
class Other:
    """Another section."""

    ratio: float = setting(0.5, "A share.")


@dataclass(frozen=True, eq=False)
class Twice(Tree):
    """A tree with a name in two sections."""

    budget: BudgetSettings
    other: Other


def test_a_tree_with_a_name_in_two_sections_is_refused():
    with pytest.raises(AssertionError, match="two sections of Twice have ratio"):
        Twice.settings()


def test_an_unknown_setting_is_told_the_closest_one():
    for make in (lambda: RunSettings.of(model="demo", ratio=0.3, stesp=3), lambda: RUN.changed(stesp=3)):
        with pytest.raises(UnknownSettingError, match="there is no setting 'stesp'") as error:
            make()
        assert error.value.hint == "did you mean steps, sites?" and error.value.exit_code == 2


def test_a_setting_without_default_must_be_given():
    with pytest.raises(DispfxError, match="`ratio` is needed"):
        RunSettings.of(model="demo")
    with pytest.raises(OutputError, match="an output path is needed"):
        _ = RunSettings.of(model="demo", ratio=0.3).output.path


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ratio": 30}, "`ratio` must be between 0 and 1, and 30 was given"),
        ({"ratio": float("nan")}, "`ratio` must be between 0 and 1, and nan was given"),
        ({"align": 0}, "`align` must be at least 1, and 0 was given"),
        ({"dtype": "float8"}, "`dtype` must be float32 or bfloat16 or float16, and 'float8' was given"),
        ({"bias": float("inf")}, "`bias` must be a finite number, and inf was given"),
        ({"seq_len": 2**31}, "`seq_len` must be at most 2,147,483,647, and 2147483648 was given"),
        ({"seq_len": -(2**70)}, f"`seq_len` must be at least 2, and {-(2**70)} was given"),
        ({"seed": 2**63}, f"`seed` must be at most 9,223,372,036,854,775,807, and {2**63} was given"),
        ({"seed": -(2**63)}, f"`seed` must be at least -9,223,372,036,854,775,807, and {-(2**63)} was given"),
        (
            {"lambda_": 10**400},
            f"`lambda_` must be at most 9,223,372,036,854,775,807, and {10**400} was given",
        ),
    ],
)
def test_a_value_that_makes_no_sense_is_refused_by_the_name_of_its_setting(changes: dict, told: str):
    for make in (
        lambda: RunSettings.of(**{"model": "demo", "ratio": 0.3} | changes),
        lambda: RUN.changed(**changes),
    ):
        with pytest.raises(DispfxError) as error:
            make()
        assert error.value.problem == told
        assert "ratio" not in changes or error.value.hint == (
            "0.3 is 30%" if changes["ratio"] == 30 else None
        )
    assert "ratio" not in changes or isinstance(error.value, BudgetError)


def test_whole_numbers_up_to_the_bound_are_taken():
    learning = RUN.changed(seq_len=2**31 - 1, seed=2**63 - 1).learning
    assert (learning.seq_len, learning.seed) == (2**31 - 1, 2**63 - 1)
    assert RUN.changed(data_bytes=2**40).text.data_bytes == 2**40


def test_each_entry_of_a_setting_that_repeats_is_checked():
    with pytest.raises(DispfxError, match=r"`batch` must be at most 2,147,483,647, and 9{20} was given"):
        trees.BenchSettings.of(model="out", batch=[8, 99999999999999999999])
    with pytest.raises(DispfxError, match="`batch` must be at least 1, and 0 was given"):
        trees.BenchSettings.of(model="out", batch=[8, 0])


def test_a_pattern_alone_is_one_pattern_and_not_its_letters():
    assert RUN.changed(skip="*.mlp").budget.skip == ("*.mlp",)


def test_changes_leave_everything_else_as_it_is():
    changed = RUN.changed(align=8, lr=0.5)
    assert (changed.budget.align, changed.learning.lr, changed.learning.steps) == (8, 0.5, 7)
    assert changed.model is RUN.model and changed.output is RUN.output
    assert RUN.changed(seq_len=64).learning.adaptable == ("samples", "batch_size")
    with pytest.raises(DispfxError, match="a recipe is chosen where settings are made"):
        RUN.changed(recipe="paper")


def test_settings_are_json_by_section_and_objects_of_a_program_are_only_named():
    plain = RUN.changed(model=nn.Linear(1, 1), data=torch.arange(3), costs=Path("a") / "b").plain()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    sections = ["model", "text", "budget", "recipe", "learning", "compute", "afterwards", "output"]
    assert list(plain) == sections
    assert plain["model"]["model"] == {"object": "Linear"} and plain["text"]["data"] == {"object": "Tensor"}
    assert plain["budget"]["costs"] == str(Path("a") / "b") and plain["output"]["out"] == "out"
    assert stored_sections(plain, strict=True) == plain


def test_a_setting_of_a_later_version_is_refused_only_where_it_would_be_used():
    plain = RUN.plain()
    plain["learning"]["colour"] = "red"
    assert stored_sections(plain, strict=False) == RUN.plain()
    with pytest.raises(ValueError, match=r"settings\.learning has no setting 'colour'"):
        stored_sections(plain, strict=True)


def test_a_section_checks_choices_ranges_and_nothing_of_what_is_none():
    @dataclass(frozen=True)
    class Counted(Section):
        """A section."""

        count: int | None = setting(None, "How many.", least=2)

    assert Counted().count is None and Counted(2).count == 2
    with pytest.raises(DispfxError, match="`count` must be at least 2, and 1 was given"):
        Counted(1)


def test_several_processes_open_the_decoder_on_their_own_card_and_parts_of_it_from_the_cpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    run = RUN.changed(device="cuda")
    assert run.placed_model.device == "cuda:3" and run.model.device == "cuda", "the report has what was given"
    assert RUN.changed(shard_on="cpu").placed_model.device == "cpu"


def test_a_section_that_an_earlier_file_lacks_has_its_defaults():
    plain = RUN.plain()
    del plain["afterwards"]
    assert stored_sections(plain, strict=True)["afterwards"] == {"recover": "none", "recover_steps": None}
    del plain["budget"]
    with pytest.raises(ValueError, match=r"settings\.budget: `ratio` is needed, or `constraint`"):
        stored_sections(plain, strict=True)
    del plain["model"]
    with pytest.raises(ValueError, match="settings must have the sections model, text, budget"):
        stored_sections(plain, strict=True)


def test_a_recipe_given_as_model_says_that_it_is_one():
    with pytest.raises(
        SourceError, match="informed is a recipe of learning, and MODEL is a decoder"
    ) as caught:
        RunSettings.of(model="informed", ratio=0.3)
    assert "recipe" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("tree", "given", "named"),
    [
        (RunSettings, {"model": "demo", "ratio": 0.3, "recover_steps": 9}, "`recover_steps`"),
        (trees.EvalSettings, {"model": "demo", "shots": 2}, "`shots`"),
        (trees.EvalSettings, {"model": "demo", "limit": 2}, "`limit`"),
        (trees.EvalSettings, {"model": "demo", "task_folder": Path("tasks")}, "`task_folder`"),
        (trees.ExportSettings, {"model": "no-folder", "onnx": True, "data": "a.txt"}, "`data`"),
    ],
)
def test_a_setting_without_effect_is_refused(tree: type[Tree], given: dict[str, object], named: str):
    with pytest.raises(DispfxError, match="has no effect") as raised:
        tree.of(**given)
    assert str(raised.value).startswith(named)


def test_the_same_settings_are_taken_where_they_have_one():
    assert RunSettings.of(model="demo", ratio=0.3, recover="scales", recover_steps=9).recovery is not None
    assert trees.EvalSettings.of(model="demo", tasks=("piqa",), shots=2).evaluation.shots == 2
    assert trees.ExportSettings.of(model="no-folder", quantize="int8", data="a.txt").text.data == "a.txt"
