"""Token files: mapped, not read; broken ones refused."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dispfx.errors import DataError
from dispfx.source.text.token_file import joined_tokens, largest_id, stored_tokens


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int32, torch.uint32, torch.int64])
def test_every_type_of_integers_is_read_as_it_is(tmp_path: Path, dtype: torch.dtype):
    ids = torch.tensor([7, 5, 200, 3]).to(dtype)
    save_file({"tokens": ids}, tmp_path / "tokens.safetensors")
    found = stored_tokens(tmp_path / "tokens.safetensors")
    assert found.dtype == dtype and found.tolist() == [7, 5, 200, 3]
    assert largest_id(found, where="") == 200
    assert joined_tokens([found, found]).tolist() == [7, 5, 200, 3] * 2


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({"ids": torch.tensor([1])}, "this one holds"),
        ({"tokens": torch.tensor([1.0])}, "vector of integers"),
        ({"tokens": torch.tensor([True])}, "vector of integers"),
        ({"tokens": torch.tensor([[1, 2]])}, "vector of integers"),
        ({"tokens": torch.zeros(0, dtype=torch.int64)}, "it is empty"),
    ],
    ids=["other-name", "floats", "booleans", "matrix", "empty"],
)
def test_a_token_file_of_another_shape_is_refused(tmp_path: Path, tensors, reason: str):
    save_file(tensors, tmp_path / "tokens.safetensors")
    with pytest.raises(DataError, match=reason):
        stored_tokens(tmp_path / "tokens.safetensors")


def test_a_broken_or_missing_token_file_is_refused(tmp_path: Path):
    (tmp_path / "broken.safetensors").write_bytes(b"no tensors")
    with pytest.raises(DataError, match="not a safetensors file"):
        stored_tokens(tmp_path / "broken.safetensors")
    save_file({"tokens": torch.arange(1000)}, tmp_path / "cut.safetensors")
    whole = (tmp_path / "cut.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-100])
    with pytest.raises(DataError, match="not a safetensors file"):
        stored_tokens(tmp_path / "cut.safetensors")
    with pytest.raises(DataError, match="does not exist"):
        stored_tokens(tmp_path / "absent.safetensors")


def test_a_file_whose_header_is_not_padded_is_read(tmp_path: Path):
    ids = torch.arange(5, dtype=torch.int32)
    for spaces in range(8):
        header = b'{"tokens":{"dtype":"I32","shape":[5],"data_offsets":[0,20]}}' + b" " * spaces
        path = tmp_path / f"{spaces}.safetensors"
        path.write_bytes(len(header).to_bytes(8, "little") + header + ids.numpy().tobytes())
        assert torch.equal(stored_tokens(path), ids)


def test_tokens_are_found_behind_other_tensors_and_are_mapped(tmp_path: Path):
    path = tmp_path / "tokens.safetensors"
    others = {"a": torch.ones(3), "z": torch.arange(5, dtype=torch.int8)}
    save_file({"tokens": torch.arange(1000, dtype=torch.int32), **others}, path, metadata={"any": "thing"})
    found = stored_tokens(path)
    assert torch.equal(found, torch.arange(1000, dtype=torch.int32))
    raw = path.read_bytes()
    path.write_bytes(raw.replace((999).to_bytes(4, "little"), (7).to_bytes(4, "little")))
    assert found[-1] == 7, "what changes on disk is seen, so nothing was copied"


def test_one_vector_is_joined_to_itself_without_a_copy(tmp_path: Path):
    ids = torch.arange(10)
    assert joined_tokens([ids]) is ids


@pytest.mark.parametrize(
    ("ids", "found"), [([2**40, 2**40], "1,099,511,627,776 to 1,099"), ([7, -3], "-3 to 7")]
)
def test_ids_out_of_range_are_told_as_they_are(ids: list[int], found: str):
    with pytest.raises(DataError, match=f"from 0 to 2,147,483,647, but holds {found}"):
        largest_id(torch.tensor(ids), where="tokens.safetensors")
