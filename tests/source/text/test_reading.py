"""Texts of every form, read together: joined, shared out, named, refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dispfx.errors import DataError
from dispfx.settings.sections import Reading
from dispfx.source import check_readable, encode, read_text
from dispfx.source.text import read_apart
from dispfx.source.text.reading import shares
from tests.source.byte_tokenizer import byte_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes("first line\r\n\n  second — line\n".encode())
    return path


def test_text_is_tokenised_whole_and_byte_for_byte(text: Path):
    tokenizer = byte_tokenizer()
    ids = read_text(text, tokenizer).tokens

    assert ids.dtype == torch.int32 and ids.dim() == 1
    assert len(ids) == len(text.read_bytes())
    assert tokenizer.decode(ids).encode() == text.read_bytes()


def test_no_special_token_is_added(text: Path):
    marked, plain = (read_text(text, byte_tokenizer(bos=bos)).tokens for bos in (True, False))
    assert torch.equal(marked, plain)


def test_a_text_longer_than_the_model_gives_no_warning(text: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = byte_tokenizer()
    assert tokenizer.model_max_length < len(read_text(text, tokenizer).tokens)
    assert not caplog.records


def test_a_text_in_memory_is_encoded_the_same_way(text: Path):
    tokenizer = byte_tokenizer(bos=True)
    ids = encode(text.read_bytes().decode(), tokenizer)
    assert torch.equal(ids, read_text(text, tokenizer).tokens) and ids.dtype == torch.int64
    with pytest.raises(DataError, match="no token in the text"):
        encode("", tokenizer)


def test_several_texts_are_joined_by_a_line_break(text: Path, tmp_path: Path):
    (tmp_path / "more.txt").write_text("more")
    tokenizer = byte_tokenizer()
    ids = read_text([text, tmp_path / "more.txt"], tokenizer).tokens
    assert tokenizer.decode(ids).encode() == text.read_bytes() + b"\nmore"


def test_a_token_file_needs_no_tokenizer_and_keeps_its_place(text: Path, tmp_path: Path):
    save_file({"tokens": torch.tensor([7, 5, 3], dtype=torch.int32)}, tmp_path / "a.safetensors")
    alone = read_text(tmp_path / "a.safetensors", None).tokens
    assert alone.tolist() == [7, 5, 3] and alone.dtype == torch.int32

    tokenizer = byte_tokenizer()
    mixed = read_text([tmp_path / "a.safetensors", text], tokenizer).tokens
    assert torch.equal(mixed, torch.cat([alone, read_text(text, tokenizer).tokens]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"fine \xff", "byte 5 is not")],
    ids=["empty", "blank", "not-utf-8"],
)
def test_a_text_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as refusal:
        read_text(path, byte_tokenizer())
    assert refusal.value.where == str(path)


def test_a_missing_text_or_a_folder_is_refused(tmp_path: Path):
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(DataError, match="cannot be read") as refusal:
            read_text(path, byte_tokenizer())
        assert refusal.value.where == str(path)


def test_text_without_a_tokenizer_is_refused_with_the_two_ways_out(text: Path):
    with pytest.raises(DataError, match="tokenizer is needed") as refusal:
        read_text(text, None)
    assert "`tokenizer`" in str(refusal.value) and ".safetensors" in str(refusal.value)


def test_no_file_at_all_is_refused():
    with pytest.raises(DataError, match="none was given"):
        read_text([], byte_tokenizer())


def test_records_and_files_are_joined_in_the_order_they_are_named(text: Path, tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"text": "one\\n"}\n{"text": "two"}\n')
    tokenizer = byte_tokenizer()
    ids = read_text([tmp_path / "a.jsonl", text], tokenizer).tokens
    assert tokenizer.decode(ids).encode() == b"one\ntwo\n" + text.read_bytes()


def test_documents_are_separated_by_what_ends_one(text: Path, tmp_path: Path):
    records = tmp_path / "records.jsonl"
    records.write_text('{"text": "one\\n"}\n{"text": "two"}\n')
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    found = read_text([records, text], tokenizer, Reading(between="<|end|>")).tokens
    expected = "one\n<|end|>two<|end|>" + text.read_bytes().decode()
    assert tokenizer.decode(found) == expected
    assert int((found == tokenizer.eos_token_id).sum()) == 2
    (apart,) = read_apart(records, tokenizer, Reading(between="<|end|>"))
    assert tokenizer.decode(apart.tokens) == "one\n<|end|>two"


def test_texts_read_apart_are_the_texts_by_themselves(text: Path, tmp_path: Path):
    (tmp_path / "more.txt").write_text("more")
    tokenizer = byte_tokenizer()
    parts = read_apart([text, tmp_path / "more.txt"], tokenizer)
    assert [part.name for part in parts] == ["text.txt", "more.txt"]
    for part, path in zip(parts, (text, tmp_path / "more.txt"), strict=True):
        assert torch.equal(part.tokens, read_text(path, tokenizer).tokens)
        assert part.largest == int(part.tokens.max())


def test_the_largest_id_of_all_texts_is_known(text: Path, tmp_path: Path):
    save_file({"tokens": torch.tensor([7, 5000, 3])}, tmp_path / "a.safetensors")
    assert read_text([text, tmp_path / "a.safetensors"], byte_tokenizer()).largest == 5000


@pytest.mark.parametrize("ids", [[1, -1], [2**31], [2**40, 1]])
def test_an_id_that_can_be_none_is_refused(tmp_path: Path, ids: list[int]):
    save_file({"tokens": torch.tensor(ids)}, tmp_path / "tokens.safetensors")
    with pytest.raises(DataError, match="from 0 to 2,147,483,647, but holds"):
        read_text(tmp_path / "tokens.safetensors", None)


def test_short_texts_leave_their_room_to_the_long_ones():
    assert shares([10, 20, 30], 100) == [10, 20, 30]
    assert shares([10, 200, 300], 100) == [10, 45, 45]
    assert shares([200, None, 10], 100) == [45, 45, 10]
    assert shares([10, None], 100) == [10, 90]
    assert shares([0, 1000], 100) == [0, 100]


def test_a_report_names_the_texts_and_how_much_of_them_was_read(tmp_path: Path):
    (tmp_path / "long.txt").write_text("a line of some words\n" * 200_000)
    (tmp_path / "short.txt").write_text("short")
    words = [tmp_path / "long.txt", tmp_path / "short.txt"]
    whole = read_text(words[1:], byte_tokenizer())
    assert whole.name == "short.txt"
    part = read_text(words, byte_tokenizer(), Reading(data_bytes=2**20))
    assert part.name == "long.txt (1023.4 KiB of 4.0 MiB), short.txt"
    assert 2**20 - 1000 < len(part.tokens) <= 2**20


def test_what_cannot_be_read_is_refused_by_the_check_as_by_reading(text: Path, tmp_path: Path):
    check_readable([text])
    (tmp_path / "blank.txt").write_text(" \n")
    (tmp_path / "broken.jsonl").write_text('{"text": "fine"}\n{"text":\n')
    (tmp_path / "late.txt").write_bytes(b"a line\n" * 300_000 + b"\xff")
    save_file({"ids": torch.tensor([1])}, tmp_path / "other.safetensors")
    for name in ("blank.txt", "broken.jsonl", "late.txt", "other.safetensors", "absent.txt"):
        with pytest.raises(DataError) as checked:
            check_readable([text, tmp_path / name])
        with pytest.raises(DataError) as read:
            read_text([text, tmp_path / name], byte_tokenizer())
        assert str(checked.value) == str(read.value)
        assert checked.value.where == str(tmp_path / name)


def test_reading_nothing_is_refused():
    with pytest.raises(DataError, match="must be at least 1,048,576"):
        Reading(data_bytes=0)
