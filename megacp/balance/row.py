"""The documents of a row and the attention work of any stretch of them, for whoever places them.

Work is counted in (query, key) pairs of the queries in a stretch, summed over the mask's rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from megacp.mask import Mask
from megacp.slices import UNBOUNDED, pairs

__all__ = ["TOLERANCE", "Part", "Row", "least_keys"]

TOLERANCE = 0.02
"""How much more work than the mean a rank may have, if the row allows it."""


class Part(NamedTuple):
    """Tokens [start, stop) of a document, and their work."""

    work: int
    tokens: int
    document: int
    start: int
    stop: int


class Row:
    """The documents of a row, and the work of any stretch of them."""

    def __init__(self, mask: Mask, grain: int) -> None:
        borders = _borders(mask, grain)
        lengths = np.diff(borders)
        tiles = -(-lengths // grain)
        first = np.cumsum(tiles) - tiles
        edges = np.repeat(borders[:-1] - first * grain, tiles) + np.arange(tiles.sum()) * grain
        work = np.r_[0, np.cumsum(_work(mask.slices, np.r_[edges, mask.seq_len]))]
        self.grain, self.seq_len, self.work = grain, mask.seq_len, int(work[-1])
        self.starts: list[int] = borders.tolist()
        self.first: list[int] = first.tolist()
        self.before: list[int] = work.tolist()  # work of the row before each tile
        columns = (
            work[first + tiles] - work[first],
            lengths,
            np.arange(len(lengths)),
            borders[:-1],
            borders[1:],
        )
        self.parts = sorted(map(Part._make, zip(*(c.tolist() for c in columns), strict=True)))

    def upto(self, document: int, position: int) -> int:
        """Return the work of the row before a position of a document; inside a tile, as if it rose evenly."""
        tile, rest = divmod(position - self.starts[document], self.grain)
        at = self.first[document] + tile
        if not rest:
            return self.before[at]
        width = min(self.grain, self.starts[document + 1] - position + rest)
        return self.before[at] + (self.before[at + 1] - self.before[at]) * rest // width

    def part(self, document: int, start: int, stop: int) -> Part:
        """Describe a stretch of a document."""
        return Part(
            self.upto(document, stop) - self.upto(document, start), stop - start, document, start, stop
        )

    def offset(self, part: Part) -> int:
        """Return how far from the start of its document a part starts."""
        return part.start - self.starts[part.document]


def _borders(mask: Mask, grain: int) -> np.ndarray:
    """Return where documents start, in any row of the mask, and G. Neighbours far shorter than the grain count as one."""
    borders = np.sort(np.concatenate([(0, mask.seq_len), *(mask.offsets or ())]))
    borders = borders[np.r_[True, borders[1:] > borders[:-1]]]
    half = max(grain // 2, 1)
    short = np.diff(borders) < half
    same = borders[1:-1] // half == borders[:-2] // half
    kept: np.ndarray = borders[np.r_[True, ~(short[1:] & short[:-1] & same), True]]
    return kept


def _work(slices: np.ndarray, edges: np.ndarray) -> np.ndarray:
    """Count the pairs of the queries between neighbouring edges, int64 [edges - 1], over all slices."""
    low = np.searchsorted(edges, slices[:, 1], side="right") - 1
    count = np.searchsorted(edges, slices[:, 2], side="left") - low
    which = np.repeat(np.arange(len(slices)), count)
    tile = np.arange(len(which)) + np.repeat(low - np.cumsum(count) + count, count)
    cut = slices[which]
    cut[:, 1] = np.maximum(cut[:, 1], edges[tile])
    cut[:, 2] = np.minimum(cut[:, 2], edges[tile + 1])
    if ((slices[:, 5] == -UNBOUNDED) & (slices[:, 6] == 0) & (slices[:, 1:3] == slices[:, 3:5]).all(1)).all():
        count = (
            (cut[:, 2] - cut[:, 1]) * (cut[:, 1] + cut[:, 2] + 1 - 2 * cut[:, 3]) // 2
        )  # causal: much quicker
    else:
        count = pairs(cut)
    return np.bincount(tile, count, len(edges) - 1).astype(np.int64)


def least_keys(mask: Mask, cp_size: int, tolerance: float = TOLERANCE) -> int:
    """Bound from below how many keys have to move, in tokens over all ranks, whatever the placement.

    Holds for causal documents where no rank has more than 1 + tolerance times the mean work, or more than its share of tokens.
    Of one document, let e_1 > e_2 > ... be the ends of what its ranks own. The tokens from e_(k+1) on belong to k ranks, so they
    are at most k shares of tokens and k times the largest work, which bounds e_(k+1) from below. The keys that move for the
    document are the sum of the ends less its length, e_2 + e_3 + ... Each document is looked at as if all ranks were free for it.
    Source: own.
    """
    share = -(-mask.seq_len // cp_size)
    most = (1 + tolerance) * mask.pairs() / cp_size
    total = 0.0
    for length in np.diff(mask.offsets[0] if mask.offsets else np.array([0, mask.seq_len])).tolist():
        for k in range(1, cp_size):
            end = max(length - k * share, max(length * (length + 1) - 2 * k * most, 0.0) ** 0.5 - 1)
            if end <= 0:
                break
            total += end
    return int(total)
