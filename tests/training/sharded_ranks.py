"""Run two processes that share the weights of one decoder."""

import json
import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dispfx.api import capture
from dispfx.compiler.pipelines import for_learning
from dispfx.distributed.ranks import Ranks, joined
from dispfx.errors import DispfxError
from dispfx.fast_decoder.comparison import sample_masks, value_and_gradient
from dispfx.fast_decoder.decoder import TrainingDecoder
from dispfx.fast_decoder.gathered import GatheredDecoder
from dispfx.fast_decoder.preparation import PlainDecoder
from dispfx.fast_decoder.shards import Sharding, rows_of
from dispfx.ir.pipeline import Pipeline
from dispfx.ir.program import Program
from dispfx.ir.retype import placed
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch
from dispfx.passes.insert_gates import InsertGates
from dispfx.plan.budget import Budget
from dispfx.run.mask_learning import LearningJob, follow, learn
from dispfx.settings import ComputeSettings
from dispfx.settings.learning_settings import LearnSettings
from tests.plain_decoders import Form, build
from tests.processes import join_all
from tests.programs import program_of, token_ids

RANKS = 2
LAYERS = 4
RATIO = 0.3
SETTINGS = LearnSettings(steps=8, seq_len=16, batch_size=4, samples=2, accumulate=2, lr=0.05, save_every=2)
IN_PARTS = ComputeSettings(shard_on="cpu")

Work = Callable[[Ranks, Path], Any]


