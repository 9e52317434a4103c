"""A run whose sequences are longer than those for which the decoder's graph holds."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import MptConfig, MptForCausalLM, PretrainedConfig

import dispfx
from dispfx.api import apply, evaluate, learn_plan, load, recover
from dispfx.compiler.programs import analyse
from dispfx.deploy.exported import PROGRAM_FILE, load_program, save_graph
from dispfx.errors import CaptureError, DataError, DispfxError
from dispfx.ir.lengths import Lengths
from dispfx.plan.plan import Plan
from dispfx.report import load_report
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source.source import named_context
from tests.api.conftest import SETTINGS, Watcher, random_tokens
from tests.api.plain import build_decoder
from tests.learning_options import options_of
from tests.lengths_decoders import long_texts, scaled
from tests.programs import relative_error, token_ids

MODEL = "tests.lengths_decoders:long_texts"
IN_RANGE = replace(SETTINGS, seq_len=24)
LONGER = replace(SETTINGS, seq_len=32)


def compile_(out: Path, tokens: Path, settings: LearnSettings, **words):
    return dispfx.compile(MODEL, 0.3, out=out, data=tokens, align=1, **options_of(settings), **words)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return what a run within the range writes."""
    path = tmp_path_factory.mktemp("lengths")
    save_file({"tokens": random_tokens()}, path / "tokens.safetensors")
    compile_(path / "out", path / "tokens.safetensors", IN_RANGE)
    return path / "out"


@pytest.mark.parametrize("settings", [LONGER, replace(LearnSettings(), adaptable=("seq_len",))])
def test_a_run_beyond_the_range_is_refused_before_learning(
    tmp_path: Path, tokens: Path, settings: LearnSettings
):
    watcher = Watcher()
    with pytest.raises(CaptureError, match="arithmetic changes at 25 tokens, and a sequence has") as error:
        compile_(tmp_path / "out", tokens, settings, observer=watcher)
    assert error.value.exit_code == 2 and "lengths_decoders.py:" in str(error.value.where)
    assert "`seq_len=24`" in str(error.value.hint)
    assert not watcher.steps and not list(tmp_path.glob("out*"))


def test_a_run_within_the_range_is_verified_at_its_longest_sequence(folder: Path):
    report = load_report(folder / "report.json")
    assert report.lengths is not None and (report.lengths.least, report.lengths.most) == (1, 24)
    assert report.perplexity is not None and report.perplexity.protocol.context == 24
    at_the_longest = {line.name for line in report.verify if line.shape == (1, 24)}
    assert at_the_longest == {"captured = model", "lowered = zeroed", "reloaded = lowered"}
    assert json.loads((folder / "report.json").read_text())["lengths"]["end"] == "changes"


def test_a_plan_keeps_the_range_and_an_older_plan_has_none(folder: Path, tmp_path: Path):
    plan = Plan.load(folder / "plan.safetensors")
    assert plan.lengths == Lengths(1, 24, "changes")
    replace(plan, lengths=None).save(tmp_path / "older.safetensors")
    assert Plan.load(tmp_path / "older.safetensors").lengths is None
    replace(plan, lengths=Lengths(5, 4)).save(tmp_path / "impossible.safetensors")
    with pytest.raises(DataError, match="range of lengths is impossible"):
        Plan.load(tmp_path / "impossible.safetensors")


def test_a_loaded_graph_raises_beyond_the_range_and_is_right_within_it(folder: Path):
    program = analyse(long_texts())
    plan = Plan.load(folder / "plan.safetensors")
    for decoder in (load(folder), dispfx.lower(program, plan), dispfx.gated(program, plan)):
        assert (
            relative_error(decoder(token_ids(1, 24)), dispfx.gated(program, plan)(token_ids(1, 24))) <= 1e-5
        )
        with pytest.raises(CaptureError, match="arithmetic changes at 25 tokens"):
            decoder(token_ids(1, 25))


def test_an_exported_program_raises_beyond_the_range_for_torch_alone_too(folder: Path):
    decoder = torch.export.load(folder / PROGRAM_FILE).module()
    plan = Plan.load(folder / "plan.safetensors")
    ids = token_ids(1, 24)
    assert relative_error(decoder(ids), dispfx.gated(analyse(long_texts()), plan)(ids)) <= 1e-5
    with pytest.raises((RuntimeError, AssertionError), match="<= 24"):
        decoder(token_ids(1, 25))


