"""The truth that distributed results are held against: one process, float64, an explicit boolean mask.

Shares no code with the package, on purpose: masks, positions and softmax are written a second time here, in the
plainest way there is. Everything is quadratic in the sequence length, so keep it small.

Legend: B batch, G global sequence, H query heads, K key/value heads, D head size of q and k, E head size of v.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

# -- masks: bool [G, G], True where query i (row) may see key j (column) -----------------------------------------------


def full(length: int) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool)


def causal(length: int, window: int | None = None) -> Tensor:
    """`window` counts the visible keys, the query's own position included."""
    mask = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        first = 0 if window is None else max(0, i - window + 1)
        mask[i, first : i + 1] = True
    return mask


def documents(cu_seqlens: list[int], is_causal: bool = True, window: int | None = None) -> Tensor:
    mask = torch.zeros(cu_seqlens[-1], cu_seqlens[-1], dtype=torch.bool)
    for start, stop in itertools.pairwise(cu_seqlens):
        inside = causal(stop - start, window) if is_causal else full(stop - start)
        mask[start:stop, start:stop] = inside
    return mask


def prefix(length: int, size: int) -> Tensor:
    """The first `size` tokens see each other; everything else is causal."""
    mask = causal(length)
    mask[:size, :size] = True
    return mask


def offsets(lengths: list[int]) -> list[int]:
    """[5, 3, 8] -> [0, 5, 8, 16]."""
    cu = [0]
    for length in lengths:
        cu.append(cu[-1] + length)
    return cu


# -- attention ---------------------------------------------------------------------------------------------------------


@dataclass
class Truth:
    """Everything in float64. out [B, G, H, E]; lse [B, H, G]; gradients shaped like their inputs."""

    out: Tensor
    lse: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dsinks: Tensor | None = None


def forward(q, k, v, mask, *, scale=None, sinks=None, softcap=None):
    """Plain softmax attention. q [B, G, H, D], k [B, G, K, D], v [B, G, K, E] -> out [B, G, H, E], lse [B, H, G].

    A row that sees no key has out 0 and lse -inf. `sinks` [H] are logits of one extra key with value 0.
    """
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    logits = logits.masked_fill(~mask, float("-inf"))
    columns = logits
    if sinks is not None:
        columns = torch.cat([logits, sinks[None, :, None, None].expand(*logits.shape[:3], 1)], dim=-1)
    lse = torch.logsumexp(columns, dim=-1)
    sees = (columns > float("-inf")).any(-1)
    weights = torch.exp(logits - lse.masked_fill(~sees, 0.0)[..., None])
    return torch.einsum("bhij,bjhe->bihe", weights, v), lse


def attention(q, k, v, mask, d_out, *, scale=None, sinks=None, softcap=None, d_lse=None) -> Truth:
    """Give outputs and all gradients in float64, for the upstream gradients d_out and, if given, d_lse."""
    q, k, v = (x.detach().double().clone().requires_grad_() for x in (q, k, v))
    leaves = [q, k, v]
    if sinks is not None:
        sinks = sinks.detach().double().clone().requires_grad_()
        leaves.append(sinks)
    out, lse = forward(q, k, v, mask, scale=scale, sinks=sinks, softcap=softcap)
    total = (out * d_out.double()).sum()
    if d_lse is not None:
        total = total + (torch.where(lse.isinf(), 0.0, lse) * d_lse.double()).sum()
    grads = torch.autograd.grad(total, leaves)
    return Truth(out.detach(), lse.detach(), *grads)


def rel(a: Tensor, b: Tensor) -> float:
    """||a - b|| / ||b||, in float64; not a number, where either is not, counts as infinitely far.

    Infinities (the lse of rows that see nothing) must sit at the same places, and are then left out.
    """
    a, b = a.detach().double(), b.detach().double()
    assert a.shape == b.shape, f"shapes differ: {tuple(a.shape)} and {tuple(b.shape)}"
    same = a.isinf() & (a == b)
    a, b = a.masked_fill(same, 0.0), b.masked_fill(same, 0.0)
    if not (a.isfinite().all() and b.isfinite().all()):
        return float("inf")
    norm = float(b.norm())
    return float((a - b).norm()) / norm if norm > 0 else float((a - b).norm())
