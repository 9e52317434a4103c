"""Every test runs on one thread, from a fixed seed, and never reaches the network."""

import os
import signal

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
