"""Context-parallel groups for a host that has none: split out of its data-parallel groups, and registered beside them.

A host without context parallelism makes data-parallel groups of D * cp ranks. Each is split, in its own order: consecutive members
share sequences, every cp-th one holds other samples. This needs no knowledge of the host's order of ranks, only of its groups.

To the host one group has become two, and each of its callers means one of them:

- *batches*: who reads which sample. Samplers, numbers of micro-batches, consumed samples. Pure data parallel.
- *replicas*: who holds the same weights. Gradients, optimizer, norms, checkpoints, logging, seeds. Data times context parallel.

What the host has made stays as it is, so replicas are what every caller gets who is not known; those that mean batches are wrapped
(:func:`as_batches`), and what they call in turn and means replicas again (:func:`as_replicas`).
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch.distributed as dist

from megacp.errors import ConfigError
from megacp.groups import Group, as_group
from megacp.hosts.hooks import Function
from megacp.hosts.session import Session

__all__ = ["Registered", "as_batches", "as_replicas", "data_parallel", "register", "split", "withdraw"]

BATCHES, REPLICAS = "batches", "replicas"


@dataclass
class Registered:
    """The groups of this rank. replicas: the host's own data-parallel group. role: which of the two the caller at hand means."""

    context: Group
    batches: Group
    replicas: Group
    role: str = REPLICAS
    names: list[tuple[ModuleType, str]] = field(default_factory=list)


def split(ranks: Sequence[int], cp_size: int) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Split a data-parallel group into its context-parallel and its pure data-parallel groups.

    Raises: ConfigError if the size does not divide the group.
    """
    if len(ranks) % cp_size:
        raise ConfigError(
            f"megacp: --context-parallel-size {cp_size} does not divide this host's data-parallel groups, which have {len(ranks)} "
            f"ranks ({list(ranks)[:8]}{' ...' if len(ranks) > 8 else ''}). Choose a divisor of {len(ranks)}, or start more ranks."
        )
    contexts = [tuple(ranks[at : at + cp_size]) for at in range(0, len(ranks), cp_size)]
    return contexts, [tuple(ranks[at::cp_size]) for at in range(cp_size)]


def register(host: ModuleType, own_group: Callable[[], Any], cp_size: int) -> Registered:
    """Make the groups of every rank and give the host its getters under Megatron's names. Collective over the world.

    Args:
        host: the module that makes the groups; packages that hand its functions on get the new ones too.
        own_group: the host's getter of its data-parallel group.
    """
    whole = own_group()
    mine = tuple(dist.get_process_group_ranks(whole))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    found: dict[str, Any] = {}
    for ranks in sorted(set(everyone)):  # the same order on every rank
        for name, parts in zip(("context", "batches"), split(ranks, cp_size), strict=True):
            for part in parts:
                group = dist.new_group(list(part))
                if dist.get_rank() in part:
                    found[name] = group
    groups = Registered(as_group(found["context"]), as_group(found["batches"]), as_group(whole))
    for module in _modules_of(host):
        for name, getter in _getters(groups).items():
            setattr(module, name, getter)
            groups.names.append((module, name))
    return groups


def withdraw(groups: Registered) -> None:
    """Take the names out of the host again."""
    for module, name in groups.names:
        vars(module).pop(name, None)
    groups.names.clear()


def _modules_of(host: ModuleType) -> list[ModuleType]:
    """List the host's registry and every module that hands its functions on."""
    function = host.initialize_model_parallel
    return [
        module
        for module in dict.fromkeys(sys.modules.values())
        if isinstance(module, ModuleType)
        and object.__getattribute__(module, "__dict__").get("initialize_model_parallel") is function
    ]


def _getters(groups: Registered) -> dict[str, Function]:
    context = groups.context

    def get_context_parallel_group(check_initialized: bool = True) -> Any:
        """Return the group of the ranks that share this rank's sequences."""
        return context.handle

    def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
        """Return their ranks in the world."""
        return list(context.global_ranks)

    def get_context_parallel_world_size() -> int:
        """Return how many ranks share a sequence."""
        return context.size

    def get_context_parallel_rank() -> int:
        """Return this rank's place among them."""
        return context.rank

    made = (
        get_context_parallel_group,
        get_context_parallel_global_ranks,
        get_context_parallel_world_size,
        get_context_parallel_rank,
    )
    return {getter.__name__: getter for getter in made}


def data_parallel(original: Function, session: Callable[[], Session], what: str) -> Function:
    """Let a getter of the data-parallel group, size, rank or source answer for the group that its caller means.

    ``with_context_parallel`` says it outright, as in newer Megatrons; without it the role of the caller counts.
    what: ``group``, ``world_size``, ``rank`` or ``src_rank``.
    """
    if what == "group":
        session().own_group = original

    @functools.wraps(original)
    def getter(*args: Any, with_context_parallel: bool | None = None, **kwargs: Any) -> Any:
        groups: Registered | None = session().groups
        if groups is None:
            return original(*args, **kwargs)
        role = groups.role
        if with_context_parallel is not None:
            role = REPLICAS if with_context_parallel else BATCHES
        group = groups.batches if role == BATCHES else groups.replicas
        if what == "group":
            return group.handle
        if what == "world_size":
            return group.size
        return group.rank if what == "rank" else group.global_ranks[0]

    return getter


@contextmanager
def _role(session: Callable[[], Session], role: str) -> Iterator[None]:
    groups = session().groups
    if groups is None:
        yield
        return
    before, groups.role = groups.role, role
    try:
        yield
    finally:
        groups.role = before


def as_batches(original: Function, session: Callable[[], Session]) -> Function:
    """Let a caller of the data-parallel getters mean who reads which sample."""
    return _in_role(original, session, BATCHES)


def as_replicas(original: Function, session: Callable[[], Session]) -> Function:
    """Let a caller of the data-parallel getters mean who holds the same weights."""
    return _in_role(original, session, REPLICAS)


def _in_role(original: Function, session: Callable[[], Session], role: str) -> Function:
    if inspect.isgeneratorfunction(original):
        raise TypeError("a generator runs in its reader's role; wrap what makes it")

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _role(session, role):
            return original(*args, **kwargs)

    return call


def destroy(original: Function, session: Callable[[], Session]) -> Function:
    """Forget the groups when the host forgets its own."""

    @functools.wraps(original)
    def destroy_model_parallel(*args: Any, **kwargs: Any) -> Any:
        if session().groups is not None:
            withdraw(session().groups)
            session().groups = None
        return original(*args, **kwargs)

    return destroy_model_parallel
