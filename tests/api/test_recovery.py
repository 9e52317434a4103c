"""recover: by scales, weights and adapters; a folder like any other, nearer to the dense decoder."""

import json
import os
import shutil
import signal
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

import dispfx
from dispfx.api import agree, apply, evaluate, export, recover, verify
from dispfx.capturing.module_capture import module_logits
from dispfx.demo import DECODER_FOLDER
from dispfx.demo.grammar import generate_text
from dispfx.deploy.digests import digests
from dispfx.deploy.exported import save_graph
from dispfx.errors import DataError, DispfxError, OutputError, PlanMismatchError, SourceError
from dispfx.learning.state import saved_step
from dispfx.quality.agreement import Comparison, compare_on_text
from dispfx.report import Report, Tuning, load_report, save_report
from dispfx.run.plan_learning import DRAFT, RECOVERY, held_state
from dispfx.settings.recovery_settings import RecoverySettings
from tests.api.conftest import MODEL, RATIO, Watcher
from tests.api.plain import another_decoder, build_decoder
from tests.programs import relative_error, token_ids
from tests.pruned_modules import writers

SETTINGS = RecoverySettings(lr=3e-3, steps=8, batch_size=4, seq_len=48, measure_every=4)
QUICK = RecoverySettings(lr=1e-3, steps=12, batch_size=2, seq_len=16, measure_every=3)
IDS = token_ids(2, 7, vocabulary=90)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(generate_text(3, 20_000), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def pruned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("pruned") / "demo"
    model = AutoModelForCausalLM.from_pretrained(DECODER_FOLDER)
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, 0)
    apply("demo", plan, out=out, export="none", eval_windows=1)
    return out


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other") / "other.txt"
    path.write_text(generate_text(4, 3_000), encoding="utf-8")
    return path


def words(text: Path, out: Path, settings: RecoverySettings = SETTINGS, **further: Any) -> dict[str, Any]:
    """Return the arguments of a recovery of the demo."""
    return {"dense": "demo", "data": str(text), "out": out, **asdict(settings), "eval_windows": 1, **further}


@pytest.fixture(scope="module", params=["weights", "scales", "lora"])
def recovered(
    request: pytest.FixtureRequest,
    pruned: Path,
    text: Path,
    other: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Tuning]:
    out = tmp_path_factory.mktemp(request.param) / "out"
    lr = {"weights": 3e-3, "scales": 3e-2, "lora": 1e-2}[request.param]
    settings = replace(SETTINGS, train=request.param, lr=lr)
    return out, recover(pruned, **words(text, out, settings, merge=True, eval_data=[str(other)] * 2))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_a_recovered_folder_is_nearer_to_the_dense_decoder_and_verifies(
    recovered: tuple[Path, Tuning], pruned: Path, other: Path
):
    out, told = recovered
    assert told.kept and told.kl_after < told.kl_before
    first, _, last = told.held_out
    assert last.kl < (0.9 if told.train == "scales" else 0.6) * first.kl and (first.step, last.step) == (0, 8)
    behaviour = load_report(out / "report.json").behaviour
    assert (told.kl_after, told.kl_text) == (behaviour[-1].kl, behaviour[-1].text)
    by_hand = [
        agree(folder, dense="demo", eval_data=str(other), eval_windows=1).kl_nats for folder in (pruned, out)
    ]
    assert [told.kl_before, behaviour[0].kl] == pytest.approx(by_hand, rel=1e-4)
    protocol: dict[str, Any] = {"eval_windows": 1, "context": told.protocol.context}
    values = [evaluate(str(folder), eval_data=str(other), **protocol).value for folder in (pruned, out)]
    assert [told.before, told.after] == pytest.approx(values, rel=1e-5)
    lines = verify(out)
    assert lines and all(line.holds for line in lines)


