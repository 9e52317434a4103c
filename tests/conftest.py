"""Every test runs on one thread, from a fixed seed, and never reaches the network."""

import base64
import gc
import os
import signal
import sys
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
# Nor does a compiler that a test starts have threads.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch

from dispfx.report import pictures
from tests.quick_run import is_left_out

torch.set_num_threads(1)
# A shell starts what it runs in the background with Ctrl-C ignored, and tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what `tools/test --quick` leaves out (see `tests.quick_run`)."""
    if is_left_out(item.path):
        item.add_marker("full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let both workers begin with long tests and end with short ones, so that they end together.

    Each worker is given one half of the list, and takes from the end of the other's when it is done.  The
    tests of a file stay together, for they share what their fixtures make.
    """
    if not hasattr(config, "workerinput"):
        return
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    by_length = sorted(files.values(), key=_length_rank)
    heavy = [file for file in by_length if _length_rank(file) < len(_LENGTHS)]
    halves = [[item for file in heavy[worker::2] for item in file] for worker in range(2)]
    short = [item for file in by_length[len(heavy) :] for item in file]
    missing = max(0, len(items) // 2 - len(halves[0]))
    items[:] = [*halves[0], *short[:missing], *halves[1], *short[missing:]]


_LENGTHS = ("long", "slow")


def _length_rank(file: list[pytest.Item]) -> int:
    """Return 0 for tests of which one is long, 1 where one is slow, 2 for others."""
    return next(
        (rank for rank, name in enumerate(_LENGTHS) if any(item.get_closest_marker(name) for item in file)),
        len(_LENGTHS),
    )


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


_MANY_MODULES = 100
_modules_when_frozen = 0


@pytest.fixture(autouse=True, scope="module")
def _frozen_libraries() -> None:
    """Keep what importing libraries has made out of the collector's sight.

    That is more than a million objects, which never become garbage; dispfx lets go of weights by a whole
    collection here and there, and each would look at all of them.
    """
    global _modules_when_frozen
    if len(sys.modules) > _modules_when_frozen + _MANY_MODULES:
        gc.collect()
        gc.freeze()
        _modules_when_frozen = len(sys.modules)


_draw_picture = pictures.draw_picture
_draws = True
_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Draw the pictures of a report only in tests that look at them: they take a third of a small run."""
    global _draws
    _draws = item.get_closest_marker("pictures") is not None


def _draw_or_not(name: str, caption: str, alt: str, draw: Any, height: float) -> pictures.Picture:
    if _draws:
        return _draw_picture(name, caption, alt, draw, height)
    return pictures.Picture(name, caption, alt, "<svg></svg>", _PIXEL)


pictures.draw_picture = _draw_or_not
