"""Random sites with labels of every kind, and a count of really sliced tensors to compare with."""

from collections.abc import Mapping, Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from dispfx.ir.sites import UNTOUCHED, BranchKind, Site, SiteKind, Slice

Shapes = dict[str, tuple[int, ...]]


def site(name: str, size: int, *slices: Slice, kind: SiteKind = "inner") -> Site:
    return Site(name, "layer.0", "mlp", kind, size, tuple(slices))


@st.composite
def decoders(draw: st.DrawFn) -> tuple[list[Site], Shapes]:
    """Draw sites and shapes: several slices an axis, repeats, untouched positions, uncut parameters."""
    shapes: Shapes = {
        f"weight.{i}": tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
        for i in range(draw(st.integers(1, 5)))
    }
    sites = []
    for index in range(draw(st.integers(1, 5))):
        size = draw(st.integers(1, 6))
        cuts = [draw(slices(shapes, size)) for _ in range(draw(st.integers(0, 3)))]
        sites.append(site(f"site.{index}", size, *cuts))
    path = f"plain.{len(sites)}"
    shapes[path] = (sites[0].size, 3)
    sites[0] = site("site.0", sites[0].size, *sites[0].slices, Slice(path, 0))
    return sites, shapes


@st.composite
def slices(draw: st.DrawFn, shapes: Mapping[str, tuple[int, ...]], size: int) -> Slice:
    path = draw(st.sampled_from(sorted(shapes)))
    axis = draw(st.integers(0, len(shapes[path]) - 1))
    length = shapes[path][axis]
    if length == size and draw(st.booleans()):
        return Slice(path, axis)
    labels = draw(st.lists(st.integers(UNTOUCHED, size - 1), min_size=length, max_size=length))
    return Slice(path, axis, tuple(labels))


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[Site], Shapes]:
    """Draw a decoder of which one more site has features by expert, on two stacks that others cut as well."""
    sites, shapes = draw(decoders())
    experts, each, times = (draw(st.integers(1, 4)) for _ in range(3))
    regular = [i for _ in range(times) for i in range(each)]
    shapes |= {"up": (experts, each * times, sites[0].size), "down": (experts, 3, each)}
    sites[0] = site("site.0", sites[0].size, *sites[0].slices, Slice("up", 2))
    stacks = (Slice("up", 1, tuple(regular), True), Slice("down", 2, None, True))
    inner = Site("experts", "layer.0", "mlp", "inner", experts * each, stacks, experts=experts)
    return [*sites, inner], shapes


def sliced_count(
    sites: Sequence[Site], shapes: Mapping[str, tuple[int, ...]], masks: Sequence[Tensor], of: str
) -> int:
    """Cut real tensors position by position and count their elements."""
    whole = {path: torch.ones(shape) for path, shape in shapes.items()}
    cut_paths = {cut.parameter for one in sites for cut in one.slices}
    for one, mask in zip(sites, masks, strict=True):
        for cut in one.slices:
            stack = whole[cut.parameter] if cut.by_expert else whole[cut.parameter][None]
            own = mask.chunk(one.experts) if cut.by_expert else [mask]
            for tensor, kept in zip(stack, own, strict=True):
                axis = cut.axis - cut.by_expert
                for position, label in enumerate(range(len(kept)) if cut.labels is None else cut.labels):
                    if label != UNTOUCHED and not kept[label]:
                        tensor.select(axis, position).zero_()
    return sum(int(t.sum()) for path, t in whole.items() if of == "total" or path in cut_paths)


def decoder_sites(
    layers: int, width: int, inner: int, key_width: int | None = None
) -> tuple[list[Site], Shapes]:
    """Return five sites a layer of a gated-MLP decoder with grouped-query attention, and its shapes."""
    keys = width if key_width is None else key_width
    sites: list[Site] = []
    shapes: Shapes = {"embed": (4 * width, width), "norm": (width,)}
    for layer in range(layers):
        paths = {
            name: f"layers.{layer}.{name}" for name in ("q", "k", "v", "o", "gate", "up", "down", "norm")
        }
        q, k, v, o, gate, up, down, norm = paths.values()
        shapes |= {q: (width, width), k: (keys, width), v: (keys, width), o: (width, width), norm: (width,)}
        shapes |= {gate: (inner, width), up: (inner, width), down: (width, inner)}
        branches: list[tuple[BranchKind, SiteKind, int, list[Slice]]] = [
            ("attention", "read", width, [Slice(q, 1), Slice(k, 1), Slice(v, 1)]),
            ("attention", "write", width, [Slice(o, 0)]),
            ("mlp", "read", width, [Slice(gate, 1), Slice(up, 1)]),
            ("mlp", "inner", inner, [Slice(gate, 0), Slice(up, 0), Slice(down, 1)]),
            ("mlp", "write", width, [Slice(down, 0)]),
        ]
        for branch, kind, size, cuts in branches:
            name = f"layers.{layer}.{branch}.{kind}"
            sites.append(Site(name, f"layers.{layer}.{branch}", branch, kind, size, tuple(cuts)))
    return sites, shapes
