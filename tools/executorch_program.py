#!/usr/bin/env python3
"""Write a pruned folder as a program of ExecuTorch with a KV cache, and compare its tokens with the folder's.

    python tools/executorch_program.py DIR OUT.pte                  needs executorch, torchao
    python tools/executorch_program.py DIR OUT.pte --xnnpack        products by XNNPACK

    forward(ids (1, T), mask (1, P + T), positions (1, T), caches (1, heads, P, width) …) → logits, caches

P tokens were seen before; the caches are given back with T more.  Exits with 1 where tokens differ.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import (  # type: ignore[import-not-found]
    XnnpackPartitioner,
)
from executorch.exir import to_edge_transform_and_lower  # type: ignore[import-not-found]
from executorch.runtime import Runtime  # type: ignore[import-not-found]
from torch import Tensor, nn

from dispfx.capturing.graph_export import traced
from dispfx.compiler.pipelines import run_pipeline
from dispfx.errors import DispfxError
from dispfx.ir.cached_inputs import CachedDecoder, cache_tensors, positions_of
from dispfx.run.folders import open_folder

_COMPARED = 24


class WithCache(nn.Module):
    """A graph with a cache under names that torch.export can make dynamic."""

    def __init__(self, graph: nn.Module):
        super().__init__()
        self.decoder = graph

    def forward(self, ids: Tensor, mask: Tensor, positions: Tensor, *past: Tensor) -> Any:
        """Return logits and the caches."""
        return self.decoder(ids, mask, positions, *past)


def main() -> int:
    """Write the program and compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="a pruned folder")
    parser.add_argument("out", type=Path, help="file to write")
    parser.add_argument("--tokens", type=int, default=64, help="most new tokens of one call")
    parser.add_argument("--context", type=int, default=256, help="most tokens in all")
    parser.add_argument("--xnnpack", action="store_true")
    args = parser.parse_args()
    try:
        program = run_pipeline("gather", open_folder(args.folder).cached())
    except DispfxError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    graph = program.graph_module
    empty = [cache.empty(1, torch.device("cpu")) for cache in cache_tensors(graph.graph)]
    sizes = [args.tokens, args.context, args.tokens]
    free = torch.export.Dim.DYNAMIC
    shapes = (*({1: free(max=size)} for size in sizes), tuple({2: free(max=args.context)} for _ in empty))
    sample = _operands(torch.zeros(1, 3, dtype=torch.int64), [_grown(one, 5) for one in empty])
    with torch.no_grad():
        made = traced(WithCache(graph), sample, shapes)
    parts = [XnnpackPartitioner()] if args.xnnpack else []
    args.out.write_bytes(to_edge_transform_and_lower(made, partitioner=parts).to_executorch().buffer)
    prompt = torch.randint(program.known_tokens, (1, 7), generator=torch.Generator().manual_seed(0))
    method = Runtime.get().load_program(str(args.out)).load_method("forward")
    found, expected = _written(method, prompt, empty), _continued(CachedDecoder(graph), prompt)
    print(
        f"{args.out}: {len(expected)} tokens after a prompt of 7: {'same' if found == expected else 'others'}"
    )
    return int(found != expected)


def _grown(cache: Tensor, tokens: int) -> Tensor:
    return cache.new_zeros(*cache.shape[:2], tokens, *cache.shape[3:])


def _operands(ids: Tensor, past: list[Tensor]) -> tuple[Tensor, ...]:
    mask = torch.ones(1, past[0].shape[2] + ids.shape[1], dtype=torch.int64)
    return (ids, mask, positions_of(mask, ids.shape[1]), *past)


def _written(method: Any, prompt: Tensor, past: list[Tensor]) -> list[int]:
    tokens: list[int] = []
    ids = prompt
    for _ in range(_COMPARED):
        logits, *kept = method.execute(_operands(ids, past))
        past = [one.clone() for one in kept]
        tokens.append(int(logits[0, -1].argmax()))
        ids = torch.tensor([tokens[-1:]])
    return tokens


def _continued(decoder: CachedDecoder, prompt: Tensor) -> list[int]:
    tokens = [int(decoder(prompt)[0, -1].argmax())]
    while len(tokens) < _COMPARED:
        tokens.append(int(decoder(torch.tensor([tokens[-1:]]))[0, -1].argmax()))
    return tokens


if __name__ == "__main__":
    sys.exit(main())
