"""About what a run of learning takes: bytes, operations, seconds; from the graph's sizes, without its values.

    estimate(program, settings)      program: captured with values or on the meta device

    memory = weights + 16 bytes · hypernetwork + features · (32 + 20 · samples) bytes + 1.6 · step + 10 MB

16 bytes are a weight, its gradient and AdamW's two moments in float32.  `dispfx.estimate.step_memory` counts
the step.  1.6 and 10 MB are what a process was measured to hold on a CPU: glibc cannot use many of the blocks
that a step frees again.  On CUDA 1.15 and 300 MB were measured: torch's allocator holds free blocks, and
cuBLAS has workspaces.  `docs/trust.md` compares estimates with measured memory.

Time counts products only (`dispfx.estimate.step_work`), plus a constant per step and device.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import fx

from dispfx.compiler.pipelines import for_learning, run_pipeline
from dispfx.estimate.devices import Device
from dispfx.estimate.free_memory import free_bytes
from dispfx.estimate.graph_sizes import Sizes
from dispfx.estimate.step_memory import StepMemory, needing_gradients, step_memory
from dispfx.estimate.step_work import StepWork, step_work
from dispfx.fast_decoder.decoder import head_takes_stream_alone
from dispfx.ir.program import Program, require_program
from dispfx.learning.hypernetwork import hypernetwork_parameters
from dispfx.plan.budget import Counted
from dispfx.plan.hardening import Groups, ParameterCount
from dispfx.settings.learning_settings import LearnSettings, learn_settings
from dispfx.words.given import require_given

_BYTES_PER_LEARNED = 16
_BYTES_PER_FEATURE, _BYTES_PER_DRAW = 32, 20
# Bytes held per byte of a step's tensors, and a constant number of bytes.
_HELD = {"cpu": (1.6, 10_000_000), "cuda": (1.15, 300_000_000)}

Place = Literal["cpu", "cuda"]
Fit = Literal["fits", "fits with checkpoints", "does not fit"]


@dataclass(frozen=True)
class Estimate:
    """What a run of learning takes.

    Args:
        settings: of the run.
        place: kind of device that the run is for; CUDA if the program has no values.
        dtype: that the decoder computes in.
        parameters: of the decoder, tied ones once.
        gated_parameters: of them, those that a ratio of `blocks` counts.
        weight_bytes: of the decoder's parameters and buffers.
        weight_bytes_by_dtype: the same, by the name of the dtype.
        hypernetwork_parameters: what is learned.
        features: of all sites.
        branches: of the decoder.
        step: memory of one forward and backward pass of the decoder.
        work: operations of the same.
        free_bytes: that the device can still give, the weights loaded; None if it does not say.
    """

    settings: LearnSettings
    place: Place
    dtype: torch.dtype
    parameters: int
    gated_parameters: int
    weight_bytes: int
    weight_bytes_by_dtype: dict[str, int]
    hypernetwork_parameters: int
    features: int
    branches: int
    step: StepMemory
    work: StepWork
    free_bytes: int | None = None

    @property
    def hypernetwork_bytes(self) -> int:
        """The hypernetwork, its gradient, AdamW's moments, and the vectors over all features."""
        vectors = _BYTES_PER_FEATURE + _BYTES_PER_DRAW * self.settings.samples
        return _BYTES_PER_LEARNED * self.hypernetwork_parameters + vectors * self.features

    @property
    def peak_bytes(self) -> int:
        """The largest sum in the place of the run, with layers compiled on CUDA as by default."""
        return self.weight_bytes + self.beside_weights(compiled=self.place == "cuda")

    def beside_weights(
        self, place: Place | None = None, *, checkpoints: bool = False, compiled: bool = False
    ) -> int:
        """Return the bytes that learning takes in addition to the weights.

        Args:
            place: where; `self.place` by default.
            checkpoints: whether layers are computed again in the backward pass.
            compiled: whether layers are compiled.
        """
        factor, constant = _HELD[place or self.place]
        step = self.step.bytes(checkpoints=checkpoints, compiled=compiled)
        return int(self.hypernetwork_bytes + factor * step) + constant

    def fits(self, room: int, place: Place | None = None) -> Fit:
        """Return whether learning fits into so many bytes in addition to the weights.

        Args:
            place: of the bytes; `self.place` by default.
        """
        place = place or self.place
        compiled = place == "cuda"
        if self.beside_weights(place, compiled=compiled) <= room:
            return "fits"
        least = self.beside_weights(place, checkpoints=True, compiled=compiled)
        return "fits with checkpoints" if least <= room else "does not fit"

    @property
    def flops_a_step(self) -> int:
        """Operations of one step of the optimizer; but for `ce`, the dense decoder's pass is one of them."""
        dense = 0 if self.settings.objective == "ce" else self.work.forward
        return (self.work.total + dense) * self.settings.accumulate

    def seconds_a_step(self, device: Device) -> float:
        """Return the time of one step on a device."""
        passes = self.settings.accumulate * self.branches * device.seconds_a_branch
        return device.seconds(self.flops_a_step, self.dtype) + passes + device.seconds_a_step

    def seconds(self, device: Device) -> float:
        """Return the time of all steps on a device."""
        return self.seconds_a_step(device) * self.settings.steps


