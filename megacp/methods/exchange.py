"""Needed-only exchange: each rank receives just those keys and values that its queries see.

One all-to-all-v, in which each rank sends every other the ranges that the plan says it needs. The rank attends to its own keys
meanwhile, then to the received ones, which stand in one buffer in global order. The backward pass fetches them again, and returns
the sums of their gradients, in float32, to the owners, which add them in the order of ranks; that is the larger message, so the
own keys' gradients are computed while it travels. For packed documents and windows this is a small part of what a ring moves; for
a causal mask over a zigzag layout about three quarters, and the buffer is as large.

It is a collective, not messages between the pairs that have something to say: every rank takes part, so the order of operations
is the same everywhere on any backend, a fresh group needs no warm-up, and ranks without work are no special case. Nothing is
called where no rank needs anything of another.

Source: MagiAttention's group-cast (github.com/SandAI-org/MagiAttention) has the same traffic; this form is our own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch

from megacp import comm, kernels
from megacp.merge import State
from megacp.methods import Call, accumulation_dtype
from megacp.plans import OTHERS, Plan, Step, blocks_in, joined_ranges, queries_of

__all__ = ["aliases", "backward", "forward", "name", "steps", "tokens_received"]

name = "exchange"
aliases: tuple[str, ...] = ()

_Pair = tuple[torch.Tensor, torch.Tensor]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the own keys while those of others come in, then to those."""
    state = State((*q.shape[:3], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    routes, kv = _routes(call.plan, call.group.rank, q.device), (k, v)
    incoming = _fetch(kv, routes, call, "forward")
    for step in call.plan.steps(call.group.rank):
        here = _joined(incoming, kv, routes) if step.owner == OTHERS else kv
        for part in call.kernel.forward(q, *here, step.blocks, call.at(step, q)):
            state.add(part)
    incoming.wait()
    return state.finish(sinks)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fetch the others' keys again, return their gradients, and compute those of the own keys meanwhile."""
    dtype, kv = accumulation_dtype(q.dtype), (k, v)
    routes = _routes(call.plan, call.group.rank, q.device)
    dq, own = kernels.Sum(q, dtype), [kernels.Sum(x, dtype) for x in kv]
    far = _joined(_fetch(kv, routes, call, "backward"), kv, routes)
    far_grads = [kernels.Sum(x, dtype) for x in far]
    first, *rest = call.plan.steps(call.group.rank)
    for step in rest:
        into = kernels.Gradients(dq, *far_grads)
        call.kernel.backward(d_out, q, *far, out, lse, step.blocks, call.at(step, q), into)
    returning = _give_back((far_grads[0].tensor, far_grads[1].tensor), routes, call)
    into = kernels.Gradients(dq, *own)
    call.kernel.backward(d_out, q, k, v, out, lse, first.blocks, call.at(first, q), into)
    dk, dv = own[0].tensor, own[1].tensor
    for slots, (k_part, v_part) in zip(routes.sends, returning.parts(kv), strict=True):
        dk.index_add_(1, slots, k_part)
        dv.index_add_(1, slots, v_part)
    return dq.tensor, dk, dv


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """Own keys first, then in one step those that came from others, if there are any."""
    layout, queries = plan.layout, queries_of(plan.layout, plan.mask, rank)
    pieces, needs = layout.pieces[rank], plan.needs
    sends, receives = bool((needs[:, 1] == rank).any()), bool((needs[:, 0] == rank).any())
    own = Step(0, rank, blocks_in(queries, pieces), sends, receives, q_pieces=pieces, k_pieces=pieces)
    if not receives:
        return (own,)
    far = _received(plan, rank)
    return own, Step(1, OTHERS, blocks_in(queries, far), q_pieces=pieces, k_pieces=far)


def tokens_received(plan: Plan, rank: int, backward: bool) -> tuple[int, int]:
    """Count the needed tokens of others; backward also the gradients that others return, one for each token and rank."""
    receiver, owner, start, stop = plan.needs.T
    size = stop - start
    return int(size[receiver == rank].sum()), int(size[owner == rank].sum()) if backward else 0


def _received(plan: Plan, rank: int) -> np.ndarray:
    """Lay out the buffer of received keys: pieces (start, stop, slot) in global order, without gaps, int64 [n, 3]."""
    first, last = np.searchsorted(plan.needs[:, 0], (rank, rank + 1))
    ranges = joined_ranges(plan.needs[first:last, 2:])
    sizes = ranges[:, 1] - ranges[:, 0]
    return np.stack([*ranges.T, np.cumsum(sizes) - sizes], 1)


@dataclass(frozen=True)
class _Routes:
    """What goes where, for one rank.

    Attributes:
        sends: for each rank, which local slots it needs. places: for each rank, where what comes from it goes in the buffer.
        length: slots of the buffer. is_idle: whether no rank at all needs anything of another.
    """

    sends: list[torch.Tensor]
    places: list[torch.Tensor]
    length: int
    is_idle: bool


@lru_cache(maxsize=512)
def _routes(plan: Plan, rank: int, device: torch.device) -> _Routes:
    layout, needs = plan.layout, plan.needs
    slots = layout.owner_slots().numpy() - rank * layout.local_len  # right for this rank's positions only
    start, stop, slot = _received(plan, rank).T
    others = np.arange(layout.cp_size + 1)
    mine = needs[needs[:, 1] == rank]
    theirs = needs[slice(*np.searchsorted(needs[:, 0], (rank, rank + 1)))]
    cuts = np.searchsorted(mine[:, 0], others), np.searchsorted(theirs[:, 1], others)
    into = theirs[:, 2:] + (slot - start)[np.searchsorted(start, theirs[:, 2], side="right") - 1][:, None]
    sends = [torch.from_numpy(slots[_spread(mine[a:b, 2:])]).to(device) for a, b in pairwise(cuts[0])]
    places = [torch.from_numpy(_spread(into[a:b])).to(device) for a, b in pairwise(cuts[1])]
    return _Routes(sends, places, int((stop - start).sum()), not len(needs))


def _spread(ranges: np.ndarray) -> np.ndarray:
    """List every number of ranges [start, stop), int64 [n, 2] -> [m]."""
    sizes = ranges[:, 1] - ranges[:, 0]
    ends: np.ndarray = np.cumsum(sizes)
    out: np.ndarray = np.arange(sizes.sum()) + np.repeat(ranges[:, 0] - (ends - sizes), sizes)
    return out


@dataclass
class _Incoming:
    """A pair of tensors (keys and values, or their gradients) on its way from each rank."""

    posted: comm.Posted | None
    buffer: torch.Tensor
    counts: list[int]

    def wait(self) -> None:
        """Wait until everything is here and everything was sent."""
        if self.posted is not None:
            self.posted.wait()

    def parts(self, like: _Pair) -> Iterator[_Pair]:
        """Wait, then give what came from each rank, [B, tokens, heads, size] with the heads and sizes of ``like``."""
        self.wait()
        at = 0
        for tokens in self.counts:
            pair = []
            for x in like:
                shape = (x.shape[0], tokens, *x.shape[2:])
                size = _per_token(x) * tokens
                pair.append(self.buffer[at : at + size].view(shape))
                at += size
            yield pair[0], pair[1]


def _fetch(kv: _Pair, routes: _Routes, call: Call, phase: str) -> _Incoming:
    """Start bringing every rank the keys and values it needs."""
    return _started(kv, routes.sends, routes.places, routes, call, f"{phase} pass (keys and values)")


def _give_back(grads: _Pair, routes: _Routes, call: Call) -> _Incoming:
    """Start returning the gradients of received keys and values to their owners."""
    return _started(grads, routes.places, routes.sends, routes, call, "backward pass (gradients)")


def _started(
    pair: _Pair, out: list[torch.Tensor], back: list[torch.Tensor], routes: _Routes, call: Call, what: str
) -> _Incoming:
    """Send each rank the slots ``out`` of both tensors, in one message, and receive as many slots as ``back`` has."""
    x, y = pair
    width = _per_token(x) + _per_token(y)  # elements a token
    packed = x.new_empty(width * sum(map(len, out)))
    at = 0
    for slots in out:
        for tensor in pair:
            shape = (tensor.shape[0], len(slots), *tensor.shape[2:])
            size = _per_token(tensor) * len(slots)
            torch.index_select(tensor, 1, slots, out=packed[at : at + size].view(shape))
            at += size
    counts = [len(slots) for slots in back]
    if routes.is_idle:
        return _Incoming(None, packed, counts)
    buffer, posted = comm.exchange(
        call.group,
        packed,
        [width * len(s) for s in out],
        [width * n for n in counts],
        f"the exchange of the {what}",
    )
    return _Incoming(posted, buffer, counts)


def _joined(incoming: _Incoming, like: _Pair, routes: _Routes) -> _Pair:
    """Bring what was received into one buffer in global order, [B, tokens, K, D] and [B, tokens, K, E]."""
    k, v = (x.new_empty(x.shape[0], routes.length, *x.shape[2:]) for x in like)
    for places, (k_part, v_part) in zip(routes.places, incoming.parts(like), strict=True):
        k.index_copy_(1, places, k_part)
        v.index_copy_(1, places, v_part)
    return k, v


def _per_token(x: torch.Tensor) -> int:
    """Count the elements of one token over all rows, [B, tokens, heads, size]."""
    return x.shape[0] * x.shape[2] * x.shape[3]
