"""Every test runs on one thread, from a fixed seed, and never reaches the network."""

import gc
import os
import signal
import sys

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"

import pytest
import torch

torch.set_num_threads(1)
# A shell starts what it runs in the background with Ctrl-C ignored, and tests send it to themselves.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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
