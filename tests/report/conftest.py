"""A report for every test of this folder."""

import pytest

from dispfx.report import Report
from tests.report.example import example_report


@pytest.fixture
def report() -> Report:
    return example_report()
