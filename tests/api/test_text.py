"""The text of a command: parts, weights, what is held out, and what is refused before all else."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import dispfx
from dispfx.api import evaluate
from dispfx.errors import DataError
from dispfx.learning.mixture import Mixture
from dispfx.learning.text import TokenBatches
from dispfx.quality.perplexity import TextFacts
from dispfx.run import run_text as command_text
from dispfx.run.run_text import TextChoice, open_text
from dispfx.settings import TextSettings
from dispfx.settings.learning_settings import LearnSettings
from dispfx.source import Source
from tests.api.conftest import MODEL, RATIO, SETTINGS, Watcher, random_tokens
from tests.api.plain import build_decoder
from tests.learning_options import options_of
from tests.source.byte_tokenizer import byte_tokenizer

CHOSEN = LearnSettings(steps=1, seq_len=4, batch_size=2)


@pytest.fixture
def source() -> Source:
    """A decoder that reads bytes; it is never run here."""
    return Source(torch.nn.Identity(), byte_tokenizer(), None, "bytes", "function")


def texts(data: Any, **others: Any) -> TextChoice:
    return TextChoice(TextSettings(data, **others))


def stored(path: Path, tokens: Tensor) -> Path:
    save_file({"tokens": tokens}, path)
    return path


def test_texts_without_weights_are_joined_and_their_last_tenth_is_held_out(source: Source, tmp_path: Path):
    a, b = (
        stored(tmp_path / "a.safetensors", torch.arange(60)),
        stored(tmp_path / "b.safetensors", torch.arange(40)),
    )
    text = open_text(source, texts([a, b]))
    assert [len(part) for part in text.learn] == [90] and text.measure is not None
    assert text.measure.tolist() == list(range(30, 40))
    assert text.about == TextFacts("a.safetensors, b.safetensors", 0.1)
    assert text.learned_name == "a.safetensors, b.safetensors"
    batches = text.batches(CHOSEN)
    assert isinstance(batches, TokenBatches) and batches.windows == 22


def test_a_text_too_short_to_measure_on_is_refused_with_what_it_has_and_needs(source: Source, tmp_path: Path):
    long = stored(tmp_path / "long.safetensors", torch.arange(60))
    short = stored(tmp_path / "short.safetensors", torch.arange(10))
    one = stored(tmp_path / "one.safetensors", torch.arange(1))
    tenth = "a text is measured on, so 20 tokens or more are needed, and it has 10 tokens"
    with pytest.raises(DataError, match=tenth):
        open_text(source, texts([short])).require_measurable()
    with pytest.raises(DataError, match="the text to measure on has 1 token, and 2 or more are needed"):
        open_text(source, texts([long], eval_data=one)).require_measurable()


def test_with_weights_the_last_tenth_of_each_text_is_held_out(source: Source, tmp_path: Path):
    a = stored(tmp_path / "a.safetensors", torch.arange(60))
    b = stored(tmp_path / "b.safetensors", torch.arange(100, 140))
    text = open_text(source, texts([a, b], data_weight=[2, 1]))
    assert [len(part) for part in text.learn] == [54, 36]
    assert text.measure is not None
    assert text.measure.tolist() == [*range(54, 60), *range(136, 140)]
    batches = text.batches(CHOSEN)
    assert isinstance(batches, Mixture)
    first = torch.cat([batches.batch(step) for step in range(30)])
    assert int((first[:, 0] >= 100).sum()) == 20 and text.about.held_out_share == 0.1
    assert [int(batch[0, 0]) for batch in batches.held_out_batches(8)] == [54, 136]


def test_with_another_text_to_measure_on_everything_is_learned_from(source: Source, tmp_path: Path):
    a, b = (
        stored(tmp_path / "a.safetensors", torch.arange(60)),
        stored(tmp_path / "b.safetensors", torch.arange(40)),
    )
    (tmp_path / "test.jsonl").write_text('{"body": "some text"}\n')
    chosen = texts([a, b], eval_data=tmp_path / "test.jsonl", data_weight=[1, 1], data_field="body")
    text = open_text(source, chosen)
    assert [len(part) for part in text.learn] == [60, 40] and text.about.held_out_share is None
    assert text.about.name == "test.jsonl" and text.learned_name == "a.safetensors, b.safetensors"
    batches = text.batches(CHOSEN)
    assert text.measure is not None
    assert torch.equal(batches.held_out_batches(1)[0][0], text.measure[:4].long())


def test_perplexity_is_measured_on_the_start_of_a_very_long_end(source: Source, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(command_text, "_MOST_MEASURED", 7)
    text = open_text(source, texts(stored(tmp_path / "a.safetensors", torch.arange(100) % 50)))
    assert text.measure is not None and text.measure.tolist() == list(range(40, 47))
    assert [len(tokens) for tokens in text.held_out] == [10]


def test_compile_learns_from_texts_with_weights_and_says_so(tmp_path: Path):
    paths = [stored(tmp_path / f"{name}.safetensors", random_tokens(300, seed=ord(name))) for name in "ab"]
    report = dispfx.compile(
        MODEL, RATIO, out=tmp_path / "out", data=paths, data_weight=[3, 1], **options_of(SETTINGS), align=1
    )
    assert report.perplexity is not None
    protocol = report.perplexity.protocol
    assert (protocol.text, protocol.held_out_share) == ("a.safetensors, b.safetensors", 0.1)
    assert protocol.tokens == 60 - 4  # windows of 16, 16, 16 and 12
    assert "learned from a.safetensors, b.safetensors;" in (tmp_path / "out" / "README.md").read_text()


def test_eval_reads_every_form_and_the_protocol_names_the_text(decoder_folder: Path, tmp_path: Path):
    text = "some text to measure on\n" * 20
    (tmp_path / "a.txt").write_text(text)
    lines = "".join(f'{{"body": "{line}"}}\n' for line in text.splitlines())
    (tmp_path / "a.jsonl").write_text(lines)
    plain = evaluate(str(decoder_folder), eval_data=tmp_path / "a.txt", context=32)
    records = evaluate(str(decoder_folder), eval_data=tmp_path / "a.jsonl", data_field="body", context=32)
    assert (plain.protocol["text"], records.protocol["text"]) == ("a.txt", "a.jsonl")
    # The last line break of the file is no record's.
    assert records.protocol["tokens"] == plain.protocol["tokens"] - 1
    assert records.value == pytest.approx(plain.value, rel=0.05)


def test_ids_beyond_the_vocabulary_are_refused_before_anything_runs(decoder_folder: Path, tmp_path: Path):
    tokens = stored(tmp_path / "a.safetensors", torch.full((500,), 256))
    for model, words in ((str(decoder_folder), "[0, 256)"), (MODEL, "[0, 61)")):
        watcher = Watcher()
        with pytest.raises(DataError, match="token ids must be in") as refusal:
            dispfx.compile(
                model, 0.3, out=tmp_path / "out", data=tokens, **options_of(SETTINGS), observer=watcher
            )
        assert words in str(refusal.value) and refusal.value.exit_code == 2
        # What a config says is known before the capture.
        assert watcher.stages == ([] if model != MODEL else ["open", "capture"])
    with pytest.raises(DataError, match="token ids must be in"):
        evaluate(str(decoder_folder), eval_data=tokens)


UNUSABLE = {
    "no field 'text'": "a.jsonl",
    "byte 2 is not": "latin.txt",
    "the text is empty": "blank.txt",
    "line 2 is not JSON": "broken.jsonl",
    "this is not a safetensors file": "a.safetensors",
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_text_that_cannot_be_used_is_refused_before_the_decoder_is_opened(
    tmp_path: Path, reason: str, monkeypatch
):
    def opened(self):
        raise AssertionError("the decoder was opened")

    for room in ("dispfx.run.readiness", "dispfx.api.commands"):
        monkeypatch.setattr(f"{room}.open_model", opened)
    (tmp_path / "a.jsonl").write_text('{"body": "text"}\n')
    (tmp_path / "latin.txt").write_bytes("naïf".encode("latin-1"))
    (tmp_path / "blank.txt").write_text("\n \n")
    (tmp_path / "broken.jsonl").write_text('{"text": "text"}\n{\n')
    (tmp_path / "a.safetensors").write_bytes(b"no tensors")
    path, good = tmp_path / UNUSABLE[reason], tmp_path / "good.txt"
    good.write_text("text")
    named: list[dict[str, Any]] = [{"data": path}, {"data": good, "eval_data": [good, path]}]
    for words in named:
        with pytest.raises(DataError, match=reason) as refusal:
            dispfx.compile(MODEL, 0.3, out=tmp_path / "out", **words)
        assert refusal.value.where == str(path) and refusal.value.exit_code == 2
    with pytest.raises(DataError, match=reason):
        evaluate(MODEL, eval_data=path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("data", "weights", "reason"),
    [
        (["a", "a"], [1, 0], "positive numbers"),
        (["a", "a"], [1, 1e-5], "one sequence in a thousand"),
        (["a", "a"], [1], "there are 1 for 2"),
        (torch.arange(9), [1], "no text to learn from was named"),
        (None, [1], "no text to learn from was named"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, data, weights, reason: str):
    (tmp_path / "a").write_text("text")
    words = [tmp_path / name for name in data] if isinstance(data, list) else data
    with pytest.raises(DataError, match=reason):
        texts(words, data_weight=weights).check()


def test_the_learned_batches_of_two_runs_are_one_and_the_same(source: Source, tmp_path: Path):
    (tmp_path / "a.txt").write_text("a text of several words\n" * 50)
    (tmp_path / "b.txt").write_text("another text of words\n" * 50)
    chosen = texts([tmp_path / "a.txt", tmp_path / "b.txt"], data_weight=[1, 3])
    one, two = (open_text(source, chosen).batches(CHOSEN) for _ in range(2))
    assert one.digest == two.digest
    assert all(torch.equal(one.batch(step), two.batch(step)) for step in range(40))
    assert (
        open_text(source, texts(chosen.settings.data, data_weight=[3, 1])).batches(CHOSEN).digest
        != one.digest
    )


def test_a_decoder_in_memory_takes_a_mixture(tmp_path: Path):
    mixture = Mixture.of(
        [random_tokens(300, seed=1), random_tokens(200, seed=2)], [1, 1], seq_len=16, batch_size=2
    )
    plan = dispfx.learn(dispfx.capture(build_decoder()), mixture, RATIO, settings=SETTINGS)
    assert abs(plan.achieved - RATIO) <= 1e-3


def test_a_file_that_is_learned_from_and_measured_on_is_told(source: Source, tmp_path: Path):
    a = stored(tmp_path / "a.safetensors", torch.arange(60))
    b = stored(tmp_path / "b.safetensors", torch.arange(40))
    assert open_text(source, texts(a, eval_data=b)).notes == ()
    (both,) = open_text(source, texts([b, a], eval_data=a)).notes
    assert "a.safetensors is learned from and measured on" in both
    (twice,) = open_text(source, texts([a, b, a])).notes
    assert "a.safetensors is named twice" in twice


def test_what_a_text_is_warned_of_and_refused_for_reaches_every_command(decoder_folder: Path, tmp_path: Path):
    (tmp_path / "ids.txt").write_text("12 345 " * 60)
    (tmp_path / "nul.txt").write_bytes("no text ".encode("utf-16-le") * 60)
    watcher = Watcher()
    evaluate(str(decoder_folder), eval_data=tmp_path / "ids.txt", context=32, observer=watcher)
    assert len(watcher.notes) == 1 and "token ids belong in" in watcher.notes[0]
    nul: dict[str, Any] = {"eval_data": tmp_path / "nul.txt", "context": 32}
    with pytest.raises(DataError, match="characters are not text"):
        evaluate(str(decoder_folder), **nul)
    protocol = evaluate(str(decoder_folder), **nul, allow_unknown=True).protocol
    assert protocol["unknown_share"] == 0.0
    with pytest.raises(DataError, match="characters are not text"):
        dispfx.compile(MODEL, 0.3, out=tmp_path / "out", data=tmp_path / "nul.txt")
