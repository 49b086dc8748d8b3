"""Who computes what, when: a layout and a mask turned into steps of blocks.

A plan is plain numpy and needs no process group, so any rank's plan of any cluster can be computed, tested and drawn on a laptop.
The same object drives execution, the estimates and the pictures. How keys and values travel is the method's business:
each method in ``megacp.methods`` describes its steps with the functions of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple, Protocol

import numpy as np

from megacp.errors import ConfigError
from megacp.layout import Layout
from megacp.mask import Mask
from megacp.slices import UNBOUNDED, count, joined, moved, overlaps, pairs, trim

__all__ = [
    "ALL_OWNERS",
    "OTHERS",
    "Block",
    "Plan",
    "Schedule",
    "Sizes",
    "Step",
    "blocks_in",
    "blocks_of",
    "head_ranges",
    "joined_ranges",
    "queries_of",
]

ALL_OWNERS = -1
"""As a step's owner: the keys and values of all ranks, in global order."""

OTHERS = -2
"""As a step's owner: those keys and values of other ranks that this one needs, in global order."""

_NOWHERE = np.zeros((0, 3), np.int64)


class Block(NamedTuple):
    """Some local queries against some keys of the step's buffer: key k is seen by query q if lo <= k - q <= hi.

    All numbers are local: queries count the rank's slots, keys the slots of the step's key/value buffer.
    """

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int
    hi: int

    @property
    def kind(self) -> str:
        """Name the shape: 'full', 'causal' (only later keys are cut off) or 'banded'."""
        if self.lo > -UNBOUNDED:
            return "banded"
        return "causal" if self.hi < UNBOUNDED else "full"

    @property
    def pairs(self) -> int:
        """Count the visible (query, key) pairs."""
        return count(self[1:])


@dataclass(frozen=True)
class Step:
    """What a rank computes while one owner's keys and values are here, and what it passes on.

    Attributes:
        index: number of the step, from 0. owner: whose keys and values, or :data:`ALL_OWNERS`, or :data:`OTHERS`.
        blocks: the work, fewest kernel calls first found.
        sends, receives: whether keys and values leave for, or come in for, the next step.
        grad_to: in the backward pass, the rank that gets this owner's gradients after this step, or None.
        grad_follows: whether the next owner's gradients so far come in after this step, from the rank before.
        grad_home: the rank from which this rank's own gradients come in after this step, or None.
        q_pieces, k_pieces: what the blocks' numbers mean, int64 [n, 3] rows (start, stop, slot) as in a layout: tokens
            [start, stop) lie from slot ``slot`` of the query (of the key/value) buffer on.
    """

    index: int
    owner: int
    blocks: tuple[Block, ...]
    sends: bool = False
    receives: bool = False
    grad_to: int | None = None
    grad_follows: bool = False
    grad_home: int | None = None
    q_pieces: np.ndarray = field(default_factory=lambda: _NOWHERE, repr=False, compare=False)
    k_pieces: np.ndarray = field(default_factory=lambda: _NOWHERE, repr=False, compare=False)

    @property
    def pairs(self) -> int:
        """Count the visible (query, key) pairs, over the rows named by the blocks."""
        return sum(block.pairs for block in self.blocks)

    @property
    def queries(self) -> np.ndarray:
        """Give the global position of each slot that the blocks' queries count, int64; -1 where a slot holds no token."""
        return _spelt(self.q_pieces)

    @property
    def keys(self) -> np.ndarray:
        """Give the global position of each slot that the blocks' keys count, int64; -1 where a slot holds no token."""
        return _spelt(self.k_pieces)


class Sizes(NamedTuple):
    """How large one token is: query heads, key/value heads, head size of q and k, head size of v."""

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


class Schedule(Protocol):
    """What a method says about its steps; each module in ``megacp.methods`` is one.

    A method that moves heads as well says two things more: ``team(plan, rank)``, the ranks among which the heads of this rank's
    queries are divided (without it: the rank alone), and ``elements_received(plan, rank, sizes, backward)``, the elements that
    reach a rank in one pass (in the inputs' dtype, in the accumulation dtype), in place of ``tokens_received``.
    """

    name: str

    def steps(self, plan: Plan, rank: int) -> tuple[Step, ...]:
        """List the steps of a rank, its own block first where the method has one."""

    def tokens_received(self, plan: Plan, rank: int, backward: bool) -> tuple[int, int]:
        """Count the tokens whose (key and value, gradient of key and value) reach a rank in one pass."""


