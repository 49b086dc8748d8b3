"""Blocks cut into what a library can do: full rectangles, causal rectangles and windows, aligned at the bottom right.

A causal part of s queries and t >= s keys lets query i see key j if j - i <= t - s: the last query sees every key. A window lets it
also see no more than ``window`` keys before that one. A part may be *flipped*: its queries and keys are counted from their ends. So a
block whose lower diagonal cuts is a causal part too, and a library that knows full and causal attention can do every block.

After cutting, the diagonals of causal parts and windows meet their corners exactly. A library may then not be led astray by the
alignment of a rectangle that has more queries than keys, where some take a bound that still cuts for none.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from megacp.plans import Block
from megacp.slices import UNBOUNDED

__all__ = ["UNLIMITED", "Part", "corner", "parts"]

UNLIMITED = -1
"""As a part's window: no limit, as in the libraries' own convention."""


class Part(NamedTuple):
    """Some queries against some keys, in the buffers' slots; see the head of this file."""

    row: int
    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    is_causal: bool = False
    window: int = UNLIMITED
    flipped: bool = False


def parts(block: Block, *, square: bool = False, windows: bool = True) -> Iterator[Part]:
    """Cut a block into parts that together hold exactly its visible pairs, each once.

    Args:
        square: causal parts must have as many keys as queries. windows: the library knows windows; without, a band becomes
            pairs of triangles as wide as itself, which costs no further operations but has every query in two parts.
    """
    row, q0, q1, k0, k1, lo, hi = _trimmed(block)
    if q1 <= q0 or k1 <= k0 or hi < lo:
        return
    rest = Block(row, q0, q1, k0, k1, lo, hi)
    if rest.kind == "full":
        yield Part(*rest[:5])
    elif hi < UNBOUNDED and k1 - hi < q1:  # queries from k1 - hi on see the last key
        yield from parts(rest._replace(q_stop=k1 - hi), square=square, windows=windows)
        yield from parts(rest._replace(q_start=k1 - hi, hi=UNBOUNDED), square=square, windows=windows)
    elif rest.kind == "causal":
        for piece in corner(rest) if square else [rest]:
            yield Part(*piece[:5], is_causal=piece.kind == "causal")
    elif hi == UNBOUNDED:
        yield from _lower(rest, square)
    elif windows:
        yield Part(*rest[:5], is_causal=True, window=hi - lo)
    else:
        for start in range(q0, q1, hi - lo + 1):
            tile = rest._replace(q_start=start, q_stop=min(start + hi - lo + 1, q1))
            turn = start + hi + 1  # the first key that the tile's first query does not see
            yield from parts(tile._replace(k_stop=min(turn, k1), hi=UNBOUNDED), square=square)
            yield from parts(tile._replace(k_start=turn, lo=-UNBOUNDED), square=square)


def corner(block: Block) -> Iterator[Block]:
    """Cut a causal block into one full rectangle, one square triangle, and the later queries that see every key."""
    row, q0, q1, k0, k1, _, hi = block
    first = q0 + hi  # the last key the first query sees
    size = k1 - first  # side of the triangle
    if first > k0:
        yield Block(row, q0, q0 + size, k0, first, -UNBOUNDED, UNBOUNDED)
    yield Block(row, q0, q0 + size, first, k1, -UNBOUNDED, hi)
    if q0 + size < q1:
        yield Block(row, q0 + size, q1, k0, k1, -UNBOUNDED, UNBOUNDED)


def _lower(block: Block, square: bool) -> Iterator[Part]:
    """Cut a block of which only the lower diagonal cuts: early queries see every key, the rest is causal from the end."""
    row, q0, q1, k0, k1, lo, _ = block
    turn = max(q0, k0 - lo)
    if turn > q0:
        yield Part(row, q0, turn, k0, k1)
    last = q1 + lo  # one past the first key that the last query sees
    if square and last < k1:
        yield Part(row, turn, q1, last, k1)
    yield Part(row, turn, q1, k0, last if square else k1, is_causal=True, flipped=True)


def _trimmed(block: Block) -> Block:
    """Shrink a block as :func:`megacp.mask.trim` does, in plain integers."""
    row, q0, q1, k0, k1, lo, hi = block
    q0, q1 = max(q0, k0 - hi), min(q1, k1 - lo)
    k0, k1 = max(k0, q0 + lo), min(k1, q1 + hi)
    hi = UNBOUNDED if hi >= k1 - 1 - q0 else hi
    lo = -UNBOUNDED if lo <= k0 - q1 + 1 else lo
    return Block(row, q0, q1, k0, k1, lo, hi)
