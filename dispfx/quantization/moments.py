"""Second moments of the inputs of linear layers on calibration data; they decide how weights are rounded.

    H = Σ w(t) · x(t)ᵀ x(t) / Σ w(t)        w(t) = ‖∂ loss / ∂ y(t)‖²,  y(t) = x(t) Wᵀ

The weight w(t) says how much an error in the layer's result for token t changes the loss (as in GuidedQuant,
arXiv 2505.07004).  Without it, the first token of a text is one of thousands.  But all other tokens attend to
the first one, so an error of its value is added to all of them.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dispfx.errors import UnsupportedGraphError, first_line, memory_shortage
from dispfx.words.option_names import option

# The loss is a mean over tokens, and float16 would lose the gradients of most of them.
_SCALE = 2.0**10


def weighted_moments(
    model: nn.Module, layers: Mapping[str, nn.Module], texts: Iterable[Tensor]
) -> dict[str, Tensor]:
    """Return the weighted second moments (K, K) of the inputs of layers, by name.

    Args:
        model: a decoder of transformers in evaluation mode, whose weights need no gradients.
        layers: linear layers of this model, by any name; the result lacks those that no token reaches.
        texts: token ids (B, T) on the model's device.

    Raises:
        UnsupportedGraphError: if the loss has no gradients, as where activations are overwritten in place.
    """
    sums = {name: _Sum() for name in layers}
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    handles = [embedding.register_forward_hook(_follow_gradients)]
    for name, layer in layers.items():
        # Other hooks gather features before and after the product; these see its own input and output.
        handles.append(layer.register_forward_pre_hook(sums[name].keep_input))
        handles.append(layer.register_forward_hook(sums[name].keep_output, prepend=True))
    try:
        for ids in texts:
            _differentiate(model, ids)
    finally:
        for handle in handles:
            handle.remove()
    return {name: found.mean for name, found in sums.items() if found.weight > 0}


def _differentiate(model: nn.Module, ids: Tensor) -> None:
    try:
        with torch.enable_grad():
            logits = model(ids).logits
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        # A power of two cancels in H exactly.
        (loss * _SCALE).backward()
    except RuntimeError as error:
        if memory_shortage(error) is not None:
            raise
        raise UnsupportedGraphError(
            "calibration data needs gradients of the loss, and torch cannot compute them for this decoder: "
            f"{first_line(error)}",
            where=type(model).__name__,
            hint="a forward pass that overwrites activations in place has none; int8 and fp8 without "
            f"{option('data')} round to nearest",
        ) from error


def _follow_gradients(module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
    """Make embeddings require gradients, so that gradients reach every layer although no weight has one."""
    # A copy, because some decoders scale the result in place, which a leaf does not allow.
    return embedded if embedded.requires_grad else embedded.requires_grad_().clone()


class _Sum:
    """The weighted sum of xᵀx over the inputs x of one layer."""

    def __init__(self) -> None:
        self.weight = 0.0
        self._total: Tensor | None = None
        self._inputs: list[Tensor] = []

    @property
    def mean(self) -> Tensor:
        assert self._total is not None
        return self._total / self.weight

    def keep_input(self, layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        self._inputs.append(args[0].detach().flatten(0, -2))

    def keep_output(self, layer: nn.Module, args: Any, output: Tensor) -> None:
        x = self._inputs.pop()
        if output.requires_grad:
            output.register_hook(lambda gradient: self._add(x, gradient.flatten(0, -2)))

    def _add(self, x: Tensor, gradient: Tensor) -> None:
        weights = gradient.float().square().sum(-1)
        weighted = x.float() * weights.sqrt()[:, None]
        product = weighted.T @ weighted
        self._total = product if self._total is None else self._total + product
        self.weight += float(weights.sum())
