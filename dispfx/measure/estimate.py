"""What learning will take, before a weight is loaded: bytes, operations, seconds.

    estimate(program, settings)      program: captured with values or on the meta device

Memory is the weights, the hypernetwork with its optimizer, and one step (`dispfx.measure.step_memory`).
The decoder's step and the hypernetwork's gradients are not there at the same time:

    peak = weights + 12 bytes · hypernetwork + features · 48 bytes + max(step, 4 bytes · hypernetwork)

since the hypernetwork and AdamW's two moments are float32 and its gradient appears when the decoder's
step is over.  Time is products only (`dispfx.measure.step_work`), at the rate of a device: right where
products dominate, too short for decoders so small that starting an operation takes longer than the
operation.
"""

from dataclasses import dataclass

import torch

from dispfx.ir.budget import Groups, ParameterCount
from dispfx.ir.plan import BudgetOf
from dispfx.ir.program import Program
from dispfx.learning.hypernetwork import hypernetwork_parameters
from dispfx.learning.settings import DEFAULT_RECIPE, LearnSettings, recipe
from dispfx.measure.devices import Device
from dispfx.measure.graph_sizes import Sizes
from dispfx.measure.step_memory import StepMemory, needing_gradients, step_memory
from dispfx.measure.step_work import StepWork, step_work
from dispfx.passes.insert_gates import InsertGates
from dispfx.pipeline import Pipeline

_FLOAT_BYTES = 4
# Weight and two moments.
_OPTIMIZER_COPIES = 3
# Two orders of the features as int64, and logits, sample, slope, noise and their gradients as float32.
_BYTES_A_FEATURE = 48


@dataclass(frozen=True)
class Estimate:
    """What a run of learning takes.

    Args:
        settings: of the run.
        dtype: that the decoder computes in.
        parameters: of the decoder, tied ones once.
        gated_parameters: of them, those that a ratio of `blocks` counts.
        weight_bytes: of the decoder's parameters and buffers.
        weight_bytes_by_dtype: the same, by the name of the dtype.
        hypernetwork_parameters: what is learned.
        features: of all sites.
        step: memory of one forward and backward pass of the decoder.
        work: operations of the same.
    """

    settings: LearnSettings
    dtype: torch.dtype
    parameters: int
    gated_parameters: int
    weight_bytes: int
    weight_bytes_by_dtype: dict[str, int]
    hypernetwork_parameters: int
    features: int
    step: StepMemory
    work: StepWork

    @property
    def hypernetwork_bytes(self) -> int:
        """The hypernetwork, AdamW's moments and the vectors over all features."""
        heads = _FLOAT_BYTES * _OPTIMIZER_COPIES * self.hypernetwork_parameters
        return heads + _BYTES_A_FEATURE * self.features

    @property
    def peak_bytes(self) -> int:
        """The largest sum on the device, without what the process itself needs."""
        gradient = _FLOAT_BYTES * self.hypernetwork_parameters
        return self.weight_bytes + self.hypernetwork_bytes + max(self.step.peak, gradient)

    @property
    def flops_a_step(self) -> int:
        """Operations of one step of the optimizer."""
        return self.work.total * self.settings.accumulate

    def seconds_a_step(self, device: Device) -> float:
        """Return the time of one step on a device."""
        return device.seconds(self.flops_a_step, self.dtype)

    def seconds(self, device: Device) -> float:
        """Return the time of all steps on a device."""
        return self.seconds_a_step(device) * self.settings.steps


def estimate(program: Program, settings: LearnSettings | None = None, *, of: BudgetOf = "blocks") -> Estimate:
    """Return what learning masks for a decoder takes; nothing is run.

    Args:
        program: analysed, with its sites.
        settings: of the run; those of the default recipe by default.
        of: which parameters `gated_parameters` counts.
    """
    settings = settings or LearnSettings(**recipe(DEFAULT_RECIPE))
    twin = Pipeline([InsertGates()], verify=False).run(program.clone())
    inputs = [node for node in twin.graph.nodes if node.op == "placeholder"]
    needs = needing_gradients(twin.graph, inputs[-len(program.sites) :])
    sizes = Sizes(twin.graph, settings.batch_size, settings.seq_len)
    groups = Groups.of_run(program.sites, constrained=settings.constrained)
    by_dtype = _bytes_by_dtype(program)
    return Estimate(
        settings=settings,
        dtype=program.dtype,
        parameters=sum(tensor.numel() for tensor in program.parameters.values()),
        gated_parameters=ParameterCount.of_sites(program.sites, program.shapes, of).dense,
        weight_bytes=sum(by_dtype.values()),
        weight_bytes_by_dtype=by_dtype,
        hypernetwork_parameters=hypernetwork_parameters(settings.hypernetwork, groups.sizes),
        features=groups.features,
        step=step_memory(twin.graph, needs, sizes),
        work=step_work(twin.graph, needs, sizes),
    )


def _bytes_by_dtype(program: Program) -> dict[str, int]:
    """Return the bytes of all the decoder's tensors, those that the graph does not read among them."""
    tensors = {**dict(program.tensors()), **program.unused}
    found: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.numel() * tensor.element_size()
    return found
