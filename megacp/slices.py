"""Banded rectangles: the one shape of which every mask is made, and what can be done with it.

A slice is a rectangle of queries and keys with two diagonals: key k is visible to query q if q is in [q_start, q_stop),
k in [k_start, k_stop), and lo <= k - q <= hi. Here slices are rows of an int64 array [n, 7] with the columns :data:`COLUMNS`.
"""

from __future__ import annotations

import numpy as np

__all__ = [
    "ALL_ROWS",
    "COLUMNS",
    "UNBOUNDED",
    "count",
    "joined",
    "moved",
    "overlaps",
    "pairs",
    "read_dense",
    "trim",
]

UNBOUNDED = 1 << 40
"""A diagonal that bounds nothing: larger than any sequence, small enough never to overflow."""

ALL_ROWS = -1
"""In a slice's row column: the slice holds for every row of the micro-batch."""

COLUMNS = ("row", "q_start", "q_stop", "k_start", "k_stop", "lo", "hi")


def trim(slices: np.ndarray) -> np.ndarray:
    """Shrink slices to the smallest rectangles that hold their visible pairs, and drop empty ones.

    Diagonals that no longer cut anything become :data:`UNBOUNDED`. Every row and every column of what is left has a visible pair.
    Shapes: int64 [n, 7] -> [m, 7], m <= n.
    """
    row, q0, q1, k0, k1, lo, hi = slices.T
    q0, q1 = np.maximum(q0, k0 - hi), np.minimum(q1, k1 - lo)
    k0, k1 = np.maximum(k0, q0 + lo), np.minimum(k1, q1 + hi)
    hi = np.where(hi >= k1 - 1 - q0, UNBOUNDED, hi)
    lo = np.where(lo <= k0 - q1 + 1, -UNBOUNDED, lo)
    out: np.ndarray = np.stack([row, q0, q1, k0, k1, lo, hi], 1)[(q1 > q0) & (k1 > k0)]
    return out


def pairs(slices: np.ndarray) -> np.ndarray:
    """Count the visible pairs of each slice, int64 [n]. Source: own; two ramp sums a diagonal."""
    _, q0, q1, k0, k1, lo, hi = slices.T
    hi = np.minimum(hi, k1 - 1 - q0)
    lo = np.maximum(lo, k0 - q1 + 1)

    def ramp(x: np.ndarray) -> np.ndarray:
        x = np.maximum(x, 0)
        sums: np.ndarray = x * (x + 1) // 2
        return sums

    def up_to(diagonal: np.ndarray) -> np.ndarray:
        count: np.ndarray = (
            ramp(q1 + diagonal - k0)
            - ramp(q0 + diagonal - k0)
            - ramp(q1 + diagonal - k1)
            + ramp(q0 + diagonal - k1)
        )
        return count

    counts: np.ndarray = np.where((q1 > q0) & (k1 > k0) & (hi >= lo), up_to(hi) - up_to(lo - 1), 0)
    return counts


def joined(slices: np.ndarray) -> list[tuple[int, ...]]:
    """Join slices whose union is itself one slice, until none is left to join.

    Two disjoint slices join if the bounding rectangle, cut by their common diagonals, has exactly as many pairs as the two
    together and loses none of either. Source: own.
    """
    blocks = sorted(map(tuple, slices.tolist()))
    while len(blocks) > 1:
        before = len(blocks)
        for order in ((0, 3, 1), (0, 1, 3)):
            blocks = _join_neighbours(sorted(blocks, key=lambda b, o=order: tuple(b[i] for i in o)))  # type: ignore[misc]
        if len(blocks) == before:
            break
    return blocks


