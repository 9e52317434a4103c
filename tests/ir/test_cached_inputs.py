"""Names, shapes and positions of what a cached program takes."""

import torch
from torch import fx

from dispfx.ir.cached_inputs import CachedShape, CacheTensor, cache_tensors, positions_of, sample_inputs

CPU = torch.device("cpu")
KEYS = CacheTensor("11.key", heads=2, size=8, dtype=torch.float32)
VALUES = CacheTensor("11.value", heads=1, size=5, dtype=torch.bfloat16)


def test_positions_count_tokens_and_not_padding():
    mask = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
    assert positions_of(mask, 4).tolist() == [[0, 1, 2, 3], [0, 0, 0, 1]]
    assert positions_of(mask, 1).tolist() == [[3], [1]]


def test_caches_are_read_from_a_graph_in_the_order_of_its_inputs():
    graph = fx.Graph()
    graph.placeholder("input_ids").meta["val"] = torch.zeros(3, 13, dtype=torch.int64)
    for cache in (KEYS, VALUES):
        node = graph.placeholder(cache.past.replace(".", "_"))
        node.meta["val"] = torch.zeros(3, cache.heads, 34, cache.size, dtype=cache.dtype)
    graph.output(node)
    assert cache_tensors(graph) == (KEYS, VALUES)
    assert (KEYS.past, KEYS.present) == ("past_key_values.11.key", "present.11.key")


def test_a_graph_without_a_cache_has_none():
    graph = fx.Graph()
    graph.output(graph.placeholder("input_ids"))
    assert cache_tensors(graph) == ()


def test_an_empty_cache_holds_no_token():
    empty = VALUES.empty(4, CPU)
    assert empty.shape == (4, 1, 0, 5) and empty.dtype == torch.bfloat16


def test_samples_have_the_asked_shape_and_one_padded_token_where_something_is_cached():
    ids, mask, positions, keys, values = sample_inputs((KEYS, VALUES), CachedShape(3, 2, 6), 50, CPU)
    assert ids.shape == positions.shape == (3, 2) and int(ids.max()) < 50
    assert mask.shape == (3, 8) and mask.sum(1).tolist() == [7, 8, 8]
    assert positions.tolist() == [[5, 6], [6, 7], [6, 7]]
    assert (keys.shape, values.shape) == ((3, 2, 6, 8), (3, 1, 6, 5)) and values.dtype == torch.bfloat16


def test_samples_of_a_prefill_hold_no_padding():
    _, mask, positions, keys = sample_inputs((KEYS,), CachedShape(2, 3, 0), 50, CPU)
    assert bool(mask.all()) and positions.tolist() == [[0, 1, 2]] * 2 and keys.numel() == 0
