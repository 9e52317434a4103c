"""JSON lines: a field of every line; what is broken is named by its line."""

import codecs
import gzip
import json
from pathlib import Path

import pytest

from dispfx.errors import DataError
from dispfx.source.text import json_array, json_lines, plain
from dispfx.source.text.json_lines import JsonLines


def written(path: Path, *records: object) -> Path:
    content = "".join(json.dumps(record) + "\n" for record in records).encode()
    path.write_bytes(gzip.compress(content) if path.suffix.lower() == ".gz" else content)
    return path


def text_in(path: Path, field: str = "text", most: int = 10**6) -> str:
    return "".join(JsonLines(path, field).texts(most))


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "A.JSONL", "a.ndjson", "A.JSON.GZ"])
def test_texts_are_joined_by_line_breaks_where_they_have_none(tmp_path: Path, name: str):
    path = written(tmp_path / name, {"text": "one\n"}, {"text": ""}, {"text": "zwö 漢"}, {"text": "three"})
    assert text_in(path) == "one\n\nzwö 漢\nthree"


def test_another_field_can_be_named_and_blank_lines_are_passed_over(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('\n{"body": "one", "text": 3}\r\n  \n{"body": "two"}')
    assert text_in(path, "body") == "one\ntwo"


def test_a_long_file_gives_the_lines_of_evenly_spaced_pieces(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 1000)
    path = written(tmp_path / "a.jsonl", *({"text": f"{number:05d}"} for number in range(10_000)))
    assert path.stat().st_size == 180_000
    numbers = [int(line) for line in text_in(path, most=20_000).splitlines()]
    assert numbers == sorted(set(numbers)) and numbers[0] == 0 and numbers[-1] > 9_500
    assert 20 * 55 <= len(numbers) <= 20 * 56, "the lines that begin in a piece of 1000 bytes"
    assert text_in(path, most=20_000) == text_in(path, most=20_000)


def test_a_record_longer_than_a_piece_is_whole(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 100)
    path = written(tmp_path / "a.jsonl", *({"text": letter * 300} for letter in "abcdefghij"))
    assert set(text_in(path, most=1600).splitlines()) <= {letter * 300 for letter in "abcdefghij"}


def test_a_long_gzipped_file_is_read_from_its_start(tmp_path: Path):
    path = written(tmp_path / "a.jsonl.gz", *({"text": f"{number:05d}"} for number in range(1000)))
    assert text_in(path, most=50).splitlines() == [f"{number:05d}" for number in range(10)]


BROKEN = {
    "line 2 is not JSON": b'{"text": "a"}\n{"text": \n',
    "line 1 is not JSON": b"text\n",
    "line 3 is a list": b'{"text": "a"}\n\n["text"]\n',
    "line 2 has no field 'text'; it has 'body', 'id'": b'{"text": "a"}\n{"body": "b", "id": 1}\n',
    "line 1 has no field 'text'; it has none": b"{}\n",
    "in line 2 it holds a value of type int": b'{"text": "a"}\n{"text": 3}\n',
    "in line 1 it holds nothing": b'{"text": null}\n',
    "in line 1 it holds a value of type list": b'{"text": ["a"]}\n',
    "line 2 is not UTF-8 at its byte 10": b'{"text": "a"}\n{"text": "\xff"}\n',
    "line 1 holds half a character": b'{"text": "\\ud800"}\n',
    "line 1 is not JSON: it nests too deeply": b'{"text": ' + b"[" * 100_000,
}


@pytest.mark.parametrize("reason", BROKEN)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_a_broken_line_is_refused_by_its_number(tmp_path: Path, reason: str, packed: bool):
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(BROKEN[reason]) if packed else BROKEN[reason])
    with pytest.raises(DataError) as refusal:
        text_in(path)
    assert reason in str(refusal.value).replace("'text' in line", "line") and refusal.value.where == str(path)


def test_a_broken_line_in_a_long_file_is_refused_by_its_byte(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plain, "_PIECE_BYTES", 1000)
    lines = [json.dumps({"text": f"{number:05d}"}) + "\n" for number in range(10_000)]
    lines[5002] = "{'text': 'bad'}\n"
    path = tmp_path / "a.jsonl"
    path.write_text("".join(lines))
    with pytest.raises(DataError, match=f"the line at byte {5002 * 18:,} is not JSON"):
        text_in(path, most=20_000)


