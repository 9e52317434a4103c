"""What a word of --data means, and what is refused before anything is read."""

from pathlib import Path

import pytest

from dispfx.errors import DataError
from dispfx.words.text_origin import TextOrigin, check_texts, repeated_texts, tables_as_text, text_origin


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("text.txt", TextOrigin("text", "text.txt")),
        ("README", TextOrigin("text", "README")),
        ("a.jsonl", TextOrigin("json-lines", "a.jsonl")),
        ("a.jsonl.gz", TextOrigin("json-lines", "a.jsonl.gz")),
        ("a/data.json", TextOrigin("json-lines", "a/data.json")),
        ("a.ndjson", TextOrigin("json-lines", "a.ndjson")),
        ("a.json.gz", TextOrigin("json-lines", "a.json.gz")),
        ("a.NDJSON.Gz", TextOrigin("json-lines", "a.NDJSON.Gz")),
        ("BIG.JSONL", TextOrigin("json-lines", "BIG.JSONL")),
        ("U.Json", TextOrigin("json-lines", "U.Json")),
        ("T.SAFETENSORS", TextOrigin("tokens", "T.SAFETENSORS")),
        ("A.Parquet", TextOrigin("parquet", "A.Parquet")),
        ("json", TextOrigin("text", "json")),
        ("a.b.parquet", TextOrigin("parquet", "a.b.parquet")),
        ("a.safetensors", TextOrigin("tokens", "a.safetensors")),
        ("datasets:alpaca", TextOrigin("dataset", "alpaca")),
        ("datasets:o/wikitext:raw:test", TextOrigin("dataset", "o/wikitext", "raw", "test")),
        ("datasets:o/wikitext:raw", TextOrigin("dataset", "o/wikitext", "raw", "train")),
        ("datasets:./folder::test", TextOrigin("dataset", "./folder", None, "test")),
    ],
)
def test_every_form_is_known_by_its_name(word: str, expected: TextOrigin):
    assert text_origin(word) == expected == text_origin(Path(word) if ":" not in word else word)


def test_a_report_calls_a_text_by_its_name_without_folders(tmp_path: Path):
    assert text_origin("a/b/text.txt").name == "text.txt"
    assert text_origin("datasets:o/wikitext:raw:test").name == "datasets:o/wikitext:raw:test"
    assert text_origin("datasets:o/alpaca").name == "datasets:o/alpaca:train"
    (tmp_path / "corpus").mkdir()
    assert text_origin(f"datasets:{tmp_path}/corpus").name == "datasets:corpus:train"


@pytest.mark.parametrize(
    "word",
    [
        "datasets:",
        "datasets::c",
        "datasets:a:b:c:d",
        "datasets:a:b:",
        "text.txt.gz",
        "A.TXT.GZ",
        "a.jsonl.zst",
        "a.ZIP",
    ],
)
def test_a_malformed_word_is_refused(word: str):
    with pytest.raises(DataError) as refusal:
        text_origin(word)
    assert refusal.value.where == word and refusal.value.hint


def test_files_must_be_there_and_weights_as_many_as_texts(tmp_path: Path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.jsonl").touch()
    check_texts([tmp_path / "a.txt"])
    check_texts([tmp_path / "a.txt"] * 2, [1.0, 2.0])
    for bad in ("absent.txt", "empty.jsonl", "."):
        with pytest.raises(DataError) as refusal:
            check_texts([tmp_path / "a.txt", tmp_path / bad])
        assert refusal.value.where == str(tmp_path / bad)
    with pytest.raises(DataError, match="there are 1 for 2"):
        check_texts([tmp_path / "a.txt"] * 2, [1.0])


@pytest.mark.parametrize(("word", "library"), [("a.parquet", "pyarrow"), ("datasets:alpaca", "datasets")])
def test_a_library_that_is_missing_is_named_with_its_extra(
    word: str, library: str, tmp_path: Path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.parquet").write_bytes(b"any")
    monkeypatch.setattr("dispfx.words.text_origin.find_spec", lambda name: None)
    with pytest.raises(DataError, match=f"needs {library}") as refusal:
        check_texts([word])
    assert refusal.value.hint == "pip install 'dispfx[data]'"


def test_a_text_that_is_named_twice_is_told_whatever_it_is_called(tmp_path: Path):
    for name, content in {"a.txt": "one", "b.txt": "two", "copy.txt": "one"}.items():
        (tmp_path / name).write_text(content)
    a, b, copy = (tmp_path / name for name in ("a.txt", "b.txt", "copy.txt"))
    (tmp_path / "link.txt").symlink_to(a)
    assert repeated_texts([a, b], []) == repeated_texts([b], [a]) == []
    for same in (a, tmp_path / "link.txt", copy, str(tmp_path / ".." / tmp_path.name / "a.txt")):
        (twice,) = repeated_texts([a, b, same], [])
        assert "twice" in twice
        (both,) = repeated_texts([b, a], [same])
        assert "measured on text that was learned from" in both and Path(same).name in both
    assert len(repeated_texts(["datasets:x:y:train"], ["datasets:x:y", "datasets:x:y:test"])) == 1


def test_a_table_that_is_read_as_text_is_told_once():
    told = tables_as_text(["a/t.csv", "b.TSV", "a/t.csv", "c.txt", "d.parquet", "datasets:x.csv"])
    assert [line.split()[0] for line in told] == ["t.csv", "b.TSV"]
    assert "convert it to .jsonl or .parquet" in told[0]
