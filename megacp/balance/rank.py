"""Fill one rank with parts of documents: large ones for the work, light ones for the tokens, and little cut."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from itertools import combinations

from megacp.balance.row import Part, Row

__all__ = ["Rank"]

_NEAR, _PAIRED, _ENDS = 24, 8, 12
"""How many parts are looked at for an exchange, alone and in pairs, and how many ends are looked at for moving."""

SL = 32
_UNSUITED = 3000
"""A cut off the grain is as bad as moving so many more keys, in tokens."""

_SHORTEST = 16
"""A tail is cut only if it fills at least one in so many of a rank's tokens."""


class Rank:
    """One rank while it is filled, out of parts sorted by work that it shares with the ranks to come."""

    def __init__(self, row: Row, parts: list[Part], room: int, cap: int, spare: int, keep: int) -> None:
        self.row, self.parts, self.keep = row, parts, keep
        self.room, self.cap = room, cap  # tokens and work that it can still take
        self.spare = spare  # work that it can do without
        self.share, self.whole = room, max(cap, 1)  # the same, of the empty rank
        self.own: list[Part] = []
        self.head: Part | None = None  # what is left of the part that was cut for this rank
        self._weigh()

    def fill(self) -> list[Part]:
        """Take parts until the rank has all its tokens, and return them."""
        if self.room and self.parts:
            top = self.parts[-1]
            if top.tokens > self.room or top.work + self._light(self.room - top.tokens) > self.cap:
                self._take_tail(top)
            self._take_large()
            self._take_light()
            if self.room and self.parts:
                self._exchange()
            if self.room % self.row.grain:
                self._move_ends()
        while self.room:
            self._take_head()
        return self.own

    def _take(self, part: Part) -> None:
        self.own.append(part)
        self.room -= part.tokens
        self.cap -= part.work

    def _return(self, part: Part) -> None:
        self.own.remove(part)
        self.room += part.tokens
        self.cap += part.work

    def _weigh(self) -> None:
        """List tokens and work of the lightest parts, 1, 2, 3 and so on of them, as far as there is room."""
        self.light_tokens, self.light_work = [0], [0]
        tokens = work = 0
        for part in self.parts[self.keep :]:
            tokens += part.tokens
            work += part.work
            self.light_tokens.append(tokens)
            self.light_work.append(work)
            if tokens > self.room:
                return

    def _light(self, tokens: int) -> int:
        """Estimate the least work that fills up so many tokens."""
        at = bisect_right(self.light_tokens, tokens)
        low, work = self.light_tokens[at - 1], self.light_work[at - 1]
        if at == len(self.light_tokens) or tokens == low:
            return work
        return work + (self.light_work[at] - work) * (tokens - low) // (self.light_tokens[at] - low)

    def _take_tail(self, part: Part) -> None:
        """Cut a part and take its tail, as long as work and tokens allow; the rest is its head."""
        row, parts = self.row, self.parts
        del parts[bisect_left(parts, part)]
        self._weigh()
        base, first = row.starts[part.document], row.first[part.document]
        low = max(-((base - part.start) // row.grain), -((base - part.stop + self.room) // row.grain))
        high = (part.stop - 1 - base) // row.grain
        if low > high:  # not one whole grain fits
            insort(parts, part)
            return self._weigh()
        bottom, top = row.upto(part.document, part.start), row.upto(part.document, part.stop)
        while low < high:
            middle = (low + high) // 2
            start = base + middle * row.grain
            missing = self.room - part.stop + start
            at = bisect_right(self.light_tokens, missing) - 1
            head = min(
                missing - self.light_tokens[at], start - part.start
            )  # tokens from the head of the same part
            work = self.light_work[at] + row.upto(part.document, part.start + head) - bottom
            if top - row.before[first + middle] + work <= self.cap:
                high = middle
            else:
                low = middle + 1
        start = max(base + low * row.grain, part.start)
        if (part.stop - start) * _SHORTEST < self.share:  # too little for what its keys cost
            insort(parts, part)
            return self._weigh()
        self._take(row.part(part.document, start, part.stop))
        self.head = row.part(part.document, part.start, start) if start > part.start else None
        return None

    def _take_large(self) -> None:
        """Take, again and again, the part with most work that leaves enough of it for the light ones to make up the tokens.

        Where that leaves the rank with less work than it needs, cut the next larger part.
        """
        parts, may_cut = self.parts, True
        while self.room:
            index, more = 0, bisect_right(parts, (self.cap - self._light(self.room) + 1,))
            while more > index:  # a larger part leaves fewer tokens to the light ones
                index = more
                if index < len(parts) and parts[index].tokens <= self.room:
                    left = self.cap - self._light(self.room - parts[index].tokens)
                    more = bisect_right(parts, (left + 1,))
            while index and parts[index - 1].tokens > self.room:
                index -= 1
            if index and index >= bisect_right(self.light_tokens, self.room) + self.keep:
                self._take(parts.pop(index - 1))
                if index < len(self.light_tokens) + self.keep:
                    self._weigh()
                continue
            if not may_cut or index == len(parts) or self.cap - self._light(self.room) <= self.spare:
                return
            may_cut, part = False, parts[index]
            if self.head:
                insort(parts, self.head)
                self.head = None
            self._take_tail(part)

    def _take_light(self) -> None:
        """Take the lightest parts, save those kept for later ranks, as long as there is room."""
        count = bisect_right(self.light_tokens, self.room) - 1
        light = self.parts[self.keep : self.keep + count]
        del self.parts[self.keep : self.keep + count]
        for part in light:
            self._take(part)
        if self.head:
            insort(self.parts, self.head)

    def _exchange(self) -> None:
        """Give back up to two documents and take up to two, so that few tokens are missing and their number suits the grain."""
        grain, parts = self.row.grain, self.parts
        best: tuple[int, tuple[Part, ...], tuple[Part, ...]] = (self._rate(self.room, self.cap)[0], (), ())
        if best[0] <= 2 * grain:
            return  # good enough
        offers: dict[int, list[tuple[int, int, tuple[Part, ...]]]] = {0: [(0, 0, ())]}
        near = [part for part in parts[:_NEAR] if part is not self.head]
        for some in _some(near, _PAIRED):
            offers.setdefault(some[0] % grain, []).append(some)
        mine = [part for part in self.own if not self.row.offset(part)][-_PAIRED:]
        for tokens, work, given in [(0, 0, ()), *_some(mine, _PAIRED)]:
            if best[0] <= 2 * grain:
                break
            room, cap = self.room + tokens, self.cap + work
            for tokens, work, taken in offers.get(room % grain, ()):
                if 0 <= room - tokens < best[0]:
                    rate = self._rate(room - tokens, cap - work)[0]
                    if rate < best[0]:
                        best = rate, given, taken
        for part in best[1]:
            self._return(part)
            insort(parts, part)
        for part in best[2]:
            del parts[bisect_left(parts, part)]
            self._take(part)

    def _rate(self, gap: int, cap: int) -> tuple[int, Part | None]:
        """Rate a rank that misses ``gap`` tokens and can take ``cap`` work, in tokens that are as bad, and name the part to cut."""
        row = self.row
        if not gap:
            return self._misfit(cap), None
        sources = [self.head] if self.head and self.head.tokens >= gap else []
        least = bisect_left(self.parts, (gap * (gap + 1) // 2,))  # what so many causal tokens have at least
        for at in range(max(least, self.keep), len(self.parts)):
            if self.parts[at].tokens >= gap:
                sources.append(self.parts[at])
                if not row.offset(self.parts[at]):
                    break
        best: tuple[int, Part | None] = 1 << 60, None
        for part in sources or self.parts[-1:]:
            stop = min(part.start + gap, part.stop)
            work = row.upto(part.document, stop) - row.upto(part.document, part.start)
            rate = row.offset(part) + gap
            rate += self._misfit(cap - work) + (_UNSUITED if rate % row.grain else 0)
            if rate < best[0]:
                best = rate, part
        return best

    def _misfit(self, cap: int) -> int:
        """Rate work beyond what a rank may have, half a per cent free, and work short of what it needs, in tokens."""
        over, under = max(0, -200 * cap - self.whole), max(0, cap - self.spare)
        return 4000 * over // self.whole + 400_000 * under // self.whole

    def _move_ends(self) -> None:
        """Take or give back ends of documents, each shorter than the grain, so that the number of tokens missing suits it.

        Each costs the keys of its document, so light documents are looked at, and four ends moved at most.
        """
        row, grain = self.row, self.row.grain
        ends: dict[int, tuple[int, int, Part]] = {}
        for sign, group in ((1, self.parts[: 2 * _NEAR]), (-1, self.own)):
            for part in group:
                stop = row.offset(part) + part.tokens
                size = sign * (stop % grain)
                if 0 < abs(size) <= part.tokens and (size not in ends or stop < ends[size][0]):
                    ends[size] = stop, size, part
        cheap = sorted(ends.values())[:_ENDS]
        for counts in ((1, 2), (3,), (4,)):
            suited = [
                (sum(end[0] for end in some) + self.room - size, some)
                for count in counts
                for some in combinations(cheap, count)
                if (size := sum([end[1] for end in some])) <= self.room and not (self.room - size) % grain
            ]
            if suited:
                for _, size, part in min(suited)[1]:
                    self._move_end(part, size)
                return

    def _move_end(self, part: Part, size: int) -> None:
        """Take the last ``size`` tokens of a part that has no rank yet, or give back the last ``-size`` of an own one."""
        cut = part.stop - abs(size)
        stays = self.row.part(part.document, part.start, cut)
        moves = self.row.part(part.document, cut, part.stop)
        if size > 0:
            del self.parts[bisect_left(self.parts, part)]
            self._take(moves)
            if stays.tokens:
                insort(self.parts, stays)
            if part is self.head:
                self.head = stays
        else:
            self._return(part)
            insort(self.parts, moves)
            if stays.tokens:
                self._take(stays)

    def _take_head(self) -> None:
        """Take the tokens that are missing from the head of a part."""
        part = self._rate(self.room, self.cap)[1]
        assert part is not None
        del self.parts[bisect_left(self.parts, part)]
        middle = min(part.start + self.room, part.stop)
        self._take(self.row.part(part.document, part.start, middle))
        if middle < part.stop:
            insort(self.parts, self.row.part(part.document, middle, part.stop))
        if part is self.head:
            self.head = None


def _some(parts: list[Part], paired: int) -> list[tuple[int, int, tuple[Part, ...]]]:
    """List parts alone, and the first few in pairs, with their tokens and work."""
    ones = [(part.tokens, part.work, (part,)) for part in parts]
    return ones + [(a.tokens + b.tokens, a.work + b.work, (a, b)) for a, b in combinations(parts[:paired], 2)]
