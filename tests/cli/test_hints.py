"""The advice of an error works where it is given: options of that verb, or another verb with its own."""

import re
import shutil
from pathlib import Path

import pytest

import dispfx
from dispfx import api
from tests.command_line import NAMED, options, run
from tests.plain_decoders import FORMS, build
from tests.quantized_folders import made, tokens
from tests.source.byte_tokenizer import byte_tokenizer
from tests.tiny_transformers import tiny_transformer

_HINT = re.compile(r"^  try:   (.*(?:\n {9}.*)*)", re.MULTILINE)
_VERB = re.compile(rf"dispfx ({'|'.join(NAMED)})\b")
_FLAG = re.compile(r"--[a-z][a-z-]*")


def advised_in_vain(verb: str, stderr: str) -> list[str]:
    """Return the options that hints name and the verb lacks; after `dispfx VERB` they are those of VERB."""
    vain = []
    for hint in _HINT.findall(stderr):
        for part in hint.split(";"):
            named = _VERB.findall(part)
            known = {word for one in options(NAMED[named[0] if named else verb]) for word in one.words}
            vain += [flag for flag in _FLAG.findall(part) if flag not in known | {"--help"}]
    return vain


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders and files that verbs are tried on; do not change them."""
    above = tmp_path_factory.mktemp("places")
    found = {name: above / name for name in ("checkpoint", "graph", "onnx")}
    made(found["checkpoint"], tiny_transformer("llama"))
    model = build(FORMS["pre-norm"], layers=1)
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, seed=0)
    api.apply(model, plan, out=found["graph"])
    api.apply(model, plan, out=found["onnx"], export="onnx")
    found["text"] = above / "text.txt"
    found["text"].write_text("the cat sat on the mat. " * 100)
    found["short"] = above / "short.txt"
    found["short"].write_text("a")
    found["ids"] = tokens(above / "ids.safetensors", 600)
    found["wide"] = above / "wide"
    byte_tokenizer().save_pretrained(found["wide"])
    found["plan"] = found["checkpoint"] / "plan.safetensors"
    found["new"] = above / "new.safetensors"
    return found


REFUSED = [
    "export checkpoint --quantize int8 --data text",
    "export checkpoint --quantize int4",
    "export graph --quantize int8",
    "export graph --onnx",
    "export graph --onnx --quantize int8",
    "export graph --pt2",
    "export onnx --quantize int8",
    "export onnx --onnx",
    "generate checkpoint --prompt hi",
    "generate checkpoint --prompt hi --runtime onnx",
    "generate graph --prompt zz --tokenizer wide",
    "generate graph --prompt hi --tokenizer nowhere",
    "bench checkpoint --eval-data text --dense demo --tokenizer nowhere",
    "eval graph --eval-data text --tokenizer wide",
    "generate plan --prompt hi",
    "generate text --prompt hi",
    "sample checkpoint --out new",
    "sample graph --out new --data ids",
    "sample demo --out new --seq-len 9999",
    "eval checkpoint --eval-data text",
    "eval checkpoint --eval-data ids --dtype bfloat16",
    "eval demo --eval-data short",
    "bench graph",
    "bench checkpoint --eval-data text --dense demo",
    "recover checkpoint --dense demo --data text --out new",
    "recover graph --dense demo --data text --out new",
    "learn demo --ratio 0.3 --data short --out new",
    "learn checkpoint --ratio 0.3 --data ids --out new",
    "compile checkpoint --ratio 0.3 --data ids --out new",
    "compile demo --ratio 0.3 --data short --out new",
    "apply checkpoint plan --out new",
    "apply demo plan --out new",
    "inspect checkpoint",
    "inspect graph",
    "report plan",
]


@pytest.mark.parametrize("command", REFUSED)
def test_advice_names_options_of_its_verb(command: str, places: dict[str, Path]):
    verb, *words = command.split()
    ended = run(verb, *(str(places.get(word, word)) for word in words))
    assert ended.exit_code == 2, ended.output
    assert advised_in_vain(verb, ended.stderr) == [], ended.stderr


def test_the_advice_for_a_tokenizer_is_not_that_for_a_decoder(places: dict[str, Path]):
    """`--tokenizer demo` is no name, which MODEL would be."""
    ended = run("generate", places["checkpoint"], "--prompt", "hi", "--tokenizer", "demo")
    assert ended.exit_code == 2 and "--tokenizer is not" in ended.stderr and "MODEL" not in ended.stderr


def test_an_option_that_a_verb_lacks_is_found():
    assert advised_in_vain("verify", "error: x\n  try:   name one with --tokenizer\n") == ["--tokenizer"]
    assert advised_in_vain("verify", "error: x\n  try:   dispfx eval DIR --tokenizer T\n") == []


def test_the_advice_to_write_onnx_first_works(places: dict[str, Path], tmp_path: Path):
    advice = run("export", places["graph"], "--quantize", "int8").stderr
    assert "--export onnx" in advice
    copy = Path(shutil.copytree(places["onnx"], tmp_path / "copy"))
    assert "add --onnx for" in run("export", copy, "--quantize", "int8").stderr
    assert run("export", copy, "--onnx", "--quantize", "int8").exit_code == 0