def test_sizes_files_plan_and_the_proof_of_the_cut_stay(recovered: tuple[Path, Tuning], pruned: Path):
    out, told = recovered
    report, was = load_report(out / "report.json"), load_report(pruned / "report.json")
    assert report.tuned == told and was.tuned is None
    assert (report.parameters, report.bytes, report.sites) == (was.parameters, was.bytes, was.sites)
    assert (out / "plan.safetensors").read_bytes() == (pruned / "plan.safetensors").read_bytes()
    names, before = ({line.name for line in one.verify} for one in (report, was))
    cut = {"captured = model", "identity", "lowered = gated", "lowered = zeroed", "removed is unread"}
    assert cut <= names & before and "reloaded = modules" not in names
    own = {"weights": set(), "scales": {"folded = scaled"}, "lora": {"merged = adapters"}}[told.train]
    assert names - before == {"reloaded = recovered", "gather-add = checkpoint"} | own
    assert report.perplexity is not None and report.perplexity.pruned == told.after
    assert report.behaviour[-1].kl == told.kl_after != was.behaviour[-1].kl
    assert set(report.skills) == set(was.skills) != set()
    files = {file.name for file in out.iterdir()} - {file.name for file in pruned.iterdir()}
    assert files == {"recovery.json"}
    for file in ("report.html", "README.md"):
        assert "KL to the dense decoder" in (out / file).read_text(encoding="utf-8"), file
    shapes = [
        {name: one.shape for name, one in load_file(folder / "model.safetensors").items()}
        for folder in (out, pruned)
    ]
    assert shapes[0] == shapes[1]


def test_what_was_pruned_is_zero_to_the_bit_after_recovery(recovered: tuple[Path, Tuning], pruned: Path):
    model: Any = AutoModelForCausalLM.from_pretrained(recovered[0])
    before = dict(AutoModelForCausalLM.from_pretrained(pruned).named_parameters())
    changed = [name for name, one in model.named_parameters() if not torch.equal(one, before[name])]
    assert len(changed) > 10, "the weights were trained"
    seen = []

    for module, gone in writers(model):

        def look(module: Any, inputs: Any, output: torch.Tensor, gone: torch.Tensor = gone) -> None:
            seen.append(int(gone.sum()))
            assert not output[..., gone].any()

        module.register_forward_hook(look)
    model(IDS)
    assert seen and sum(seen) > 0


def test_scales_change_weights_by_factors_alone(pruned: Path, text: Path, tmp_path: Path):
    """One number per feature: rows or columns of a weight are those of before, times a number."""
    settings = replace(SETTINGS, train="scales", lr=0.05)
    told = recover(pruned, **words(text, tmp_path / "out", settings))
    old, new = (load_file(folder / "model.safetensors") for folder in (pruned, tmp_path / "out"))
    assert told.parameters == sum(site.kept for site in load_report(pruned / "report.json").sites)
    assert torch.equal(old["model.embed_tokens.weight"], new["model.embed_tokens.weight"])
    name = "model.layers.1.self_attn.q_proj.weight"
    ratio = (new[name] / old[name]).double()
    columns = ratio[:, old[name].abs().min(0).values > 1e-4]
    assert columns.shape[1] > 10 and not torch.allclose(columns, torch.ones_like(columns), atol=1e-3)
    torch.testing.assert_close(columns, columns[:1].expand_as(columns), rtol=1e-3, atol=1e-3)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_are_written_for_peft(pruned: Path, text: Path, tmp_path: Path):
    from peft import PeftModel

    watcher = Watcher()
    settings = replace(SETTINGS, train="lora", rank=4, alpha=8.0, lr=1e-2)
    told = recover(pruned, **words(text, tmp_path / "out", settings), observer=watcher)
    assert told.kl_after < told.kl_before and told.protocol.held_out_share == 0.1
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "recovery.json", "README.md",
    }  # fmt: skip
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert told.parameters == sum(tensor.numel() for tensor in stored.values())
    base = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert base == str(pruned)
    record = json.loads((tmp_path / "out" / "recovery.json").read_text())
    assert [line["step"] for line in record["log"]] == list(range(1, 9)) and record["after"] == told.after
    assert watcher.stages == ["open", "capture", "open", "measure", "recover", "measure"]

    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(pruned), tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(pruned)
    assert not torch.equal(module_logits(model.eval(), IDS), module_logits(plain, IDS))


