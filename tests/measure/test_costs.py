"""A measured table is valid, and larger products cost more."""

import importlib
import sys
from pathlib import Path

import torch

from dispfx.plan.latency_table import LatencyTable

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
measure_costs = importlib.import_module("measure_costs").measure_costs
sys.path.pop(0)


def test_a_measured_table_is_valid_and_rises_with_size():
    table = measure_costs(torch.device("cpu"), torch.float32, 4, (8, 1024), rounds=3)
    assert LatencyTable.of_plain(vars(table)) == table
    assert (table.tokens, table.rows, table.columns) == (4, (8, 1024), (8, 1024))
    assert table.product_seconds(1024, 1024) > table.product_seconds(8, 8) > 0
    assert table.selection_seconds > 0
