"""Place a row's documents so that every rank has the same tokens and the same attention work, and few keys have to move.

What moves: a rank that owns tokens of a causal document up to position e needs the keys [0, e) of it, so a document that is cut
into consecutive parts on different ranks costs as many keys as its cut positions add up to; one that stays whole costs nothing.
Few cuts, and low ones, are what is looked for.

How: ranks are filled one after the other, each with as much work as it may have. If the part with most work is too much for
a rank, its tail is cut off, as large as the work allows. Then come the largest parts that fit whole, then light ones for the
tokens that are missing, and the last of those from the head of a part, where they cost fewest keys. So a row of one document
becomes a zigzag: a tail and a head for each rank. At the end ranks with too much work trade stretches with those that have little.

Cuts lie at multiples of a grain of tokens from the start of their document. Then a rank's tokens add up only if the lengths of
the documents that end on it suit the grain; light documents are exchanged, or ends shorter than the grain moved, until they do.
Where a row has too few documents for that, a rank gets one cut at another place.

Work is counted in (query, key) pairs, in integers and in a fixed order: every rank finds the same placement. Source: own.
"""

from __future__ import annotations

from megacp.balance.rank import Rank
from megacp.balance.row import TOLERANCE, Part, Row, least_keys
from megacp.balance.trade import level
from megacp.mask import Mask

__all__ = ["GRAIN", "TOLERANCE", "least_keys", "place"]

GRAIN = 64
"""Cuts inside a document lie at multiples of this many tokens from its start."""

_FINEST = 8
"""No finer grain than this is tried."""

_AIMS = (1.013, 1.018, 1.007, 1.0)
"""Work that ranks are filled up to, relative to the mean."""

_TRIED, _RETRIED = 16, 128
"""How many aims are tried, times ranks: for fewer keys, and to be rid of cuts off the grain. All are, to keep the tolerance."""

_KEPT = 2
"""So many of the lightest parts a rank are kept for later ranks, which need them to make their tokens add up."""

_SPARED = 8
"""One in so many parts of the work that all ranks to come can do without, this rank may do without."""


def place(mask: Mask, cp_size: int) -> list[list[tuple[int, int]]]:
    """Return for each rank the ranges (start, stop) of global positions it owns; numbers of tokens differ by at most one.

    Rows that differ are placed by the sum of their work. Where the grain stands in the way of the tolerance, a finer one is tried.
    """
    grain = _grain(mask.seq_len, cp_size)
    excess, ranks = _placed(Row(mask, grain), cp_size)
    while excess > 0 and grain > _FINEST:
        grain = max(_FINEST, grain // 4)
        finer = _placed(Row(mask, grain), cp_size)
        if finer[0] < excess:
            excess, ranks = finer
    return [[(part.start, part.stop) for part in own] for own in ranks]


def _placed(row: Row, cp_size: int) -> tuple[int, list[list[Part]]]:
    """Place a row, and say how many pairs the busiest rank has beyond the tolerance."""
    limit = int((1 + TOLERANCE) * row.work / cp_size)
    suits = row.seq_len % (cp_size * row.grain) == 0
    best: tuple[tuple[int, int, int], list[list[Part]]] | None = None
    for tried, aim in enumerate(_AIMS if len(row.parts) > 1 else (1.0,)):
        if best and best[0][0] <= limit and tried * cp_size >= (_RETRIED if suits and best[0][1] else _TRIED):
            break
        ranks = _fill(row, cp_size, aim)
        key = max(level(row, ranks, limit), limit), *_price(row, ranks)
        if best is None or key < best[0]:
            best = key, ranks
    assert best is not None
    return best[0][0] - limit, best[1]


def _grain(seq_len: int, cp_size: int) -> int:
    """Choose the grain: :data:`GRAIN`, or less where ranks have so few tokens that it could not balance them."""
    share = -(-seq_len // cp_size)
    return GRAIN if share >= 16 * GRAIN else 1 << max(0, (share // 32).bit_length() - 1)


def _fill(row: Row, cp_size: int, aim: float) -> list[list[Part]]:
    """Fill the ranks one after the other; the last one takes what is left."""
    share, short = -(-row.seq_len // cp_size), -row.seq_len % cp_size
    most = int(aim * row.work / cp_size)
    left, parts, ranks = row.work, list(row.parts), []
    for rank in range(cp_size - 1):
        spare = (most * (cp_size - rank) - left) // _SPARED  # how much less than `most` this rank may have
        keep = min(_KEPT * (cp_size - 1 - rank), len(parts) // 3)
        own = Rank(row, parts, share - (rank >= cp_size - short), most, spare, keep).fill()
        left -= sum(part.work for part in own)
        ranks.append(own)
    return [*ranks, parts]


def _price(row: Row, ranks: list[list[Part]]) -> tuple[int, int]:
    """Count what should not be, and the keys that ranks need up to the last token they own of each document.

    Should not be: cuts off the grain, and parts beyond the documents and four a rank.
    """
    wrong = max(0, sum(map(len, ranks)) - len(row.parts) - 4 * len(ranks))
    ends: dict[tuple[int, int], int] = {}
    for rank, own in enumerate(ranks):
        for part in own:
            start = row.offset(part)
            wrong += start % row.grain > 0
            at = rank, part.document
            ends[at] = max(ends.get(at, 0), start + part.tokens)
    return wrong, sum(ends.values())
