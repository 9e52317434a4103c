"""The API reference: every public name says what it does, what shapes it takes and what it raises."""

import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import dispfx
import dispfx.api
import dispfx.errors

TOOL = Path(__file__).parents[2] / "tools" / "reference_pages.py"
SHAPE = re.compile(r"\([A-Z](, [A-Z])*,?\)")
# They compute from what was checked before, or only look.
RAISE_NOTHING = {"coverage", "doctor", "estimate", "gate", "settings_of"}


@pytest.fixture(scope="module")
def reference() -> ModuleType:
    spec = importlib.util.spec_from_file_location("reference_pages", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["reference_pages"] = module
    spec.loader.exec_module(module)
    return module


def public(module: str) -> dict[str, Any]:
    """Return a module's own public names that have a docstring of their own to have."""
    found = importlib.import_module(module)
    own = [name for name, value in vars(found).items() if getattr(value, "__module__", "") == module]
    names = getattr(found, "__all__", [name for name in own if not name.startswith("_")])
    values = {name: getattr(found, name) for name in names}
    return {
        name: value for name, value in values.items() if inspect.isroutine(value) or inspect.isclass(value)
    }


def undocumented(module: str) -> list[str]:
    """Return public names without a docstring that somebody wrote."""
    found = []
    for name, value in public(module).items():
        said = value.__doc__ or ""
        if not said.strip() or said.startswith(f"{name}("):  # a dataclass writes one for itself
            found.append(f"{module}.{name}")
        if inspect.isclass(value):
            found += [f"{module}.{name}.{member}" for member in undocumented_members(value)]
    return found


def undocumented_members(of: type) -> list[str]:
    found = []
    for name, value in vars(of).items():
        function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
        if not name.startswith("_") and inspect.isfunction(function) and not function.__doc__:
            found.append(name)
    return found


def functions() -> dict[str, Any]:
    found = public("dispfx") | public("dispfx.api")
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def test_every_public_name_has_a_docstring(reference: ModuleType):
    assert sum(len(public(module)) for module in reference.MODULES) > 60
    assert [name for module in reference.MODULES for name in undocumented(module)] == []


@pytest.mark.parametrize("name", sorted(functions()))
def test_a_function_of_the_interface_gives_shapes_and_errors(name: str):
    function = functions()[name]
    said = inspect.getdoc(function) or ""
    types = " ".join(str(one) for one in inspect.get_annotations(function).values())
    if "Tensor" in types:
        assert SHAPE.search(said), "it takes or returns tensors, and gives no shape"
    assert ("Raises:" in said) != (name in RAISE_NOTHING)
    raised = re.findall(r"^    ([A-Z]\w+(?:, [A-Z]\w+)*): ", said.partition("Raises:")[2], re.MULTILINE)
    for error in ", ".join(raised).split(", ") if raised else []:
        assert hasattr(dispfx.errors, error) or error == "RankLost", f"no such error: {error}"


def test_a_name_without_a_docstring_would_be_found(monkeypatch):
    assert undocumented("dispfx.errors") == []
    monkeypatch.setattr(dispfx.errors.DataError, "__doc__", None)
    assert undocumented("dispfx.errors") == ["dispfx.errors.DataError"]


def test_the_pages_show_every_name_and_can_be_reached(reference: ModuleType, tmp_path: Path):
    pytest.importorskip("pdoc", reason="the reference needs pdoc, which is in the dev extra")
    pages = reference.write_reference(tmp_path)
    index = (tmp_path / reference.INDEX_FILE).read_text(encoding="utf-8")
    for module, page in zip(reference.MODULES, pages, strict=True):
        text = page.read_text(encoding="utf-8")
        assert [name for name in public(module) if f'id="{name}"' not in text] == []
        assert f'href="{page.relative_to(tmp_path)}"' in index
    assert "share of the counted parameters to remove" in pages[0].read_text(encoding="utf-8")
    learning = (tmp_path / "dispfx" / "settings" / "learning_settings.html").read_text(encoding="utf-8")
    assert (
        "Weight of the budget loss." in learning and "2048, or the decoder's context if shorter" in learning
    )