@dataclass(frozen=True)
class Plan:
    """A layout, a mask and a method, turned into steps. Make one with :func:`megacp.plan`.

    Attributes:
        layout, mask: what is planned for. schedule: the method.
        hierarchy: for a method of two levels, how many consecutive ranks make one of the inner level, and how many of those
            there are; None for others.
    """

    layout: Layout
    mask: Mask
    schedule: Schedule
    hierarchy: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.layout.seq_len != self.mask.seq_len:
            raise ConfigError(
                f"megacp: the layout places {self.layout.seq_len} tokens, the mask covers {self.mask.seq_len}. "
                "Make both for the same sequence."
            )

    @property
    def method(self) -> str:
        """Name the method."""
        return self.schedule.name

    def steps(self, rank: int) -> tuple[Step, ...]:
        """List what a rank does, step by step."""
        return _steps(self, rank)

    def team(self, rank: int) -> tuple[int, ...]:
        """List the ranks that compute the same pairs, each for its own share of the heads; the rank alone for most methods."""
        team = getattr(self.schedule, "team", None)
        return (rank,) if team is None else team(self, rank)

    def heads(self, rank: int, heads: int) -> range:
        """Give those of ``heads`` query heads that a rank computes."""
        team = self.team(rank)
        return head_ranges(heads, len(team))[team.index(rank)]

    def pairs(self, rank: int) -> int:
        """Count the (query, key) pairs that a rank computes for one row (over all rows, if the mask's rows differ).

        Each is computed for the rank's :meth:`heads`, so ranks of one :meth:`team` count the same pairs.
        """
        return int(self.work[list(self.team(rank))].sum())

    def flops(
        self,
        rank: int,
        *,
        heads: int = 1,
        head_dim: int = 1,
        value_dim: int | None = None,
        backward: bool = False,
    ) -> int:
        """Count the floating-point operations of a rank's two matrix products, 2 for each multiply and add.

        ``heads`` are all query heads. The backward pass has 2.5 times as many operations (five products for two).
        """
        mine = len(self.heads(rank, heads))
        forward = 2 * self.pairs(rank) * mine * (head_dim + (head_dim if value_dim is None else value_dim))
        return forward * 5 // 2 if backward else forward

    def bytes_received(
        self,
        rank: int,
        *,
        heads: int | None = None,
        kv_heads: int = 1,
        head_dim: int = 1,
        value_dim: int | None = None,
        itemsize: int = 1,
        grad_itemsize: int = 4,
        backward: bool = False,
    ) -> int:
        """Count the bytes of keys, values (and, backward, their gradients) that reach a rank in one pass of one row.

        With the default sizes the unit is an element of one head of size 1: twice the tokens received. Methods that move heads
        also bring queries and results, and count ``heads`` (as many as ``kv_heads`` if None). ``grad_itemsize`` is that of
        everything that travels in the accumulation dtype.
        """
        sizes = Sizes(kv_heads if heads is None else heads, kv_heads, head_dim, value_dim or head_dim)
        return self._received(rank, sizes, backward, itemsize, grad_itemsize)

    def _received(self, rank: int, sizes: Sizes, backward: bool, itemsize: int, grad_itemsize: int) -> int:
        counted = getattr(self.schedule, "elements_received", None)
        if counted is not None:
            plain, exact = counted(self, rank, sizes, backward)
        else:
            tokens, grads = self.schedule.tokens_received(self, rank, backward)
            per_token = sizes.kv_heads * (sizes.head_dim + sizes.value_dim)
            plain, exact = per_token * tokens, per_token * grads
        return int(plain * itemsize + exact * grad_itemsize)

    @property
    def work(self) -> np.ndarray:
        """Pairs between the queries of each rank and the keys of each owner, int64 [cp_size, cp_size]."""
        return _work(self.layout, self.mask)

    @property
    def needs(self) -> np.ndarray:
        """List the keys that each rank needs of each other: int64 [n, 4] rows (rank, owner, start, stop), sorted.

        Positions are global; rows of one rank do not overlap. Every token of them is seen by one of the rank's queries.
        """
        return _needs(self.layout, self.mask)

    def __repr__(self) -> str:
        padding = f" in {self.layout.seq_len + self.layout.padding} slots" if self.layout.padding else ""
        return (
            f"Plan({self.method}, {self.layout.name} over {self.layout.cp_size}, {self.mask.kind}, "
            f"{self.mask.seq_len} tokens{padding})"
        )


@lru_cache(maxsize=1024)
def _steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    return plan.schedule.steps(plan, rank)


def queries_of(layout: Layout, mask: Mask, rank: int) -> np.ndarray:
    """Cut the mask's slices to a rank's queries, queries counted in local slots, keys in global positions, int64 [n, 7]."""
    pieces, slices = layout.pieces[rank], mask.slices
    if not len(pieces) or not len(slices):
        return np.zeros((0, 7), np.int64)
    which, piece = overlaps(slices[:, 1], slices[:, 2], pieces[:, 0], pieces[:, 1])
    cut, piece_rows = slices[which].copy(), pieces[piece]
    cut[:, 1] = np.maximum(cut[:, 1], piece_rows[:, 0])
    cut[:, 2] = np.minimum(cut[:, 2], piece_rows[:, 1])
    return trim(moved(cut, q_by=piece_rows[:, 2] - piece_rows[:, 0]))