def test_one_large_json_document_is_no_line(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(json_lines, "_LONGEST_LINE_BYTES", 1000)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"records": [{"text": "some text"}] * 1000}))
    for most in (10**6, 2000):
        with pytest.raises(DataError, match="is longer than 1,000 bytes"):
            text_in(path, most=most)


@pytest.mark.parametrize(
    "damage", [lambda raw: raw[:-12], lambda raw: b"no gzip", lambda raw: raw[:40] + b"xx" + raw[42:]]
)
def test_a_damaged_gzip_file_is_refused(tmp_path: Path, damage):
    path = written(tmp_path / "a.jsonl.gz", *({"text": f"{number * 77777}"} for number in range(100)))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match="not a complete gzip file"):
        text_in(path)


@pytest.mark.parametrize("most", [10**6, 2**10], ids=["whole", "pieces"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path: Path, most: int):
    path = written(tmp_path / "a.jsonl", *({"text": f"{number:05d}"} for number in range(100)))
    plain = text_in(path, most=most)
    path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert text_in(path, most=most).splitlines()[0] == plain.splitlines()[0] == "00000"


def test_a_gzipped_file_may_begin_with_a_byte_order_mark(tmp_path: Path):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(codecs.BOM_UTF8 + b'{"text": "a"}\r\n\r\n{"text": "b"}\r\n'))
    assert text_in(path) == "a\nb"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_a_file_in_utf_16_is_refused(tmp_path: Path, encoding: str):
    path = tmp_path / "a.jsonl"
    mark = "" if encoding == "utf-16" else "\ufeff"
    path.write_bytes(f'{mark}{{"text": "a"}}\n'.encode(encoding))
    with pytest.raises(DataError, match="the file looks like UTF-16"):
        text_in(path)


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.jsonl.gz"])
@pytest.mark.parametrize("indent", [None, 2])
def test_a_list_of_records_is_read_record_by_record(tmp_path: Path, name: str, indent, monkeypatch):
    monkeypatch.setattr(json_array, "_BLOCK_BYTES", 7)  # cuts within characters and records
    records = [{"text": "zwö ]"}, {"id": [1, {}], "text": "漢\n"}, {"text": "b"}]
    content = codecs.BOM_UTF8 + f" {json.dumps(records, indent=indent, ensure_ascii=False)} \r\n".encode()
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    assert text_in(tmp_path / name) == "zwö ]\n漢\nb"
    assert text_in(tmp_path / name, most=6) == "zwö ]"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"[]", None),
        (b'[{"text": "a"}, 3]', "record 2 is a int without fields"),
        (b'[{"text": "a"}', "']' was expected, but 'the end of the file' was found"),
        (b'[{"text": "a"}]\n[{"text": "b"}]', "something after the list"),
        (b'[{"text": "a"}, {"text"]', "not a list of JSON records: Expecting"),
        (b'[{"text": "\xff"}]', "is not UTF-8"),
        (b"[" * 100_000, "nests too deeply"),
        (b'[{"text": "' + b"a" * 2000 + b'"}, ', "a record is longer than 1,000 bytes"),
    ],
)
def test_a_broken_list_of_records_is_refused(tmp_path: Path, content: bytes, reason, monkeypatch):
    monkeypatch.setattr(json_lines, "_LONGEST_LINE_BYTES", 1000 if b"aaaa" in content else 2**20)
    monkeypatch.setattr(json_array, "_BLOCK_BYTES", 2**7 if b"aaaa" in content else 2**20)
    path = tmp_path / "a.json"
    path.write_bytes(content)
    if reason is None:
        assert text_in(path) == ""
        return
    with pytest.raises(DataError, match=reason) as refusal:
        text_in(path)
    assert refusal.value.where == str(path)


def test_a_field_inside_of_others_is_named_with_dots(tmp_path: Path):
    records = [{"a": {"b": "one", "c.d": {"e": "x"}}}, {"a.b": "two", "a": {"b": 3, "c.d": {"e": "y"}}}]
    path = written(tmp_path / "a.jsonl", *records)
    assert text_in(path, "a.b") == "one\ntwo" and text_in(path, "a.c.d.e") == "x\ny"
    with pytest.raises(DataError, match=r"line 1 has no field 'a\.x'; it has 'a'"):
        text_in(path, "a.x")
    with pytest.raises(DataError, match="in line 1 it holds a value of type dict"):
        text_in(path, "a")
