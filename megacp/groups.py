"""The ranks that share a sequence.

Only this file and ``megacp.comm`` know torch.distributed. A group may hold any global ranks (strided, offset, one alone);
everything above counts ranks inside the group.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megacp.errors import ConfigError

__all__ = ["Group", "as_group"]


@dataclass(frozen=True)
class Group:
    """A context-parallel group as seen from one of its members.

    Attributes:
        handle: the torch process group, or None for a single rank without torch.distributed.
        rank, size: of this process inside the group. global_ranks: the members' ranks in the world, in group order.
        seats: the members' ranks inside ``handle`` if they are only a part of it, see :meth:`part`; None if they are all of it.
    """

    handle: Any
    rank: int
    size: int
    global_ranks: tuple[int, ...]
    seats: tuple[int, ...] | None = None

    @property
    def backend(self) -> str:
        """Name the backend ('gloo', 'nccl', ...), or 'none' for a single rank without torch.distributed."""
        return str(dist.get_backend(self.handle)) if self.handle is not None else "none"

    @property
    def nodes(self) -> tuple[int, ...] | None:
        """Give the node of each member, as far as the launcher's LOCAL_WORLD_SIZE tells (equal on all nodes); None if it does not."""
        size = os.environ.get("LOCAL_WORLD_SIZE", "")
        return (
            tuple(rank // int(size) for rank in self.global_ranks) if size.isdecimal() and int(size) else None
        )

    def part(self, members: Sequence[int]) -> Group:
        """Take some members of the group, this rank among them and in rising order, as a group of their own.

        No process group is made: messages and :func:`megacp.comm.exchange` run on this one's, in which all its members must take
        part at the same time, each in its own part of equal size. So nothing can be created in another order on another rank, and
        no second communicator takes memory.
        """
        seats = self.seats or tuple(range(self.size))
        return Group(
            self.handle,
            list(members).index(self.rank),
            len(members),
            tuple(self.global_ranks[member] for member in members),
            tuple(seats[member] for member in members),
        )


def as_group(group: Any = None) -> Group:
    """Take a process group, a one-dimensional DeviceMesh, a :class:`Group`, or None.

    None is the default process group, or a single rank where torch.distributed is not initialised.
    Raises: ConfigError if this process is not a member, or the mesh has more than one dimension.
    """
    if isinstance(group, Group):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Group(None, 0, 1, (0,))
        group = dist.group.WORLD
    if hasattr(group, "get_group"):
        if getattr(group, "ndim", 1) != 1:
            raise ConfigError(
                f"megacp: a DeviceMesh of {group.ndim} dimensions is no context-parallel group. Pass the one dimension: mesh['cp']."
            )
        group = group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_rank(group) < 0:
        raise ConfigError(
            f"megacp: rank {dist.get_rank()} of the world is not a member of the context-parallel group it was given. "
            "Pass each rank the group it belongs to."
        )
    return Group(
        group, dist.get_rank(group), dist.get_world_size(group), tuple(dist.get_process_group_ranks(group))
    )
