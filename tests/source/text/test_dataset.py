"""Data sets by name: read as a stream, whole where short, an equal share of every part where long."""

import json
from pathlib import Path

import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from dispfx.errors import DataError
from dispfx.source import check_readable, read_text
from dispfx.source.text import dataset
from dispfx.source.text.dataset import NamedDataset
from dispfx.words.text_origin import TextOrigin, text_origin
from tests.source.byte_tokenizer import byte_tokenizer

datasets = pytest.importorskip("datasets")

FILES, ROWS = 3, 40


def document(file: int, row: int) -> str:
    return f"{file} {row:02d}"


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Keep what the library writes out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of three files of JSON lines, and a test split of one."""
    path = tmp_path_factory.mktemp("sets") / "corpus"
    path.mkdir()
    for file in range(FILES):
        rows = [{"text": document(file, row), "id": row} for row in range(ROWS)]
        (path / f"train-{file:05d}-of-{FILES:05d}.jsonl").write_text(
            "".join(json.dumps(r) + "\n" for r in rows)
        )
    (path / "test.jsonl").write_text('{"text": "only this", "id": 1}\n')
    return path


def text_in(word: str, field: str = "text", most: int = 10**6) -> str:
    return "".join(NamedDataset(text_origin(word), field).texts(most))


def test_a_short_data_set_is_read_whole_and_in_order(folder: Path):
    expected = [document(file, row) for file in range(FILES) for row in range(ROWS)]
    assert text_in(f"datasets:{folder}").splitlines() == expected
    assert text_in(f"datasets:{folder}", most=4 * FILES * ROWS).splitlines() == expected


def test_of_a_longer_one_every_file_gives_its_beginning(folder: Path):
    found = text_in(f"datasets:{folder}", most=FILES * 10 * 4).splitlines()
    assert found == [document(file, row) for file in range(FILES) for row in range(10)]


def test_files_are_put_into_groups_where_there_are_many(folder: Path, monkeypatch):
    monkeypatch.setattr(dataset, "_MOST_GROUPS", 2)
    found = text_in(f"datasets:{folder}", most=2 * 10 * 4).splitlines()
    assert found == [document(file, row) for file in (0, 2) for row in range(10)]
    assert len(text_in(f"datasets:{folder}").splitlines()) == FILES * ROWS


def test_what_a_short_file_leaves_goes_to_the_others(tmp_path: Path):
    (tmp_path / "train-00000-of-00002.jsonl").write_text('{"text": "0 00"}\n')
    rows = "".join(json.dumps({"text": document(1, row)}) + "\n" for row in range(50))
    (tmp_path / "train-00001-of-00002.jsonl").write_text(rows)
    found = text_in(f"datasets:{tmp_path}", most=80).splitlines()
    assert found == ["0 00", *(document(1, row) for row in range(19))]


def test_a_split_a_configuration_and_a_field_are_chosen(folder: Path):
    assert text_in(f"datasets:{folder}:default:test") == "only this"
    assert text_in(f"datasets:{folder}::test") == "only this"
    with pytest.raises(DataError, match="no field 'body'; it has 'text', 'id'"):
        text_in(f"datasets:{folder}", "body")
    with pytest.raises(DataError, match="in record 1 it holds a value of type int"):
        text_in(f"datasets:{folder}", "id")


def test_a_data_set_saved_by_the_library_is_read_too(tmp_path: Path):
    texts = ["one", "two\n", "three"]
    saved = datasets.Dataset.from_dict({"text": texts})
    saved.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"dev": saved}).save_to_disk(str(tmp_path / "several"))
    assert text_in(f"datasets:{tmp_path / 'one'}") == "one\ntwo\nthree"
    assert text_in(f"datasets:{tmp_path / 'several'}::dev") == "one\ntwo\nthree"
    with pytest.raises(DataError, match="cannot be read: KeyError"):
        text_in(f"datasets:{tmp_path / 'several'}")


@pytest.mark.parametrize(
    ("ending", "reason"), [("::nope", "Bad split: nope"), (":nope", "'nope' not found"), ("/absent", "hub")]
)
def test_a_split_a_configuration_or_a_folder_that_is_not_there_is_refused(
    folder: Path, ending: str, reason: str
):
    with pytest.raises(DataError, match=reason) as refusal:
        text_in(f"datasets:{folder}{ending}")
    assert refusal.value.exit_code == 2


def test_empty_and_broken_data_sets_are_refused(tmp_path: Path):
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="any data files"):
        text_in(f"datasets:{tmp_path / 'none'}")
    (tmp_path / "blank").mkdir()
    (tmp_path / "blank" / "train.jsonl").write_text('{"text": ""}\n{"text": " "}\n')
    with pytest.raises(DataError, match="the text is empty"):
        read_text(f"datasets:{tmp_path / 'blank'}", byte_tokenizer())
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.jsonl").write_text('{"text": "a"}\n{"text"')
    with pytest.raises(DataError, match="the data set cannot be read"):
        text_in(f"datasets:{tmp_path / 'broken'}")


def test_offline_is_said_at_once_with_the_way_out(monkeypatch: pytest.MonkeyPatch):
    class Offline:
        def dataset_info(self, name: str, timeout: float) -> None:
            raise OfflineModeIsEnabled("offline")

    monkeypatch.setattr(dataset, "HfApi", Offline)
    with pytest.raises(DataError, match="the hub cannot be reached") as refusal:
        check_readable("datasets:Salesforce/wikitext:wikitext-2-raw-v1:test")
    assert refusal.value.exit_code == 2 and "datasets:FOLDER" in str(refusal.value.hint)


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(DataError, match="datasets is needed") as refusal:
        "".join(NamedDataset(TextOrigin("dataset", str(tmp_path)), "text").texts(10))
    assert refusal.value.hint == "pip install 'dispfx[data]'"


def test_the_check_reads_one_record_and_a_report_says_that_only_the_start_was_read(folder: Path, monkeypatch):
    asked = []
    plain = NamedDataset.texts

    def counted(self, most_bytes: int):
        for text in plain(self, most_bytes):
            asked.append(text)
            yield text

    monkeypatch.setattr(NamedDataset, "texts", counted)
    check_readable(f"datasets:{folder}::test")
    assert asked == ["only this"]
    assert read_text(f"datasets:{folder}::test", byte_tokenizer()).name == "datasets:corpus:test"
