"""All-to-all: heads for tokens. Each rank attends with its share of the heads over the whole sequence.

Queries, keys and values are exchanged so that every rank has all tokens, in global order, for some heads; the results go back the
same way. The mask is met as it is, so kernel calls are the fewest there are and work is equal whatever the mask and layout.
The price: no more ranks than query heads, nothing of the exchange is hidden behind work, and the backward pass moves inputs and
results again rather than keeping them a second time.

Source: DeepSpeed-Ulysses (arXiv 2309.14509); dividing heads that do not divide evenly is our own.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from megacp import heads, kernels
from megacp.merge import State
from megacp.methods import Call, accumulation_dtype
from megacp.plans import ALL_OWNERS, Plan, Sizes, Step, merged

__all__ = ["aliases", "backward", "elements_received", "forward", "name", "refuses", "steps", "team"]

name = "all_to_all"
aliases: tuple[str, ...] = ("a2a",)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Trade tokens for heads, attend, and trade back."""
    trade = _trade(q, k, call)
    call = replace(call, first_head=trade.mine.queries.start)
    q_all, k_all, v_all = trade.inputs(q, k, v)
    state = State((*q_all.shape[:3], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    for step in call.plan.steps(call.group.rank):
        for part in call.kernel.forward(q_all, k_all, v_all, step.blocks, call.at(step, q_all)):
            state.add(part)
    out, lse = state.finish(trade.sinks(sinks))
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
    trade, dtype = _trade(q, k, call), accumulation_dtype(q.dtype)
    call = replace(call, first_head=trade.mine.queries.start)
    d_all, q_all, k_all, v_all, out_all, lse_all = trade.backward_inputs(d_out, q, k, v, out, lse)
    into = kernels.Gradients(*(kernels.Sum(x, dtype) for x in (q_all, k_all, v_all)))
    for step in call.plan.steps(call.group.rank):
        call.kernel.backward(
            d_all, q_all, k_all, v_all, out_all, lse_all, step.blocks, call.at(step, q_all), into
        )
    return trade.gradients(into.dq.tensor, into.dk.tensor, into.dv.tensor, q.dtype)


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """One step: the whole mask, queries and keys in global order."""
    everything = np.array([(0, plan.layout.seq_len, 0)], np.int64)
    return (Step(0, ALL_OWNERS, merged(plan.mask.slices), q_pieces=everything, k_pieces=everything),)


def team(plan: Plan, rank: int) -> tuple[int, ...]:
    """Name all ranks: they divide the heads."""
    return tuple(range(plan.layout.cp_size))


def elements_received(plan: Plan, rank: int, sizes: Sizes, backward: bool) -> tuple[int, int]:
    """Count other ranks' tokens with this rank's heads coming in, and this rank's tokens with other heads coming back."""
    return heads.elements_received(plan.layout, sizes, plan.layout.cp_size, rank, backward)


def refuses(plan: Plan, heads: int, kv_heads: int) -> str | None:
    """Refuse more ranks than query heads: some would have nothing to do."""
    cp_size = plan.layout.cp_size
    if heads >= cp_size:
        return None
    return (
        f"all_to_all divides the {heads} query heads (and {kv_heads} key/value heads) over the ranks, so that {cp_size - heads} of "
        f"{cp_size} ranks would have none. Use at most {heads} ranks, or method 'hierarchical' with an inner size of at most {heads}"
    )


def _trade(q: torch.Tensor, k: torch.Tensor, call: Call) -> heads.Trade:
    return heads.Trade(call.group, call.plan.layout, 0, q.shape[2], k.shape[2])
