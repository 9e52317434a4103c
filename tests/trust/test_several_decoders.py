"""Several decoders in one process do not disturb each other."""

import json
import os
import subprocess
import sys


def test_pruned_and_dense_decoders_agree_with_themselves_in_turn_in_threads_and_after_a_fork():
    """In a process of its own: one that pytest has given threads cannot be forked safely."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.trust.several_decoders"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout, done.stderr
    record = json.loads(done.stdout)
    assert record["decoders"] == 10
    assert not any(record["differing"].values()), record