def blocks_in(queries: np.ndarray, pieces: np.ndarray) -> tuple[Block, ...]:
    """Bring slices whose keys are global positions to a buffer's slots, cut to what it holds, merged to the fewest calls.

    Shapes: queries int64 [n, 7] from :func:`queries_of`; pieces int64 [m, 3] rows (start, stop, slot) as in a layout.
    """
    start, stop, slot = pieces.T
    which, piece = overlaps(queries[:, 3], queries[:, 4], start, stop)
    cut = queries[which].copy()
    cut[:, 3] = np.maximum(cut[:, 3], start[piece])
    cut[:, 4] = np.minimum(cut[:, 4], stop[piece])
    return merged(trim(moved(cut, k_by=(slot - start)[piece])))


def head_ranges(heads: int, ranks: int) -> list[range]:
    """Divide heads over ranks in order, as evenly as whole heads allow; the first ranks have the odd ones."""
    size, odd = divmod(heads, ranks)
    starts = [rank * size + min(rank, odd) for rank in range(ranks + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def blocks_of(layout: Layout, mask: Mask, rank: int) -> dict[int, tuple[Block, ...]]:
    """List for each owner the blocks between a rank's queries and that owner's keys, merged to the fewest calls."""
    found: dict[int, list[np.ndarray]] = {}
    for cut, slots, owner in _cut_keys(queries_of(layout, mask, rank), layout):
        local = trim(moved(cut, k_by=slots))
        for one in np.unique(owner):
            found.setdefault(int(one), []).append(local[owner == one])
    return {owner: merged(np.concatenate(parts)) for owner, parts in found.items()}


def merged(slices: np.ndarray) -> tuple[Block, ...]:
    """Turn slices in local numbers into the fewest blocks found."""
    return tuple(Block(*numbers) for numbers in joined(slices))


def _cut_keys(queries: np.ndarray, layout: Layout) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Cut slices (keys in global positions) at the borders between owners.

    Yields in portions of bounded size: slices [n, 7] still in global key positions, the shift of each to the owner's
    slots [n], and the owner [n].
    """
    start, stop, slot, owner = _placement(layout)
    portion = 1 << 18
    for at in range(0, len(queries), portion):
        part = queries[at : at + portion]
        which, piece = overlaps(part[:, 3], part[:, 4], start, stop)
        cut = part[which].copy()
        cut[:, 3] = np.maximum(cut[:, 3], start[piece])
        cut[:, 4] = np.minimum(cut[:, 4], stop[piece])
        kept = pairs(cut) > 0
        piece = piece[kept]
        yield cut[kept], (slot - start)[piece], owner[piece]


@lru_cache(maxsize=128)
def _placement(layout: Layout) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """List all pieces of all ranks by position: start, stop, slot, owner, each int64 [n]."""
    rows = np.concatenate([np.c_[p, np.full(len(p), rank)] for rank, p in enumerate(layout.pieces)])
    start, stop, slot, owner = rows[np.argsort(rows[:, 0])].T
    return start, stop, slot, owner


@lru_cache(maxsize=128)
def _work(layout: Layout, mask: Mask) -> np.ndarray:
    cp = layout.cp_size
    flat = np.zeros(cp * cp, np.int64)
    for rank in range(cp):
        for cut, _, owner in _cut_keys(queries_of(layout, mask, rank), layout):
            np.add.at(flat, rank * cp + owner, pairs(cut))
    out = flat.reshape(cp, cp)
    out.setflags(write=False)
    return out


@lru_cache(maxsize=128)
def _needs(layout: Layout, mask: Mask) -> np.ndarray:
    """Say what each rank needs of each other, for all ranks in one go; see :attr:`Plan.needs`."""
    start, stop, _, owner = _placement(layout)
    unions = [joined_ranges(queries_of(layout, mask, rank)[:, 3:5]) for rank in range(layout.cp_size)]
    rank = np.repeat(np.arange(layout.cp_size), [len(union) for union in unions])
    first, last = np.concatenate(unions).T
    which, piece = overlaps(first, last, start, stop)
    first, last = np.maximum(first[which], start[piece]), np.minimum(last[which], stop[piece])
    rows = np.stack([rank[which], owner[piece], first, last], 1)
    rows = rows[rows[:, 0] != rows[:, 1]]
    out: np.ndarray = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
    out.setflags(write=False)
    return out


def joined_ranges(ranges: np.ndarray) -> np.ndarray:
    """Join ranges [start, stop) that overlap or touch: int64 [n, 2] -> [m, 2], sorted."""
    if not len(ranges):
        return ranges
    ranges = ranges[np.argsort(ranges[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ranges[:, 1])
    heads = np.flatnonzero(np.r_[True, ranges[1:, 0] > reach[:-1]])
    return np.stack([ranges[heads, 0], reach[np.r_[heads[1:] - 1, len(ranges) - 1]]], 1)


def _spelt(pieces: np.ndarray) -> np.ndarray:
    """Spell pieces out: the global position of each slot up to the last that holds a token, -1 for none."""
    sizes = pieces[:, 1] - pieces[:, 0]
    out = np.full(int((pieces[:, 2] + sizes).max(initial=0)), -1, np.int64)
    for start, stop, slot in pieces:
        out[slot : slot + stop - start] = np.arange(start, stop)
    return out