def _join_neighbours(blocks: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    out: list[tuple[int, ...]] = []
    for block in blocks:
        while out and (union := _union(out[-1], block)) is not None:
            out.pop()
            block = union
        out.append(block)
    return out


def _union(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return the slice that is exactly the union of two disjoint slices, or None."""
    row, aq0, aq1, ak0, ak1, alo, ahi = a
    brow, bq0, bq1, bk0, bk1, blo, bhi = b
    if row != brow or bq0 > aq1 or aq0 > bq1 or bk0 > ak1 or ak0 > bk1:
        return None
    los = {x for x in (alo, blo) if x > -UNBOUNDED}
    his = {x for x in (ahi, bhi) if x < UNBOUNDED}
    if len(los) > 1 or len(his) > 1:
        return None
    lo, hi = min(los, default=-UNBOUNDED), max(his, default=UNBOUNDED)
    whole = (row, min(aq0, bq0), max(aq1, bq1), min(ak0, bk0), max(ak1, bk1), lo, hi)
    cut = [(r, q0, q1, k0, k1, lo, hi) for r, q0, q1, k0, k1, _, _ in (a, b)]
    n_a, n_b = count(a[1:]), count(b[1:])
    same = count(whole[1:]) == n_a + n_b and count(cut[0][1:]) == n_a and count(cut[1][1:]) == n_b
    return whole if same else None


def count(numbers: tuple[int, ...]) -> int:
    """Count the visible pairs of one slice (q_start, q_stop, k_start, k_stop, lo, hi), in plain integers.

    The same as :func:`megacp.mask.pairs`, ten times faster for a single slice.
    """
    q0, q1, k0, k1, lo, hi = numbers
    hi, lo = min(hi, k1 - 1 - q0), max(lo, k0 - q1 + 1)
    if q1 <= q0 or k1 <= k0 or hi < lo:
        return 0
    count = 0
    for sign, diagonal in ((1, hi), (-1, lo - 1)):
        for plus, side in ((1, q1 - k0), (-1, q0 - k0), (-1, q1 - k1), (1, q0 - k1)):
            size = side + diagonal
            if size > 0:
                count += sign * plus * (size * (size + 1) // 2)
    return count


def overlaps(
    starts: np.ndarray, stops: np.ndarray, lows: np.ndarray, highs: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Pair each range [start, stop) with each disjoint range [low, high) that it overlaps; two index arrays."""
    order = np.argsort(lows, kind="stable")
    first = np.searchsorted(highs[order], starts, side="right")
    last = np.searchsorted(lows[order], stops, side="left")
    count = np.maximum(last - first, 0)
    which = np.repeat(np.arange(len(starts)), count)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    return which, order[np.repeat(first, count) + within]


def moved(slices: np.ndarray, q_by: np.ndarray | int = 0, k_by: np.ndarray | int = 0) -> np.ndarray:
    """Count queries and keys from other origins; the diagonals move along."""
    out: np.ndarray = slices.copy()
    out[:, 1:3] += np.reshape(q_by, (-1, 1))
    out[:, 3:5] += np.reshape(k_by, (-1, 1))
    shift = np.asarray(k_by) - np.asarray(q_by)
    for column, open_at in ((5, -UNBOUNDED), (6, UNBOUNDED)):
        out[:, column] = np.where(slices[:, column] == open_at, open_at, slices[:, column] + shift)
    return out


def read_dense(table: np.ndarray) -> list[tuple[int, ...]]:
    """Cover the True values by slices: runs of rows whose edges stand still or move one key a row."""
    open_runs: list[
        list[int]
    ] = []  # first row, start, stop in the first row, then how both edges move (-1: not known yet)
    done: list[tuple[int, ...]] = []

    def close(run: list[int], stop_row: int) -> None:
        first, start, stop, start_moves, stop_moves = run
        height = stop_row - first - 1
        lo = start - first if start_moves == 1 else -UNBOUNDED
        hi = stop - 1 - first if stop_moves == 1 else UNBOUNDED
        done.append((ALL_ROWS, first, stop_row, start, stop + height * (stop_moves == 1), lo, hi))

    for index, row in enumerate(table):
        edges = np.flatnonzero(np.diff(np.r_[False, row, False].astype(np.int8)))
        intervals = list(map(tuple, edges.reshape(-1, 2).tolist()))
        going_on = []
        for run in open_runs:
            first, start, stop, start_moves, stop_moves = run
            age = index - first
            fits = [
                (a, b)
                for a, b in intervals
                if a - start in ((0, 1) if start_moves < 0 else (age * start_moves,))
                and b - stop in ((0, 1) if stop_moves < 0 else (age * stop_moves,))
            ]
            if fits:
                intervals.remove(fits[0])
                going_on.append(
                    [
                        first,
                        start,
                        stop,
                        fits[0][0] - start if age == 1 else start_moves,
                        fits[0][1] - stop if age == 1 else stop_moves,
                    ]
                )
            else:
                close(run, index)
        open_runs = going_on + [[index, a, b, -1, -1] for a, b in intervals]
    for run in open_runs:
        close(run, len(table))
    return done
