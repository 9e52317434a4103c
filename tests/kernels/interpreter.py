"""Whether Triton can interpret kernels on the CPU here."""

from types import ModuleType

import numpy
import pytest


def require_interpreter() -> None:
    """Skip the test where there is no Triton, or one whose interpreter does not go with numpy."""
    triton = pytest.importorskip("triton", reason="Triton comes with torch for GPUs")
    if _version(numpy) >= (2, 4) and _version(triton) < (3, 8):
        pytest.skip("this Triton's interpreter reads numbers in a way that numpy 2.4 has removed")


def _version(module: ModuleType) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))
