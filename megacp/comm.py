"""Collectives of the context-parallel group, each with a deadline.

Every wait is bounded: when a peer does not answer, :class:`~megacp.errors.CommTimeout` names this rank, the peers and the step.
Peers are group ranks here; they are turned into global ranks in this one place.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from megacp.errors import CommTimeout, ConfigError
from megacp.groups import Group

__all__ = [
    "Posted",
    "all_gather",
    "broadcast",
    "deadline",
    "exchange",
    "post",
    "reduce_scatter",
    "set_deadline",
    "total",
]

_deadline_s = 600.0

# Newer PyTorch has the first names and warns about the second.
_gather_into: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_into: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all: Any = dist.all_to_all_single


def set_deadline(seconds: float) -> None:
    """Limit each wait of megacp's own exchanges, in seconds.

    Raises: ConfigError for a limit that is not above 0.
    """
    if not seconds > 0:
        raise ConfigError(f"megacp: a deadline of {seconds!r} seconds is no deadline. Give a number above 0.")
    global _deadline_s
    _deadline_s = float(seconds)


def deadline() -> float:
    """Return the limit of each wait in seconds: MEGACP_TIMEOUT_S, or what :func:`set_deadline` set (600 at first)."""
    return float(os.environ.get("MEGACP_TIMEOUT_S", _deadline_s))


@dataclass
class Posted:
    """Messages on their way. ``wait`` ends when all have been sent and received."""

    group: Group
    what: str
    peers: tuple[int, ...]
    works: list[Any] = field(default_factory=list)
    keep: tuple[torch.Tensor, ...] = ()

    def wait(self) -> None:
        """Wait for every message, at most until the deadline.

        Raises: CommTimeout naming this rank, the peers and what was exchanged.
        """
        for work in self.works:
            _finish(work, self.group, self.what, self.peers)
        self.works, self.keep = [], ()


def post(
    group: Group,
    sends: Sequence[tuple[torch.Tensor, int]],
    receives: Sequence[tuple[torch.Tensor, int]],
    what: str,
) -> Posted:
    """Start sending and receiving whole contiguous tensors, as one batch; returns at once.

    Args:
        sends, receives: (tensor, peer's rank in the group). Two messages between the same pair arrive in the order of posting.
    """
    ops = [dist.P2POp(dist.isend, t, group.global_ranks[peer], group.handle) for t, peer in sends]
    ops += [dist.P2POp(dist.irecv, t, group.global_ranks[peer], group.handle) for t, peer in receives]
    peers = tuple(sorted({peer for _, peer in (*sends, *receives)}))
    posted = Posted(group, what, peers, keep=tuple(t for t, _ in (*sends, *receives)))
    if ops:
        try:
            posted.works = dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            raise _lost(group, what, peers, error) from error
    return posted


def exchange(
    group: Group, send: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
) -> tuple[torch.Tensor, Posted]:
    """Start sending each member its part of ``send`` and receiving one from each; all-to-all-v, returns at once.

    One collective, not messages between pairs: every member takes part even if it has nothing to send, so the order is the same
    everywhere and a fresh group needs no warm-up. Between two ranks with nothing to say to each other nothing travels.

    Shapes: send [sum(sent)] -> [sum(received)], elements of one dtype, parts in group order.
    Args:
        sent, received: elements for, and from, each member. The result may be read after ``wait`` on what is returned.
    """
    out = send.new_empty(sum(received))
    if group.size == 1:
        out.copy_(send)
        return out, Posted(group, what, ())
    work = _all_to_all(
        out, send, _seated(group, received), _seated(group, sent), group=group.handle, async_op=True
    )
    return out, Posted(group, what, _others(group), [work], (send, out))


def all_gather(group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
    """Bring every rank's ``x`` together, in group order: [*shape] -> [size, *shape]."""
    x = x.contiguous()
    if group.size == 1:
        return x[None]
    out = x.new_empty(group.size, *x.shape)
    work = _gather_into(out.view(-1), x.view(-1), group=_whole(group), async_op=True)
    _finish(work, group, what, _others(group))
    return out


def reduce_scatter(group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
    """Sum over ranks and keep this rank's part: [size, *shape] -> [*shape]."""
    x = x.contiguous()
    if group.size == 1:
        return x[0]
    out = torch.empty_like(x[0])
    work = _reduce_into(out.view(-1), x.view(-1), group=_whole(group), async_op=True)
    _finish(work, group, what, _others(group))
    return out


def total(group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
    """Sum ``x`` over the group into a new tensor."""
    out = x.detach().clone(memory_format=torch.contiguous_format)
    if group.size > 1:
        _finish(dist.all_reduce(out, group=_whole(group), async_op=True), group, what, _others(group))
    return out


def broadcast(group: Group, x: torch.Tensor, source: int, what: str) -> None:
    """Overwrite every rank's ``x`` by that of the group's rank ``source``."""
    if group.size > 1:
        work = dist.broadcast(x, group.global_ranks[source], group=_whole(group), async_op=True)
        _finish(work, group, what, _others(group))


def _seated(group: Group, counts: Sequence[int]) -> list[int]:
    """Spread counts for a group's members over all ranks of its process group; 0 for the rest."""
    if group.seats is None:
        return list(counts)
    out = [0] * dist.get_world_size(group.handle)
    for seat, count in zip(group.seats, counts, strict=True):
        out[seat] = count
    return out


def _whole(group: Group) -> Any:
    """Return the process group of a group that is all of it."""
    if group.seats is not None:
        raise ConfigError(
            f"megacp: ranks {group.global_ranks} are only a part of their process group, on which this collective cannot run alone. "
            "Make a process group of them."
        )
    return group.handle


def _others(group: Group) -> tuple[int, ...]:
    return tuple(rank for rank in range(group.size) if rank != group.rank)


def _finish(work: Any, group: Group, what: str, peers: tuple[int, ...]) -> None:
    try:
        if group.backend == "nccl":
            work.wait()  # waits on the stream, not the host; NCCL's own watchdog holds the deadline
        else:
            work.wait(timedelta(seconds=deadline()))
    except RuntimeError as error:
        raise _lost(group, what, peers, error) from error


def _lost(group: Group, what: str, peers: tuple[int, ...], error: RuntimeError) -> CommTimeout:
    def name(rank: int) -> str:
        return f"{rank} (world rank {group.global_ranks[rank]})"

    return CommTimeout(
        f"megacp: rank {name(group.rank)} of the context-parallel group waited in {what} for rank "
        f"{', '.join(map(name, peers))}, at most {deadline():g} s. The backend said: {str(error).splitlines()[0]}. "
        "Look at the output of the rank it waited for; raise MEGACP_TIMEOUT_S if that rank was only slow."
    )
