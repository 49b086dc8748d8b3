"""Trade tokens for heads inside a team of ranks, and back: an all-to-all.

Before, each rank of the team has some tokens with all heads; after, all the team's tokens in global order with some heads.
Query heads are divided in order, as evenly as whole heads allow. A key/value head goes to every rank that has a query head of
it, so it is sent more than once only where the team is larger than the number of key/value heads, or cuts through a group; its
gradients are then summed, in the order of ranks. Padding is left behind.

Shapes: ``B`` batch, ``S`` local slots, ``T`` slots of the team's sequence, ``H`` query heads, ``K`` key/value heads,
``D`` head size of q and k, ``E`` head size of v; ``h``, ``n`` the heads that one rank of the team computes; ``X`` any size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from megacp import comm
from megacp.groups import Group
from megacp.layout import Layout
from megacp.plans import Sizes, head_ranges

__all__ = ["Share", "Trade", "elements_received", "shares"]


@dataclass(frozen=True)
class Share:
    """The heads of one rank of a team.

    Attributes:
        queries: its query heads. keys: the key/value heads that those look at.
        repeats: for each key/value head of the kernel call its index in ``keys``, or None if they are ``keys`` as they stand. A
            kernel wants equally many query heads for each, which a share that cuts through a group does not have.
    """

    queries: range
    keys: range
    repeats: tuple[int, ...] | None = None


@lru_cache(maxsize=256)
def shares(heads: int, kv_heads: int, ranks: int) -> tuple[Share, ...]:
    """Divide query heads, and the key/value heads they look at, over the ranks of a team."""
    group, out = heads // kv_heads, []
    for queries in head_ranges(heads, ranks):
        seen = [head // group for head in queries]
        keys = range(seen[0], seen[-1] + 1) if seen else range(0)
        run = next((n for n in range(min(group, len(seen)), 1, -1) if _in_runs(seen, n)), 1)
        repeats = tuple(head - keys.start for head in seen[::run])
        out.append(Share(queries, keys, None if repeats == tuple(range(len(keys))) else repeats))
    return tuple(out)


def elements_received(layout: Layout, sizes: Sizes, inner: int, rank: int, backward: bool) -> tuple[int, int]:
    """Count the elements that one pass's trades bring to a rank: (in the inputs' dtype, in the accumulation dtype)."""
    divided = shares(sizes.heads, sizes.kv_heads, inner)
    seat = rank % inner
    held = [sum(b - a for a, b in layout.ranges(r)) for r in range(rank - seat, rank - seat + inner)]
    mine, others = held[seat], sum(held) - held[seat]
    queries, keys = len(divided[seat].queries), len(divided[seat].keys)
    away = [share for i, share in enumerate(divided) if i != seat]
    queries_away, keys_away = sum(len(s.queries) for s in away), sum(len(s.keys) for s in away)
    d, e = sizes.head_dim, sizes.value_dim
    there = others * (queries * d + keys * (d + e))  # q, k, v of others' tokens
    if not backward:
        return there + mine * queries_away * e, mine * queries_away  # out; lse
    plain = there + others * queries * 2 * e + mine * queries_away * d  # d_out, out; dq
    grads = mine * keys_away * (d + e)
    exact = others * queries  # lse
    return (plain, exact + grads) if _is_shared(divided) else (plain + grads, exact)


@dataclass(frozen=True)
class Trade:
    """A team's exchange of tokens for heads, for the sizes of one call.

    Attributes:
        group: the team. layout: of all ranks. first: the context-parallel rank of the team's first member.
        heads, kv_heads: ``H`` and ``K``.
    """

    group: Group
    layout: Layout
    first: int
    heads: int
    kv_heads: int

    @property
    def mine(self) -> Share:
        """Give this rank's heads."""
        return self._shares[self.group.rank]

    def sinks(self, sinks: torch.Tensor | None) -> torch.Tensor | None:
        """Take the sinks of this rank's heads, [H] -> [h]."""
        return None if sinks is None else sinks[self.mine.queries.start : self.mine.queries.stop]

    def inputs(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trade q [B, S, H, D], k [B, S, K, D], v [B, S, K, E] for [B, T, h, D], [B, T, n, D], [B, T, n, E]."""
        q, k, v = self._to_heads([q], [k, v], "the all-to-all of queries, keys and values")
        return q, k, v

    def results(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Trade out [B, T, h, E], lse [B, h, T] back for [B, S, H, E], [B, H, S]; padding slots are 0 and -inf."""
        out, column = self._to_tokens(
            [out, _column(lse)], [], "the all-to-all of results", fills=(0.0, -math.inf)
        )
        return out, column[..., 0].transpose(1, 2)

    def backward_inputs(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trade what the backward pass starts from, local tokens for this rank's heads, in the order given."""
        d_out, q, out, column, k, v = self._to_heads(
            [d_out, q, out, _column(lse)], [k, v], "the all-to-all of the backward pass's inputs"
        )
        return d_out, q, k, v, out, column[..., 0].transpose(1, 2).contiguous()

    def gradients(
        self, dq: torch.Tensor, dk: torch.Tensor, dv: torch.Tensor, inputs: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Trade gradients [B, T, h, D], [B, T, n, D], [B, T, n, E] back for those of local tokens.

        What is complete travels in the inputs' dtype; keys and values whose gradients several ranks have in that of the sums.
        """
        if not _is_shared(self._shares):
            dk, dv = dk.to(inputs), dv.to(inputs)
        dq, dk, dv = self._to_tokens([dq.to(inputs)], [dk, dv], "the all-to-all of gradients")
        return dq, dk, dv

    @property
    def _shares(self) -> tuple[Share, ...]:
        return shares(self.heads, self.kv_heads, self.group.size)

    def _to_heads(
        self, queries: Sequence[torch.Tensor], keys: Sequence[torch.Tensor], what: str
    ) -> list[torch.Tensor]:
        """Send each member its heads of this rank's tokens: [B, S, H, X] -> [B, T, h, X], [B, S, K, X] -> [B, T, n, X]."""
        slots, places, length = _places(self.layout, self.first, self.group.size, queries[0].device)
        here = slots[self.group.rank]
        tensors = [x if here is None else x.index_select(1, here) for x in (*queries, *keys)]
        kinds = len(queries), len(keys)
        received = _exchange(
            self.group,
            [[_heads(x, h) for x, h in zip(tensors, _of(s, kinds), strict=True)] for s in self._shares],
            [[(len(at), len(h)) for h in _of(self.mine, kinds)] for at in places],
            what,
        )
        out = []
        for i, x in enumerate(tensors):
            whole = x.new_zeros(x.shape[0], length, received[0][i].shape[2], x.shape[3])
            for at, parts in zip(places, received, strict=True):
                whole.index_copy_(1, at, parts[i])
            out.append(whole)
        if self.mine.repeats is not None:
            index = torch.tensor(self.mine.repeats, device=out[0].device)
            out[len(queries) :] = [x.index_select(2, index) for x in out[len(queries) :]]
        return out

    def _to_tokens(
        self,
        queries: Sequence[torch.Tensor],
        keys: Sequence[torch.Tensor],
        what: str,
        fills: Sequence[float] = (),
    ) -> list[torch.Tensor]:
        """Send each member its tokens of this rank's heads: [B, T, h, X] -> [B, S, H, X], [B, T, n, X] -> [B, S, K, X].

        What several ranks give for one key/value head is summed. Slots that hold no token get 0, or what ``fills`` says.
        """
        slots, places, _ = _places(self.layout, self.first, self.group.size, queries[0].device)
        here, tokens = slots[self.group.rank], len(places[self.group.rank])
        kinds = len(queries), len(keys)
        tensors = [*queries, *(_summed(x, self.mine) for x in keys)]
        received = _exchange(
            self.group,
            [[x.index_select(1, at) for x in tensors] for at in places],
            [[(tokens, len(h)) for h in _of(share, kinds)] for share in self._shares],
            what,
        )
        out = []
        for i, x in enumerate(tensors):
            all_heads = self.heads if i < len(queries) else self.kv_heads
            local = x.new_zeros(x.shape[0], tokens, all_heads, x.shape[3])
            for share, parts in zip(self._shares, received, strict=True):
                _heads(local, _of(share, kinds)[i]).add_(parts[i])
            if here is not None:
                fill = fills[i] if fills else 0.0
                padded = x.new_full((x.shape[0], self.layout.local_len, all_heads, x.shape[3]), fill)
                local = padded.index_copy_(1, here, local)
            out.append(local)
        return out


def _exchange(
    group: Group, sends: list[list[torch.Tensor]], shapes: list[list[tuple[int, int]]], what: str
) -> list[list[torch.Tensor]]:
    """Send each member a list of tensors [B, tokens, heads, X]; one message for each member and dtype.

    ``sends`` holds a list for each member, alike but for tokens and heads; ``shapes`` the (tokens, heads) of what each sends here.
    """
    samples = sends[0]
    received: list[list[torch.Tensor]] = [list(samples) for _ in shapes]
    started = []
    for dtype in dict.fromkeys(x.dtype for x in samples):
        of = [i for i, x in enumerate(samples) if x.dtype == dtype]
        coming = {
            (member, i): (samples[i].shape[0], *one[i], samples[i].shape[3])
            for member, one in enumerate(shapes)
            for i in of
        }
        packed = torch.empty(
            sum(xs[i].numel() for xs in sends for i in of), dtype=dtype, device=samples[0].device
        )
        at = 0
        for x in (xs[i] for xs in sends for i in of):
            packed[at : at + x.numel()].view(x.shape).copy_(x)
            at += x.numel()
        sent = [sum(xs[i].numel() for i in of) for xs in sends]
        due = [sum(math.prod(coming[member, i]) for i in of) for member in range(len(shapes))]
        started.append((coming, *comm.exchange(group, packed, sent, due, what)))
    for coming, out, posted in started:
        posted.wait()
        at = 0
        for (member, i), shape in coming.items():
            received[member][i] = out[at : at + math.prod(shape)].view(shape)
            at += math.prod(shape)
    return received


def _of(share: Share, kinds: tuple[int, int]) -> list[range]:
    """List the heads of so many query-like and so many key-like tensors."""
    return [share.queries] * kinds[0] + [share.keys] * kinds[1]


def _summed(x: torch.Tensor, share: Share) -> torch.Tensor:
    """Sum the gradients of repeated key/value heads: [B, T, n, X] -> [B, T, len(share.keys), X]."""
    if share.repeats is None:
        return x
    out = x.new_zeros(*x.shape[:2], len(share.keys), x.shape[3])
    for i, head in enumerate(share.repeats):
        out[:, :, head] += x[:, :, i]
    return out


def _in_runs(seen: list[int], run: int) -> bool:
    """Say whether the heads come in runs of equal ones, all of length ``run``."""
    return len(seen) % run == 0 and all(head == seen[i - i % run] for i, head in enumerate(seen))


def _is_shared(divided: Sequence[Share]) -> bool:
    """Say whether some key/value head goes to more than one rank."""
    given = [head for share in divided for head in share.keys]
    return len(set(given)) < len(given)


def _heads(x: torch.Tensor, heads: range) -> torch.Tensor:
    return x[:, :, heads.start : heads.stop]


def _column(lse: torch.Tensor) -> torch.Tensor:
    """Turn [B, H, S] into [B, S, H, 1]."""
    return lse.transpose(1, 2)[..., None]


@lru_cache(maxsize=256)
def _places(
    layout: Layout, first: int, size: int, device: torch.device
) -> tuple[list[torch.Tensor | None], list[torch.Tensor], int]:
    """Say for each member which of its slots hold tokens (None: all), and where those stand in the team's sequence."""
    joined = layout.joined(size)
    team = joined.positions(first // size)
    order = torch.zeros(layout.seq_len, dtype=torch.int64)
    order[team[team >= 0]] = torch.nonzero(team >= 0)[:, 0]
    slots: list[torch.Tensor | None] = []
    places = []
    for rank in range(first, first + size):
        positions = layout.positions(rank)
        real = torch.nonzero(positions >= 0)[:, 0]
        slots.append(None if len(real) == len(positions) else real.to(device))
        places.append(order[positions[real]].to(device))
    return slots, places, joined.local_len
