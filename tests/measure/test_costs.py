"""A measured table is valid, and larger products cost more."""

import torch

from dispfx.benchmark.latency_measurement import measure_costs
from dispfx.plan.latency_table import CostTable


def test_a_measured_table_is_valid_and_rises_with_size():
    table = measure_costs(torch.device("cpu"), torch.float32, 4, (8, 1024), rounds=3)
    assert CostTable.of_plain(vars(table)) == table
    assert (table.tokens, table.rows, table.columns) == (4, (8, 1024), (8, 1024))
    assert table.product_seconds(1024, 1024) > table.product_seconds(8, 8) > 0
    assert table.selection_seconds > 0
