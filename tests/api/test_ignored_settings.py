"""A setting of how MODEL is loaded acts, or is refused, where MODEL is an output folder or a module."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dispfx.api import bench, compile, evaluate, export, generate
from dispfx.errors import DispfxError, SourceError
from dispfx.settings.trees import RecoverSettings
from tests.api.conftest import Compiled
from tests.api.plain import build_decoder
from tests.source.byte_tokenizer import byte_tokenizer


@pytest.fixture
def digits(tmp_path: Path) -> dict[str, Any]:
    """A text of bytes that the plain decoder knows, and the tokenizer of bytes."""
    (tmp_path / "digits.txt").write_text("0123456789" * 40)
    byte_tokenizer().save_pretrained(tmp_path / "bytes")
    return {"eval_data": tmp_path / "digits.txt", "tokenizer": str(tmp_path / "bytes"), "context": 16}


@pytest.mark.parametrize("changes", [{"dtype": "bfloat16"}, {"revision": "main"}], ids=str)
@pytest.mark.parametrize("verb", [evaluate, export, generate, bench])
def test_a_folder_has_its_own_type_and_no_revision(
    verb: Callable[..., Any], changes: dict[str, Any], compiled: Compiled, tokens: Path
):
    others = {evaluate: {"eval_data": tokens}, export: {"pt2": True}, generate: {"prompt": "a"}}.get(verb, {})
    (name,) = changes
    with pytest.raises(SourceError, match=f"`{name}=.*has no effect on a folder that dispfx wrote"):
        verb(str(compiled.path), **others, **changes)


def test_a_folder_without_a_tokenizer_takes_the_one_that_is_named(compiled: Compiled, digits: dict[str, Any]):
    """The error without one gives this advice."""
    assert evaluate(str(compiled.path), **digits).value > 1.0
    written = generate(str(compiled.path), "01", tokenizer=digits["tokenizer"], max_new_tokens=2)
    assert isinstance(written, str)


def test_a_module_takes_a_tokenizer_too(digits: dict[str, Any]):
    assert evaluate(build_decoder(), **digits).value > 1.0


@pytest.mark.parametrize(
    ("changes", "words", "advice"),
    [
        ({"dtype": "bfloat16"}, "its weights are torch.float32", "module.to"),
        ({"revision": "main"}, "chooses a version of a hub id", "leave it out"),
        ({"device": "cuda"}, "it is on cpu", "module.to"),
    ],
    ids=["dtype", "revision", "device"],
)
def test_a_module_is_not_what_the_settings_would_make_of_it(
    changes: dict[str, Any], words: str, advice: str, tokens: Path, tmp_path: Path, monkeypatch: Any
):
    """The report said bfloat16 of a run in float32."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SourceError, match=words) as caught:
        compile(build_decoder(), 0.3, tokens, tmp_path / "out", **changes)
    assert advice in str(caught.value.hint) and not list(tmp_path.iterdir())


def test_what_a_module_is_already_may_be_said(tokens: Path):
    assert evaluate(build_decoder(), eval_data=tokens, context=16, dtype="float32", device="cpu").value > 1.0


def test_weights_are_recovered_in_the_type_of_the_folder():
    asked = {"model": "out/pruned", "dense": "demo", "out": "out/recovered", "dtype": "bfloat16"}
    with pytest.raises(DispfxError, match="`dtype` is that of frozen weights under adapters"):
        RecoverSettings.of(**asked)
    assert RecoverSettings.of(**asked, train="lora").model.dtype == "bfloat16"
