"""A table of positions bounds the texts that a decoder reads, and is found by dataflow."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import dispfx
from dispfx.analysis.lookups import longest_text, require_readable
from dispfx.errors import DataError
from dispfx.learning.text import TokenBatches
from dispfx.learning.trainer import Watch
from dispfx.run.fitting import settings_of
from dispfx.settings import learn_settings
from tests.captures import plain
from tests.plain_decoders import FORMS, VOCABULARY, Decoder, build

# Where token t stands in a table of 64 rows, and how many tokens then have a place.
WAYS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], int]] = {
    "sliced": (lambda table, places: table[: places.shape[0]], 64),
    "looked up": (lambda table, places: F.embedding(places, table), 64),
    "indexed": (lambda table, places: table[places], 64),
    "behind two rows": (lambda table, places: F.embedding(places + 2, table), 62),
    "every second": (lambda table, places: table.index_select(0, 2 * places), 32),
}


class Placed(Decoder):
    """A plain decoder that finds its positions in one of the ways."""

    way = staticmethod(WAYS["sliced"][0])

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.ones_like(ids[0]).cumsum(0) - 1
        x = self.embedding(ids) + self.way(self.positions, places)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def placed(way: str) -> dispfx.Program:
    decoder = build(FORMS["pre-norm"])
    decoder.__class__ = type("Placed", (Placed,), {"way": staticmethod(WAYS[way][0])})
    return dispfx.capture(decoder)


@pytest.mark.parametrize("way", WAYS)
def test_the_longest_text_is_the_one_whose_last_token_has_a_place(way):
    program, longest = placed(way), WAYS[way][1]
    assert longest_text(program, 2048) == longest
    assert longest_text(program, 7) == 7
    require_readable(program, longest)
    program.graph_module(torch.zeros(1, longest, dtype=torch.int64))
    with pytest.raises(DataError, match=rf"ends after {longest}\n  where: positions\n.*`seq_len={longest}`"):
        require_readable(program, longest + 1)


def test_computed_positions_have_no_end():
    program = plain("llama")
    assert longest_text(program, 100_000) == 100_000


def test_learning_takes_the_sequences_that_a_table_allows_or_says_which_they_are():
    said: list[str] = []
    program = placed("looked up")
    tokens = torch.randint(VOCABULARY, (4_000,), generator=torch.Generator().manual_seed(0))
    plan = dispfx.learn(program, tokens, 0.3, steps=2, batch_size=2, watch=Watch(note=said.append))
    assert plan.achieved == pytest.approx(0.3, abs=0.005)
    assert said[0] == "batches of 2 × 64 tokens: the decoder does not read longer sequences"
    for settings in (None, learn_settings(None)):
        with pytest.raises(DataError, match="ends after 64"):
            dispfx.learn(program, tokens, 0.3, settings=settings, steps=2, batch_size=2, seq_len=65)
    cut = TokenBatches(tokens, 65, 2)
    with pytest.raises(DataError, match="ends after 64"):
        dispfx.learn(program, cut, 0.3, settings=learn_settings(None, seq_len=65, batch_size=2, steps=2))


def test_settings_of_a_decoder_are_those_that_its_tables_allow():
    found = settings_of(placed("looked up"), learn_settings(None))
    assert (found.seq_len, found.batch_size, found.samples) == (64, 64, 64)
