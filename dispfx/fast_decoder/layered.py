"""A decoder made of its outline: prologue, layers that own their weights, epilogue.

    LayeredDecoder(program)(ids, *further inputs)      the same values as the program's graph

Each part is a module that holds its own tensors under the decoder's own paths and calls a body; layers of
one kind call the same body, so replacing a body (by a compiled one, say) replaces it for all of them.
What several parts read, a tied embedding for example, they share.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.errors import PassError
from dispfx.ir.outline import Body, Part
from dispfx.ir.program import Program, own_tensor

BodyCall = Callable[..., tuple[Any, ...]]


class PartModule(nn.Module):
    """One part with its tensors.

    Args:
        part: what it takes and gives.
        tensors: of the program, by path.
        call: computes the part's body.

    `wrap`, where it is set, is given the computation and the values and returns the results; the tensors
    are looked up inside of it, so that it may compute twice and have the tensors of that time.
    `lend` is entered while the part computes, by whoever brings its tensors only then.
    """

    wrap: Callable[..., Any] | None = None
    lend: Callable[[], AbstractContextManager[None]] = nullcontext

    def __init__(self, part: Part, tensors: Mapping[str, Tensor], call: BodyCall):
        super().__init__()
        self.part = part
        self.call = call
        self._names: list[tuple[nn.Module, str]] = []
        for path in part.tensors:
            self._names.append(own_tensor(self, path, tensors[path]))

    def places(self) -> list[tuple[str, nn.Module, str]]:
        """Return path, owner and name there of every tensor."""
        return [(path, *place) for path, place in zip(self.part.tensors, self._names, strict=True)]

    def tensors(self) -> list[Tensor]:
        """Return the part's tensors as they are now, in the order of its body."""
        return [getattr(owner, name) for owner, name in self._names]

    def forward(self, *values: Any) -> tuple[Any, ...]:
        """Return the part's results for its values."""
        with self.lend():
            if self.wrap is not None and torch.is_grad_enabled():
                return self.wrap(self._compute, *values)
            return self._compute(*values)

    def _compute(self, *values: Any) -> tuple[Any, ...]:
        return self.call(*values, *self.tensors())


class Stack(nn.Module):
    """The layers, and one call for all of them, for whoever has work before the first or after the last."""

    def __init__(self, layers: Iterable[PartModule]):
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def __iter__(self) -> Iterator[PartModule]:
        """Yield the layers in order."""
        yield from self.children()  # type: ignore[misc]

    def forward(self, run: Callable[[], Any]) -> Any:
        """Return what `run` returns, which calls the layers."""
        return run()


class LayeredDecoder(nn.Module):
    """A program as modules.

    With `first_needs_gradient` the stream's first value asks for a gradient like every later one, so that
    all layers are one case to a compiler; what is before it gets none then.

    Args:
        program: with its outline.
        tensors: in place of the program's own, by path.

    Raises:
        PassError: if the program has no outline.
    """

    first_needs_gradient = False

    def __init__(self, program: Program, tensors: Mapping[str, Tensor] | None = None):
        super().__init__()
        outline = program.outline
        if outline is None:
            raise PassError("the program has no outline; outline-layers must run first")
        tensors = dict(program.tensors()) if tensors is None else tensors
        self.bodies: dict[Body, BodyCall] = {
            body: body.call() for body in dict.fromkeys(part.body for part in outline.parts)
        }
        self.prologue = PartModule(outline.prologue, tensors, self.bodies[outline.prologue.body])
        self.layers = Stack(PartModule(part, tensors, self.bodies[part.body]) for part in outline.layers)
        self.epilogue = PartModule(outline.epilogue, tensors, self.bodies[outline.epilogue.body])
        self.outline = outline
        self.inputs = tuple(node.name for node in program.graph.nodes if node.op == "placeholder")
        self._last_use = _last_uses([*self.parts])

    @property
    def parts(self) -> Sequence[PartModule]:
        """All parts, in order."""
        return [self.prologue, *self.layers, self.epilogue]

    def places(self) -> dict[str, list[tuple[nn.Module, str]]]:
        """Return for every path all places, as owner and name there, that have its tensor."""
        found: dict[str, list[tuple[nn.Module, str]]] = {}
        for part in self.parts:
            for path, owner, name in part.places():
                found.setdefault(path, []).append((owner, name))
        return found

    def replace_body(self, body: Body, call: BodyCall) -> None:
        """Compute a body by `call` in every part that has it."""
        self.bodies[body] = call
        for part in self.parts:
            if part.part.body is body:
                part.call = call

    def stream(self, *inputs: Any) -> tuple[list[Any], dict[str, Any]]:
        """Run all parts but the epilogue.

        Returns:
            The values that the epilogue takes, and everything given by name that is still alive.
        """
        values = dict(zip(self.inputs, inputs, strict=True))
        self._run(0, self.prologue, values)
        carried = self.prologue.part.results[0]
        if self.first_needs_gradient and torch.is_grad_enabled():
            values[carried] = values[carried].detach().requires_grad_()
        return self.layers(lambda: self._through_layers(values)), values

    def _through_layers(self, values: dict[str, Any]) -> list[Any]:
        for index, part in enumerate(self.parts[1:-1], start=1):
            self._run(index, part, values)
        return [values[name] for name in self.epilogue.part.values]

    def _run(self, index: int, part: PartModule, values: dict[str, Any]) -> None:
        given = part(*(values[name] for name in part.part.values))
        for name in self._last_use[index]:
            values.pop(name, None)
        values.update(zip(part.part.results, given, strict=True))

    def forward(self, *inputs: Any) -> Any:
        """Return what the program returns for its inputs."""
        taken, _ = self.stream(*inputs)
        given = self.epilogue(*taken)
        return given[0] if len(given) == 1 else given


def _last_uses(parts: Sequence[PartModule]) -> list[list[str]]:
    """Return for every part the values that no later part takes."""
    last = {name: index for index, part in enumerate(parts) for name in part.part.values}
    ends: list[list[str]] = [[] for _ in parts]
    for name, index in last.items():
        ends[index].append(name)
    return ends
