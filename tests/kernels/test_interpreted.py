"""The Triton kernels, interpreted on the CPU, compute their references.

On a GPU `tools/bench_shapes.py --sections check` compares them in every dtype.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.kernels.interpreter import require_interpreter

# Eleven bits of half precision, once for the shares and once for the result.
HALF = 2e-3


def test_the_kernels_compute_their_references():
    """Triton interprets kernels if it is told so before it is imported."""
    require_interpreter()
    script = Path(__file__).with_name("interpreted.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    errors = json.loads(done.stdout)
    assert len(errors["attention"]) == 9 and max(errors["attention"]) <= HALF
