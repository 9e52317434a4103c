"""UTF-8 files: every byte of a short one, evenly spaced lines of a long one."""

import codecs
import gzip
import os
from itertools import pairwise
from pathlib import Path

import pytest

from dispfx.errors import DataError
from dispfx.source.text import plain
from dispfx.source.text.plain import PlainText, spans


def lines(count: int) -> str:
    return "".join(f"line {number:06d} — of the text\n" for number in range(count))


def test_a_file_that_may_be_read_whole_is_read_byte_for_byte(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_BLOCK_BYTES", 7)  # cuts within characters
    content = "﻿first\r\n\n  ünïcödé — 漢字 🙂\n\nno line break at the end"
    (tmp_path / "text.txt").write_bytes(content.encode())
    # The byte-order mark says how the file is spelt, and is no text.
    assert "".join(PlainText(tmp_path / "text.txt").texts(1000)) == content.removeprefix("\ufeff")
    assert PlainText(tmp_path / "text.txt").size() == len(content.encode())


def test_a_longer_file_gives_whole_lines_at_even_distances(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 1000)
    path = tmp_path / "text.txt"
    path.write_text(lines(30_000), encoding="utf-8")
    read = "".join(PlainText(path).texts(50_000))
    assert 50_000 - 50 * 2 * 28 < len(read.encode()) <= 50_000
    found = read.splitlines(keepends=True)
    numbers = [int(line[5:11]) for line in found]
    assert found == [f"line {number:06d} — of the text\n" for number in numbers]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0
    begins = [after for before, after in pairwise(numbers) if after != before + 1]
    assert len(begins) == 49
    gaps = {after - before for before, after in pairwise(begins)}
    assert max(gaps) - min(gaps) <= 2 and abs(min(gaps) - 600) <= 2
    assert read == "".join(PlainText(path).texts(50_000)), "the same bytes every time"


@pytest.mark.parametrize("letter", ["a", "é", "漢", "🙂"])
def test_a_long_file_without_line_breaks_is_cut_between_characters(tmp_path: Path, letter: str, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 101)
    path = tmp_path / "text.txt"
    path.write_text(letter * 5000, encoding="utf-8")
    read = "".join(PlainText(path).texts(2000))
    assert set(read) == {letter, "\n"}
    whole, cut = 19 * 101, 19 * 2 * 3
    assert whole - cut <= len(read.replace("\n", "").encode()) <= whole


def test_a_long_file_with_lines_longer_than_a_piece_still_gives_every_piece(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 100)
    path = tmp_path / "text.txt"
    path.write_text(("x" * 140 + "\n") * 200)
    pieces = list(PlainText(path).texts(3000))
    assert len(pieces) == 30 and all(piece.strip() for piece in pieces)


def test_pieces_do_not_overlap_and_depend_on_sizes_alone():
    for size, most in ((1001, 1000), (2**30 + 1, 2**30), (10**12, 2**27), (5, 1), (17, 16)):
        found = spans(size, most)
        assert found[0].start == 0 and found[-1].stop <= size
        assert all(before.stop <= after.start for before, after in pairwise(found))
        assert sum(span.stop - span.start for span in found) <= most
    assert len(spans(10**12, 2**27)) == 128 and spans(100, 100)[0].stop == 100


@pytest.mark.parametrize("at", [0, 5, 12, 13])
def test_the_first_byte_that_is_not_utf_8_is_named(tmp_path: Path, at: int, monkeypatch):
    monkeypatch.setattr(plain, "_BLOCK_BYTES", 6)
    content = bytearray("é" * 10, "utf-8")
    content[at] = 0xFF
    (tmp_path / "text.txt").write_bytes(content)
    first_bad = at if at % 2 == 0 else at - 1  # a first byte without its second is bad itself
    with pytest.raises(DataError, match=f"byte {first_bad} is not"):
        list(PlainText(tmp_path / "text.txt").texts(1000))


def test_a_file_that_ends_within_a_character_is_refused(tmp_path: Path):
    (tmp_path / "text.txt").write_bytes("fine é".encode()[:-1])
    with pytest.raises(DataError, match="byte 5 is not"):
        list(PlainText(tmp_path / "text.txt").texts(1000))


def test_a_bad_byte_in_a_piece_of_a_long_file_is_named_by_its_place(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 1000)
    content = bytearray(lines(3000), "utf-8")
    start = next(span.start for span in spans(len(content), 50_000) if span.start > 59_000)
    content[start + 500] = 0xFF
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match=f"byte {start + 500} is not"):
        list(PlainText(tmp_path / "text.txt").texts(50_000))


def test_a_pipe_is_refused_since_it_could_be_read_only_once(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="not a regular file"):
        list(PlainText(tmp_path / "pipe").texts(1000))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_is_called_by_its_name_where_it_says_so(tmp_path: Path, encoding: str):
    (tmp_path / "text.txt").write_bytes("﻿text".encode(encoding))
    with pytest.raises(DataError, match="it looks like UTF-16"):
        list(PlainText(tmp_path / "text.txt").texts(1000))


def test_a_long_file_loses_its_byte_order_mark_too(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 1000)
    path = tmp_path / "text.txt"
    path.write_text("\ufeff" + lines(3000), encoding="utf-8")
    assert "".join(PlainText(path).texts(5000)).startswith("line 000000 — ")


@pytest.mark.parametrize(
    ("content", "form"),
    [
        (gzip.compress(b"text", mtime=0), "a gzip file"),
        ("text".encode("utf-16"), "UTF-16"),
        (codecs.BOM_UTF32_LE + "text".encode("utf-32-le"), "UTF-32"),
        (codecs.BOM_UTF32_BE + "text".encode("utf-32-be"), "UTF-32"),
        (b"PK\x03\x04\xff\xfe", "a zip file"),
        (b"PAR1\x15\x04\xff", "a parquet file"),
    ],
)
def test_a_file_of_another_form_is_called_by_it(tmp_path: Path, content: bytes, form: str):
    (tmp_path / "text").write_bytes(content)
    with pytest.raises(DataError, match=f"it looks like {form}"):
        "".join(PlainText(tmp_path / "text").texts(1000))
