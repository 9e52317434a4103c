"""What a process that was killed leaves behind."""

import subprocess
import sys
from pathlib import Path

_NAMES_ONE = """
import sys
from pathlib import Path
from dispfx.files.disk import partial_beside
print(partial_beside(Path(sys.argv[1])))
"""


def left_behind(path: Path) -> Path:
    """Return the temporary name that a process, which has ended since, had for `path`."""
    found = subprocess.run(
        [sys.executable, "-c", _NAMES_ONE, path], capture_output=True, text=True, check=True
    )
    return Path(found.stdout.strip())
