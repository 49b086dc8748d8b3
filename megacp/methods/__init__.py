"""How keys and values travel: one file a method, and the registry.

A method is a module with ``name``, ``aliases``, the schedule (``steps``, ``tokens_received``: what happens when, for the plan) and
two loops (``forward``, ``backward``). A method that moves heads has ``team`` and ``elements_received`` in place of
``tokens_received``. One that cannot do every number of heads has ``refuses(plan, heads, kv_heads)``, which says why not, or None;
one of two levels has ``levels(cp_size, hierarchy, kv_heads, nodes)``, which checks or chooses their sizes.
A method from outside registers itself with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol

import torch

from megacp.errors import ConfigError
from megacp.groups import Group
from megacp.kernels import Kernel, Options, Where
from megacp.layout import Layout
from megacp.mask import Mask
from megacp.plans import Plan, Schedule, Sizes, Step

__all__ = [
    "Call",
    "Choice",
    "Estimate",
    "Method",
    "accumulation_dtype",
    "choose",
    "estimate",
    "levels",
    "names",
    "refusal",
    "register",
    "resolve",
]

AUTO = "auto"
"""In place of a method's name: let :func:`choose` take one."""

_RATES = {"cuda": (4e3, 1e10), "cpu": (50.0, 2e6)}
"""Round figures by device: operations done in the time that one byte takes between ranks, and that one kernel call takes to start."""


@dataclass(frozen=True)
class Call:
    """What stays the same through one attention call: the plan, and what carries it out."""

    plan: Plan
    group: Group
    kernel: Kernel
    options: Options
    first_head: int = 0  # the model's number of the first query head here, where heads are divided

    def at(self, step: Step, q: torch.Tensor) -> Options:
        """Return the options for one step's kernel calls with queries ``q`` [B, S, H, D]."""
        if not self.options.needs_positions:
            return self.options
        where = Where(
            torch.from_numpy(step.queries).to(q.device),
            torch.from_numpy(step.keys).to(q.device),
            torch.arange(self.first_head, self.first_head + q.shape[2], device=q.device),
        )
        return replace(self.options, where=where)


class Method(Schedule, Protocol):
    """A module with these names is a method."""

    aliases: tuple[str, ...]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [B, S, H, E], lse [B, H, S]) of the rank's queries, in the accumulation dtype."""

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of the rank's own tokens, in the accumulation dtype."""


_registry: dict[str, Method] = {}


def register(method: Any) -> None:
    """Make a method known by its name and aliases.

    Raises: ConfigError if a name is taken by another method.
    """
    for name in (method.name, *method.aliases):
        if _registry.get(name, method) is not method:
            raise ConfigError(f"megacp: a method named '{name}' is registered already. Choose another name.")
        _registry[name] = method


def names() -> list[str]:
    """List the known methods, without aliases."""
    return sorted({method.name for method in _registry.values()})


def resolve(name: str) -> Method:
    """Return the method of a name or alias.

    Raises: ConfigError listing the legal names.
    """
    if name not in _registry:
        aliases = [f"{alias} = {m.name}" for alias, m in sorted(_registry.items()) if alias != m.name]
        raise ConfigError(
            f"megacp: context-parallel method {name!r} is not known. Use one of: {', '.join(names())} (also {', '.join(aliases)})."
        )
    return _registry[name]


def levels(
    method: Schedule,
    cp_size: int,
    hierarchy: Sequence[int] | None,
    kv_heads: int | None = None,
    nodes: Sequence[int] | None = None,
) -> tuple[int, int] | None:
    """Check, or choose, the (inner, outer) sizes of a method of two levels; None for the others.

    Args:
        nodes: the node of each rank of the group, if known.
    Raises: ConfigError if they do not fit the group, or were given for a method that has no levels.
    """
    of_two = getattr(method, "levels", None)
    if of_two is not None:
        sizes: tuple[int, int] = of_two(cp_size, hierarchy, kv_heads, nodes)
        return sizes
    if hierarchy is not None:
        raise ConfigError(
            f"megacp: hierarchy {tuple(hierarchy)} was given, but method '{method.name}' has one level. "
            "Leave hierarchy out, or use method 'hierarchical'."
        )
    return None


def refusal(plan: Plan, heads: int, kv_heads: int) -> str | None:
    """Say why a plan's method cannot do attention with so many heads, or None if it can."""
    refuses = getattr(plan.schedule, "refuses", None)
    reason: str | None = refuses(plan, heads, kv_heads) if refuses is not None else None
    return reason


