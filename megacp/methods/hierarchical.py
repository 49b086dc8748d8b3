"""Two levels: heads for tokens inside teams of neighbouring ranks, a ring across the teams.

A team is ``inner`` ranks that are consecutive in the group. Its ranks trade tokens for heads, so that each holds the team's tokens,
in global order, for its share of the heads; then it passes keys and values round a ring of the ranks with the same heads, one of
each team, as method ``ring`` does among single ranks. So the all-to-all stays on the fast links inside a node, and the ring has
``inner`` times fewer steps. The layout is whatever was given for all ranks; a balanced one stays balanced.

Both levels are parts of the one group that was given: no process group is made. Source: USP (arXiv 2405.07719); Megatron's "a2a+p2p".
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from megacp import heads, methods
from megacp.errors import ConfigError
from megacp.methods import Call
from megacp.plans import Plan, Sizes, Step

__all__ = [
    "aliases",
    "backward",
    "elements_received",
    "forward",
    "levels",
    "name",
    "refuses",
    "steps",
    "team",
]

name = "hierarchical"
aliases: tuple[str, ...] = ("a2a+p2p",)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trade tokens for heads inside the team, go round the ring of teams, and trade back."""
    trade = _inside(q, k, call)
    across = _across(call, trade)
    out, lse = _outer().forward(*trade.inputs(q, k, v), across, trade.sinks(sinks))
    return trade.results(out.to(q.dtype), lse)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: Call,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Do the same with gradients."""
    trade = _inside(q, k, call)
    across = _across(call, trade)
    gradients = _outer().backward(*trade.backward_inputs(d_out, q, k, v, out, lse), across)
    return trade.gradients(*gradients, q.dtype)


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """List the steps of the ring of teams; a step's owner is a team."""
    inner, _ = _sizes(plan)
    return _ring_of_teams(plan).steps(rank // inner)


def team(plan: Plan, rank: int) -> tuple[int, ...]:
    """Name the ranks of the team, which divide the heads."""
    inner, _ = _sizes(plan)
    return tuple(range(rank - rank % inner, rank - rank % inner + inner))


def elements_received(plan: Plan, rank: int, sizes: Sizes, backward: bool) -> tuple[int, int]:
    """Count what the trade inside the team brings, and the ring of teams with this rank's heads."""
    inner, _ = _sizes(plan)
    plain, exact = heads.elements_received(plan.layout, sizes, inner, rank, backward)
    tokens, grads = _outer().tokens_received(_ring_of_teams(plan), rank // inner, backward)
    share = heads.shares(sizes.heads, sizes.kv_heads, inner)[rank % inner]
    per_token = (len(share.keys) if share.repeats is None else len(share.repeats)) * (
        sizes.head_dim + sizes.value_dim
    )
    return plain + per_token * tokens, exact + per_token * grads


def refuses(plan: Plan, heads: int, kv_heads: int) -> str | None:
    """Refuse teams of more ranks than query heads."""
    inner, _ = _sizes(plan)
    if heads >= inner:
        return None
    return (
        f"hierarchical divides the {heads} query heads (and {kv_heads} key/value heads) over {inner} ranks inside each team, so that "
        f"{inner - heads} of them would have none. Use hierarchy=(inner, outer) with an inner size of at most {heads}"
    )


def levels(
    cp_size: int,
    hierarchy: Sequence[int] | None,
    kv_heads: int | None = None,
    nodes: Sequence[int] | None = None,
) -> tuple[int, int]:
    """Check (inner, outer), or choose it.

    Without one asked for, ``inner`` is the largest divisor of cp_size that keeps each team on one node, as far as ``nodes`` (the node
    of each rank) is known, and that divides kv_heads; without those, that is at most the square root of cp_size.
    Raises: ConfigError if the product is not cp_size.
    """
    if hierarchy is None:
        fits = [n for n in range(1, cp_size + 1) if cp_size % n == 0]
        fits = [
            n
            for n in fits
            if nodes is None or all(len(set(nodes[i : i + n])) == 1 for i in range(0, cp_size, n))
        ]
        inner = max(n for n in fits if (n * n <= cp_size if kv_heads is None else kv_heads % n == 0))
        return inner, cp_size // inner
    sizes = tuple(hierarchy) if isinstance(hierarchy, (tuple, list)) else (hierarchy,)
    legal = [(n, cp_size // n) for n in range(1, cp_size + 1) if cp_size % n == 0]
    if sizes not in legal:
        raise ConfigError(
            f"megacp: hierarchy {sizes} does not fit a context-parallel group of {cp_size} ranks: (inner, outer) must be two whole "
            f"numbers whose product is {cp_size}. Use one of {', '.join(map(str, legal))}."
        )
    return sizes[0], sizes[1]


def _outer() -> methods.Method:
    """Return the method across the teams, by its name in the registry."""
    return methods.resolve("ring")


@lru_cache(maxsize=512)
def _ring_of_teams(plan: Plan) -> Plan:
    inner, _ = _sizes(plan)
    return Plan(plan.layout.joined(inner), plan.mask, _outer())


def _sizes(plan: Plan) -> tuple[int, int]:
    if plan.hierarchy is None or math.prod(plan.hierarchy) != plan.layout.cp_size:
        raise ConfigError(
            f"megacp: method 'hierarchical' over {plan.layout.cp_size} ranks has hierarchy {plan.hierarchy}. Make the plan with "
            "megacp.plan(..., hierarchy=(inner, outer))."
        )
    return plan.hierarchy


def _inside(q: torch.Tensor, k: torch.Tensor, call: Call) -> heads.Trade:
    """Give the trade of this rank's team."""
    members = team(call.plan, call.group.rank)
    return heads.Trade(call.group.part(members), call.plan.layout, members[0], q.shape[2], k.shape[2])


def _across(call: Call, trade: heads.Trade) -> Call:
    """Turn the call into one of the ring of teams: the ranks that stand where this one does in their teams."""
    inner, _ = _sizes(call.plan)
    members = range(call.group.rank % inner, call.group.size, inner)
    first_head = trade.mine.queries.start
    return replace(
        call, plan=_ring_of_teams(call.plan), group=call.group.part(members), first_head=first_head
    )