def run_ranks(folder: Path, work: Work) -> list[Any]:
    """Run `work` in two processes, and return what it returned, or what it raised, in each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = get_context("spawn")
    processes = [context.Process(target=_run, args=(rank, port, folder, work)) for rank in range(RANKS)]
    for process in processes:
        process.start()
    join_all(processes, seconds=480)
    files = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    return [json.loads(file.read_text()) if file.exists() else "died" for file in files]


def _run(rank: int, port: int, folder: Path, work: Work) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    with joined("cpu") as ranks:
        try:
            found = work(ranks, folder)
        except DispfxError as error:
            found = f"{type(error).__name__}: {error}"
        (folder / f"rank{rank}.json").write_text(json.dumps(found))


ONE_NUMBER = "one number"


class Scaled(nn.Module):
    """A branch times a weight of one number."""

    def __init__(self, branch: nn.Module):
        super().__init__()
        self.branch, self.scale = branch, nn.Parameter(torch.tensor(0.75))

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(x) * self.scale


def decoder_of(form: str) -> Program:
    """Return the program of a decoder with the same weights on every rank."""
    if form != ONE_NUMBER:
        return program_of(form, layers=LAYERS)
    decoder = build(Form(), layers=LAYERS)
    for layer in decoder.layers:
        layer.mlp = Scaled(layer.mlp)  # type: ignore[arg-type]
    return capture(decoder)


def text_of(settings: LearnSettings) -> TokenBatches:
    """Return batches of random tokens."""
    ids = token_ids(1, 1200)[0]
    return TokenBatches.split(ids, seq_len=settings.seq_len, batch_size=settings.batch_size)


def plan_of(
    form: str,
    ranks: Ranks,
    compute: ComputeSettings | None,
    settings: LearnSettings = SETTINGS,
    *,
    state: Path | None = None,
    resume: bool = False,
    program: Program | None = None,
) -> list[list[int]] | None:
    """Learn on these ranks; return the kept indices on the leading one."""
    program = program or decoder_of(form)
    text = text_of(settings)
    if not ranks.leads:
        job = LearningJob(
            program=program,
            text=text,
            budget=Budget(RATIO),
            settings=settings,
            compute=compute or ComputeSettings(),
            ranks=ranks,
        )
        follow(job)
        return None
    plan = learn(
        program,
        text,
        RATIO,
        settings=settings,
        ranks=ranks,
        compute=compute,
        watch=Watch(state, resume),
    )
    return [selection.kept.tolist() for selection in plan.selections]


@dataclass
class Seen:
    """What one rank saw of a decoder in parts.

    Args:
        own, whole: numbers that it holds between two steps, and that the decoder has.
        most: most numbers of the layers that it had at once beside its own.
        layer: numbers of the largest layer.
        same_loss, same_gradient: whether the bits are those of whole weights.
        graph_error: how far the gathered whole graph is from the plain one, in the gradient.
        mask_changes: whether a mask changes the loss.
        left: numbers gathered that are still there after the backward pass.
    """

    own: int
    whole: int
    most: int
    layer: int
    same_loss: bool
    same_gradient: bool
    graph_error: float
    mask_changes: bool
    left: int
    in_chunks: bool


def look(form: str, ranks: Ranks, *, checkpointing: bool, compiled: bool = False) -> dict[str, Any]:
    """Compute one loss with weights in parts and with whole ones."""
    program = decoder_of(form)
    plain = Pipeline([InsertGates()]).run(program.clone())
    fast = for_learning(plain, 16)
    whole = TrainingDecoder(fast, checkpointing=checkpointing, compiled=compiled)
    plain_placed = placed(plain, torch.device("cpu"))
    fast_placed = for_learning(plain_placed, 16)
    sharding = Sharding(rows_of(dict(program.tensors())), ranks.size, torch.device("cpu"))
    parts = TrainingDecoder(fast_placed, checkpointing=checkpointing, compiled=compiled, sharding=sharding)
    assert parts.shards is not None
    # Every rank has text of its own.
    ids, masks = token_ids(2, 16, seed=ranks.rank), sample_masks((sum(parts.sizes),), torch.device("cpu"))
    expected, of_expected = value_and_gradient(whole.loss, ids, masks)
    gathered = _GatheredNumbers(parts)
    value, gradient = value_and_gradient(parts.loss, ids, masks)
    left = gathered.now()
    graph = GatheredDecoder(plain_placed, parts.shards)
    _, of_graph = value_and_gradient(graph.loss, ids, masks)
    _, of_plain = value_and_gradient(PlainDecoder(plain).loss, ids, masks)
    with torch.no_grad():
        other = parts.loss(ids, torch.ones_like(masks))
    layers = [
        sum(weight.numel() for weight in layer.parameters() if weight.dim()) for layer in whole.layered.layers
    ]
    return asdict(
        Seen(
            own=_own_numbers(parts),
            whole=sum(tensor.numel() for tensor in whole.parameters()),
            most=gathered.most,
            layer=max(layers),
            same_loss=torch.equal(value, expected),
            same_gradient=torch.equal(gradient, of_expected),
            graph_error=float((of_graph - of_plain).norm() / of_plain.norm()),
            mask_changes=not torch.equal(other, value),
            left=left,
            in_chunks=parts.in_chunks,
        )
    )


def _own_numbers(decoder: nn.Module) -> int:
    from torch.distributed.tensor import DTensor

    return sum(
        tensor.to_local().numel() if isinstance(tensor, DTensor) else tensor.numel()
        for tensor in decoder.parameters()
    )


class _GatheredNumbers:
    """Counts numbers of whole weights, as memory that is allocated, whenever a layer computes."""

    def __init__(self, decoder: TrainingDecoder):
        self.most = 0
        self._weights: dict[int, Tensor] = {}
        self._decoder = decoder
        for body, call in list(decoder.layered.bodies.items()):

            def counting(*operands: Any, call: Any = call) -> Any:
                self.most = max(self.most, self.now())
                return call(*operands)

            decoder.layered.replace_body(body, counting)

    def now(self) -> int:
        for layer in self._decoder.layered.layers:
            for tensor in layer.parameters():
                self._weights.setdefault(id(tensor), tensor)
        from torch.distributed.tensor import DTensor

        # A weight of one number is on every rank all the time.
        whole = [one for one in self._weights.values() if one.dim() and not isinstance(one, DTensor)]
        return sum(tensor.untyped_storage().nbytes() // tensor.element_size() for tensor in whole)


def changed(**changes: Any) -> LearnSettings:
    """Return the settings with changes."""
    return replace(SETTINGS, **changes)