def estimate(
    program: Program,
    settings: LearnSettings | None = None,
    *,
    of: Counted = "blocks",
    device: torch.device | None = None,
) -> Estimate:
    """Return about what learning masks for a decoder takes; nothing is run.

    Args:
        program: analysed, with its sites.
        settings: of the run; those of the default recipe by default.
        of: which parameters `gated_parameters` counts.
        device: to learn on; where the program is by default.
    """
    require_program(program)
    device = program.device if device is None else device
    require_given(device, torch.device, "torch.device('cuda') is one")
    settings = learn_settings() if settings is None else settings
    require_given(settings, LearnSettings, "dispfx.api.learn_settings(model) returns one")
    gated = run_pipeline("gate", program.clone(), verify=False)
    sizes = Sizes(gated.graph, settings.batch_size, settings.seq_len)
    groups = Groups.of_run(program.sites, constrained=settings.constrained)
    by_dtype = _bytes_by_dtype(program)
    return Estimate(
        settings=settings,
        place="cpu" if device.type == "cpu" else "cuda",
        dtype=program.dtype,
        parameters=program.size,
        gated_parameters=ParameterCount.of_sites(program.sites, program.shapes, of).dense,
        weight_bytes=sum(by_dtype.values()),
        weight_bytes_by_dtype=by_dtype,
        hypernetwork_parameters=hypernetwork_parameters(settings.hypernetwork, groups.sizes),
        features=groups.features,
        branches=len(program.branches),
        step=_step_memory(for_learning(gated, settings.seq_len, verify=False), settings),
        work=step_work(gated.graph, needing_gradients(gated.graph, _masks(gated)), sizes),
        free_bytes=free_bytes(device),
    )


def _masks(gated: Program) -> list[fx.Node]:
    inputs = [node for node in gated.graph.nodes if node.op == "placeholder"]
    return inputs[-len(gated.sites) :]


def _step_memory(fast: Program, settings: LearnSettings) -> StepMemory:
    """Return the memory of a step as `dispfx.fast_decoder` computes it."""
    sizes = Sizes(fast.graph, settings.batch_size, settings.seq_len)
    outline = fast.outline
    if outline is None:
        return step_memory(fast.graph, needing_gradients(fast.graph, _masks(fast)), sizes)
    # Layers hand a gradient on to the first value of the stream too.
    first = fast.nodes[outline.prologue.results[0]]
    return step_memory(
        fast.graph,
        needing_gradients(fast.graph, [*_masks(fast), first]),
        sizes,
        stream=fast.nodes[outline.epilogue.values[0]],
        layers=len(outline.layers),
        in_chunks=head_takes_stream_alone(fast),
    )


def _bytes_by_dtype(program: Program) -> dict[str, int]:
    """Return the bytes of all the decoder's tensors, those that the graph does not read among them."""
    tensors = {**dict(program.tensors()), **program.unused}
    found: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.numel() * tensor.element_size()
    return found
