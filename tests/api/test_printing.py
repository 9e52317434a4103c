"""--print-after: every pass can be printed, and an unknown name or a pass that never ran is told."""

from pathlib import Path

import pytest

import dispfx.api
from dispfx.api import PASSES
from dispfx.benchmark.decoder_speed import step_call
from dispfx.compiler.programs import analyse, gate, lower
from dispfx.errors import DispfxError
from dispfx.ir.cached_inputs import CachedShape
from dispfx.plan.plan import Plan
from dispfx.run.mask_learning import learn
from dispfx.run.timed_stages import printing
from dispfx.settings.learning_settings import LearnSettings
from tests.api.conftest import Watcher, random_tokens
from tests.api.plain import build_decoder
from tests.captures import lowered_with_cache

ROOT = Path(dispfx.__file__).parents[1]


def test_every_file_of_a_pass_has_its_name_in_the_list():
    files = {path.stem.replace("_", "-") for path in ROOT.glob("passes/*.py")} - {"--init--"}
    assert sorted(PASSES) == sorted(files)


@pytest.mark.parametrize("name", ["lower_gates", "no-such-pass", ""])
def test_an_unknown_pass_is_an_error_that_lists_the_passes(name: str):
    listed = r"a pass to print after must be canonicalize or .*outline-layers"
    with pytest.raises(DispfxError, match=listed) as error, printing([name]):
        pytest.fail("nothing runs")
    assert error.value.exit_code == 2
    assert (error.value.hint == "did you mean lower-gates?") == (name == "lower_gates")


def test_passes_of_analysis_gates_lowering_and_learning_are_printed():
    watcher = Watcher()
    names = [*[*PASSES][:8], "group-heads", "outline-layers"]
    with printing(names, watcher):
        program = analyse(build_decoder())
        gate(program)
        lower(program, Plan.random(program, 0.3, 0), write="index-add")
        settings = LearnSettings(steps=1, seq_len=16)
        learn(program, random_tokens(), 0.3, settings=settings)
    assert set(watcher.printed_names) == set(names) and watcher.notes == []


def test_a_graph_that_was_printed_is_not_printed_again_and_nothing_is_after_the_block():
    watcher = Watcher()
    with printing(["canonicalize"], watcher):
        program = analyse(build_decoder())
        analyse(build_decoder())
    analyse(build_decoder())
    gate(program)
    assert watcher.printed_names == ["canonicalize"]


def test_a_pass_that_did_not_run_is_told_and_not_where_the_command_failed():
    watcher = Watcher()
    with printing(["gather-add", "gather-add"], watcher):
        analyse(build_decoder())
    assert watcher.notes == ["gather-add did not run in this command, so there is no graph to print after it"]
    failing = Watcher()
    with pytest.raises(ZeroDivisionError), printing(["gather-add"], failing):
        raise ZeroDivisionError
    assert failing.notes == []


def test_passes_of_timed_steps_are_printed():
    watcher = Watcher()
    names = ["fuse-projections", "last-logits", "static-cache", "group-heads"]
    with printing(names, watcher):
        step_call(lowered_with_cache("llama", 0.4), CachedShape(1, 5, 0), "eager")
    assert set(watcher.printed_names) == set(names)
