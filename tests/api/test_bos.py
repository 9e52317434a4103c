"""The beginning-of-sequence token: where a tokenizer adds it, so do learning, measuring and generating."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import dispfx
from dispfx import api
from dispfx.errors import DataError, DispfxError
from dispfx.plan.plan import Plan
from dispfx.quality.perplexity import TextFacts, perplexity
from dispfx.report import load_report
from dispfx.run.run_text import TextChoice, open_text
from dispfx.settings import TextSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source import load_source
from tests.api.conftest import Watcher
from tests.learning_options import options_of
from tests.source.byte_tokenizer import byte_tokenizer

BOS = 256
SETTINGS = LearnSettings(steps=2, seq_len=16, batch_size=2, save_every=1)
TEXT = "some text to learn from and to measure on\n" * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose tokenizer begins every text with token 256."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("begun")
    config = LlamaConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        eos_token_id=10,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    byte_tokenizer(bos=True).save_pretrained(path)
    (path / "text.txt").write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def compiled(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Watcher]:
    out, watcher = tmp_path_factory.mktemp("compiled") / "out", Watcher()
    dispfx.compile(
        str(folder), 0.2, folder / "text.txt", out, **options_of(SETTINGS), align=1, observer=watcher
    )
    return out, watcher


def texts(data: Any, **others: Any) -> TextChoice:
    return TextChoice(TextSettings(data, **others))


def ids_of(text: str) -> Tensor:
    return torch.tensor(byte_tokenizer()([text])["input_ids"][0])


def test_every_sequence_to_learn_from_begins_with_it(folder: Path):
    source = load_source(str(folder))
    text = open_text(source, texts(folder / "text.txt"))
    batches = text.batches(SETTINGS)
    for ids_BT in [*(batches.batch(index) for index in range(8)), *batches.held_out_batches(8)]:
        assert ids_BT.shape[1] == 16 and ids_BT[:, 0].tolist() == [BOS] * len(ids_BT)
        assert not bool((ids_BT[:, 1:] == BOS).any())
    weighted = texts([folder / "text.txt"] * 2, data_weight=[1, 2])
    assert open_text(source, weighted).batches(SETTINGS).batch(0)[:, 0].tolist() == [BOS] * 2
    assert open_text(source, texts(folder / "text.txt", bos="off")).bos == ()


def test_every_process_of_a_run_cuts_the_same_sequences(folder: Path):
    source = load_source(str(folder))
    one, two = (open_text(source, texts(folder / "text.txt")).batches(SETTINGS) for _ in range(2))
    assert one.digest == two.digest and one.digest.endswith(f"each sequence after token {BOS}")
    assert torch.equal(one.batch(3), two.batch(3))


def test_documents_that_are_kept_apart_begin_with_it(folder: Path):
    source = load_source(str(folder))
    chosen = texts(folder / "text.txt").of_documents(source, ord("\n"))
    newline = int(ids_of("\n")[0])
    ids_T = (
        open_text(source, replace(texts(folder / "text.txt"), separator=newline))
        .batches(LearnSettings(seq_len=64, batch_size=1))
        .batch(0)[0]
    )
    ends = (ids_T[:-1] == newline).nonzero().flatten()
    assert len(ends) > 0 and ids_T[ends + 1].tolist() == [BOS] * len(ends)
    assert chosen.separator == ord("\n")


def test_report_and_plan_say_what_sequences_began_with(compiled: tuple[Path, Watcher]):
    out, watcher = compiled
    report = load_report(out / "report.json")
    assert report.perplexity is not None and report.settings is not None
    assert report.perplexity.protocol.bos == (BOS,)
    assert report.settings["text"]["bos"] == "auto"
    # Every window of 64 tokens begins with it, and every token of the held-out text is predicted.
    assert report.perplexity.protocol.tokens == len(TEXT) // 10
    assert Plan.load(out / "plan.safetensors").bos == (BOS,)
    assert any("sequences begin with '<s>' (token 256)" in note for note in watcher.notes)
    assert "begins with token 256, which is not predicted" in (out / "README.md").read_text()


def test_perplexity_is_that_of_windows_which_begin_with_it(folder: Path, compiled: tuple[Path, Watcher]):
    for model in (folder, compiled[0]):
        measured: dict[Any, Any] = {
            bos: api.evaluate(str(model), eval_data=folder / "text.txt", context=32, bos=bos)
            for bos in ("auto", "on", "off")
        }
        assert measured["auto"] == measured["on"] != measured["off"]
        assert measured["auto"].protocol["bos"] == (BOS,) and measured["off"].protocol["bos"] == ()
        decoder = dispfx.load(model) if model != folder else load_source(str(folder)).model
        by_hand = perplexity(decoder, ids_of(TEXT), context=32, text=TextFacts("text.txt", None, (BOS,)))
        assert measured["auto"].value == by_hand.value
    alike = [
        api.agree(compiled[0], dense=str(folder), eval_data=folder / "text.txt", context=32, bos=bos)
        for bos in ("auto", "off")
    ]
    assert alike[0].tokens == len(TEXT) and alike[0].kl_nats != alike[1].kl_nats


def test_a_tokenizer_that_adds_none_changes_no_number(decoder_folder: Path, folder: Path):
    found = [
        api.evaluate(str(decoder_folder), eval_data=folder / "text.txt", context=32, bos=bos)
        for bos in ("auto", "off")
    ]
    assert found[0] == found[1] and found[0].protocol["bos"] == ()
    text = open_text(load_source(str(decoder_folder)), texts(folder / "text.txt"))
    assert text.bos == () and text.notes == () and "after" not in text.batches(SETTINGS).digest


def test_on_without_such_a_token_is_refused_by_every_command(
    decoder_folder: Path, folder: Path, tmp_path: Path
):
    text = folder / "text.txt"
    calls: list[Any] = [
        lambda: dispfx.compile(str(decoder_folder), 0.2, text, tmp_path / "a", bos="on"),
        lambda: api.learn_plan(str(decoder_folder), 0.2, text, tmp_path / "b", bos="on"),
        lambda: api.evaluate(str(decoder_folder), eval_data=text, bos="on"),
        lambda: api.generate(str(decoder_folder), "some", bos="on"),
    ]
    for call in calls:
        with pytest.raises(DataError, match="the tokenizer has no bos_token") as refusal:
            call()
        assert refusal.value.exit_code == 2
    with pytest.raises(DispfxError, match="`bos` must be auto or on or off, and 'yes' was given"):
        api.evaluate(str(decoder_folder), eval_data=text, bos="yes")  # type: ignore[arg-type]


def test_token_ids_are_taken_as_they_are_and_a_line_says_so(folder: Path, tmp_path: Path):
    source, ids = load_source(str(folder)), ids_of(TEXT).to(torch.int32)
    save_file({"tokens": ids}, tmp_path / "a.safetensors")
    for data in (tmp_path / "a.safetensors", ids, [folder / "text.txt", tmp_path / "a.safetensors"]):
        text = open_text(source, texts(data))
        assert text.bos == text.about.bos == ()
        assert text.notes == ("token ids are taken as they are: no beginning-of-sequence token is added",)
    text = open_text(source, texts(ids, eval_data=folder / "text.txt"))
    assert text.bos == () and text.about.bos == (BOS,) and len(text.notes) == 2
    asked = open_text(source, texts(ids, bos="on"))
    assert asked.bos == asked.about.bos == (BOS,)


def test_a_run_with_another_choice_is_not_resumed(folder: Path, tmp_path: Path):
    class Stopping(Watcher):
        def learning(self, record: Any) -> None:
            if record.step == 1:
                raise KeyboardInterrupt

    common: dict[str, Any] = dict(
        out=tmp_path / "p.safetensors", data=folder / "text.txt", **options_of(SETTINGS)
    )
    with pytest.raises(KeyboardInterrupt):
        api.learn_plan(str(folder), 0.2, **common, bos="off", observer=Stopping())
    with pytest.raises(DataError, match=f"and is .*, each sequence after token {BOS}"):
        api.learn_plan(str(folder), 0.2, **common, resume=True)
    plan = api.learn_plan(str(folder), 0.2, **common, bos="off", resume=True)
    assert plan.bos == Plan.load(tmp_path / "p.safetensors").bos == ()


def test_a_prompt_begins_with_it_once(folder: Path, monkeypatch):
    seen: list[list[int]] = []

    def continued(decoder: Any, ids: Tensor, **options: Any) -> Tensor:
        seen.append(ids[0].tolist())
        return torch.cat([ids, ids[:, -1:]], 1)

    monkeypatch.setattr("dispfx.api.commands.continue_ids", continued)
    some = ids_of("some").tolist()
    assert api.generate(str(folder), "some") == "e"
    api.generate(str(folder), "<s>some")
    api.generate(str(folder), "some", bos="off")
    assert seen == [[BOS, *some], [BOS, *some], some]


def test_a_decoder_is_recovered_from_the_same_sequences(
    folder: Path, compiled: tuple[Path, Watcher], tmp_path: Path, monkeypatch
):
    seen: list[Tensor] = []

    def stopped(task: Any, keeping: Any) -> None:
        seen.extend([task.text.batch(0), task.held_out[0]])
        raise KeyboardInterrupt

    monkeypatch.setattr("dispfx.run.recovered_folder.recover", stopped)
    settings: dict[str, Any] = {"steps": 1, "seq_len": 16, "batch_size": 2, "dense": str(folder)}
    with pytest.raises(KeyboardInterrupt):
        api.recover(compiled[0], data=folder / "text.txt", out=tmp_path / "t", **settings)
    assert seen[0][:, 0].tolist() == [BOS] * 2 and seen[1][:, 0].tolist() == [BOS]
