"""Regions of another gradient or autocast mode: what is in them is code like other code."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import dispfx
from tests.one_branch import VOCABULARY, Middle, OneBranch, require_one_function
from tests.plain_decoders import perturb
from tests.programs import token_ids

IDS = token_ids(2, 9, vocabulary=VOCABULARY)


def _off():
    return torch.autocast("cpu", enabled=False)


def literal(m: OneBranch, x: Tensor) -> Tensor:
    with _off():
        scale = torch.tensor(0.5)
    return m.head(x * scale)


def literal_without_gradient(m: OneBranch, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return m.head(x * torch.tensor([0.5]))


def in_place(m: OneBranch, x: Tensor) -> Tensor:
    with _off():
        x = x * 2
        x += 1
    return m.head(x)


def through_a_view(m: OneBranch, x: Tensor) -> Tensor:
    """torch has to make this one functional, and the last values of the graph come from a region."""
    with _off():
        y = m.head(x)
        y[..., 0] = 0
        y[..., 1:3].mul_(torch.tensor(2.0))
    with torch.enable_grad():
        return y * 1.5


def written_in_another_region(m: OneBranch, x: Tensor) -> Tensor:
    y = x * 2
    with _off():
        y.add_(1)
        with torch.enable_grad(), _off():
            y.mul_(torch.tensor(3.0))
        y.sub_(x)
    return m.head(y)


def checkpointed(reentrant: bool) -> Callable[[OneBranch, Tensor], Tensor]:
    def end(m: OneBranch, x: Tensor) -> Tensor:
        def part(x: Tensor) -> Tensor:
            y = m.head(x)
            y += torch.tensor(0.5)
            return y

        return checkpoint(part, x, use_reentrant=reentrant)  # type: ignore[return-value]

    return end


def without_inference_mode(m: OneBranch, x: Tensor) -> Tensor:
    with torch.inference_mode():
        y = x * torch.tensor(2.0)
        y += 1
    return m.head(y + x)


REGIONS = {
    "a literal": literal,
    "a literal in gradient mode": literal_without_gradient,
    "in place": in_place,
    "in place through a view": through_a_view,
    "in place in several": written_in_another_region,
    "checkpoint": checkpointed(False),
    "reentrant checkpoint": checkpointed(True),
    "inference mode": without_inference_mode,
}


def decoder(end: Callable[[OneBranch, Tensor], Tensor]) -> OneBranch:
    torch.manual_seed(0)
    return perturb(OneBranch(Middle(lambda m, h: F.gelu(h)), end))  # type: ignore[return-value]


# What torch says of a checkpoint without a gradient.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", sorted(REGIONS))
def test_a_region_is_code_like_other_code(name: str):
    model = decoder(REGIONS[name])
    program = dispfx.capture(model)
    assert all("wrap_with" not in str(node.target) for node in program.graph.nodes)
    with torch.no_grad():
        assert torch.equal(program.graph_module(IDS), model(IDS))
    assert [site.kind for site in program.sites] == ["read", "inner", "write"]
    require_one_function(model, program)


def on(m: OneBranch, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = m.head(x)
        y += 1
        with _off():
            z = m.head(x * torch.tensor(0.5))
    return y + z


def test_autocast_that_is_switched_on_becomes_casts():
    model = decoder(on)
    program = dispfx.capture(model)
    with torch.no_grad():
        assert torch.equal(program.graph_module(IDS), model(IDS))
    halves = {node.meta["val"].dtype for node in program.graph.nodes if "linear" in node.name}
    assert halves == {torch.float32, torch.bfloat16}
