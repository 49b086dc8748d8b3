"""Ring attention: keys and values pass from neighbour to neighbour, each rank attends to whoever's are here.

Step t of rank r works on the keys and values of owner r - t. The next owner's are received while the block is computed, into the
other of two buffers, however large the group is. In the backward pass their gradients follow one step behind, in float32,
from the first rank that computes any to the last, and from there straight home. What no later rank needs is not sent.

Source: Liu, Zaharia and Abbeel 2023 (arXiv 2310.01889), section 3; the skipping and the way home are our own.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch

from megacp import comm, kernels
from megacp.merge import State
from megacp.methods import Call, accumulation_dtype
from megacp.plans import Plan, Step, blocks_of

__all__ = ["aliases", "backward", "forward", "name", "steps", "tokens_received"]

name = "ring"
aliases: tuple[str, ...] = ("p2p",)

_Pair = tuple[torch.Tensor, torch.Tensor]
_Sums = tuple[kernels.Sum, kernels.Sum]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pass keys and values round once, merging the partial results."""
    state = State((*q.shape[:3], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    buffers = _Buffers(k.contiguous(), v.contiguous())
    for step in call.plan.steps(call.group.rank):
        incoming = _pass_on(call, step, buffers, "forward")
        for part in call.kernel.forward(q, *buffers.here, step.blocks, call.at(step, q)):
            state.add(part)
        incoming.wait()
        buffers.turn()
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
    """Pass keys and values round again, their gradients one step behind."""
    rank, dtype = call.group.rank, accumulation_dtype(q.dtype)
    buffers = _Buffers(k.contiguous(), v.contiguous())
    dq, own = kernels.Sum(q, dtype), _sums(buffers.here, dtype)
    here, travelling, home = own, _Gradients(), _Gradients()
    for step in call.plan.steps(rank):
        incoming = _pass_on(call, step, buffers, "backward")
        into = kernels.Gradients(dq, *here)
        call.kernel.backward(d_out, q, *buffers.here, out, lse, step.blocks, call.at(step, q), into)
        incoming.wait()
        buffers.turn()
        travelling.wait()
        travelling = _pass_gradients(call, step, here, home)
        here = _sums(buffers.here, dtype, travelling)
    travelling.wait()
    dk, dv = own[0].tensor, own[1].tensor
    home.add_to(dk, dv)
    return dq.tensor, dk, dv


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """List the steps: own keys and values first, then those of the ranks behind, nearest first."""
    cp = plan.layout.cp_size
    blocks, spans = blocks_of(plan.layout, plan.mask, rank), _spans(plan)
    out = []
    for t in range(cp):
        owner, behind = (rank - t) % cp, (rank - t - 1) % cp  # whose keys are here, and whose come next
        first, last = spans[owner]
        on_the_way = first <= t <= last
        step = Step(
            index=t,
            owner=owner,
            blocks=blocks.get(owner, ()),
            sends=t < last,
            receives=t < spans[behind][1],
            grad_to=None if not on_the_way else owner if t == last else (rank + 1) % cp,
            grad_follows=spans[behind][0] <= t < spans[behind][1],
            grad_home=(rank + t) % cp if t > 0 and t == spans[rank][1] else None,
            q_pieces=plan.layout.pieces[rank],
            k_pieces=plan.layout.pieces[owner],
        )
        if t == 0 or step.blocks or step.sends or step.receives or on_the_way or step.grad_home is not None:
            out.append(step)
    return tuple(out)


def tokens_received(plan: Plan, rank: int, backward: bool) -> tuple[int, int]:
    """Count whole buffers of S slots: one for each receiving step, and one for each message with gradients."""
    mine = plan.steps(rank)
    received = sum(step.receives for step in mine)
    gradients = sum(step.grad_follows + (step.grad_home is not None) for step in mine) if backward else 0
    return received * plan.layout.local_len, gradients * plan.layout.local_len


@lru_cache(maxsize=1024)
def _spans(plan: Plan) -> list[tuple[int, int]]:
    """List for each owner how many hops away the first and the last rank are that need its keys; (cp, 0) for nobody."""
    cp = plan.layout.cp_size
    out = []
    for owner in range(cp):
        hops = (np.flatnonzero(plan.work[:, owner]) - owner) % cp
        hops = hops[hops > 0]
        out.append((int(hops.min()), int(hops.max())) if len(hops) else (cp, 0))
    return out


class _Buffers:
    """The keys and values at hand, and two buffers to receive into, used in turn; the rank's own are never overwritten."""

    def __init__(self, k: torch.Tensor, v: torch.Tensor) -> None:
        self.here: _Pair = (k, v)
        self._own = self.here
        self._spare: list[_Pair] = []
        self._coming: _Pair | None = None

    def receive(self) -> _Pair:
        """Return a free buffer for the next owner's keys and values."""
        k, v = self._own
        self._coming = self._spare.pop() if self._spare else (torch.empty_like(k), torch.empty_like(v))
        return self._coming

    def turn(self) -> None:
        """Make what was received the keys and values at hand."""
        if self._coming is None:
            return
        if self.here is not self._own:
            self._spare.append(self.here)
        self.here, self._coming = self._coming, None


class _Gradients:
    """Gradients of keys and values that are being received; the pair is None if nothing comes."""

    def __init__(self, pair: _Pair | None = None) -> None:
        self.pair = pair
        self.posted: comm.Posted | None = None

    def wait(self) -> _Pair | None:
        """Wait for what was posted, and give what was received; the pair is then the caller's."""
        if self.posted is not None:
            self.posted.wait()
        return self.pair

    def add_to(self, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Wait for what was posted, and add what was received."""
        pair = self.wait()
        if pair is not None:
            dk.add_(pair[0])
            dv.add_(pair[1])


def _pass_on(call: Call, step: Step, buffers: _Buffers, phase: str) -> comm.Posted:
    """Start sending this step's keys and values to the next rank and receiving the next step's from the rank before."""
    group = call.group
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    return comm.post(
        group,
        sends=[(x, after) for x in buffers.here] if step.sends else [],
        receives=[(x, before) for x in buffers.receive()] if step.receives else [],
        what=f"step {step.index} of the ring's {phase} pass (keys and values)",
    )


def _sums(kv: _Pair, dtype: torch.dtype, arriving: _Gradients | None = None) -> _Sums:
    """Begin the sums of an owner's gradients with those that are arriving, waited for when there is something to add to them.

    So they travel behind the computation, and need no second buffer beside them for what is added.
    """

    def begin(i: int) -> kernels.Sum:
        def so_far() -> torch.Tensor | None:
            pair = arriving.wait() if arriving is not None else None
            return pair[i] if pair is not None else None

        return kernels.Sum(kv[i], dtype, so_far)

    return begin(0), begin(1)


def _pass_gradients(call: Call, step: Step, sums: _Sums, home: _Gradients) -> _Gradients:
    """Start sending this owner's gradients on, and receiving the next owner's and, once, this rank's own into ``home``.

    Both ends of a message post it in the same step, so that backends which run exchanges in order cannot block each other.
    """
    group, coming = call.group, _Gradients()
    receives: list[tuple[torch.Tensor, int]] = []
    if step.grad_follows:
        coming.pair = _empty_like(sums)
        receives += [(x, (group.rank - 1) % group.size) for x in coming.pair]
    if step.grad_home is not None:
        home.pair = _empty_like(sums)
        receives += [(x, step.grad_home) for x in home.pair]
    coming.posted = comm.post(
        group,
        sends=[(x.tensor, step.grad_to) for x in sums] if step.grad_to is not None else [],
        receives=receives,
        what=f"step {step.index} of the ring's backward pass (gradients of keys and values)",
    )
    return coming


def _empty_like(sums: _Sums) -> _Pair:
    k, v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in sums)
    return k, v
