"""Checks that go before any timing: kernels and static caches against what they must compute."""

from collections.abc import Iterator

import decoder_shapes as shapes
import torch

from dispfx.api.cached import CachedDecoder
from dispfx.api.static import StaticDecoder, static_programs
from dispfx.kernels.cached_attention import CACHED_ATTENTION, reference
from dispfx.kernels.norm_select import ADD_NORM_SELECT
from dispfx.kernels.norm_select import reference as norm_reference
from dispfx.passes.fuse_norms import FuseNorms
from dispfx.pipeline import Pipeline

Check = tuple[str, float, float]
# Rounding of the results, and of the shares before the second product.
TOLERANCES = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# batch, query heads, key heads, places, head size, last place in use
ATTENTIONS = [
    (1, 40, 40, 1088, 128, 1024), (1, 32, 8, 1088, 128, 0), (64, 40, 40, 320, 128, 256),
    (3, 32, 8, 700, 128, 699),
    (2, 32, 32, 1000, 80, 511), (1, 6, 2, 100, 64, 99), (128, 4, 4, 64, 16, 63), (1, 71, 1, 2048, 64, 1500),
]  # fmt: skip
# width, features of the branch, kept: odd, one, all
NORMS = [(5120, 2561, 3333), (4096, 9, 1), (2560, 2561, 2560), (768, 77, 13), (33, 8, 5)]


def all_checks(device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Yield name, error and tolerance of every check."""
    for attention in ATTENTIONS:
        yield attention_check(attention, device, dtype)
    for norm in NORMS:
        yield from norm_checks(norm, device, dtype)
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


def norm_checks(norm: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Iterator[Check]:
    """Compare write, norm and selection in one kernel with the same operations apart."""
    width, columns, kept = norm
    generator = torch.Generator(device=device).manual_seed(width)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    x, written, weight, bias = random(3, 5, width), random(3, 5, columns), random(width), random(width)
    inverse = torch.randint(columns, (width,), generator=generator, device=device, dtype=torch.int32)
    chosen = torch.randperm(width, generator=generator, device=device)[:kept].sort().values
    places = torch.full((width,), -1, dtype=torch.int32, device=device)
    places[chosen] = torch.arange(kept, dtype=torch.int32, device=device)
    for is_rms in (True, False):
        for added in (written, None):
            taken = (x, added, inverse if added is not None else None, weight, None if is_rms else bias)
            actual = ADD_NORM_SELECT(*taken, places, kept, 1e-5, is_rms)
            expected = norm_reference(*taken, places, kept, 1e-5, is_rms)
            kind = f"{'rms' if is_rms else 'layer'} norm {norm}{'' if added is None else ' of a sum'}"
            yield f"{kind}, sum", _error(actual[0], expected[0]), TOLERANCES[dtype] / 4
            yield f"{kind}, selected", _error(actual[1], expected[1]), TOLERANCES[dtype] / 4


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
    fused = static_programs(Pipeline([FuseNorms()]).run(pruned.clone()), 128)
    for name, made, options in (
        ("as it is", programs, {}),
        ("norms fused", fused, {}),
        ("compiled", programs, {"compile": _compiled, "cuda_graph": recorded}),
        ("norms fused, compiled", fused, {"compile": _compiled, "cuda_graph": recorded}),
    ):
        decoder = StaticDecoder(made, 2, **options)
        actual = [decoder.prefill(ids[:, :64]).clone()]
        actual += [decoder.step(ids[:, place : place + 1]).clone() for place in range(64, 96)]
        error = _error(torch.cat(actual, 1), torch.cat(expected, 1))
        yield f"prefill and 32 steps, {name}", error, 2 * TOLERANCES[dtype]


def _compiled(graph: torch.fx.GraphModule):
    return torch.compile(graph, fullgraph=True, dynamic=False)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    a, b = actual.double(), expected.double()
    return float((a - b).abs().max() / b.abs().max()) if bool(a.isfinite().all()) else float("inf")