class Choice(NamedTuple):
    """The method that ``auto`` takes, and a sentence that says why."""

    method: str
    reason: str


class Estimate(NamedTuple):
    """One forward and backward pass of the busiest rank: time in operations, bytes received, kernel calls, work by the mean's."""

    time: float
    received: int
    calls: int
    balance: float


@lru_cache(maxsize=512)
def choose(layout: Layout, mask: Mask, sizes: Sizes, itemsize: int = 2, device: str = "cuda") -> Choice:
    """Choose the method whose plan promises the shortest pass, from the plan's own figures and two round rates of the device.

    The time of a rank is that of its work, one start a kernel call, and the bytes that do not travel behind work; the slowest of (up
    to three, evenly spread) ranks counts. Methods of two levels take no part: what they gain lies in links of different speed, which a
    plan does not know. The choice is the same on every rank, and cached. ``itemsize``: bytes of an element of the inputs.
    """
    found, left_out = {}, []
    for method in dict.fromkeys(_registry.values()):
        if hasattr(method, "levels"):
            continue
        plan = Plan(layout, mask, method)
        reason = refusal(plan, sizes.heads, sizes.kv_heads)
        if reason is None:
            found[method.name] = _estimated(plan, sizes, itemsize, device)
        else:
            left_out.append(f"{method.name} is left out: {reason}")
    best, *others = sorted(found, key=lambda name: found[name].time)
    if layout.cp_size == 1 or not others:
        return Choice(
            best, ". ".join([f"{best}: there is nothing to choose over {layout.cp_size} ranks", *left_out])
        )
    a, b = found[best], found[others[0]]
    why = (
        f"{best} is estimated {b.time / a.time:.2f} times as fast as {others[0]}: {a.received / 1e6:.2f} MB received against "
        f"{b.received / 1e6:.2f}, {a.calls} kernel calls against {b.calls}, busiest rank {a.balance:.2f} times the mean against "
        f"{b.balance:.2f}"
    )
    return Choice(best, ". ".join([why, *left_out]))


def estimate(
    layout: Layout,
    mask: Mask,
    method: str,
    sizes: Sizes,
    itemsize: int = 2,
    device: str = "cuda",
    hierarchy: Sequence[int] = (),
) -> Estimate:
    """Estimate one pass of a method, or of the one that ``auto`` would take.

    Args:
        itemsize: bytes of an element of the inputs. hierarchy: (inner, outer) sizes for a method of two levels, if they are given.
    Raises: ConfigError for an unknown method, or sizes that do not fit.
    """
    if method == AUTO:
        method = choose(layout, mask, sizes, itemsize, device).method
    schedule = resolve(method)
    asked = hierarchy if hierarchy and hasattr(schedule, "levels") else None
    plan = Plan(layout, mask, schedule, levels(schedule, layout.cp_size, asked, sizes.kv_heads))
    return _estimated(plan, sizes, itemsize, device)


def _estimated(plan: Plan, sizes: Sizes, itemsize: int, device: str) -> Estimate:
    cp_size = plan.layout.cp_size
    per_byte, per_call = _RATES.get(device, _RATES["cuda"])
    pairs = [plan.pairs(rank) * len(plan.heads(rank, sizes.heads)) for rank in range(cp_size)]
    exact = 8 if itemsize == 8 else 4
    slowest = Estimate(0.0, 0, 0, max(pairs) * cp_size / max(sum(pairs), 1))
    for rank in sorted({0, (cp_size - 1) // 2, cp_size - 1}):
        steps, time, received = plan.steps(rank), 0.0, 0
        work = 2 * len(plan.heads(rank, sizes.heads)) * (sizes.head_dim + sizes.value_dim)
        calls, receiving = sum(len(step.blocks) for step in steps), sum(step.receives for step in steps)
        for is_backward in (False, True):
            size = plan.bytes_received(
                rank,
                **sizes._asdict(),
                itemsize=itemsize,
                grad_itemsize=exact,
                backward=is_backward,
            )
            behind = size * per_byte / receiving if receiving else 0.0
            for step in steps:
                done = step.pairs * work * (2.5 if is_backward else 1.0)
                time += max(done, behind) if step.receives else done
            time += calls * per_call + (0.0 if receiving else size * per_byte)
            received += size
        slowest = max(slowest, Estimate(time, received, 2 * calls, slowest.balance))
    return slowest


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results and travelling gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


for _name in ("ring", "all_gather", "exchange", "all_to_all", "hierarchical"):
    register(import_module(f"megacp.methods.{_name}"))
