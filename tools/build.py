#!/usr/bin/env python3
"""Build wheel and sdist so that the same commit always gives the same bytes.

    tools/build.py --out dist

Only tracked files are built, from a copy in which every time is that of the commit (or SOURCE_DATE_EPOCH),
with the setuptools that runs this; nothing is downloaded.  setuptools writes the times of its own files into
an sdist, so that archive is packed again: entries by name, without owners, with that one time.  The bytes
also depend on the versions of Python and setuptools, which are printed.
"""

import argparse
import gzip
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent
BUILT = ("dispfx", "passes", "dispfx_autoload.py", "pyproject.toml", "README.md", "LICENSE")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the two archives")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    epoch = int(os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        archives = build(Path(folder), epoch)
        for archive in archives:
            shutil.copyfile(archive, args.out / archive.name)
            print(hashlib.sha256(archive.read_bytes()).hexdigest(), args.out / archive.name)
    import setuptools

    print(f"python {sys.version.split()[0]}, setuptools {setuptools.__version__}, time {epoch}")


def build(folder: Path, epoch: int) -> list[Path]:
    """Build both archives in `folder` and return them."""
    source = folder / "source"
    for name in _git("ls-files", "-z", "--", *BUILT).split("\0"):
        if name:
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(CHECKOUT / name, source / name, follow_symlinks=False)
    for path in source.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() else 0o644)
        os.utime(path, (epoch, epoch), follow_symlinks=False)
    wheel = _built("wheel", source, folder / "wheel", epoch)
    sdist = _built("sdist", source, folder / "sdist", epoch)
    sdist.write_bytes(_packed_again(sdist, epoch))
    return [wheel, sdist]


def _built(kind: str, source: Path, into: Path, epoch: int) -> Path:
    into.mkdir()
    code = f"from setuptools.build_meta import build_{kind}; build_{kind}({str(into)!r})"
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)
    (archive,) = into.iterdir()
    return archive


def _packed_again(archive: Path, epoch: int) -> bytes:
    packed = io.BytesIO()
    with (
        tarfile.open(archive) as old,
        gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as squeezed,
        tarfile.open(fileobj=squeezed, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for entry in sorted(old.getmembers(), key=lambda entry: entry.name):
            entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname = epoch, 0, 0, "", ""
            entry.pax_headers = {}
            new.addfile(entry, old.extractfile(entry) if entry.isfile() else None)
    return packed.getvalue()


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    main()
