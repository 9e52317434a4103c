"""A decoder with caches of a fixed length, run as `bench` times it: compiled, and replayed as a CUDA graph.

Shape legend: B batch, T tokens, V vocabulary.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispfx.compiler.pipelines import StaticPrograms
from dispfx.errors import DataError
from dispfx.ir.cached_inputs import positions_of
from dispfx.kernels.recording import recording, warm_up

Compile = Callable[[torch.fx.GraphModule], Callable[..., Any]]


class StaticDecoder:
    """Runs a decoder on one batch of texts after another, with keys and values kept in place.

        decoder = StaticDecoder(programs, batch=1)
        logits = decoder.prefill(prompt_ids)     # (B, 1, V)
        logits = decoder.step(next_ids)          # (B, 1, V)

    Args:
        programs: of the decoder.
        batch: B, fixed with the caches.
        compile: makes a faster callable of a graph, such as `torch.compile`; by default it runs as it is.
        cuda_graph: record the decode step once and replay it.
    """

    def __init__(
        self,
        programs: StaticPrograms,
        batch: int,
        *,
        compile: Compile | None = None,
        cuda_graph: bool = False,
    ):
        self._programs = programs
        self._device = programs.decode.device
        make = compile or (lambda graph: graph)
        self._prefill = make(programs.prefill.graph_module)
        self._decode = make(programs.decode.graph_module)
        self.caches = [cache.zeros(batch, programs.length, self._device) for cache in programs.caches]
        self._mask = torch.ones(batch, programs.length, dtype=torch.int64, device=self._device)
        self._start = torch.zeros((), dtype=torch.int64, device=self._device)
        self._step = _Recorded(self._run_step, batch, self._device) if cuda_graph else self._run_step
        self._used = 0

    @torch.no_grad()
    def prefill(self, ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """Return the logits (B, 1, V) of the last token of every prompt; the texts so far are forgotten.

        Args:
            ids: (B, T) int64.
            attention_mask: (B, T), 0 at padding, for programs that obey it.

        Raises:
            DataError: if the prompt is longer than the cache, or padded where that is not obeyed.
        """
        self._require_room(ids.shape[1], 0)
        self._mask.fill_(1)
        if attention_mask is not None:
            if not self._programs.padded and not bool(attention_mask.all()):
                raise DataError(
                    "these programs take prompts without padding", hint="make them with padded=True"
                )
            self._mask[:, : ids.shape[1]] = attention_mask
        self._start.zero_()
        self._used = ids.shape[1]
        positions = positions_of(self._mask[:, : self._used], self._used)
        return self._prefill(ids, self._mask, positions, self._start, *self.caches)

    @torch.no_grad()
    def step(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of new tokens; T is 1 where the step is recorded.

        Raises:
            DataError: if the cache is full.
        """
        self._require_room(ids.shape[1], self._used)
        self._start.fill_(self._used)
        self._used += ids.shape[1]
        return self._step(ids, positions_of(self._mask[:, : self._used], ids.shape[1]))

    def _run_step(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self._decode(ids, self._mask, positions, self._start, *self.caches)

    def _require_room(self, tokens: int, used: int) -> None:
        if used + tokens > self._programs.length:
            raise DataError(
                f"the cache has {self._programs.length} places, and {used + tokens} are needed",
                hint="make the programs with a larger length",
            )


class _Recorded:
    """A decode step as a CUDA graph: one launch, however many kernels."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], batch: int, device: torch.device):
        self._step = step
        self._ids = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._positions = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._logits = torch.empty(0)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        self._ids.copy_(ids)
        self._positions.copy_(positions)
        if self._graph is None:
            self._record()
        assert self._graph is not None
        self._graph.replay()
        return self._logits

    def _record(self) -> None:
        """Run the step a few times, so that everything is compiled and allocated, then record it.

        Repeated steps write the same values to the same places, so they do no harm.
        """
        device = self._ids.device
        warm_up(lambda: self._step(self._ids, self._positions), 3, device)
        self._graph = torch.cuda.CUDAGraph()
        with recording(self._graph, device):
            self._logits = self._step(self._ids, self._positions)
