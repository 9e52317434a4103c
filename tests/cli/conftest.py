"""The command line with the compiler replaced, so that each test sees what it was asked to do."""

from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock, create_autospec

import pytest

from dispfx import api
from dispfx.report import Report
from tests.command_line import Result, run
from tests.report.example import example_report


@pytest.fixture
def dispfx() -> Callable[..., Result]:
    """Run the command line and return its exit code and output."""
    return run


@pytest.fixture
def replaced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., MagicMock]:
    """Replace a function of the API by one that takes the same arguments and returns `result`."""

    def replace(name: str, result: Any = None, error: BaseException | None = None) -> MagicMock:
        twin = create_autospec(getattr(api, name), return_value=result, side_effect=error)
        monkeypatch.setattr(api, name, twin)
        return twin

    return replace


@pytest.fixture
def report() -> Report:
    """What a compilation returns."""
    return example_report()