class Stopped(Watcher):
    """Interrupts a run when a step is shown, once or several times."""

    def __init__(self, *steps: int):
        super().__init__()
        self.at = list(steps)

    def working(self, name: str, done: int, total: int, figures: str) -> None:
        if name == "recovering" and self.at and done == self.at[0]:
            self.at.pop(0)
            os.kill(os.getpid(), signal.SIGTERM if self.at else signal.SIGINT)


def test_weights_of_another_run_are_neither_recovered_nor_exported(pruned: Path, text: Path, tmp_path: Path):
    mixed = tmp_path / "mixed"
    shutil.copytree(pruned, mixed)
    tensors = load_file(mixed / "model.safetensors")
    doubled = {name: 2 * one if one.is_floating_point() else one for name, one in tensors.items()}
    save_file(doubled, mixed / "model.safetensors", {"format": "pt"})
    for run in (
        lambda: recover(mixed, **words(text, tmp_path / "out")),
        lambda: export(mixed, onnx=True),
    ):
        with pytest.raises(OutputError, match=r"model\.safetensors: missing, or changed"):
            run()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mixed"]
    assert not (mixed / "onnx").exists()


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned module that transformers does not know: a graph alone."""
    out = tmp_path_factory.mktemp("graph") / "out"
    apply(MODEL, dispfx.Plan.random(dispfx.capture(build_decoder()), 0.3, 0), out=out)
    return out


@pytest.mark.parametrize("train", ["weights", "scales"])
def test_a_module_without_a_class_of_transformers_recovers_and_goes_on_to_the_same_bits(
    train: Any, graph: Path, tokens: Path, tmp_path: Path
):
    lr = {"weights": 1e-3, "scales": 1e-2}[train]
    given: dict[str, Any] = words(tokens, tmp_path / "whole", replace(QUICK, train=train, lr=lr), dense=MODEL)
    told = recover(graph, **given)
    assert told.kept and told.kl_after < told.kl_before
    assert all(line.holds for line in verify(tmp_path / "whole"))
    out, state = tmp_path / "out", tmp_path / "out.state"
    for stop, said in ((1, "no state in"), (5, "going on at step 1")):
        watcher = Stopped(stop)
        with pytest.raises(KeyboardInterrupt):
            again: dict[str, Any] = {**given, "out": out, "resume": True, "observer": watcher}
            recover(graph, **again)
        assert saved_step(state) == stop and not out.exists()
        assert any(said in note for note in watcher.notes)
    given["out"] = out
    with pytest.raises(OutputError, match="an unfinished run left its state"):
        recover(graph, **given)
    assert recover(graph, **given, resume=True) == told
    assert not state.exists()
    decoders = [dispfx.load(folder) for folder in (out, tmp_path / "whole", graph)]
    ids = token_ids(2, 9)
    first, second, before = (one(ids) for one in decoders)
    assert torch.equal(first, second) and relative_error(first, before) > 1e-4

    watcher = Watcher()
    assert recover(graph, **{**given, "out": out, "resume": True, "observer": watcher}) == told
    assert watcher.notes[-1] == f"{out} is complete; there is nothing to do"
    assert not {"measure", "recover"} & {*watcher.stages}


def test_sequences_beyond_the_table_of_positions_and_ranks_beyond_all_widths_are_refused(
    pruned: Path, graph: Path, text: Path, tokens: Path, tmp_path: Path
):
    arguments = words(text, tmp_path / "out")
    with pytest.raises(DispfxError, match="no layer has room for adapters of rank 100,000"):
        recover(pruned, **{**arguments, "train": "lora", "rank": 100_000, "stream_weight": None})
    with pytest.raises(DataError, match="table of positions ends after 64"):
        recover(graph, **words(tokens, tmp_path / "out", replace(QUICK, seq_len=65), dense=MODEL))
    assert not (tmp_path / "out").exists()


def test_two_recoveries_into_one_output_do_not_meet(graph: Path, tokens: Path, tmp_path: Path):
    with (
        held_state(tmp_path / "out", resume=False),
        pytest.raises(OutputError, match="another run is at work"),
    ):
        recover(graph, **words(tokens, tmp_path / "out", QUICK, dense=MODEL))
    assert not list(tmp_path.iterdir())


def test_weights_that_got_worse_are_not_kept(graph: Path, tokens: Path, tmp_path: Path, monkeypatch: Any):
    """Held-out KL may fall where that of the second text rises."""
    values = iter([0.5, 0.7, 0.5])  # before, of what was trained, and of what was written

    def compared(*given: Any, **options: Any) -> Comparison:
        found = compare_on_text(*given, **options)
        return replace(found, agreement=replace(found.agreement, kl_nats=next(values)))

    monkeypatch.setattr("dispfx.run.run_text.compare_on_text", compared)
    watcher = Watcher()
    told = recover(graph, **words(tokens, tmp_path / "out", QUICK, dense=MODEL), observer=watcher)
    assert not told.kept and told.kl_before == told.kl_after == 0.5
    assert any(
        "recovery did not help: KL on" in note and "0.5000 and became 0.7000" in note
        for note in watcher.notes
    )
    ids = token_ids(2, 9)
    assert torch.equal(dispfx.load(tmp_path / "out")(ids), dispfx.load(graph)(ids))
    assert "left as they were" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_that_got_worse_are_written_as_new_ones(
    pruned: Path, text: Path, tmp_path: Path, monkeypatch: Any
):
    values = count(50)

    def compared(*given: Any, **options: Any) -> Comparison:
        found = compare_on_text(*given, **options)
        return replace(found, agreement=replace(found.agreement, kl_nats=float(next(values))))

    monkeypatch.setattr("dispfx.run.run_text.compare_on_text", compared)
    told = recover(pruned, **words(text, tmp_path / "out", replace(SETTINGS, train="lora", rank=4, lr=1e-2)))
    assert not told.kept
    stored = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert stored and not any(tensor.any() for name, tensor in stored.items() if "lora_B" in name)
    assert "left as they were" in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")


def test_chat_templates_of_a_tokenizer_stay(pruned: Path, text: Path, tmp_path: Path):
    base = tmp_path / "base"
    shutil.copytree(pruned, base)
    (base / "additional_chat_templates").mkdir()
    (base / "additional_chat_templates" / "tool.jinja").write_text("TOOL", encoding="utf-8")
    recover(base, **words(text, tmp_path / "out", replace(SETTINGS, steps=1, measure_every=1)))
    kept = tmp_path / "out" / "additional_chat_templates" / "tool.jinja"
    assert kept.read_text(encoding="utf-8") == "TOOL"


def test_a_recovered_folder_can_be_recovered_again(graph: Path, tokens: Path, tmp_path: Path):
    first = recover(graph, **words(tokens, tmp_path / "one", QUICK, dense=MODEL))
    again = recover(tmp_path / "one", **words(tokens, tmp_path / "two", QUICK, dense=MODEL))
    assert again.kl_before == pytest.approx(first.kl_after, rel=1e-4)


def test_too_short_a_text_another_decoder_and_a_graph_with_adapters_leave_nothing(
    graph: Path, tokens: Path, tmp_path: Path
):
    out = tmp_path / "out"
    with pytest.raises(DataError, match="table of positions ends after 64"):
        recover(graph, **words(tokens, out, replace(QUICK, seq_len=600), dense=MODEL))
    with pytest.raises(DataError, match="held-out text needs 64 tokens or more"):
        recover(graph, **words(tokens, out, replace(QUICK, seq_len=64), dense=MODEL))
    with pytest.raises(PlanMismatchError, match="made for a decoder with fingerprint"):
        recover(graph, **words(tokens, out, QUICK, dense=MODEL.replace("build", "another")))
    with pytest.raises(OutputError, match="adapters need a folder that transformers loads"):
        recover(graph, **words(tokens, out, replace(QUICK, train="lora"), dense=MODEL))
    with pytest.raises(DispfxError, match=r"step \d is nan, and nothing was written"):
        recover(graph, **words(tokens, out, replace(QUICK, lr=1e30), dense=MODEL))
    assert not list(tmp_path.iterdir())


def compiled(tokens: Path, out: Path, **further: Any) -> Report:
    options: dict[str, Any] = {"steps": 3, "seq_len": 16, "batch_size": 2, "align": 1, "recover_steps": 5}
    return dispfx.compile(MODEL, RATIO, tokens, out, **options | further)


@pytest.mark.parametrize("kind", ["weights", "scales"])
def test_compile_recovers_at_the_end_and_goes_on_where_it_was(kind: str, tokens: Path, tmp_path: Path):
    watcher = Watcher()
    report = compiled(tokens, tmp_path / "whole", recover=kind, observer=watcher)
    told = report.tuned
    assert told is not None and told.train == kind and told.base == MODEL and told.steps == 5
    assert told.kl_after <= told.kl_before and watcher.reports == [report]
    assert told.seq_len == 60, "the held-out end has no more tokens"
    assert report.perplexity is not None and report.perplexity.pruned == told.after
    assert report.settings is not None and report.settings["afterwards"]["recover"] == kind
    assert not (tmp_path / "whole.state").exists()
    assert all(line.holds for line in verify(tmp_path / "whole"))

    state = tmp_path / "out.state"
    with pytest.raises(KeyboardInterrupt):
        compiled(tokens, tmp_path / "out", recover=kind, observer=Stopped(2))
    assert (state / DRAFT / "report.json").is_file() and saved_step(state / RECOVERY) == 2
    watcher = Watcher()
    again = compiled(tokens, tmp_path / "out", recover=kind, resume=True, observer=watcher)
    assert again.tuned == told and "going on at step 2" in watcher.notes
    assert watcher.steps == [] and "lower" not in watcher.stages, "neither learned nor written again"
    ids = token_ids(2, 9)
    assert torch.equal(dispfx.load(tmp_path / "out")(ids), dispfx.load(tmp_path / "whole")(ids))


def test_a_run_that_goes_on_with_other_texts_measures_both_decoders_on_these(tokens: Path, tmp_path: Path):
    texts = {name: tmp_path / f"{name}.safetensors" for name in ("one", "two")}
    for seed, path in enumerate(texts.values()):
        ids = torch.randint(60, (400,), generator=torch.Generator().manual_seed(seed))
        save_file({"tokens": ids}, path)
    whole = compiled(tokens, tmp_path / "whole", recover="weights", eval_data=texts["two"]).tuned
    with pytest.raises(KeyboardInterrupt):
        compiled(tokens, tmp_path / "out", recover="weights", eval_data=texts["one"], observer=Stopped(2))
    report = compiled(tokens, tmp_path / "out", recover="weights", eval_data=texts["two"], resume=True)
    assert whole is not None and report.tuned == whole
    assert report.settings is not None and report.settings["text"]["eval_data"] == str(texts["two"])
    again = compiled(tokens, tmp_path / "out", recover="weights", eval_data=texts["two"], resume=True)
    assert again == report, "complete, and made from what this run asks for"

    # The same name, and another text.
    with pytest.raises(KeyboardInterrupt):
        compiled(tokens, tmp_path / "same", recover="weights", eval_data=texts["one"], observer=Stopped(2))
    shutil.copy(texts["two"], texts["one"])
    found = compiled(tokens, tmp_path / "same", recover="weights", eval_data=texts["one"], resume=True).tuned
    assert found is not None
    assert (found.before, found.kl_before, found.kl_after) == pytest.approx(
        (whole.before, whole.kl_before, whole.kl_after), rel=1e-4
    )


def test_a_complete_folder_of_another_recovery_is_not_taken_for_this_one(
    graph: Path, tokens: Path, tmp_path: Path
):
    given = words(tokens, tmp_path / "out", QUICK, dense=MODEL)
    told = recover(graph, **given)
    assert recover(graph, **given, resume=True) == told
    for changed, said in (
        ({"lr": 2e-3}, "lr was 0.001 and is 0.002 now"),
        ({"train": "scales", "stream_weight": 0.0}, "train was weights and is scales now"),
        ({"dense": "demo"}, f"dense was {MODEL} and is demo now"),
    ):
        with pytest.raises(OutputError, match=f"was made with other settings: {said}"):
            recover(graph, **{**given, **changed}, resume=True)


def test_a_state_of_other_training_is_named_by_the_setting(graph: Path, tokens: Path, tmp_path: Path):
    given = words(tokens, tmp_path / "out", QUICK, dense=MODEL)
    with pytest.raises(KeyboardInterrupt):
        recover(graph, **given, observer=Stopped(2))
    with pytest.raises(DataError, match="train was 'weights' and is 'scales'"):
        recover(graph, **{**given, "train": "scales", "stream_weight": None}, resume=True)


def test_a_decoder_with_few_positions_is_recovered_in_shorter_windows(
    graph: Path, tokens: Path, tmp_path: Path
):
    long = tmp_path / "long.safetensors"
    save_file({"tokens": torch.randint(60, (3_000,), generator=torch.Generator().manual_seed(0))}, long)
    told = recover(graph, **words(tokens, tmp_path / "out", QUICK, dense=MODEL, eval_data=long))
    assert told.protocol.context == 64
    report = apply(MODEL, graph / "plan.safetensors", out=tmp_path / "again", eval_data=long, eval_windows=1)
    assert report.perplexity is not None and report.perplexity.protocol.context == 64


def test_forms_of_dense_weights_and_weights_in_parts_cannot_be_recovered(tokens: Path, tmp_path: Path):
    with pytest.raises(DispfxError, match="`recover` cannot be followed by `export='dense'`"):
        compiled(tokens, tmp_path / "out", recover="weights", export="dense")
    with pytest.raises(DispfxError, match="leave out `shard`"):
        settings = dispfx.api.RunSettings.of(
            model=MODEL, ratio=RATIO, out=tmp_path / "out", data=tokens, recover="scales", shard_on="cpu"
        )
        dispfx.api.run_compile(settings)
    assert not list(tmp_path.iterdir())


def test_the_onnx_model_of_a_recovered_decoder_is_made_of_its_own_weights(tokens: Path, tmp_path: Path):
    report = compiled(tokens, tmp_path / "out", recover="weights", export="onnx")
    names = {line.name for line in report.verify}
    assert any(name.startswith("onnx") for name in names) and (tmp_path / "out" / "onnx").is_dir()
    lines = verify(tmp_path / "out")
    assert any(line.name.startswith("onnx") for line in lines) and all(line.holds for line in lines)


def test_another_decoder_of_the_same_shapes_is_not_the_dense_one():
    assert dispfx.capture(another_decoder()).fingerprint != dispfx.capture(build_decoder()).fingerprint


class Gate(nn.Module):
    """A decoder with one more factor: the root of a weight that is zero has no finite gradient."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder, self.gate = decoder, nn.Parameter(torch.zeros(()))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(ids) * (1 + self.gate.abs().sqrt())


