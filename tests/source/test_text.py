"""Text and token files, whole and broken."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dispfx.errors import DataError
from dispfx.source import encode, read_tokens
from tests.source.byte_tokenizer import byte_tokenizer


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes("first line\r\n\n  second — line\n".encode())
    return path


def test_text_is_tokenised_whole_and_byte_for_byte(text: Path):
    tokenizer = byte_tokenizer()
    ids = read_tokens(text, tokenizer)

    assert ids.dtype == torch.int64 and ids.dim() == 1
    assert len(ids) == len(text.read_bytes())
    assert tokenizer.decode(ids).encode() == text.read_bytes()


def test_no_special_token_is_added(text: Path):
    assert torch.equal(read_tokens(text, byte_tokenizer(bos=True)), read_tokens(text, byte_tokenizer()))


def test_a_text_longer_than_the_model_gives_no_warning(text: Path, caplog: pytest.LogCaptureFixture):
    tokenizer = byte_tokenizer()
    assert tokenizer.model_max_length < len(read_tokens(text, tokenizer))
    assert not caplog.records


def test_a_text_in_memory_is_encoded_the_same_way(text: Path):
    tokenizer = byte_tokenizer(bos=True)
    assert torch.equal(encode(text.read_bytes().decode(), tokenizer), read_tokens(text, tokenizer))
    with pytest.raises(DataError, match="no token in the text"):
        encode("", tokenizer)


def test_several_texts_are_joined_by_a_line_break(text: Path, tmp_path: Path):
    (tmp_path / "more.txt").write_text("more")
    tokenizer = byte_tokenizer()
    ids = read_tokens([text, tmp_path / "more.txt"], tokenizer)
    assert tokenizer.decode(ids).encode() == text.read_bytes() + b"\nmore"


def test_a_token_file_needs_no_tokenizer_and_keeps_its_place(text: Path, tmp_path: Path):
    save_file({"tokens": torch.tensor([7, 5, 3], dtype=torch.int32)}, tmp_path / "a.safetensors")
    alone = read_tokens(tmp_path / "a.safetensors", None)
    assert alone.tolist() == [7, 5, 3] and alone.dtype == torch.int64

    tokenizer = byte_tokenizer()
    mixed = read_tokens([tmp_path / "a.safetensors", text], tokenizer)
    assert torch.equal(mixed, torch.cat([alone, read_tokens(text, tokenizer)]))


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"", "empty"), (b" \n\t\n", "empty"), (b"fine \xff", "byte 5 is not")],
    ids=["empty", "blank", "not-utf-8"],
)
def test_a_text_that_cannot_be_read_is_refused_by_name(tmp_path: Path, content: bytes, reason: str):
    path = tmp_path / "text.txt"
    path.write_bytes(content)
    with pytest.raises(DataError, match=reason) as refusal:
        read_tokens(path, byte_tokenizer())
    assert refusal.value.where == str(path)


def test_a_missing_text_or_a_folder_is_refused(tmp_path: Path):
    for path in (tmp_path / "absent.txt", tmp_path):
        with pytest.raises(DataError, match="cannot be read") as refusal:
            read_tokens(path, byte_tokenizer())
        assert refusal.value.where == str(path)


def test_text_without_a_tokenizer_is_refused_with_the_two_ways_out(text: Path):
    with pytest.raises(DataError, match="tokenizer is needed") as refusal:
        read_tokens(text, None)
    assert "--tokenizer" in str(refusal.value) and ".safetensors" in str(refusal.value)


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"ids": torch.tensor([1])}, "this one holds"),
        ({"tokens": torch.tensor([1.0])}, "vector of integers"),
        ({"tokens": torch.tensor([[1, 2]])}, "vector of integers"),
        ({"tokens": torch.tensor([1, -1])}, "from 0 upwards"),
        ({"tokens": torch.zeros(0, dtype=torch.int64)}, "from 0 upwards"),
    ],
    ids=["other-name", "floats", "matrix", "negative", "empty"],
)
def test_a_token_file_of_another_shape_is_refused(tmp_path: Path, tensors, reason: str):
    save_file(tensors, tmp_path / "tokens.safetensors")
    with pytest.raises(DataError, match=reason):
        read_tokens(tmp_path / "tokens.safetensors", None)


def test_a_broken_or_missing_token_file_is_refused(tmp_path: Path):
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="no safetensors file"):
        read_tokens(tmp_path / "broken.safetensors", None)
    with pytest.raises(DataError, match="there is none"):
        read_tokens(tmp_path / "absent.safetensors", None)


def test_no_file_at_all_is_refused():
    with pytest.raises(DataError, match="none was given"):
        read_tokens([], byte_tokenizer())
