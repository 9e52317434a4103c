"""AdamW (arXiv 1711.05101) that takes outer products by their factors.

With g = left · rightᵀ the gradient, n the steps done with this one, and 1 − β as a number of its own:

    p ← p − lr · decay · p      m ← m + (1 − β₁)(g − m)      v ← v + (1 − β₂)(g² − v)
    p ← p − lr / (1 − β₁ⁿ) · m / (√v / √(1 − β₂ⁿ) + ε)

The heads' gradient has as many numbers as they have.  On a GPU, where the step of AdamW takes as long as its
numbers take to be read and written, it is made out of its factors where it is needed, and never written.
Without Triton the products are written, and torch's own AdamW takes them.

Legend: C matrices, W rows, F columns, P parameters.
"""

import importlib.util
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import first_line
from dispfx.learning.outer_product import OuterProduct, OuterProducts

_COLUMNS = (16, 32, 64, 128, 256)


class OuterAdamW(torch.optim.AdamW):
    """AdamW, fused, with the state of torch's own, whatever way a parameter takes.

    Args:
        parameters: with a gradient, or (C, W, F) with an outer product for it.
        lr, weight_decay: as torch's.
        note: told why a GPU does without the kernels.
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        *,
        lr: float,
        weight_decay: float,
        note: Callable[[str], None] = lambda text: None,
    ):
        super().__init__(parameters, lr=lr, weight_decay=weight_decay, fused=True)
        self._note, self._noted = note, False

    @torch.no_grad()
    def apply(self, outer: OuterProducts, skip: Tensor) -> None:
        """Do a step.

        Args:
            outer: the gradients of parameters that have no `grad`.
            skip: a float32 scalar on the device; where it is 1, the step changes nothing.
        """
        taken = {parameter: outer[parameter] for parameter in outer if self._has_kernels(parameter)}
        for parameter, product in outer.items():
            if parameter not in taken:
                parameter.grad = product.written()
        if taken:
            self.apply_kernels(taken, skip)
        self.found_inf = skip
        self.step()

    @torch.no_grad()
    def apply_kernels(self, outer: OuterProducts, skip: Tensor) -> None:
        """Do the step of these parameters alone, by the kernels."""
        # Triton is there with torch for GPUs only.
        from dispfx.learning.outer_adamw_kernels import outer_adamw

        states = [self._state_of(parameter) for parameter in outer]
        done = 1 - skip
        for state in states:
            state["step"] += done
        group = self.param_groups[0]
        # In float64, as torch has them: 1 - β₂ⁿ is small at first.
        steps_P = torch.stack([state["step"] for state in states]).double()
        beta_1, beta_2 = group["betas"]
        scale_P = (group["lr"] / (1 - beta_1**steps_P)).float()
        unbias_P = (1 - beta_2**steps_P).rsqrt().float()
        for index, (parameter, product) in enumerate(outer.items()):
            outer_adamw(
                parameter,
                states[index]["exp_avg"],
                states[index]["exp_avg_sq"],
                product,
                (scale_P[index], unbias_P[index], skip),
                decay=group["lr"] * group["weight_decay"],
                betas=(beta_1, beta_2),
                eps=group["eps"],
            )

    def _has_kernels(self, parameter: Tensor) -> bool:
        """Whether the kernels do the step of a parameter; the first time that a GPU has none, say why."""
        if parameter.device.type != "cuda":
            return False
        obstacle = _obstacle(parameter)
        if obstacle is not None and not self._noted:
            self._note(f"gradients of the hypernetwork's heads are written out: {obstacle}")
            self._noted = True
        return obstacle is None

    def _state_of(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), device=parameter.device)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        return state


def _obstacle(parameter: Tensor) -> str | None:
    """Return why the kernels cannot do the step of a parameter on a GPU, or None."""
    columns = parameter.shape[-1]
    if torch.version.cuda is None:
        return "the kernels are for CUDA"
    if columns not in _COLUMNS or not parameter.is_contiguous() or parameter.dtype != torch.float32:
        return f"the kernels are for {', '.join(map(str, _COLUMNS))} float32 columns, not {columns}"
    return _disagreement(parameter.device, columns)


@lru_cache
def _disagreement(device: torch.device, columns: int) -> str | None:
    """Return why the kernels do not give what torch's AdamW gives, tried once on a few rows, or None."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        found, expected = (steps_of_both(device, columns, kernels=kernels) for kernels in (True, False))
    except Exception as error:  # a Triton that cannot compile for this card; torch's own is there
        return f"the kernels fail: {first_line(error)}"
    agree = all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected, strict=True))
    return None if agree else "the kernels get other numbers than torch's AdamW"


def steps_of_both(device: torch.device, columns: int, *, kernels: bool, steps: int = 4) -> list[Tensor]:
    """Return a parameter (3, 21, F) and its state after a few steps, the second of which is skipped."""
    generator = torch.Generator().manual_seed(columns)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    parameter = nn.Parameter(drawn(3, 21, columns))
    optimizer = OuterAdamW([parameter], lr=1e-2, weight_decay=0.1)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        outer = {parameter: OuterProduct(drawn(3, 21), drawn(3, columns))}
        skip = torch.tensor(float(step == 1), device=device)
        if kernels:
            optimizer.apply_kernels(outer, skip)
            continue
        parameter.grad = outer[parameter].written()
        optimizer.apply({}, skip)
    state: dict[str, Any] = optimizer.state[parameter]
    return [parameter.detach(), *state.values()]
