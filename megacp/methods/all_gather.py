"""All-gather: every rank gets all keys and values once, in global order, and attends to what its queries see.

The backward pass gathers them again rather than keeping them, and reduce-scatters their gradients in float32.
One exchange and the fewest kernel calls; the price is room for the whole sequence's keys and values during the call.

Source: Llama 3 (arXiv 2407.21783), section 3.3.2; Megatron-LM's and Transformer Engine's "all_gather".
"""

from __future__ import annotations

import numpy as np
import torch

from megacp import comm, kernels
from megacp.merge import State
from megacp.methods import Call, accumulation_dtype
from megacp.plans import ALL_OWNERS, Plan, Step, merged, queries_of

__all__ = ["aliases", "backward", "forward", "name", "steps", "tokens_received"]

name = "all_gather"
aliases: tuple[str, ...] = ("allgather",)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gather keys and values, then attend."""
    state = State((*q.shape[:3], v.shape[-1]), accumulation_dtype(q.dtype), q.device)
    k_global, v_global = _gathered(k, call, "forward (keys)"), _gathered(v, call, "forward (values)")
    for step in call.plan.steps(call.group.rank):
        for part in call.kernel.forward(q, k_global, v_global, step.blocks, call.at(step, q)):
            state.add(part)
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
    """Gather keys and values again, and send every token's gradients to its owner."""
    dtype = accumulation_dtype(q.dtype)
    k_global, v_global = _gathered(k, call, "backward (keys)"), _gathered(v, call, "backward (values)")
    into = kernels.Gradients(*(kernels.Sum(x, dtype) for x in (q, k_global, v_global)))
    for step in call.plan.steps(call.group.rank):
        call.kernel.backward(d_out, q, k_global, v_global, out, lse, step.blocks, call.at(step, q), into)
    dq, dk, dv = (total.tensor for total in into)
    return dq, _returned(dk, call, "keys"), _returned(dv, call, "values")


def steps(plan: Plan, rank: int) -> tuple[Step, ...]:
    """One step: the rank's queries against everything, in global order."""
    blocks = merged(queries_of(plan.layout, plan.mask, rank))
    everything = np.array([(0, plan.layout.seq_len, 0)], np.int64)
    return (Step(0, ALL_OWNERS, blocks, q_pieces=plan.layout.pieces[rank], k_pieces=everything),)


def tokens_received(plan: Plan, rank: int, backward: bool) -> tuple[int, int]:
    """Count what the other ranks hold; backward as much again in gradients to add up."""
    others = (plan.layout.cp_size - 1) * plan.layout.local_len
    return others, others if backward else 0


def _gathered(x: torch.Tensor, call: Call, what: str) -> torch.Tensor:
    """Bring all ranks' keys (or values) into global order: [B, S, K, D] -> [B, G, K, D]."""
    ranks = comm.all_gather(call.group, x, f"the all-gather of {what}")  # [cp, B, S, K, D]
    return call.plan.layout.restore(ranks.transpose(0, 1).flatten(1, 2), dim=1)


def _returned(grad: torch.Tensor, call: Call, what: str) -> torch.Tensor:
    """Sum a global gradient over ranks and keep the rank's own tokens: [B, G, K, D] -> [B, S, K, D]."""
    layout = call.plan.layout
    ranks = layout.spread(grad, dim=1).unflatten(1, (layout.cp_size, layout.local_len)).transpose(0, 1)
    return comm.reduce_scatter(call.group, ranks, f"the reduce-scatter of the gradients of {what}")
