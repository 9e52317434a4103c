"""Checks that go before any timing: kernels and static caches against what they must compute."""

from collections.abc import Iterator

import decoder_shapes as shapes
import torch
from static_decoder import StaticDecoder

from dispfx.compiler.pipelines import static_programs
from dispfx.ir.cached_inputs import CachedDecoder
from dispfx.kernels.cached_attention import CACHED_ATTENTION, reference

Check = tuple[str, float, float]
# Rounding of the results, and of the shares before the second product.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# batch, query heads, key heads, places, head size, last place in use
ATTENTIONS = [
    (1, 40, 40, 1088, 128, 1024), (1, 32, 8, 1088, 128, 0), (64, 40, 40, 320, 128, 256),
    (3, 32, 8, 700, 128, 699),
    (2, 32, 32, 1000, 80, 511), (1, 6, 2, 100, 64, 99), (128, 4, 4, 64, 16, 63), (1, 71, 1, 2048, 64, 1500),
]  # fmt: skip


def all_checks(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Yield name, error and tolerance of every check."""
    for attention in ATTENTIONS:
        yield attention_check(attention, device, dtype)
    yield from decoder_checks(device, dtype)


def attention_check(attention: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Check:
    """Compare attention over a static cache with the same in float32."""
    batch, heads, groups, places, size, last = attention
    generator = torch.Generator(device=device).manual_seed(places)
    query = torch.randn(batch, 1, heads, size, generator=generator, device=device).to(dtype).transpose(1, 2)
    keys, values = (
        torch.randn(batch, groups, places, size, generator=generator, device=device).to(dtype)
        for _ in range(2)
    )
    start = torch.tensor(last, device=device)
    actual = CACHED_ATTENTION(query, keys, values, start, None)
    expected = reference(query.float(), keys.float(), values.float(), start)
    return f"cached attention {attention}", _error(actual, expected), TOLERANCES[dtype]


@torch.no_grad()
def decoder_checks(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Compare a pruned decoder with a static cache, as it is and compiled, with one whose cache grows."""
    program = shapes.captured(shapes.config_of("tiny", 2, 512), device, dtype)
    shapes.fill(program)
    pruned = shapes.contender(program, shapes.periodic_plan(program, 0.4, period=2, align=8)).fast
    ids = torch.randint(512, (2, 96), device=device)
    growing = CachedDecoder(pruned.graph_module)
    expected = [growing(ids[:, :64])[:, -1:]]
    expected += [growing(ids[:, place : place + 1]) for place in range(64, 96)]
    programs = static_programs(pruned, 128)
    recorded = device.type == "cuda"
    for name, options in (
        ("as it is", {}),
        ("compiled", {"compile": _compiled, "cuda_graph": recorded}),
    ):
        decoder = StaticDecoder(programs, 2, **options)
        actual = [decoder.prefill(ids[:, :64]).clone()]
        actual += [decoder.step(ids[:, place : place + 1]).clone() for place in range(64, 96)]
        error = _error(torch.cat(actual, 1), torch.cat(expected, 1))
        yield f"prefill and 32 steps, {name}", error, 2 * TOLERANCES[dtype]


def _compiled(graph: torch.fx.GraphModule):
    return torch.compile(graph, fullgraph=True, dynamic=False)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = actual.double(), expected.double()
    return float((a - b).abs().max() / b.abs().max()) if bool(a.isfinite().all()) else float("inf")
