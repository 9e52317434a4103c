"""Run learning in several processes on this machine."""

import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dispfx.distributed.ranks import Ranks, joined
from dispfx.errors import DispfxError
from dispfx.learning.distillation import Keeping, recover
from dispfx.learning.trainer import Watch, follow_run, learn
from dispfx.plan.budget import Budget
from tests.learning.students import recovery_task, weights
from tests.learning.tiny_decoder import (
    TinyDecoder,
    batches,
    markov_tokens,
    settings,
    task_of,
    untrained_decoder,
)
from tests.processes import join_all

RANKS = 2
TEXT_TOKENS = 3_000


class Deaf(TinyDecoder):
    """A decoder that no mask changes."""

    def forward(self, ids_BT: Tensor, masks: Any) -> Tensor:
        return super().forward(ids_BT, [torch.ones_like(mask) for mask in masks])


class Dying(TinyDecoder):
    """A decoder whose process dies in its fifth forward pass."""

    calls = 0

    def forward(self, ids_BT: Tensor, masks: Any) -> Tensor:
        self.calls += 1
        if self.calls == 5:
            os._exit(3)
        return super().forward(ids_BT, masks)


class Spoiled(TinyDecoder):
    """A decoder that gives NaN from its third step on; one forward pass before checks the gates."""

    calls = 0

    def forward(self, ids_BT: Tensor, masks: Any) -> Tensor:
        self.calls += 1
        return super().forward(ids_BT, masks) * (1.0 if self.calls < 4 else torch.nan)


_FOLLOWERS: dict[str, type[TinyDecoder]] = {
    "sound": TinyDecoder,
    "deaf": Deaf,
    "dying": Dying,
    "spoiled": Spoiled,
}


@dataclass(frozen=True)
class Scenario:
    """One run of two ranks.

    Args:
        name: of its folder.
        follower: the kind of decoder that the second rank has.
        changes: settings of the run.
        state_of: the run whose state it resumes.
        recovers: whether a cut decoder is trained, in place of masks.
    """

    name: str
    follower: str = "sound"
    changes: dict[str, Any] = field(default_factory=dict)
    state_of: str | None = None
    recovers: bool = False


def run_scenarios(folder: Path, scenarios: Sequence[Scenario]) -> None:
    """Run them one after the other in the same two processes, so that these start once.

    In the folder of each, the leading rank writes `logits.pt` and its state into `state`, and each rank what
    it raised.  One that recovers writes its weights into `rank0.safetensors` and `rank1.safetensors`.
    """
    ports = []
    for _ in scenarios:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            ports.append(free.getsockname()[1])
    context = get_context("spawn")
    work = [
        context.Process(target=_work, args=(rank, ports, str(folder), scenarios)) for rank in range(RANKS)
    ]
    for process in work:
        process.start()
    join_all(work, seconds=240)


def raised(folder: Path) -> list[str]:
    """Return what each rank raised, "" where nothing, "died" where it said nothing."""
    files = [folder / f"rank{rank}.txt" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else "died" for file in files]


def decoder_of(kind: type[TinyDecoder]) -> TinyDecoder:
    """Return the same weights in a decoder of some kind."""
    decoder = kind()
    decoder.load_state_dict(untrained_decoder().state_dict())
    for parameter in decoder.parameters():
        parameter.requires_grad_(False)
    return decoder


def _work(rank: int, ports: list[int], folder: str, scenarios: Sequence[Scenario]) -> None:
    torch.set_num_threads(1)
    for port, scenario in zip(ports, scenarios, strict=True):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        path, found = Path(folder) / scenario.name, ""
        path.mkdir(exist_ok=True)
        with joined("cpu") as ranks:
            try:
                (_recover if scenario.recovers else _learn)(ranks, path, scenario)
            except DispfxError as error:
                found = f"{type(error).__name__}: {error}"
            (path / f"rank{rank}.txt").write_text(found)


def _learn(ranks: Ranks, folder: Path, scenario: Scenario) -> None:
    chosen = settings(**scenario.changes)
    text, budget = batches(markov_tokens(TEXT_TOKENS), chosen), Budget(0.3)
    decoder = decoder_of(TinyDecoder if ranks.leads else _FOLLOWERS[scenario.follower])
    if not ranks.leads:
        follow_run(task_of(decoder, text, budget, chosen, ranks=ranks))
        return
    resume = scenario.state_of is not None
    state = folder.parent / (scenario.state_of or scenario.name) / "state"
    found = learn(task_of(decoder, text, budget, chosen, ranks=ranks), Watch(state, resume))
    torch.save(found.logits, folder / "logits.pt")


def _recover(ranks: Ranks, folder: Path, scenario: Scenario) -> None:
    task = recovery_task(ranks=ranks, **scenario.changes)
    state = folder.parent / (scenario.state_of or scenario.name) / "state"
    recover(task, Keeping(state, scenario.state_of is not None))
    save_file(weights(task), folder / f"rank{ranks.rank}.safetensors")
