"""A parameter has one frozen twin, and both move together."""

import gc
import weakref

import torch
from torch import nn

from dispfx.ir.twins import frozen_twin, move


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.arange(6.0).reshape(2, 3))


def test_a_twin_is_frozen_shares_the_storage_and_is_the_only_one():
    weight = parameter()
    twin = frozen_twin(weight)
    assert not twin.requires_grad and weight.requires_grad
    assert twin.data_ptr() == weight.data_ptr() and twin is frozen_twin(weight)


def test_a_parameter_with_other_values_has_another_twin():
    weight = parameter()
    before = frozen_twin(weight)
    weight.data = weight.data.double()
    after = frozen_twin(weight)
    assert before.dtype == torch.float32 and after.dtype == torch.float64 and after is frozen_twin(weight)


def test_a_twin_on_the_meta_device_stays_the_same():
    weight = nn.Parameter(torch.empty(2, 3, device="meta"))
    assert frozen_twin(weight) is frozen_twin(weight)


def test_values_move_for_both():
    weight = parameter()
    twin, place = frozen_twin(weight), torch.zeros(4, 3)
    place[:2] = weight.detach()
    move(twin, place[:2])
    assert twin.data_ptr() == weight.data_ptr() == place.data_ptr()
    assert weight.requires_grad and not twin.requires_grad and frozen_twin(weight) is twin


def test_a_parameter_that_has_gone_elsewhere_stays_there():
    weight = parameter()
    twin = frozen_twin(weight)
    weight.data = torch.ones(2, 3)
    move(twin, torch.zeros(2, 3))
    assert weight.data.all() and not twin.any()


def test_a_tensor_that_is_no_twin_moves_alone():
    weight = parameter()
    move(weight, torch.zeros(2, 3))
    assert not weight.data.any()


def test_a_twin_does_not_keep_its_parameter_alive_nor_the_other_way_round():
    weight = parameter()
    twin = frozen_twin(weight)
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
    move(twin, torch.zeros(2, 3))
    assert not twin.any()
