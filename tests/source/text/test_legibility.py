"""Text that a decoder cannot make sense of: told from a twentieth on, refused from a half on."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dispfx.errors import DataError
from dispfx.settings.sections import Reading
from dispfx.source.text import check_readable, read_apart, read_text
from tests.source.byte_tokenizer import byte_tokenizer

ALLOWED = Reading(allow_unknown=True)


def word_tokenizer(**special: str) -> Any:
    """A tokenizer that knows ten words, and has a token for others where it is given one."""
    words = {word: index for index, word in enumerate(["<u>", "</s>", *"abcdefgh"])}
    unknown = special.get("unk_token")
    model = models.WordLevel(words, unk_token=unknown) if unknown else models.BPE(words, merges=[])
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def text_of(tmp_path: Path, known: int, unknown: int) -> Path:
    path = tmp_path / f"{known}.txt"
    path.write_text("a " * known + "z " * unknown)
    return path


@pytest.mark.parametrize("special", [{"unk_token": "<u>"}, {}], ids=["a token for it", "dropped"])
def test_unknown_text_is_told_or_refused_by_its_share(tmp_path: Path, special: dict[str, str]):
    tokenizer = word_tokenizer(**special)
    few, some, half, most = (text_of(tmp_path, known, 100 - known) for known in (95, 94, 50, 49))
    assert read_text(few, tokenizer).notes == () and read_text(few, tokenizer).unknown_share == 0.05
    (note,) = read_text(some, tokenizer).notes
    assert note == f"{some}: the tokenizer does not know 6% of the text"
    assert len(read_text(half, tokenizer).notes) == 1
    for read in (read_text, read_apart):
        with pytest.raises(DataError, match="the tokenizer does not know 51% of the text") as refusal:
            read(most, tokenizer)
        assert "`allow_unknown=True`" in str(refusal.value.hint) and refusal.value.where == str(most)
    allowed = read_text(most, tokenizer, ALLOWED)
    assert allowed.unknown_share == 0.51 and len(allowed.notes) == 1


def test_a_token_with_another_use_is_not_one_for_unknown_text(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("ab</s>" * 50)
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "</s>", "unk_token": "</s>"})
    assert int((read_text(path, tokenizer).tokens == tokenizer.unk_token_id).sum()) == 50
    assert read_text(path, tokenizer).unknown_share == 0.0 and read_text(path, tokenizer).notes == ()


def test_a_tokenizer_of_bytes_knows_everything(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("漢字 ünïcödé 🙂\n" * 20, encoding="utf-8")
    assert read_text(path, byte_tokenizer()).unknown_share == 0.0


@pytest.mark.parametrize(
    "content",
    [
        "plain English in UTF-16\n".encode("utf-16-le") * 20,
        b"\0" * 4000,
        "\ufffd\ufffd\ufffd is left\ufffd\ufffd\ufffd".encode(),
    ],
    ids=["UTF-16", "NUL", "replaced"],
)
def test_what_is_no_text_is_refused_before_a_decoder_is_opened(tmp_path: Path, content: bytes):
    path = tmp_path / "a.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"of the characters are not text") as refusal:
        check_readable(path)
    assert refusal.value.where == str(path) and refusal.value.exit_code == 2
    check_readable(path, ALLOWED)
    with pytest.raises(DataError, match="of the characters are not text"):
        read_text(path, byte_tokenizer())


def test_a_text_with_some_broken_characters_gets_a_warning(tmp_path: Path):
    path = tmp_path / "a.txt"
    path.write_text("na\ufffdve and caf\ufffd" * 9, encoding="utf-8")
    (note,) = read_text(path, byte_tokenizer()).notes
    assert note.startswith(f"{path}: 14% of the characters are not text")
    path.write_text("\tcolumns\r\n\x0cpages \x1b[1mbold\x1b[0m\n" * 9)
    assert read_text(path, byte_tokenizer()).notes == ()


@pytest.mark.parametrize("content", ["12 345\n6789 " * 9, "[12, 345,\n6789]"])
def test_numbers_that_may_be_token_ids_get_a_warning(tmp_path: Path, content: str):
    path = tmp_path / "ids.txt"
    path.write_text(content)
    (note,) = read_text(path, byte_tokenizer()).notes
    assert "token ids belong in a .safetensors file" in note
    path.write_text(content + "a word")
    assert read_text(path, byte_tokenizer()).notes == ()


def test_the_share_of_several_texts_is_their_mean(tmp_path: Path):
    from safetensors.torch import save_file

    a, b = text_of(tmp_path, 95, 5), text_of(tmp_path, 100, 0)
    save_file({"tokens": torch.zeros(1000, dtype=torch.int64)}, tmp_path / "t.safetensors")
    tokenizer = word_tokenizer(unk_token="<u>")
    found = read_text([a, tmp_path / "t.safetensors", b], tokenizer)
    assert found.unknown_share == 0.025, "ids that were given are not judged"
    assert read_text(tmp_path / "t.safetensors", None).unknown_share is None


@pytest.mark.parametrize("name", ["a.txt", "a", "records.log"])
@pytest.mark.parametrize(
    "content",
    [
        '{"text": "one"}',
        '\ufeff{"text": "one"}\n\n{"text": "two\u2028"}\r\n',
        '{"text": "one"}\n' * 9 + "the tenth line is not read",
        '{"text": "' + "long " * 20_000 + '"}\n',
        ('{"text": "' + "long " * 6_000 + '"}\n') * 5,
    ],
    ids=["one", "several", "first ones", "a long one", "several long ones"],
)
def test_json_lines_under_another_name_are_refused_before_a_decoder_is_opened(
    tmp_path: Path, name: str, content: str
):
    path = tmp_path / name
    path.write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="its first lines are JSON objects") as refusal:
        check_readable(path)
    assert refusal.value.where == str(path) and "name the file .jsonl" in str(refusal.value.hint)
    (note,) = read_text(path, byte_tokenizer(), ALLOWED).notes
    assert note == f"{path}: a text file was expected, and its first lines are JSON objects"


@pytest.mark.parametrize(
    "content",
    [
        '{"a": 1}\nand text\n',
        '{\n  "a": 1\n}\n',
        '["a"]\n["b"]\n',
        '{"a": 1\n' * 9,
        "{" * 100_000,
        "1\n2 a\n",
    ],
)
def test_text_with_some_json_is_text(tmp_path: Path, content: str):
    path = tmp_path / "a.txt"
    path.write_text(content)
    assert read_text(path, byte_tokenizer()).notes == ()


def test_records_may_hold_json_as_their_text(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": '{"a": 1}'}))
    assert read_text(path, byte_tokenizer()).notes == ()
