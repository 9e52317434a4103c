"""An output that was made from something else is not taken for this run's, nor another decoder for DIR's."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import dispfx
from dispfx.api import agree, apply, recover
from dispfx.demo import DECODER_FOLDER
from dispfx.demo.grammar import generate_text
from dispfx.errors import DataError, OutputError, PlanMismatchError
from dispfx.ir.content_digest import program_digest
from tests.api.conftest import MODEL, RATIO, SETTINGS, Compiled, Watcher, random_tokens
from tests.api.plain import another_decoder, build_decoder
from tests.learning_options import options_of

OTHER = "tests.api.plain:another_decoder"


class Louder(nn.Module):
    """A decoder whose logits are multiplied by a buffer or a constant, which are no weights."""

    def __init__(self, factor: float, *, as_buffer: bool):
        super().__init__()
        self.inner = build_decoder()
        self.factor = factor
        if as_buffer:
            del self.factor
            self.register_buffer("factor", torch.tensor(factor))

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(ids) * self.factor


def louder_buffer() -> nn.Module:
    return Louder(3.0, as_buffer=True)


def louder_constant() -> nn.Module:
    return Louder(3.0, as_buffer=False)


def plain_buffer() -> nn.Module:
    return Louder(1.5, as_buffer=True)


def plain_constant() -> nn.Module:
    return Louder(1.5, as_buffer=False)


HERE = __name__


def given(out: Path, **further: Any) -> dict[str, Any]:
    return {"out": out, "align": 1, **options_of(SETTINGS), **further}


@pytest.mark.parametrize("form", [plain_buffer, plain_constant])
def test_a_program_has_its_buffers_and_constants_in_its_digest(form: Callable[[], nn.Module]):
    first, again, other = (
        program_digest(dispfx.capture(one()))
        for one in (form, form, {plain_buffer: louder_buffer, plain_constant: louder_constant}[form])
    )
    assert first == again != other


def test_a_complete_folder_of_other_contents_under_the_same_names_is_refused(
    compiled: Compiled, tokens: Path, tmp_path: Path
):
    texts, out = tmp_path / "t.safetensors", tmp_path / "out"
    shutil.copy(tokens, texts)
    report = dispfx.compile(build_decoder(), RATIO, texts, **given(out))
    assert dispfx.compile(build_decoder(), RATIO, texts, **given(out, resume=True)) == report
    with pytest.raises(OutputError, match=r"was made from another decoder\n"):
        dispfx.compile(another_decoder(), RATIO, texts, **given(out, resume=True))
    save_file({"tokens": random_tokens(seed=5)}, texts)
    said = "was made from another text to learn from and another text to measure on"
    with pytest.raises(OutputError, match=said):
        dispfx.compile(build_decoder(), RATIO, texts, **given(out, resume=True))


@pytest.mark.parametrize("lost", ["program.pt2", "plan.safetensors"])
def test_a_damaged_folder_is_not_complete(compiled: Compiled, tokens: Path, tmp_path: Path, lost: str):
    out = tmp_path / "out"
    shutil.copytree(compiled.path, out)
    content = (out / lost).read_bytes()
    for damage in (lambda: (out / lost).write_bytes(content[:-1]), (out / lost).unlink):
        damage()
        with pytest.raises(OutputError, match=f"{lost}: missing, or changed"):
            dispfx.compile(MODEL, RATIO, tokens, **given(out, resume=True))


def test_a_complete_folder_without_the_form_that_is_asked_for_is_refused(compiled: Compiled, tokens: Path):
    with pytest.raises(OutputError, match="was made with `export='none'`, not onnx") as error:
        dispfx.compile(MODEL, RATIO, tokens, **given(compiled.path, resume=True, export="onnx"))
    assert "dispfx export" in str(error.value.hint)


def test_a_complete_plan_of_another_method_or_decoder_is_refused(tokens: Path, tmp_path: Path):
    out = tmp_path / "plan.safetensors"
    chosen = {"out": out, "method": "magnitude", "seq_len": 16}
    plan = dispfx.api.learn_plan(MODEL, RATIO, tokens, **chosen)
    assert dispfx.api.learn_plan(MODEL, RATIO, tokens, **chosen, resume=True) == plan
    assert set(dispfx.Plan.load(out).made_from) == set(plan.made_from) != set()
    for model, changes, said in (
        (MODEL, {"method": "wanda"}, "another choice of settings"),
        (MODEL, {"skip": ["*.mlp"]}, "another choice of settings"),
        (OTHER, {}, "another decoder"),
    ):
        with pytest.raises(OutputError, match=f"was made from {said}\n"):
            dispfx.api.learn_plan(model, RATIO, tokens, **{**chosen, **changes}, resume=True)
    dispfx.Plan.random(dispfx.capture(build_decoder()), RATIO, 0).save(out)
    with pytest.raises(OutputError, match="does not say what it was made from"):
        dispfx.api.learn_plan(MODEL, RATIO, tokens, **chosen, resume=True)


def test_learning_goes_on_with_the_same_constants_only(tokens: Path, tmp_path: Path):
    class Impatient(Watcher):
        def learning(self, record: Any) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        dispfx.compile(plain_constant(), RATIO, tokens, **given(tmp_path / "out", observer=Impatient()))
    with pytest.raises(PlanMismatchError, match="the state to resume from was made for another decoder"):
        dispfx.compile(louder_constant(), RATIO, tokens, **given(tmp_path / "out", resume=True))


def trained(out: Path, **further: Any) -> dict[str, Any]:
    sizes = {"steps": 2, "seq_len": 16, "batch_size": 2, "eval_windows": 1}
    return {"out": out, **sizes, **further}


@pytest.mark.parametrize("train", ["weights", "scales"])
@pytest.mark.parametrize("form", ["buffer", "constant"])
def test_a_decoder_with_other_buffers_or_code_is_not_what_a_graph_was_compiled_from(
    tokens: Path, tmp_path: Path, train: str, form: str
):
    plain, louder = f"{HERE}:plain_{form}", f"{HERE}:louder_{form}"
    plan = dispfx.Plan.random(dispfx.capture(globals()[f"plain_{form}"]()), RATIO, 0)
    apply(plain, plan, out=tmp_path / "dir")
    with pytest.raises(PlanMismatchError, match=f"dir was not compiled from {louder}"):
        recover(tmp_path / "dir", **trained(tmp_path / "out", dense=louder, data=tokens, train=train))
    assert recover(tmp_path / "dir", **trained(tmp_path / "out", dense=plain, data=tokens, train=train))


def test_a_complete_recovery_of_other_text_or_fewer_steps_is_refused(tokens: Path, tmp_path: Path):
    texts, out = tmp_path / "t.safetensors", tmp_path / "out"
    shutil.copy(tokens, texts)
    apply(MODEL, dispfx.Plan.random(dispfx.capture(build_decoder()), RATIO, 0), out=tmp_path / "dir")
    told = recover(tmp_path / "dir", **trained(out, dense=MODEL, data=texts))
    assert recover(tmp_path / "dir", **trained(out, dense=MODEL, data=texts, resume=True)) == told
    for changes in ({"steps": None}, {"patience": 1}, {"eval_windows": 2}):
        with pytest.raises(OutputError, match=r"other settings|another choice of settings\n"):
            recover(tmp_path / "dir", **trained(out, dense=MODEL, data=texts, resume=True, **changes))
    save_file({"tokens": random_tokens(seed=5)}, texts)
    with pytest.raises(OutputError, match="was made from another text to learn from"):
        recover(tmp_path / "dir", **trained(out, dense=MODEL, data=texts, resume=True))


def test_predictions_are_compared_with_the_decoder_that_a_folder_was_compiled_from(
    compiled: Compiled, tokens: Path
):
    assert agree(compiled.path, dense=MODEL, eval_data=tokens, eval_windows=1).tokens > 0
    with pytest.raises(PlanMismatchError, match="was compiled from a decoder with other weights"):
        agree(compiled.path, dense=OTHER, eval_data=tokens, eval_windows=1)


def test_predictions_are_not_compared_with_a_decoder_of_another_config(tokens: Path, tmp_path: Path):
    torch.manual_seed(0)
    sizes: Any = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    LlamaForCausalLM(LlamaConfig(vocab_size=61, max_position_embeddings=64, **sizes)).save_pretrained(
        tmp_path / "dense"
    )
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    plan = dispfx.Plan.random(dispfx.capture(model), RATIO, 0)
    apply(str(tmp_path / "dense"), plan, out=tmp_path / "out", export="none")
    words: dict[str, Any] = {"dense": str(tmp_path / "dense"), "eval_data": tokens, "eval_windows": 1}
    assert agree(tmp_path / "out", **words).tokens > 0
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(PlanMismatchError, match="has another rms_norm_eps than that of the dense decoder"):
        agree(tmp_path / "out", **words)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo, pruned at random."""
    out = tmp_path_factory.mktemp("demo") / "out"
    plan = dispfx.Plan.random(dispfx.capture(AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)), RATIO, 0)
    apply("demo", plan, out=out, export="none", eval_windows=1)
    return out


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(generate_text(3, 20_000), encoding="utf-8")
    return path


