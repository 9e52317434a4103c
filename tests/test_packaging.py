"""What an installation holds: every package once, and the data files."""

import tarfile
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from dispfx import __version__
from tests.wheels import CHECKOUT, build, copied_checkout

SETUPTOOLS = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages_on_disk() -> dict[str, Path]:
    """Package name → folder, following the layout and not the symlink."""
    found = {}
    for room in ("dispfx", "passes"):
        for path in sorted((CHECKOUT / room).rglob("__init__.py")):
            folder = path.parent.relative_to(CHECKOUT)
            if folder.is_relative_to("dispfx/passes"):
                continue
            name = ".".join(folder.parts)
            found[f"dispfx.{name}" if room == "passes" else name] = path.parent
    return found


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout's files that a build reads."""
    return copied_checkout(tmp_path_factory.mktemp("source"))


def test_every_package_is_listed():
    assert sorted(SETUPTOOLS["packages"]) == sorted(packages_on_disk())


def test_the_symlink_serves_editors_and_leads_to_the_passes():
    link = CHECKOUT / "dispfx" / "passes"
    assert link.is_symlink() and not link.readlink().is_absolute()
    assert link.resolve() == (CHECKOUT / "passes").resolve()


@pytest.mark.slow
def test_a_wheel_holds_every_module_and_data_file_once(copied: Path, tmp_path: Path):
    wheel = build("wheel", copied, tmp_path / "wheel")
    assert wheel.name == f"dispfx-{__version__}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert max(Counter(names).values()) == 1
    for package, folder in packages_on_disk().items():
        for module in folder.glob("*.py"):
            assert f"{package.replace('.', '/')}/{module.name}" in names
    assert {"dispfx/py.typed", "dispfx_autoload.py"} <= set(names)
    assert not [name for name in names if name.startswith(("passes/", "tests/"))]
    for path in (CHECKOUT / "dispfx" / "demo" / "decoder").iterdir():
        assert f"dispfx/demo/decoder/{path.name}" in names


@pytest.mark.slow
def test_a_wheel_from_the_sdist_is_the_wheel_from_the_checkout(copied: Path, tmp_path: Path):
    archive = build("sdist", copied, tmp_path / "sdist")
    with tarfile.open(archive) as file:
        names = file.getnames()
        file.extractall(tmp_path / "unpacked", filter="data")
    assert max(Counter(names).values()) == 1
    assert not [name for name in names if "/dispfx/passes" in name], "the passes are in the sdist twice"
    (unpacked,) = (tmp_path / "unpacked").iterdir()

    from_sdist = zipfile.ZipFile(build("wheel", unpacked, tmp_path / "a"))
    from_checkout = zipfile.ZipFile(build("wheel", copied, tmp_path / "b"))
    contents = [
        {entry.filename: entry.CRC for entry in wheel.infolist() if not entry.filename.endswith("RECORD")}
        for wheel in (from_sdist, from_checkout)
    ]
    assert contents[0] == contents[1]