def test_a_program_whose_decoder_computes_one_token_otherwise_rejects_it_in_every_loader(tmp_path: Path):
    program = analyse(scaled(lambda tokens, x: 2 * x if tokens == 1 else x))
    assert program.lengths.least == 2
    lowered = dispfx.lower(program, Plan.random(program, 0.3, 0))
    save_graph(lowered, tmp_path)
    for decoder in (torch.export.load(tmp_path / PROGRAM_FILE).module(), load_program(tmp_path)):
        assert relative_error(decoder(token_ids(1, 2)), lowered(token_ids(1, 2))) <= 1e-6
        with pytest.raises(RuntimeError, match="2 tokens or more"):
            decoder(token_ids(1, 1))


def in_chunks_of_eight(tokens: int, x: Tensor) -> Tensor:
    """Mix each eight tokens, of which the last eight are filled up with zeros."""
    chunks = F.pad(x, (0, 0, 0, -tokens % 8)).unfold(1, 8, 8)
    return x + chunks.mean(-1).repeat_interleave(8, 1)[:, :tokens]


def last_twenty(tokens: int, x: Tensor) -> Tensor:
    """Add the last twenty tokens to themselves."""
    some = min(tokens, 20)
    return x + torch.cat((torch.zeros_like(x[:, :-some]), x[:, -some:]), 1)


@pytest.mark.parametrize("mix", [in_chunks_of_eight, last_twenty])
def test_an_exported_program_holds_at_lengths_that_sizes_of_the_decoder_divide(
    mix: Callable[[int, Tensor], Tensor], tmp_path: Path
):
    program = analyse(scaled(mix))
    lowered = dispfx.lower(program, Plan.random(program, 0.3, 0))
    save_graph(lowered, tmp_path)
    loaded = load_program(tmp_path)
    for tokens in (8, 9, 16, 20, 40):
        ids = token_ids(1, tokens)
        assert relative_error(loaded(ids), lowered(ids)) <= 1e-6, tokens


def test_windows_beyond_the_range_are_not_measured(folder: Path, tokens: Path):
    evaluate(str(folder), eval_data=tokens, context=24, eval_windows=2)
    with pytest.raises(DataError, match="arithmetic changes at 25 tokens"):
        evaluate(str(folder), eval_data=tokens, context=32, eval_windows=2)


def test_a_plan_is_applied_and_measured_within_the_range(folder: Path, tokens: Path, tmp_path: Path):
    report = apply(MODEL, folder / "plan.safetensors", out=tmp_path / "out", eval_data=tokens, eval_windows=2)
    assert report.perplexity is not None and report.perplexity.protocol.context == 24


def test_an_onnx_model_that_could_not_refuse_long_texts_is_not_written(tmp_path: Path, tokens: Path):
    with pytest.raises(CaptureError, match="an ONNX model would be wrong beyond 24 tokens"):
        compile_(tmp_path / "out", tokens, IN_RANGE, export="onnx")
    assert not list(tmp_path.glob("out*"))


def test_an_onnx_model_that_could_not_refuse_a_single_token_is_not_written(tmp_path: Path, tokens: Path):
    model = scaled(lambda tokens, x: 2 * x if tokens == 1 else x)
    with pytest.raises(CaptureError, match="an ONNX model would be wrong below 2 tokens"):
        dispfx.compile(
            model, 0.3, out=tmp_path / "out", data=tokens, align=1, **options_of(IN_RANGE), export="onnx"
        )
    assert not list(tmp_path.glob("out*"))


def test_learning_from_a_captured_program_asks_for_the_range_too():
    with pytest.raises(DispfxError, match="arithmetic changes at 25 tokens, and a sequence has 32"):
        dispfx.learn(analyse(long_texts()), random_tokens(), 0.3, settings=LONGER)


def mpt(**words) -> MptForCausalLM:
    """Return a decoder whose attention raises beyond a length that its config calls `max_seq_len`."""
    torch.manual_seed(0)
    config = MptConfig(d_model=32, n_heads=4, n_layers=2, vocab_size=64, max_seq_len=40)
    config.update(words)
    return MptForCausalLM(config).eval()


class Unnamed(nn.Module):
    """A decoder with a limit that nothing names."""

    def __init__(self):
        super().__init__()
        self.decoder = mpt()

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids, use_cache=False).logits


def config_with(**entries: Any) -> PretrainedConfig:
    """Return a config whose class names no length."""
    return PretrainedConfig(**entries)


