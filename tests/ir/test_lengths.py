"""A range of sequence lengths, and modules that are held to one."""

import pytest
import torch
from torch import Tensor, nn

from dispfx.errors import CaptureError, DataError
from dispfx.ir.lengths import Lengths, hold_to


class Same(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        return ids


def test_a_range_names_its_ends():
    assert [str(Lengths()), str(Lengths(3)), str(Lengths(1, 4096))] == [
        "any length",
        "3 tokens or more",
        "1 to 4,096 tokens",
    ]
    assert Lengths(3, 5).within(9) == 5 and Lengths(3).within(9) == 9


def test_a_limit_is_a_fault_of_the_text_and_a_change_one_of_the_capture():
    with pytest.raises(DataError, match="this decoder reads at most 8 tokens, and a sequence has 9"):
        Lengths(1, 8, "limit").require(9)
    with pytest.raises(CaptureError, match="arithmetic changes at 9 tokens") as error:
        Lengths(1, 8, "changes", where="layer, a.py:3").require(9)
    assert error.value.where == "layer, a.py:3" and "`seq_len=8`" in str(error.value.hint)
    with pytest.raises(CaptureError, match="below 3 tokens"):
        Lengths(3).require(2)


def test_a_module_is_held_to_the_last_range_and_by_the_input_that_counts_the_tokens():
    module = Same()
    hold_to(module, Lengths(1, 4))
    hold_to(module, Lengths(1, 8), index=1)
    assert len(module._forward_pre_hooks) == 1
    module(torch.zeros(1, 6), torch.zeros(1, 8))
    with pytest.raises(CaptureError, match="a sequence has 9"):
        module(torch.zeros(1, 6), torch.zeros(1, 9))
    hold_to(module, Lengths())
    assert not module._forward_pre_hooks