@pytest.mark.parametrize("kind", ["weights", "scales"])
def test_a_gradient_of_recovery_that_is_infinite_is_found_before_learning(
    kind: str, tokens: Path, tmp_path: Path
):
    watcher = Watcher()
    options: dict[str, Any] = {"steps": 3, "seq_len": 16, "batch_size": 2, "align": 1, "recover": kind}
    model = Gate(build_decoder()).eval()
    required = [one.requires_grad for one in model.parameters()]
    if kind == "weights":
        with pytest.raises(DispfxError, match=r"recovery needs finite gradients(.|\n)*gate"):
            dispfx.compile(model, RATIO, tokens, tmp_path / "out", **options, observer=watcher)
        assert not watcher.steps and not list(tmp_path.iterdir())
    else:  # the gate itself is not trained
        dispfx.compile(model, RATIO, tokens, tmp_path / "out", **options, recover_steps=2)
    assert required == [one.requires_grad for one in model.parameters()]


def test_a_preview_names_the_sequences_that_recovery_takes(tokens: Path, tmp_path: Path):
    settings = dispfx.api.RunSettings.of(
        model=MODEL, ratio=RATIO, out=tmp_path / "out", data=tokens, recover="weights", seq_len=16, align=1
    )
    recovery = dispfx.api.preview(settings).recovery
    assert recovery is not None and recovery.seq_len == 60, "the held-out end has no more tokens"


