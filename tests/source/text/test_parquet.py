"""Parquet: a column of text; what is no text is named by its row."""

from pathlib import Path
from typing import Any

import pytest

from dispfx.errors import DataError
from dispfx.source.text.parquet import Parquet

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def written(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    parquet.write_table(pa.table(columns), path, **options)
    return path


def text_in(path: Path, field: str = "text", most: int = 10**6) -> str:
    return "".join(Parquet(path, field).texts(most))


def test_texts_are_joined_by_line_breaks(tmp_path: Path):
    path = written(
        tmp_path / "a.parquet", {"id": [1, 2, 3], "text": ["one\n", "zwö", "three"]}, row_group_size=2
    )
    assert text_in(path) == "one\nzwö\nthree"


@pytest.mark.parametrize("kind", ["large_string", "dictionary", "string_view"])
def test_every_type_of_text_is_read(tmp_path: Path, kind: str):
    types = {
        "large_string": pa.large_string(),
        "dictionary": pa.dictionary(pa.int32(), pa.string()),
        "string_view": pa.string_view(),
    }
    path = written(tmp_path / "a.parquet", {"body": pa.array(["a", "b", "a"]).cast(types[kind])})
    assert text_in(path, "body") == "a\nb\na"


def test_a_long_table_gives_the_beginnings_of_evenly_spaced_row_groups(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("dispfx.source.text.parquet._MOST_GROUPS", 4)
    texts = [f"{number:05d} {number * 7919:08d}" for number in range(10_000)]
    path = written(
        tmp_path / "a.parquet", {"text": texts}, row_group_size=1000, use_dictionary=False, compression="gzip"
    )
    size = Parquet(path, "text").size()
    assert 10_000 * 14 < size < 10_000 * 20
    found = text_in(path, most=4 * 140).splitlines()
    assert found == [text for start in (0, 2000, 5000, 7000) for text in texts[start : start + 10]]
    assert text_in(path, most=size).splitlines() == texts


def test_a_row_without_text_is_refused_by_its_number(tmp_path: Path):
    path = written(tmp_path / "a.parquet", {"text": ["a", "b", None, "d"]}, row_group_size=2)
    with pytest.raises(DataError, match="in row 3 it holds nothing") as refusal:
        text_in(path)
    assert refusal.value.where == str(path)


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"body": ["a"], "id": [1]}, "the table has no field 'text'; it has 'body', 'id'"),
        ({"text": [1, 2]}, "in row 1 it holds a value of type int"),
        ({"text": [["a"]]}, "in row 1 it holds a value of type list"),
        ({"text": [b"a"]}, "in row 1 it holds a value of type bytes"),
    ],
)
def test_a_column_that_is_missing_or_no_text_is_refused(tmp_path: Path, columns, reason: str):
    path = written(tmp_path / "a.parquet", columns)
    with pytest.raises(DataError, match=reason):
        text_in(path)


def test_text_that_is_not_utf_8_is_refused(tmp_path: Path):
    array = pa.array([b"fine", b"\xff\xfe"]).view(pa.string())
    path = written(tmp_path / "a.parquet", {"text": array})
    with pytest.raises(DataError, match="not UTF-8"):
        text_in(path)


def test_a_file_that_is_no_parquet_or_is_missing_is_refused(tmp_path: Path):
    path = written(tmp_path / "a.parquet", {"text": ["a"] * 1000})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        text_in(path)
    path.write_bytes(b"no parquet")
    with pytest.raises(DataError, match="cannot be read"):
        Parquet(path, "text").size()
    with pytest.raises(DataError, match="there is no such file"):
        text_in(tmp_path / "absent.parquet")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow.parquet", None)
    path = written(tmp_path / "a.parquet", {"text": ["a"]})
    with pytest.raises(DataError, match="pyarrow is needed") as refusal:
        text_in(path)
    assert refusal.value.hint == "pip install 'dispfx[data]'"


def test_a_name_with_a_dot_is_a_column_or_leads_into_one(tmp_path: Path):
    columns = {"a.b": ["one", "two"], "a": [{"b": "x", "c": 1}, {"b": "y", "c": 2}], "a.bc": ["no", "no"]}
    dotted = written(tmp_path / "a.parquet", {"id": [1, 2], "a.b": columns["a.b"], "a.bc": columns["a.bc"]})
    assert text_in(dotted, "a.b") == "one\ntwo"
    assert 0 < Parquet(dotted, "a.b").size() < 200
    nested = written(tmp_path / "b.parquet", {"id": [1, 2], "a": columns["a"]})
    assert text_in(nested, "a.b") == "x\ny"
    both = written(tmp_path / "c.parquet", columns)
    assert text_in(both, "a.b") == "one\ntwo"
    for absent in ("a.x", "b", "a.b.c", "."):
        with pytest.raises(DataError, match=r"has no field .*; it has 'id', 'a'"):
            text_in(nested, absent)
    with pytest.raises(DataError, match="in row 1 it holds a value of type dict"):
        text_in(nested, "a")
