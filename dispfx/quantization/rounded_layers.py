"""Round the weights of a decoder's layers, with or without calibration data."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor, nn

from dispfx.quantization.moments import weighted_moments
from dispfx.quantization.weight_rounding import Grid, Rounded, rounded, to_nearest

# Largest size of all moments that are held at once, in float32 numbers.
_MOST_HELD = 2**30
# A linear layer of transformers (GPT-2) that stores its weight as (K, N).
_TRANSPOSED = "Conv1D"


def layers_to_round(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a decoder of transformers by path.

    The head and layers that share their weight with another module are left out.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(id(parameter), set()).add(path)
    return {
        path: module
        for path, module in model.named_modules()
        if (type(module) is nn.Linear or type(module).__name__ == _TRANSPOSED)
        and module is not head
        and len(owners[id(module.weight)]) == 1
    }


def weight_of_layer(layer: nn.Module) -> Tensor:
    """Return the weight of a linear layer as (N, K)."""
    weight: Tensor = layer.weight.detach()  # type: ignore[operator,assignment]
    return weight.T if type(layer).__name__ == _TRANSPOSED else weight


def rounded_layers(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    grid: Callable[[nn.Module], Grid],
    texts: Callable[[], Iterable[Tensor]] | None,
) -> Iterator[tuple[str, Rounded]]:
    """Yield the rounded weight of every layer, by path.

    Args:
        model: a decoder of transformers in evaluation mode; it is not changed.
        layers: of this model, see `layers_to_round`.
        grid: returns the grid of a layer.
        texts: returns the calibration data, token ids (B, T) on the model's device; it may be called several
            times.  None rounds to nearest.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    model.requires_grad_(False)
    try:
        for part in _parts(layers):
            moments = {} if texts is None else weighted_moments(model, part, texts())
            for path, layer in part.items():
                weight, chosen = weight_of_layer(layer).float().contiguous(), grid(layer)
                read = moments.pop(path, None)
                yield path, to_nearest(weight, chosen) if read is None else rounded(weight, read, chosen)
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _parts(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, nn.Module]]:
    """Split layers so that the moments of one part fit into memory."""
    part: dict[str, nn.Module] = {}
    held = 0
    for path, layer in layers.items():
        needed = weight_of_layer(layer).shape[1] ** 2
        if part and held + needed > _MOST_HELD:
            yield part
            part, held = {}, 0
        part[path], held = layer, held + needed
    if part:
        yield part
