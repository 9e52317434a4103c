"""Whatever goes wrong ends in a message and the right exit code."""

import errno
import io
import json
import os
from pathlib import Path

import pytest
import torch

from dispfx import errors
from dispfx.cli.screen import Screen
from dispfx.run.timed_stages import Stages
from dispfx.verification.equivalence import Verification
from tests.processes import run_code, started
from tests.trust.runs import write_tokens


def compile_demo(dispfx, out: Path, *more: str):
    return dispfx("compile", "demo", "--ratio", "0.3", "--out", out, *more)


@pytest.mark.parametrize("kind", errors.DispfxError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_error_raised_on_purpose_is_a_message_with_its_exit_code(
    dispfx, replaced, tmp_path: Path, kind
):
    replaced("run_compile", error=kind("what was wrong", where="layers.0", hint="do this"))
    result = compile_demo(dispfx, tmp_path / "out")

    ours = kind in (errors.PassError, errors.VerificationError)
    assert result.exit_code == (1 if ours else 2)
    assert result.stderr == "error: what was wrong\n  where: layers.0\n  try:   do this\n"
    assert result.stdout == ""


def test_an_unexpected_error_is_our_fault_in_two_lines(dispfx, replaced, tmp_path: Path):
    replaced("run_compile", error=RuntimeError("shape mismatch\nwith a long tail"))
    result = compile_demo(dispfx, tmp_path / "out")
    assert result.exit_code == 1
    assert result.stderr == "error: RuntimeError: shape mismatch\n  run again with --debug to see where\n"


def test_debug_shows_the_traceback_and_keeps_the_exit_code(dispfx, replaced, tmp_path: Path):
    replaced("run_compile", error=errors.DataError("no text"))
    result = compile_demo(dispfx, tmp_path / "out", "--debug")
    assert result.exit_code == 2 and "Traceback" in result.stderr and "no text" in result.stderr


def test_an_interrupt_says_how_to_go_on(dispfx, replaced, tmp_path: Path):
    replaced("run_compile", error=KeyboardInterrupt())
    fresh = compile_demo(dispfx, tmp_path / "out")
    assert fresh.exit_code == 130 and "run the same command again" in fresh.stderr

    (tmp_path / "out.state").mkdir()
    saved = compile_demo(dispfx, tmp_path / "out")
    assert saved.exit_code == 130
    assert "--resume" in saved.stderr and str(tmp_path / "out.state") in saved.stderr


def test_an_interrupt_of_a_verb_without_state_promises_none(dispfx, replaced):
    replaced("inspect", error=KeyboardInterrupt())
    result = dispfx("inspect", "demo")
    assert result.exit_code == 130 and "nothing was written" in result.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("inspect", "demo"),
        ("compile", "mine:build", "--ratio", "0.3", "--data", "text.txt", "--out", "out"),
        ("compile", "--config", "report.json", "--out", "out"),
        ("doctor",),
    ],
)
def test_a_current_folder_that_was_removed_is_said_before_a_library_looks_at_it(
    dispfx, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
):
    """Left to torch, the process ends without a word of ours."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    result = dispfx(*words)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.startswith("error: the current folder does not exist any more")


def test_a_full_disk_under_what_is_printed_is_no_fault_of_ours(dispfx, replaced, tmp_path: Path):
    replaced("run_compile", error=OSError(errno.ENOSPC, "No space left on device"))
    result = compile_demo(dispfx, tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith(
        "error: the output of this command cannot be written: No space left on device"
    )


def test_signs_that_an_encoding_lacks_end_no_command():
    """Names of sites have an ellipsis."""
    with started(["dispfx", "inspect", "demo"], {**os.environ, "PYTHONIOENCODING": "ascii"}) as process:
        printed, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "layers.{0?3}" in printed


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", b"u00e9"), ("utf-8", "é".encode())])
def test_json_stays_whole_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, printed: bytes):
    into = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(into, encoding, write_through=True))
    Screen(json=True).print_json({"text": "é"})
    assert json.loads(into.getvalue()) == {"text": "é"} and printed in into.getvalue()


def json_error(result) -> dict:
    """Return the error in the one JSON document that stdout has."""
    found = json.loads(result.stdout)["error"]
    assert found.keys() == {"kind", "message", "where", "hint", "exit_code"}
    assert found["exit_code"] == result.exit_code
    return found


@pytest.mark.parametrize("kind", errors.DispfxError.__subclasses__(), ids=lambda kind: kind.__name__)
def test_with_json_stdout_has_the_error_too(dispfx, replaced, tmp_path: Path, kind):
    replaced("run_compile", error=kind("what was wrong", where="layers.0", hint="do this"))
    found = json_error(compile_demo(dispfx, tmp_path / "out", "--json"))
    assert found.pop("exit_code") == kind.exit_code
    told = {"kind": kind.__name__, "message": "what was wrong", "where": "layers.0"}
    assert found | {"hint": ""} == told | {"hint": ""} and found["hint"].startswith("do this")


def test_with_json_faults_of_ours_interrupts_and_wrong_arguments_are_told_too(
    dispfx, replaced, tmp_path: Path
):
    twin = replaced("run_compile", error=RuntimeError("shape mismatch\nwith a long tail"))
    found = json_error(compile_demo(dispfx, tmp_path / "out", "--json"))
    assert (found["kind"], found["message"]) == ("RuntimeError", "shape mismatch\nwith a long tail")
    assert found["exit_code"] == 1 and "--debug" in found["hint"]
    twin.side_effect = KeyboardInterrupt()
    assert json_error(compile_demo(dispfx, tmp_path / "out", "--json"))["kind"] == "Interrupted"
    for words in (
        ("compile", "demo", "--json"),
        ("nonsense", "demo", "--json"),
        ("inspect", "demo", "--json", "--select", "no-such"),
        ("inspect", "demo", "--json", "--no-such-option"),
    ):
        assert json_error(dispfx(*words))["kind"] == "UsageError"
    assert json_error(dispfx("inspect", "demo", "--json", "--device", "gpu"))["kind"] == "DispfxError"
    repeated = dispfx("compile", "--config", "report.json", "--json")
    assert "--out is needed" in json_error(repeated)["message"]


def test_with_json_a_verify_that_fails_is_one_document_with_what_was_compared(
    dispfx, replaced, tmp_path: Path
):
    (tmp_path / "report.json").write_text("{}")
    replaced("verify", [Verification("reloaded", (2, 9), 1.0, 1.0, 0.0)])
    result = dispfx("verify", tmp_path, "--json")
    assert json_error(result)["kind"] == "VerificationError" and result.exit_code == 1
    assert json.loads(result.stdout)["verify"][0]["name"] == "reloaded"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("prune", "compile"), ("evalute", "eval"), ("Benchmark", "bench"), ("train", "recover")],
)
def test_an_unknown_verb_is_told_the_one_that_is_meant(dispfx, word: str, meant: str):
    result = dispfx(word, "demo")
    assert result.exit_code == 2 and f"did you mean {meant}" in result.stderr


def test_a_verb_like_no_other_is_told_all_verbs(dispfx):
    result = dispfx("xyzzy", "--json")
    assert json_error(result)["message"].endswith("finetune, report, compare, passes, doctor")


OUT_OF_MEMORY = {
    "Python": MemoryError(),
    "torch on the CPU": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:128] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 4000000000000 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "torch on a card": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB."),
    "the system": OSError(errno.ENOMEM, "Cannot allocate memory"),
    "ONNX Runtime": RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : bad_alloc"),
}


@pytest.mark.parametrize("name", sorted(OUT_OF_MEMORY))
def test_memory_that_runs_out_in_a_stage_is_told_with_the_stage_and_the_way_on(
    dispfx, replaced, tmp_path: Path, name: str
):
    def work(*_args, **_options):
        with Stages()("write"):
            raise OUT_OF_MEMORY[name]

    replaced("run_compile").side_effect = work
    (tmp_path / "out.state").mkdir()
    result = compile_demo(dispfx, tmp_path / "out")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: memory ran out in stage write: ")
    assert f"the state is in {tmp_path / 'out.state'}" in result.stderr
    assert "--resume" in result.stderr and len(result.stderr.splitlines()) <= 4


@pytest.mark.parametrize("name", sorted(OUT_OF_MEMORY))
def test_memory_that_runs_out_elsewhere_or_behind_another_error_is_told_as_that(dispfx, replaced, name: str):
    twin = replaced("generate", error=OUT_OF_MEMORY[name])
    result = dispfx("generate", "demo", "--prompt", "a")
    assert result.exit_code == 2 and result.stderr.startswith("error: memory ran out: ")
    behind = errors.DataError("transformers cannot load this folder")
    behind.__cause__ = OUT_OF_MEMORY[name]
    twin.side_effect = behind
    assert "memory ran out" in dispfx("generate", "demo", "--prompt", "a").stderr


def test_what_dispfx_says_of_memory_itself_is_left_as_it_is(dispfx, replaced):
    replaced("inspect", error=errors.DispfxError("there is not enough memory", hint="use less"))
    assert dispfx("inspect", "demo").stderr == "error: there is not enough memory\n  try:   use less\n"


SHORT_OF_MEMORY = """
import resource, sys, torch
import dispfx.run.writing as writing

def write(*_):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, before[1]))
    try:
        torch.ones(2**28)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)  # the interpreter itself needs some to end

writing.write_decoder = write
from dispfx.cli import main
sys.argv = ["dispfx", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs to see how much memory is used")
def test_a_run_whose_memory_is_limited_says_the_stage_and_goes_on_after_it(tmp_path: Path):
    tokens = tmp_path / "tokens.safetensors"
    write_tokens(tokens)
    words = "compile tests.api.plain:build_decoder --ratio 0.3 --recipe paper --seq-len 16 --steps 2"
    words += f" --data {tokens} --out {tmp_path / 'out'}"
    result = run_code(SHORT_OF_MEMORY, *words.split(), OMP_NUM_THREADS="1")
    assert result.returncode == 2
    assert "error: memory ran out in stage write: RuntimeError: " in result.stderr
    assert f"{words} --resume" in result.stderr
    with started(["dispfx", *words.split(), "--resume"]) as again:
        said, wrong = again.communicate(timeout=300)
    assert again.returncode == 0, wrong
    assert "going on at step 2" in said and (tmp_path / "out" / "report.json").is_file()
