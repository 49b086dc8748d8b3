"""Even out the work of ranks that have their tokens already, by swapping stretches of equal length."""

from __future__ import annotations

from collections.abc import Callable

from megacp.balance.row import Part, Row

__all__ = ["level"]


def level(row: Row, ranks: list[list[Part]], limit: int) -> int:
    """Let the rank with most work trade stretches of equal length with the one with least, until none is over the limit.

    Returns the most work a rank has.
    """
    work = [sum(part.work for part in own) for own in ranks]
    for _ in range(4 * len(ranks)):
        high = work.index(max(work))
        if work[high] <= limit:
            break
        lows = sorted(range(len(ranks)), key=work.__getitem__)[:3]
        for low in (rank for rank in lows if work[rank] < limit):
            moved = _trade(row, ranks[high], ranks[low], work[high] - limit, limit - work[low])
            if moved:
                break
        else:
            break
        work[high] -= moved
        work[low] += moved
    return max(work)


def _trade(row: Row, busy: list[Part], idle: list[Part], least: int, most: int) -> int:
    """Swap a stretch with much work a token for a head with little; return the work moved: at least ``least`` if that can be."""
    best: tuple[tuple[bool, int], int, Part, int, Part, int] | None = None
    light = [part for part in sorted(idle, key=_density) if part.tokens >= row.grain][:5]
    for mine, stop in _stops(row, sorted(busy, key=_density)[-5:]):
        for other in light:
            gain_of = _gains(row, mine, stop, other)
            low, high = 0, min(stop - mine.start, other.tokens) // row.grain
            while low < high:  # the fewest grains that move enough
                middle = (low + high) // 2
                if gain_of(middle) >= least:
                    high = middle
                else:
                    low = middle + 1
            if gain_of(low) > most:
                low -= 1
            gain = gain_of(low)
            if low > 0 and gain > 0:
                cost = stop - row.starts[mine.document] + row.offset(other) + low * row.grain
                key = gain < least, -gain if gain < least else cost
                if best is None or key < best[0]:
                    best = key, gain, mine, stop, other, low * row.grain
    if best is None:
        return 0
    _, gain, mine, stop, other, tokens = best
    _move(row, busy, idle, mine, stop - tokens, stop)
    _move(row, idle, busy, other, other.start, other.start + tokens)
    return gain


def _stops(row: Row, parts: list[Part]) -> list[tuple[Part, int]]:
    """List where a stretch to give away can stop: on the grain, at the end of a part or half-way."""
    stops = [(part, stop) for part in parts for stop in (part.stop, (part.start + part.stop) // 2)]
    return [(part, stop - (stop - row.starts[part.document]) % row.grain) for part, stop in stops]


def _density(part: Part) -> float:
    return part.work / part.tokens


def _gains(row: Row, mine: Part, stop: int, other: Part) -> Callable[[int], int]:
    """Tell, for numbers of grains, the work that moves with those before ``stop``, less that of as many at the other's head."""
    before, upto, grain, document, start = row.before, row.upto, row.grain, other.document, other.start
    last = (
        row.first[mine.document] + (stop - row.starts[mine.document]) // grain
    )  # ``stop`` lies on the grain
    base = before[last] + upto(document, start)
    return lambda grains: base - before[last - grains] - upto(document, start + grains * grain)


def _move(row: Row, giver: list[Part], taker: list[Part], part: Part, start: int, stop: int) -> None:
    giver.remove(part)
    for a, b in ((part.start, start), (stop, part.stop)):
        if b > a:
            giver.append(row.part(part.document, a, b))
    taker.append(row.part(part.document, start, stop))
