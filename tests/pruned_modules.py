"""Which modules of a loaded decoder write among zeros."""

from torch import Tensor, nn

from dispfx.huggingface.layout import WRITE
from dispfx.huggingface.modules import GatherOutput


def writers(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Return each module that puts its output among zeros, adapters included, and which features are zero."""
    return [
        (module, _pruned(module))
        for module in model.modules()
        if GatherOutput(WRITE) in module._forward_hooks.values()
    ]


def _pruned(module: nn.Module) -> Tensor:
    index = next(one for name, one in module.named_buffers() if name.endswith(WRITE))
    return index == index.max()
