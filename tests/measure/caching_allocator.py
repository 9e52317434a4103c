"""The allocator of torch for GPUs, block by block, without a GPU.

Rules as in c10/cuda/CUDACachingAllocator.cpp: the smallest free block of a place that is large enough, or a
new segment of 2 MiB, 20 MiB or a multiple of 2 MiB; what is left of a block is cut off where it is worth it,
and a block that is freed grows together with free neighbours.  A place is a stream or the pool of a graph,
and small blocks and large ones lie apart.
"""

from dataclasses import dataclass, field

_MEBI = 2**20
_LEAST = 512


@dataclass(eq=False)
class Block:
    """A piece of a segment."""

    place: tuple[str, bool]
    address: int
    size: int
    before: "Block | None" = None
    behind: "Block | None" = None
    free: bool = False


@dataclass
class CachingAllocator:
    """Hands out blocks, and knows the most that was allocated and reserved."""

    place: str = "usual stream"
    allocated: int = 0
    reserved: int = 0
    most_allocated: int = 0
    most_reserved: int = 0
    _free: dict[tuple[str, bool], set[Block]] = field(default_factory=dict)
    _end: int = 0

    def take(self, size: int) -> Block:
        """Return a block of at least that size, in the place that is set."""
        size = max(_LEAST, -(-size // _LEAST) * _LEAST)
        place = (self.place, size <= _MEBI)
        free = self._free.setdefault(place, set())
        fitting = (block for block in free if block.size >= size)
        block = min(fitting, key=lambda block: (block.size, block.address), default=None)
        if block is None:
            block = self._segment(place, size)
        free.discard(block)
        block.free = False
        self._cut(block, size)
        self.allocated += block.size
        self.most_allocated = max(self.most_allocated, self.allocated)
        return block

    def give(self, block: Block) -> None:
        """Take a block back."""
        self.allocated -= block.size
        for neighbour in (block.before, block.behind):
            if neighbour is not None and neighbour.free:
                self._free[block.place].discard(neighbour)
                pair = (neighbour, block) if neighbour is block.before else (block, neighbour)
                block = _joined(*pair)
        block.free = True
        self._free[block.place].add(block)

    def empty_cache(self) -> None:
        """Give back all segments that are free as a whole, but those of a graph's pool."""
        for (place, _), blocks in self._free.items():
            for block in [one for one in blocks if one.before is one.behind is None and place != "graph"]:
                blocks.discard(block)
                self.reserved -= block.size

    def _segment(self, place: tuple[str, bool], size: int) -> Block:
        small, middle = place[1], size < 10 * _MEBI
        whole = 2 * _MEBI if small else 20 * _MEBI if middle else -(-size // (2 * _MEBI)) * 2 * _MEBI
        block = Block(place, self._end, whole)
        self._end += whole
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _cut(self, block: Block, size: int) -> None:
        left = block.size - size
        if left < _LEAST if block.place[1] else left <= _MEBI:
            return
        rest = Block(block.place, block.address + size, left, block, block.behind, free=True)
        if block.behind is not None:
            block.behind.before = rest
        block.behind, block.size = rest, size
        self._free[block.place].add(rest)


def _joined(first: Block, second: Block) -> Block:
    first.size += second.size
    first.behind = second.behind
    if second.behind is not None:
        second.behind.before = first
    return first