@pytest.mark.parametrize(("name", "value"), [("max_seq_len", 40), ("n_ctx", 7), ("max_target_positions", 9)])
def test_the_context_is_found_under_every_name_that_configs_have(name: str, value: int):
    assert named_context(config_with(**{name: value})) == value
    assert named_context(config_with(**{name: value}, max_position_embeddings=5)) == 5
    for wrong in (True, 1, "40", None):
        assert named_context(config_with(**{name: wrong})) is None


@pytest.mark.parametrize("build", [mpt, Unnamed])
def test_a_decoder_that_raises_beyond_a_length_is_compiled_and_measured_within_it(
    tmp_path: Path, tokens: Path, build: Callable[[], nn.Module]
):
    text, watcher = tokens, Watcher()
    report = dispfx.compile(
        build(), 0.3, out=tmp_path / "out", data=text, method="magnitude", align=1, export="none",
        eval_data=text, eval_windows=2, observer=watcher, batch_size=2,
    )  # fmt: skip
    assert report.perplexity is not None and report.perplexity.protocol.context == 40
    assert any("× 40 tokens" in note for note in watcher.notes)
    found = evaluate(str(tmp_path / "out"), eval_data=text, eval_windows=2)
    assert found.protocol["context"] == 40
    again = apply(build(), tmp_path / "out" / "plan.safetensors", out=tmp_path / "two", eval_data=text)
    assert again.perplexity is not None and again.perplexity.protocol.context == 40


def test_a_sequence_that_the_decoder_does_not_run_on_is_refused_with_the_longest(
    tmp_path: Path, tokens: Path
):
    with pytest.raises(DataError, match="reads at most 40 tokens, and a sequence has 64") as error:
        dispfx.compile(Unnamed(), 0.3, out=tmp_path / "out", data=tokens, method="magnitude", seq_len=64)
    assert "`seq_len=40`" in str(error.value.hint) and not list(tmp_path.glob("out*"))


def test_a_decoder_without_a_named_length_is_recovered_within_it(tmp_path: Path, tokens: Path):
    words: dict[str, Any] = {"data": tokens, "eval_data": tokens, "eval_windows": 1, "batch_size": 2}
    dispfx.compile(Unnamed(), 0.3, out=tmp_path / "out", method="magnitude", align=1, export="none", **words)
    told = recover(
        tmp_path / "out", dense=Unnamed(), out=tmp_path / "again", train="scales", steps=1, **words
    )
    assert told.protocol.context == 40


class Switching(nn.Module):
    """A decoder of which `torch.export` notes nothing where its logits change."""

    def __init__(self, factor: Callable[[int], float], context: int | None = None):
        super().__init__()
        self.decoder, self.factor = build_decoder(), factor
        if context is not None:
            self.config = PretrainedConfig.from_dict({"max_position_embeddings": context})

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(ids) * self.factor(ids.shape[1])


def eagerly_beyond_24(tokens: int) -> float:
    return 2.0 if not torch.compiler.is_compiling() and tokens > 24 else 1.0


def every_eighth_beyond_50(tokens: int) -> float:
    return 2.0 if tokens % 8 == 0 and tokens > 50 else 1.0


def eagerly_from_25_to_30(tokens: int) -> float:
    return 2.0 if not torch.compiler.is_compiling() and 25 <= tokens <= 30 else 1.0


@pytest.mark.parametrize("verb", ["compile", "learn", "apply"])
def test_graph_and_decoder_are_compared_beyond_the_lengths_of_a_run(verb: str, tmp_path: Path, tokens: Path):
    words: dict[str, Any] = {"method": "magnitude", "seq_len": 16}
    changing, out = Switching(eagerly_beyond_24), tmp_path / "out"
    with pytest.raises(CaptureError, match="tokens it differs"):
        if verb == "compile":
            dispfx.compile(changing, 0.3, tokens, out, **words)
        elif verb == "learn":
            learn_plan(changing, 0.3, tokens, tmp_path / "plan.safetensors", **words)
        else:
            plan = Plan.random(analyse(Switching(lambda tokens: 1.0)), 0.3, 0)
            apply(changing, plan, out=out)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob("plan*"))


@pytest.mark.parametrize(("factor", "at"), [(every_eighth_beyond_50, 56), (eagerly_from_25_to_30, 29)])
def test_lengths_between_those_of_the_run_and_the_claimed_one_are_compared_too(
    factor: Callable[[int], float], at: int, tmp_path: Path, tokens: Path
):
    words: dict[str, Any] = {"method": "magnitude", "seq_len": 16}
    with pytest.raises(CaptureError, match=rf"at \(1, {at}\) tokens it differs"):
        dispfx.compile(Switching(factor, context=60), 0.3, tokens, tmp_path / "out", **words)
