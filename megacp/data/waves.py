"""Give each document of a global batch as many ranks as it needs, and all ranks the same time: short ones few, long ones many.

The ranks are cut into blocks of consecutive ranks, blocks of one size into blocks of the next smaller one, down to single ranks. A
document goes to a block of the smallest size that has memory for it; the longest are placed first, each in the block with least to
do. One that would keep its block busy longer than the others is spread over a block of the next size. A rank works on the rows of
large blocks first. So blocks only ever part within a step and nobody waits for a rank that comes from elsewhere: ranks need to be
equally busy over the step, not in each row.

What a document costs is estimated by :class:`Cost`, from figures that the caller gives. Plain numbers, no process group; every rank
computes the same, from sums in a fixed order.

Source: own; longest first into the least loaded is Graham 1969. A size for each sample from precomputed groups is also what
Megatron-LM's hybrid context parallelism, ByteScale (arXiv 2502.21231) and FlexSP (arXiv 2412.01523) do.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from megacp.data.packing import first_fit_decreasing
from megacp.errors import ConfigError

__all__ = ["Cost", "Row", "Waves", "block_sizes", "spread"]

_LIMITS = (1.0, 1.002, 1.005, 1.01, 1.02, 1.04, 1.08, 1.16, 1.3, 1.6)
"""Times up to which blocks are filled before a document is spread wider, relative to the bound."""

_GRAIN = 0.01
"""Documents that take less of the step than this are not spread wider for the sake of time."""

_CLOSE = 1.003
"""So near to the bound no better schedule is looked for."""


@dataclass(frozen=True)
class Cost:
    """What a step's parts take, in seconds, forward and backward and over all layers.

    Attributes:
        token: a token's matrix products outside attention. pair: one visible (query, key) pair of attention.
        key: bringing one token's keys and values, and their gradients, to one more rank of the same node. far_key: of another node;
            as ``key`` if None. node: ranks of a node.
        row: what a row takes whatever it holds (starting kernels, a micro-batch's own work). call: what it takes for each rank of its
            block besides, as a ring has a step for each. tile: kernels compute attention in tiles of so many queries and keys.
    """

    token: float
    pair: float
    key: float = 0.0
    far_key: float | None = None
    node: int = 8
    row: float = 0.0
    call: float = 0.0
    tile: int = 1

    def __post_init__(self) -> None:
        figures = (self.token, self.pair, self.key, self.far_key or 0.0, self.row, self.call)
        is_sane = all(0 <= x < float("inf") for x in figures) and min(self.node, self.tile) >= 1
        if not is_sane or not self.token + self.pair:
            raise ConfigError(
                f"megacp: {self} is no cost. Give seconds of at least 0, one of token and pair above 0, and a node and a "
                "tile of at least 1."
            )

    @staticmethod
    def of(
        *,
        layers: int,
        hidden: int,
        ffn: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab: int,
        matmul_rate: float,
        attention_rate: float,
        near_rate: float,
        far_rate: float,
        node: int = 8,
        row: float = 0.0,
        call: float = 0.0,
        tile: int = 128,
        itemsize: int = 2,
    ) -> Cost:
        """Work the cost out from a model's sizes and a cluster's rates.

        The model is a decoder with gated MLPs (three matrices of hidden x ffn). The backward pass of a matrix product is two more,
        of attention 2.5 times the forward pass. Keys and values travel in both passes, their gradients once, in float32.

        Args:
            matmul_rate, attention_rate: operations a second of one rank that the kernels reach, not the data sheet's.
            near_rate, far_rate: bytes a second that reach one rank from the same node, and from others.
            row: seconds. call: seconds that one call of an attention kernel takes to start, with its message and merge.
            tile: of the kernels, in tokens. itemsize: bytes of an element.
        """
        attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
        weights = layers * (attention + 3 * hidden * ffn) + hidden * vocab
        values = layers * kv_heads * 2 * head_dim
        moved = values * (2 * itemsize + 4)
        return Cost(
            token=6 * weights / matmul_rate,
            pair=layers * heads * 4 * head_dim * 3.5 / attention_rate,
            key=moved / near_rate,
            far_key=moved / far_rate,
            node=node,
            row=row,
            call=2 * layers * call,
            tile=tile,
        )

    def key_over(self, size: int) -> float:
        """Give what a token's keys take within a block of ``size`` ranks."""
        return self.key if self.far_key is None or self.node % size == 0 else self.far_key

    def document(self, tokens: int, size: int) -> float:
        """Estimate what a document takes of each rank of a block: its share of matrix products, and of attention.

        The other ranks' keys travel behind attention, and count in its place where they take longer.
        """
        return float(self._documents(np.array([tokens], np.int64), size)[0])

    def _documents(self, tokens: np.ndarray, size: int) -> np.ndarray:
        from megacp.layout import chunk_of  # here, as it brings torch, which reading documents does without

        chunk = chunk_of(tokens, size)
        slots = tokens if size == 1 else 2 * chunk  # one rank alone needs no padding
        side = -(-slots // self.tile)
        tiles = side * (side + 1) // 2 + (size - 1) * side * -(-chunk // self.tile)
        attention = self.pair * (tiles * self.tile**2).astype(np.float64)
        travel = self.key_over(size) * (size - 1) * slots.astype(np.float64)
        out: np.ndarray = self.token * slots.astype(np.float64) + np.maximum(attention, travel)
        return out

    def of_row(self, size: int) -> float:
        """Give what a row takes of each of ``size`` ranks besides its documents."""
        return self.row + self.call * size


class Row(NamedTuple):
    """A packed row of documents for one block of ranks: one micro-batch of theirs.

    Attributes:
        first, size: the block is ranks [first, first + size). documents: which, in the order of their tokens. lengths: their tokens.
    """

    first: int
    size: int
    documents: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def ranks(self) -> range:
        """The block's ranks."""
        return range(self.first, self.first + self.size)

    @property
    def tokens(self) -> int:
        """Tokens of the row."""
        return sum(self.lengths)

    @property
    def local_tokens(self) -> int:
        """Slots that the row takes on each rank, where a layout gives all ranks equal tokens."""
        return -(-self.tokens // self.size)

    @property
    def pairs(self) -> int:
        """Visible (query, key) pairs of causal attention within documents."""
        return sum(length * (length + 1) // 2 for length in self.lengths)


@dataclass(frozen=True)
class Waves:
    """The rows of one step. Make one with :func:`spread`.

    Attributes:
        ranks: how many there are. capacity: slots of a rank in one row. sizes: of the blocks, rising. lengths: of all documents.
        waves: wave k has the k-th row of each rank that has so many; blocks of one wave do not overlap. Waves are an order, not a
            barrier: a rank goes on as soon as its own row is done.
    """

    ranks: int
    capacity: int
    sizes: tuple[int, ...]
    lengths: tuple[int, ...] = field(repr=False)
    waves: tuple[tuple[Row, ...], ...] = field(repr=False)

    def rows(self, rank: int) -> list[Row | None]:
        """List a rank's row of each wave; None where it has nothing to do."""
        return [next((row for row in wave if rank in row.ranks), None) for wave in self.waves]

    def __iter__(self) -> Iterator[Row]:
        return (row for wave in self.waves for row in wave)

    def seconds(self, cost: Cost | Callable[[Row], float]) -> float:
        """Simulate the step: a row begins when all its ranks are free. ``cost`` may also be the seconds of a row."""
        return max(self.busy(cost)[1])

    def busy(self, cost: Cost | Callable[[Row], float]) -> tuple[list[float], list[float]]:
        """Simulate the step; give for each rank the seconds it works, and when it is done."""
        takes = (lambda row: row_seconds(row, cost)) if isinstance(cost, Cost) else cost
        works, done = [0.0] * self.ranks, [0.0] * self.ranks
        for row in self:
            seconds = takes(row)
            end = max(done[rank] for rank in row.ranks) + seconds
            for rank in row.ranks:
                works[rank] += seconds
                done[rank] = end
        return works, done

    def bound(self, cost: Cost) -> float:
        """Give seconds that no schedule of these documents can be below, by this cost: see :func:`least_seconds`."""
        return least_seconds(self.lengths, self.ranks, self.capacity, cost, self.sizes)

    def digest(self) -> bytes:
        """Name the schedule by what is in it, 16 bytes."""
        rows = [(row.first, row.size, row.documents, row.lengths) for row in self]
        text = repr((self.ranks, self.capacity, self.sizes, [len(wave) for wave in self.waves], rows))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def row_seconds(row: Row, cost: Cost) -> float:
    """Estimate what a row takes of each of its ranks."""
    lengths = np.array(row.lengths, np.int64)
    return cost.of_row(row.size) + float(sum(cost._documents(lengths, row.size).tolist()))


def least_seconds(
    lengths: Sequence[int], ranks: int, capacity: int, cost: Cost, sizes: Sequence[int]
) -> float:
    """Give seconds that no schedule can be below: the greater of two, both without any exchange.

    All work, divided evenly, in rows that are full; or the longest document alone on the largest block.
    """
    exact = np.array(lengths, np.float64)
    work = (cost.token * exact + cost.pair * (exact * (exact + 1) / 2)).tolist()
    even = (float(sum(work)) + cost.of_row(1) * float(sum(lengths)) / capacity) / ranks
    return max(even, cost.of_row(1) + float(max(work)) / sizes[-1])


def block_sizes(ranks: int) -> tuple[int, ...]:
    """Give the sizes of blocks: powers of two as far as they divide, then the other factors, up to all ranks. 12 -> 1, 2, 4, 12."""
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ConfigError(f"megacp: ranks is {ranks!r}; it must be a whole number of at least 1.")
    sizes, factor = [1], 2
    while sizes[-1] < ranks:
        rest = ranks // sizes[-1]
        factor = next(f for f in range(factor, rest + 1) if rest % f == 0)
        sizes.append(sizes[-1] * factor)
    return tuple(sizes)


def check_sizes(sizes: Sequence[int], ranks: int) -> tuple[int, ...]:
    """Refuse sizes whose blocks do not lie inside one another.

    Raises: ConfigError.
    """
    chain = (*sizes, ranks)
    whole = all(isinstance(s, int) and not isinstance(s, bool) and s >= 1 for s in chain)
    if not sizes or not whole or any(b % a for a, b in pairwise(chain)):
        raise ConfigError(
            f"megacp: blocks of {list(sizes)} ranks do not fit {ranks} ranks. Each size must divide the next larger one and the "
            f"largest must divide the ranks, as in {list(block_sizes(ranks))}."
        )
    if len(set(sizes)) != len(sizes):
        raise ConfigError(f"megacp: sizes of blocks are given twice: {list(sizes)}. Give each once.")
    return tuple(sizes)


def spread(
    lengths: Sequence[int] | np.ndarray,
    ranks: int,
    capacity: int,
    cost: Cost,
    sizes: Sequence[int] | None = None,
) -> Waves:
    """Place the documents of one step on blocks of ranks so that the slowest rank is done as early as can be found.

    Args:
        lengths: tokens of each document (or piece that is trained as one); empty ones are left out.
        ranks: data-parallel times context-parallel ranks. capacity: slots that a rank has memory for in one row (micro-batch).
        sizes: of blocks, rising, each dividing the next; see :func:`block_sizes` for what None means. One size alone is fixed context
            parallelism.
    The simulated seconds are never above those of a single size, where that one has memory for all documents.
    Raises: ConfigError for a size below 1, sizes that do not lie inside one another, no documents, or one too long for all ranks.
    """
    chain = check_sizes(block_sizes(ranks) if sizes is None else list(sizes), ranks)
    tokens = _checked_lengths(lengths, capacity, chain[-1])
    table = _Table(tokens, ranks, capacity, cost, chain)
    best: tuple[float, Waves] | None = None
    for placed in table.candidates():
        if best is not None and placed.seconds >= best[0]:
            continue  # packed into rows it takes at least as long
        waves = Waves(
            ranks, capacity, chain, tuple(tokens.tolist()), _in_waves(placed, tokens, ranks, capacity)
        )
        seconds = waves.seconds(cost)
        if best is None or seconds < best[0]:
            best = seconds, waves
    assert best is not None
    return best[1]


def _checked_lengths(lengths: Sequence[int] | np.ndarray, capacity: int, largest: int) -> np.ndarray:
    tokens = np.asarray(lengths)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu" or not (tokens > 0).any() or (tokens < 0).any():
        raise ConfigError(
            "megacp: there is nothing to place: give the number of tokens of each document, one at least above 0."
        )
    if isinstance(capacity, bool) or not isinstance(capacity, (int, np.integer)) or capacity < 1:
        raise ConfigError(
            f"megacp: capacity is {capacity!r}; it must be a whole number of tokens, at least 1."
        )
    longest = int(tokens.argmax())
    if tokens[longest] > largest * capacity:
        raise ConfigError(
            f"megacp: document {longest} has {tokens[longest]} tokens, and the largest block of {largest} ranks, {capacity} tokens "
            f"each, holds {largest * capacity}. Cut it into pieces, or give more ranks or a larger capacity."
        )
    return tokens.astype(np.int64)


class _Placed(NamedTuple):
    """Which documents each block has: (size, block number) -> documents, longest first. seconds: of the slowest rank."""

    blocks: dict[tuple[int, int], list[int]]
    seconds: float


class _Table:
    """What each document takes at each size, and the ways to place them that are tried."""

    def __init__(
        self, tokens: np.ndarray, ranks: int, capacity: int, cost: Cost, sizes: tuple[int, ...]
    ) -> None:
        self.tokens, self.ranks, self.capacity, self.cost, self.sizes = tokens, ranks, capacity, cost, sizes
        self.order = [int(d) for d in np.argsort(-tokens, kind="stable") if tokens[d]]
        exact = tokens.astype(np.float64)
        self.seconds = [  # with its share of the rows that it helps to fill
            (cost._documents(tokens, size) + exact * (cost.of_row(size) / (size * capacity))).tolist()
            for size in sizes
        ]
        self.least = np.searchsorted(
            np.array(sizes) * capacity, tokens
        ).tolist()  # the first that has the memory

    def candidates(self) -> Iterator[_Placed]:
        """Try limits from tight to loose, then each size alone."""
        bound = least_seconds(self.tokens.tolist(), self.ranks, self.capacity, self.cost, self.sizes)
        for limit in (*_LIMITS, float("inf")):
            placed = self.place(limit * bound)
            yield placed
            if placed.seconds <= _CLOSE * bound:
                break
        for at in range(max(self.least[d] for d in self.order), len(self.sizes)):
            yield self.place(float("inf"), alone=at)

    def place(self, limit: float, alone: int | None = None) -> _Placed:
        """Place all documents, spreading those wider that would pass the limit; or all at one size."""
        level = list(self.least) if alone is None else [alone] * len(self.least)
        for _ in range(4 * self.ranks):
            blocks, over = self._filled(level, limit)
            if over is None:
                break
            level[over] += 1
        else:
            blocks, _ = self._filled(level, float("inf"))
        return _Placed(blocks, self._slowest(blocks))

    def _filled(self, level: list[int], limit: float) -> tuple[dict[tuple[int, int], list[int]], int | None]:
        """Fill blocks from the largest size down; give up at the first document that must be spread wider, and name it."""
        by_level: list[list[int]] = [[] for _ in self.sizes]
        for document in self.order:
            by_level[level[document]].append(document)
        blocks: dict[tuple[int, int], list[int]] = {}
        loads = [0.0] * (self.ranks // self.sizes[-1])
        for at in reversed(range(len(self.sizes))):
            size, seconds, is_last = self.sizes[at], self.seconds[at], at + 1 == len(self.sizes)
            parts = self.ranks // size // len(loads)
            heap = [(load, i * parts + part) for i, load in enumerate(loads) for part in range(parts)]
            heapq.heapify(heap)
            for document in by_level[at]:
                load, block = heap[0]
                takes = seconds[document]
                if load + takes > limit and not is_last and takes > _GRAIN * limit:
                    return {}, document
                blocks.setdefault((size, block), []).append(document)
                heapq.heapreplace(heap, (load + takes, block))
            loads = [load for load, _ in sorted(heap, key=lambda one: one[1])]
        return blocks, None

    def _slowest(self, blocks: dict[tuple[int, int], list[int]]) -> float:
        """Estimate when the last rank is done, rows counted as if packed without gaps."""
        busy = [0.0] * self.ranks
        for at, size in enumerate(self.sizes):
            row = self.cost.of_row(size)
            for block in range(self.ranks // size):
                documents = blocks.get((size, block), [])
                tokens = sum(int(self.tokens[d]) for d in documents)
                full = tokens / (size * self.capacity)
                seconds = sum(self.seconds[at][d] for d in documents) + row * (math.ceil(full) - full)
                for rank in range(block * size, block * size + size):
                    busy[rank] += seconds
        return max(busy)


def _in_waves(placed: _Placed, tokens: np.ndarray, ranks: int, capacity: int) -> tuple[tuple[Row, ...], ...]:
    """Pack each block's documents into rows, and number each rank's rows, large blocks first."""
    waves: list[list[Row]] = []
    begun = [0] * ranks
    for size, block in sorted(placed.blocks, key=lambda one: (-one[0], one[1])):
        documents = placed.blocks[size, block]
        lengths = tokens[documents]
        first = block * size
        for row in first_fit_decreasing(lengths, size * capacity):
            held = [documents[i] for i in row]
            waves += [[] for _ in range(begun[first] + 1 - len(waves))]
            waves[begun[first]].append(Row(first, size, tuple(held), tuple(int(tokens[d]) for d in held)))
            for rank in range(first, first + size):
                begun[rank] += 1
    return tuple(tuple(sorted(wave)) for wave in waves)