def changed_demo(folder: Path, file: str, change: Callable[[dict[str, Any]], None]) -> Path:
    """Return a copy of the demo's folder with another JSON file."""
    shutil.copytree(DECODER_FOLDER, folder)
    content = json.loads((folder / file).read_text(encoding="utf-8"))
    change(content)
    (folder / file).write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.mark.parametrize("train", ["weights", "lora"])
def test_another_config_is_another_decoder(demo: Path, text: Path, tmp_path: Path, train: str):
    if train == "lora":
        pytest.importorskip("peft")
    dense = changed_demo(tmp_path / "dense", "config.json", lambda config: config.update(rms_norm_eps=0.5))
    with pytest.raises(PlanMismatchError, match=f"was not compiled from {dense}: its logits differ"):
        recover(demo, **trained(tmp_path / "out", dense=str(dense), data=str(text), train=train))
    assert not (tmp_path / "out").exists()


def test_another_tokenizer_reads_other_tokens(demo: Path, text: Path, tmp_path: Path):
    def permute(tokenizer: dict[str, Any]) -> None:
        vocabulary = tokenizer["model"]["vocab"]
        first, second = list(vocabulary)[-2:]
        common, other = " the" if " the" in vocabulary else "e", first
        vocabulary[common], vocabulary[other] = vocabulary[other], vocabulary[common]
        assert second != common

    dense = changed_demo(tmp_path / "dense", "tokenizer.json", permute)
    with pytest.raises(DataError, match="read a text as other tokens"):
        recover(demo, **trained(tmp_path / "out", dense=str(dense), data=str(text)))
    with pytest.raises(DataError, match="read a text as other tokens"):
        agree(str(demo), dense=str(dense), eval_data=str(text), eval_windows=1)
