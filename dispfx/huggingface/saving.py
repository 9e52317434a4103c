"""A pruned decoder in memory, as it will be read back: its modules, and what to store of them."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.analysis.label_map import Mismatch
from dispfx.huggingface.building import pruned_twin
from dispfx.huggingface.layout import Layout
from dispfx.huggingface.planning import plan_modules, ways
from dispfx.ir.program import Program


@dataclass(frozen=True, eq=False)
class PrunedModel:
    """A decoder whose modules are pruned.

    Args:
        model: of the dense decoder's own class.
        layout: of its modules.
    """

    model: nn.Module
    layout: Layout

    def stored_parameters(self) -> dict[str, Tensor]:
        """Return the parameters by their names on disk, a tied one once."""
        return dict(self.model.named_parameters())

    def stored_buffers(self) -> dict[str, Tensor]:
        """Return the buffers that the model saves, index buffers among them, by their names on disk."""
        saved = self.model.state_dict().keys()
        return {path: buffer for path, buffer in self.model.named_buffers() if path in saved}


def build_pruned(
    program: Program,
    kept: Mapping[str, Tensor],
    model: nn.Module,
    lowered: nn.Module,
    *,
    underived: Collection[str],
    agrees: Callable[[nn.Module], str | None],
) -> PrunedModel | Mismatch:
    """Return a pruned copy of a decoder; `model` is not changed, and uncut tensors are shared.

    If code between modules depends on a width, every module keeps its outer widths.

    Args:
        program: of the decoder.
        kept: sorted kept indices by site.
        model: the decoder.
        lowered: its lowered graph.
        underived: buffers that a decoder built from the config does not have right.
        agrees: says what is wrong with a candidate, or None.
    """
    problems: list[str] = []
    for unseen in ways(program.sites):
        planned = plan_modules(program, kept, model, unseen=unseen)
        if isinstance(planned, Mismatch):
            return planned
        layout = replace(planned.layout, **_further(model, underived, program.dtype))
        values = planned.values(dict(model.named_parameters()), dict(lowered.named_parameters()))
        pruned = PrunedModel(pruned_twin(model, layout, values), layout)
        problem = agrees(pruned.model)
        if problem is None:
            return pruned
        problems.append(problem)
    return Mismatch(problems[-1])


def _further(model: nn.Module, underived: Collection[str], dtype: torch.dtype) -> dict[str, Any]:
    """Return what a layout says about tensors that transformers would not give back as they are."""
    persistent = model.state_dict().keys()
    stored = persistent | set(underived)
    dtypes = {
        path: str(tensor.dtype).removeprefix("torch.")
        for path, tensor in (*model.named_parameters(), *model.named_buffers())
        if tensor.is_floating_point() and tensor.dtype != dtype and path in stored
    }
    return {"buffers": tuple(sorted(set(underived) - persistent)), "dtypes": dtypes}