def test_an_embedding_with_sparse_gradients_is_recovered(tokens: Path, tmp_path: Path):
    model = build_decoder()
    next(one for one in model.modules() if isinstance(one, nn.Embedding)).sparse = True
    options: dict[str, Any] = {"steps": 3, "seq_len": 16, "batch_size": 2, "align": 1}
    report = dispfx.compile(
        model, RATIO, tokens, tmp_path / "out", recover="weights", recover_steps=2, **options
    )
    assert report.tuned is not None and all(line.holds for line in report.verify)


def test_what_fails_in_recovery_after_learning_names_the_way_to_the_pruned_decoder(
    tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*given: Any) -> None:
        raise DispfxError("no")

    monkeypatch.setattr("dispfx.api.compilation.recover_folder", fails)
    with pytest.raises(DispfxError, match="`recover='none'` writes the pruned decoder without recovery"):
        compiled(tokens, tmp_path / "out", recover="weights")
    assert compiled(tokens, tmp_path / "out", recover="none", recover_steps=None, resume=True).tuned is None


def test_a_folder_is_not_its_own_output_and_its_weights_are_finite(graph: Path, tokens: Path, tmp_path: Path):
    with pytest.raises(OutputError, match="cannot be written over the folder that it is made from"):
        recover(graph, **words(tokens, graph, QUICK, dense=MODEL))
    model = build_decoder()
    plan = dispfx.Plan.random(dispfx.capture(model), 0.3, 0)
    lowered = dispfx.lower(dispfx.capture(model), plan)
    path, weight = next((path, one) for path, one in lowered.named_parameters() if one.dim() == 2)
    with torch.no_grad():
        weight[0, 0] = torch.nan
    broken = tmp_path / "broken"
    shutil.copytree(graph, broken)
    save_graph(lowered, broken)
    report = load_report(broken / "report.json")
    save_report(replace(report, files=digests(broken)), broken / "report.json")
    with pytest.raises(SourceError, match="weights must be finite") as error:
        recover(broken, **words(tokens, tmp_path / "out", QUICK, dense=MODEL))
    assert error.value.where == path


def test_weights_that_leave_no_room_for_their_moments_are_refused(
    graph: Path, tokens: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("dispfx.run.preflight.free_bytes", lambda device: 1000)
    monkeypatch.setattr("dispfx.run.readiness.require_room_for_weights", lambda *given, **further: None)
    with pytest.raises(DispfxError, match=r"recovery takes .* weights, 16 bytes each; 0\.0 MB are free"):
        recover(graph, **words(tokens, tmp_path / "out", QUICK, dense=MODEL))
