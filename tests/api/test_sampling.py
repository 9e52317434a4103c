"""sample: a decoder writes text, and learning takes it."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GenerationConfig

from dispfx import api
from dispfx.errors import CaptureError, DataError, DispfxError, OutputError, SourceError
from dispfx.report import NullObserver
from dispfx.run.opening import open_model
from dispfx.run.sampled_text import Openings, fitted_sampling, sampled_text
from dispfx.settings.sections import ModelSettings
from dispfx.settings.verb_settings import GenerationSettings, SamplingSettings
from dispfx.source import Source
from tests.api.conftest import MODEL
from tests.api.plain import build_decoder
from tests.command_line import run
from tests.plain_decoders import VOCABULARY

FEW = SamplingSettings(tokens=120, seq_len=20, opening=6, batch_size=3)


@pytest.fixture(scope="module")
def demo() -> Source:
    return open_model(ModelSettings("demo"))


def text_of(source: Source, openings: Tensor | None, settings: SamplingSettings) -> Tensor:
    parts = () if openings is None else (openings,)
    return torch.cat(list(sampled_text(source, Openings(parts), settings)))


def plain() -> Source:
    return open_model(ModelSettings(build_decoder()))


def greedy(source: Source, openings: Tensor) -> tuple[Tensor, Tensor]:
    """Text at next to no temperature, and the likeliest token after each of its tokens."""
    cold = SamplingSettings(tokens=60, seq_len=20, opening=6, batch_size=2, temperature=1e-4)
    text = text_of(source, openings, cold)
    with torch.no_grad():
        output: Any = source.model(text)
    logits = output if isinstance(output, Tensor) else output.logits
    return text, logits.argmax(-1)


@pytest.mark.parametrize("opened", [plain, lambda: open_model(ModelSettings("demo"))])
def test_next_to_no_temperature_gives_the_likeliest_token(opened: Any):
    source = opened()
    text, likeliest = greedy(source, torch.arange(30))
    assert text.shape == (3, 20)
    assert torch.equal(text[:, 6:], likeliest[:, 5:-1])
    starts = text[:, 0]
    assert torch.equal(text[:, :6], starts[:, None] + torch.arange(6)), "openings are pieces of the text"


def test_tokens_are_as_likely_as_the_decoder_says(demo: Source):
    opening = torch.tensor([5, 9, 7])
    settings = SamplingSettings(tokens=4 * 2000, seq_len=4, opening=3, batch_size=1000)
    drawn = text_of(demo, opening, settings)[:, 3]
    with torch.no_grad():
        expected = demo.model(opening[None]).logits[0, -1].softmax(-1)
    counts = torch.bincount(drawn, minlength=len(expected)) / 2000
    assert float((counts - expected).abs().sum() / 2) < 0.1  # total variation; 0.03 to 0.05 by chance
    uniform = torch.full_like(expected, 1 / len(expected))
    assert float((uniform - expected).abs().sum() / 2) > 0.3, "the draw tells the two apart"


def test_the_decoder_s_own_generation_settings_play_no_part(demo: Source):
    openings = torch.arange(30)
    before = text_of(demo, openings, FEW)
    model: Any = demo.model
    own = GenerationConfig(top_k=1, do_sample=True, repetition_penalty=5.0, eos_token_id=list(range(40)))
    model.generation_config, kept = own, model.generation_config
    try:
        assert torch.equal(text_of(demo, openings, FEW), before)
        assert model.generation_config is own
    finally:
        model.generation_config = kept


def test_a_seed_gives_one_text_and_leaves_the_global_generator_alone(demo: Source):
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    first = text_of(demo, None, FEW)
    assert torch.equal(torch.rand(1), expected)
    assert first.shape == (6, 20) and len(first.unique(dim=0)) == 6
    assert torch.equal(text_of(demo, None, FEW), first)
    other = SamplingSettings(tokens=120, seq_len=20, opening=6, batch_size=3, seed=1)
    assert not torch.equal(text_of(demo, None, other), first)


def test_without_a_text_sequences_begin_with_the_tokenizer_s_first_token(demo: Source):
    tokenizer: Any = demo.tokenizer
    known = {tokenizer.bos_token_id, tokenizer.eos_token_id}
    assert set(text_of(demo, None, FEW)[:, 0].tolist()) <= known


@contextmanager
def refused(kind: type[Exception], words: str, out: Path) -> Iterator[None]:
    before = out.read_bytes() if out.exists() else None
    with pytest.raises(kind, match=words):
        yield
    assert (out.read_bytes() if out.exists() else None) == before


def test_what_cannot_be_sampled_is_refused_and_nothing_is_written(tmp_path: Path, demo: Source):
    out, short = tmp_path / "own.safetensors", tmp_path / "short.safetensors"
    save_file({"tokens": torch.arange(20)}, short)
    with refused(DataError, "no token is known that the decoder's texts begin with", out):
        api.sample(build_decoder(), out, tokens=40, seq_len=8)
    with refused(DataError, "has 18 tokens, and 32 are needed", out):
        api.sample(MODEL, out, data=short, tokens=40, seq_len=60)
    with refused(OutputError, "an output path is needed", out):
        api.sample(MODEL)
    with pytest.raises(DataError, match="sequences of 5000 tokens were asked for"):
        fitted_sampling(SamplingSettings(seq_len=5000), demo)
    with refused(OutputError, "must end in .safetensors", tmp_path / "own.txt"):
        api.sample(MODEL, tmp_path / "own.txt", tokens=40)
    out.write_bytes(b"")
    with refused(OutputError, "must not exist yet", out):
        api.sample(MODEL, out, tokens=40)


def _broken() -> nn.Module:
    decoder = build_decoder()
    decoder.get_parameter("head.weight").data[0, 0] = torch.nan
    return decoder


def test_a_decoder_that_cannot_write_the_text_is_refused_before_it_writes(tmp_path: Path):
    out, few = tmp_path / "own.safetensors", SimpleNamespace(tokens=40, seq_len=8, opening=4)
    with refused(SourceError, "weights must be finite: 1 times NaN in head.weight", out):
        api.sample(_broken(), out, data=torch.arange(20), **vars(few))
    with refused(DataError, "(?s)does not run on sequences of 65 tokens.*use a smaller `seq_len`", out):
        api.sample(build_decoder(), out, data=torch.arange(40), tokens=40, seq_len=65)
    with refused(DataError, f"in .0, {VOCABULARY}. for this decoder, but the text holds {VOCABULARY}", out):
        api.sample(build_decoder(), out, data=torch.arange(VOCABULARY + 1), **vars(few))
    with refused(CaptureError, "logits of shape", out):
        api.sample(nn.Identity(), out, data=torch.arange(20), **vars(few))
    with refused(DataError, "token ids must be a vector of integers, and `data` is float32 .20,.", out):
        api.sample(build_decoder(), out, data=torch.arange(20.0), **vars(few))


def test_a_text_of_any_integers_gives_the_same_openings(tmp_path: Path):
    kinds = (torch.int64, torch.int32, torch.uint8, torch.int8, torch.int16)
    kinds = (*kinds, torch.uint16, torch.uint32, torch.uint64)
    for kind in kinds:
        save_file({"tokens": torch.arange(50).to(kind)}, tmp_path / "text.safetensors")
        out = tmp_path / f"{kind}.safetensors"
        api.sample(MODEL, out, data=tmp_path / "text.safetensors", tokens=40, seq_len=8, opening=4)
    first, *others = (load_file(tmp_path / f"{kind}.safetensors")["tokens"] for kind in kinds)
    assert all(torch.equal(first, other) for other in others)


def test_openings_are_drawn_by_the_weights_of_the_texts(tmp_path: Path):
    texts = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    for path, token in zip(texts, (3, 7), strict=True):
        save_file({"tokens": torch.full((60,), token)}, path)
    given = {"data": texts, "tokens": 4 * 400, "seq_len": 4, "opening": 2}
    api.sample(MODEL, tmp_path / "own.safetensors", data_weight=[1, 3], **given)
    begun = load_file(tmp_path / "own.safetensors")["tokens"].view(400, 4)[:, :2]
    assert bool((begun[:, 0] == begun[:, 1]).all()), "an opening is a piece of one text"
    assert abs(float((begun[:, 0] == 7).float().mean()) - 0.75) < 0.07  # three standard deviations


def test_a_folder_that_is_missing_is_made_and_a_file_that_appeared_is_kept(tmp_path: Path):
    out = tmp_path / "new" / "own.safetensors"

    class Meddling(NullObserver):
        def working(self, name: str, done: int, total: int, figures: str) -> None:
            assert out.parent.is_dir()
            out.write_text("theirs")

    with pytest.raises(OutputError, match="own-2"):
        api.sample("demo", out, tokens=40, seq_len=8, observer=Meddling())
    assert out.read_text() == "theirs"
    assert load_file(tmp_path / "new" / "own-2.safetensors")["tokens"].shape == (40,)


@pytest.mark.parametrize("temperature", [1e-300, 1e-35])
def test_the_least_temperatures_give_the_likeliest_token(demo: Source, temperature: float):
    cold = SamplingSettings(tokens=40, seq_len=20, opening=6, temperature=temperature)
    usual = SamplingSettings(tokens=40, seq_len=20, opening=6, temperature=1e-4)
    openings = torch.arange(30)
    assert torch.equal(text_of(demo, openings, cold), text_of(demo, openings, usual))


@pytest.mark.parametrize(
    ("seed", "allowed"),
    [
        (2**64, "at most 9,223,372,036,854,775,807"),
        (-(10**400), "at least -9,223,372,036,854,775,807"),
    ],
)
def test_a_seed_that_torch_does_not_take_is_refused(seed: int, allowed: str):
    with pytest.raises(DispfxError, match=f"`seed` must be {allowed}"):
        SamplingSettings(seed=seed)
    with pytest.raises(DispfxError, match=f"`seed` must be {allowed}"):
        GenerationSettings("a", seed=seed)


def test_a_negative_seed_draws_a_text_of_its_own(demo: Source):
    texts = [
        text_of(demo, torch.arange(30), SamplingSettings(tokens=40, seq_len=20, opening=6, seed=seed))
        for seed in (-1, -1, 1)
    ]
    assert torch.equal(texts[0], texts[1]) and not torch.equal(texts[0], texts[2])


def test_the_file_is_a_text_to_learn_from(tmp_path: Path):
    own, opened = tmp_path / "own.safetensors", tmp_path / "text.safetensors"
    save_file({"tokens": torch.arange(60)}, opened)
    given = ["--data", opened, "--tokens", 700, "--seq-len", 32, "--opening", 4, "--out", own]
    result = run("sample", "demo", *given, "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"tokens": 700, "file": str(own)}
    tokens = load_file(own)["tokens"]
    assert tokens.shape == (700,) and tokens.dtype is torch.int32
    # The last tenth of the text is held out, so no opening reaches into it.
    begun = tokens[: 32 * 21].view(21, 32)[:, :4]
    assert int(begun.max()) < 54 and bool((begun[:, 1:] - begun[:, :-1] == 1).all())
    plan = api.learn_plan(
        "demo", 0.3, own, tmp_path / "plan.safetensors", steps=2, seq_len=32, batch_size=2, start="uniform"
    )
    assert abs(plan.achieved - 0.3) < 0.01
    assert run("sample", "demo", "--out", own).exit_code == 2
