"""What learning will take, before a weight is loaded: bytes, operations, seconds.

    estimate(program, settings)      program: captured with values or on the meta device

Memory is the weights, the hypernetwork with its optimizer, and one step (`dispfx.estimate.step_memory`).
The decoder's step and the hypernetwork's gradients are not there at the same time:

    peak = weights + 12 bytes · hypernetwork + features · (20 + 12 · samples) bytes
         + max(step, 4 bytes · hypernetwork)

since the hypernetwork and AdamW's two moments are float32 and its gradient appears when the decoder's
step is over and is freed before the next.  On CUDA that gradient is in the memory of a graph that is replayed
(`dispfx.learning.update`) and stays, as does what goes into the graph, and torch takes more than tensors ask
for (`dispfx.estimate.cuda_memory`):

    peak = weights + 16 bytes · hypernetwork + features · (24 + 20 · samples + 8 · counted) bytes
         + workspaces + step

where what is counted for the budget is one vector, or one a sample.  Measuring takes less than a step of as
many tokens: it keeps nothing for a backward pass, and its chunks of logits (`dispfx.quality.logits_by_rows`)
are smaller than those of the loss.  Time is products only
(`dispfx.estimate.step_work`), at the rate of a device: right where products dominate, too short for decoders
so small that starting an operation takes longer than the operation.
"""

from dataclasses import dataclass, replace

import torch
from torch import fx

from dispfx.compiler.stages import for_learning, run_stage
from dispfx.estimate.cuda_memory import workspaces_bytes
from dispfx.estimate.devices import Device
from dispfx.estimate.graph_sizes import Sizes
from dispfx.estimate.step_memory import StepMemory, needing_gradients, step_memory
from dispfx.estimate.step_work import StepWork, step_work
from dispfx.fast_decoder.decoder import head_takes_stream_alone
from dispfx.fast_decoder.preparation import SHORT
from dispfx.ir.program import Program
from dispfx.learning.hypernetwork import hypernetwork_parameters
from dispfx.plan.budget import BudgetOf
from dispfx.plan.hardening import Groups, ParameterCount
from dispfx.settings.learning_settings import DEFAULT_RECIPE, LearnSettings, recipe_settings

_FLOAT_BYTES = 4
# Weight and two moments.
_OPTIMIZER_COPIES = 3
# Two orders of the features as int64 and logits as float32; of every sample mask, slope and gradient.
_BYTES_A_FEATURE = 20
_BYTES_A_SAMPLE = 12
# Of the graph that is replayed on CUDA: values and slopes, of all masks and of what is counted; and logits.
_PAIR_BYTES = 8


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
        on_gpu: for a run on CUDA.
        workspace_bytes: that cuBLAS takes; 0 elsewhere.
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
    on_gpu: bool = False
    workspace_bytes: int = 0

    @property
    def hypernetwork_bytes(self) -> int:
        """The hypernetwork, AdamW's moments, the vectors over all features, and on CUDA the gradient."""
        heads = _FLOAT_BYTES * _OPTIMIZER_COPIES * self.hypernetwork_parameters
        vectors = _BYTES_A_FEATURE + _BYTES_A_SAMPLE * self.settings.samples
        return heads + vectors * self.features + (self._replayed_bytes if self.on_gpu else 0)

    @property
    def _replayed_bytes(self) -> int:
        """What `dispfx.learning.update.ReplayedUpdate` holds: what goes in and what comes out."""
        samples = self.settings.samples
        counted = samples if self.settings.budget_on == "masks" else 1
        vectors = _PAIR_BYTES * (samples + counted) + _FLOAT_BYTES
        return _FLOAT_BYTES * self.hypernetwork_parameters + vectors * self.features

    @property
    def held_bytes(self) -> int:
        """What stays from step to step beside the weights."""
        return self.hypernetwork_bytes + self.workspace_bytes

    @property
    def gradient_bytes(self) -> int:
        """The gradient of the hypernetwork where it comes after the decoder's step and goes again."""
        return 0 if self.on_gpu else _FLOAT_BYTES * self.hypernetwork_parameters

    @property
    def peak_bytes(self) -> int:
        """The largest sum on the device, without what the process itself needs."""
        return self.weight_bytes + self.held_bytes + max(self.step.peak, self.gradient_bytes)

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


def estimate(
    program: Program,
    settings: LearnSettings | None = None,
    *,
    of: BudgetOf = "blocks",
    device: torch.device | None = None,
) -> Estimate:
    """Return what learning masks for a decoder takes; nothing is run.

    Args:
        program: analysed, with its sites.
        settings: of the run; those of the default recipe by default.
        of: which parameters `gated_parameters` counts.
        device: to learn on; where the program is by default.
    """
    device = device or program.device
    on_gpu = device.type == "cuda"
    settings = settings or LearnSettings(**recipe_settings(DEFAULT_RECIPE))
    plain = run_stage("gate", program.clone(), verify=False)
    sizes = Sizes(plain.graph, settings.batch_size, settings.seq_len)
    groups = Groups.of_run(program.sites, constrained=settings.constrained)
    by_dtype = _bytes_by_dtype(program)
    return Estimate(
        settings=settings,
        dtype=program.dtype,
        parameters=program.size,
        gated_parameters=ParameterCount.of_sites(program.sites, program.shapes, of).dense,
        weight_bytes=sum(by_dtype.values()),
        weight_bytes_by_dtype=by_dtype,
        hypernetwork_parameters=hypernetwork_parameters(settings.hypernetwork, groups.sizes),
        features=groups.features,
        step=_step_memory(plain, settings, on_gpu),
        work=step_work(plain.graph, needing_gradients(plain.graph, _masks(plain)), sizes),
        on_gpu=on_gpu,
        workspace_bytes=workspaces_bytes(device) if on_gpu else 0,
    )


def _masks(gated: Program) -> list[fx.Node]:
    inputs = [node for node in gated.graph.nodes if node.op == "placeholder"]
    return inputs[-len(gated.sites) :]


def _step_memory(plain: Program, settings: LearnSettings, on_gpu: bool) -> StepMemory:
    """Return the memory of a step as `dispfx.fast_decoder` computes it, or of the comparison before."""
    whole = Sizes(plain.graph, settings.batch_size, settings.seq_len, on_gpu=on_gpu)
    needs = needing_gradients(plain.graph, _masks(plain))
    fast = for_learning(plain, settings.seq_len, verify=False)
    if fast.outline is None:
        return step_memory(plain.graph, needs, whole)
    short = Sizes(plain.graph, 1, min(settings.seq_len, SHORT), on_gpu=on_gpu)
    compared = step_memory(plain.graph, needs, short)
    # Layers hand a gradient on to the first value of the stream too.
    first = fast.nodes[fast.outline.prologue.results[0]]
    needs = needing_gradients(fast.graph, [*_masks(fast), first])
    sizes = Sizes(fast.graph, settings.batch_size, settings.seq_len, on_gpu=on_gpu)
    stream = fast.nodes[fast.outline.epilogue.values[0]] if head_takes_stream_alone(fast) else None
    step = step_memory(fast.graph, needs, sizes, stream)
    return replace(step, peak=max(step.peak, compared.peak))


def _bytes_by_dtype(program: Program) -> dict[str, int]:
    """Return the bytes of all the decoder's tensors, those that the graph does not read among them."""
    tensors = {**dict(program.tensors()), **program.unused}
    found: dict[str, int] = {}
    for tensor in tensors.values():
        name = str(tensor.dtype).removeprefix("torch.")
        found[name] = found.get(name, 0) + tensor.numel() * tensor.element_size()
    return found
