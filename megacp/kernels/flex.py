"""PyTorch's FlexAttention, for what no other kernel does: softcap and other sizes of heads on CUDA. Not yet run on a GPU.

All blocks of a step in which each query has one run of keys go in one call, whatever their masks: the mask function reads each query's
first and last key from two tensors, and the list of tiles to compute is made from those, so nothing quadratic is held.

FlexAttention's own backward takes no log-sum-exp from outside. But its log-sum-exp is differentiable, and the final result is a
function of each call's (out, lse), so the backward pass runs the call again and hands it these gradients, which are exact:

    w = exp(lse_part - lse),  d_out_part = w * d_out,  d_lse_part = w * (d_out . out_part - d_out . out)

The price is one more forward pass. Its operator for the backward (``flex_attention_backward``) would save that, but takes graphs
that only PyTorch's own tracing can make.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from megacp.kernels import Gradients, Options, Request, not_offered, signatures
from megacp.merge import Partial
from megacp.plans import Block
from megacp.slices import UNBOUNDED

__all__ = ["backward", "forward", "name", "refuses"]

name = "flex"

_DEVICE = "cuda"
_TILE = 128


class _Call(NamedTuple):
    """One call: rows, queries and keys it is about, and its mask."""

    rows: slice
    queries: slice
    keys: slice
    mask: Any


def refuses(request: Request) -> str | None:
    """Refuse other devices, float64, head sizes below 16, and a machine without Triton."""
    if request.device != _DEVICE:
        return f"PyTorch's FlexAttention computes gradients on {_DEVICE}, not {request.device}"
    if request.dtype == torch.float64:
        return "PyTorch's FlexAttention has no float64"
    if min(request.head_dim, request.value_dim) < 16:
        return f"PyTorch's FlexAttention has head sizes from 16 on, not {request.head_dim} and {request.value_dim}"
    reason = not_offered(request.options, "softcap")
    if reason is None and _DEVICE == "cuda" and not signatures.is_installed("triton"):
        reason = "the package triton is not installed, without which FlexAttention cannot be compiled"
    if reason is None and not hasattr(_flex(), "AuxRequest"):
        reason = "this PyTorch's flex_attention has no return_aux"
    return reason


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each set of blocks without a query in common."""
    for call in _calls(tuple(blocks), q.shape[0], q.shape[1], q.device):
        out, lse = _attend(
            q[call.rows, call.queries], k[call.rows, call.keys], v[call.rows, call.keys], call, options
        )
        yield Partial(out.transpose(1, 2), lse, call.rows, call.queries.start, call.queries.stop)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Sequence[Block],
    options: Options,
    into: Gradients,
) -> None:
    """Add the gradients of each call, by running it again; see the head of this file."""
    for call in _calls(tuple(blocks), q.shape[0], q.shape[1], q.device):
        of_queries, of_keys = (call.rows, call.queries), (call.rows, call.keys)
        q_part, k_part, v_part = (
            x.detach().requires_grad_() for x in (q[of_queries], k[of_keys], v[of_keys])
        )
        with torch.enable_grad():
            out_part, lse_part = _attend(q_part, k_part, v_part, call, options)
        d_final, final = (x[of_queries].transpose(1, 2).float() for x in (d_out, out))
        weight = torch.exp(lse_part.detach() - lse[call.rows, :, call.queries]).nan_to_num(0.0)  # [b, H, s]
        d_lse = weight * (d_final * (out_part.detach().float() - final)).sum(-1)
        d_part = (d_final * weight[..., None]).to(out_part.dtype)
        dq, dk, dv = torch.autograd.grad(
            (out_part, lse_part), (q_part, k_part, v_part), (d_part, d_lse.to(lse_part.dtype))
        )
        into.dq.add(dq, *of_queries)
        into.dk.add(dk, *of_keys)
        into.dv.add(dv, *of_keys)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: _Call, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return out [b, H, s, E] and lse [b, H, s]."""
    out, more = _function()(
        *(x.transpose(1, 2) for x in (q, k, v)),
        score_mod=_capped(options.softcap),
        block_mask=call.mask,
        scale=options.scale,
        enable_gqa=True,
        return_aux=_flex().AuxRequest(lse=True),
    )
    return out, more.lse


def _flex() -> Any:
    import torch.nn.attention.flex_attention as module  # loads the compiler's parts, so only when it is used

    return module


@lru_cache(maxsize=1)
def _function() -> Callable[..., Any]:
    # fullgraph: past PyTorch's limit of recompilations an error, not the uncompiled function, which holds all logits.
    compiled: Callable[..., Any] = torch.compile(_flex().flex_attention, dynamic=True, fullgraph=True)
    return compiled


@lru_cache(maxsize=16)
def _capped(softcap: float | None) -> Callable[..., torch.Tensor] | None:
    if softcap is None:
        return None
    cap: float = softcap

    def capped(score: torch.Tensor, *_: torch.Tensor) -> torch.Tensor:
        return cap * torch.tanh(score / cap)

    return capped


@lru_cache(maxsize=128)
def _calls(blocks: tuple[Block, ...], rows: int, slots: int, device: torch.device) -> tuple[_Call, ...]:
    """Sort blocks into calls in which each query has one run of keys."""
    of_all = all(block.row < 0 for block in blocks)
    height = 1 if of_all else rows
    out = []
    for group in _disjoint(blocks, height):
        q0, q1 = min(b.q_start for b in group), max(b.q_stop for b in group)
        k0, k1 = min(b.k_start for b in group), max(b.k_stop for b in group)
        first, last = np.ones((height, slots), np.int64), np.zeros((height, slots), np.int64)
        for block in group:
            which = slice(None) if block.row < 0 else slice(block.row, block.row + 1)
            queries = np.arange(block.q_start, block.q_stop)
            low, high = (queries + d if abs(d) < UNBOUNDED else None for d in (block.lo, block.hi))
            first[which, queries] = block.k_start - k0 if low is None else np.maximum(low, block.k_start) - k0
            last[which, queries] = (
                block.k_stop - 1 - k0 if high is None else np.minimum(high, block.k_stop - 1) - k0
            )
        mask = _mask(first[:, q0:q1], last[:, q0:q1], k1 - k0, device)
        out.append(_Call(slice(0, rows), slice(q0, q1), slice(k0, k1), mask))
    return tuple(out)


def _disjoint(blocks: tuple[Block, ...], height: int) -> list[list[Block]]:
    """Divide blocks into the fewest groups without a query in common."""
    groups: list[list[Block]] = []
    ends: list[list[int]] = []  # of each group, per row
    for block in sorted(blocks, key=lambda b: b.q_start):
        which = range(height) if block.row < 0 else [block.row]
        free = (i for i, end in enumerate(ends) if all(end[row] <= block.q_start for row in which))
        index = next(free, len(groups))
        if index == len(groups):
            groups.append([])
            ends.append([0] * height)
        groups[index].append(block)
        for row in which:
            ends[index][row] = block.q_stop
    return groups


def _mask(first: np.ndarray, last: np.ndarray, keys: int, device: torch.device) -> Any:
    """Make the block mask of queries that each see the keys first..last (none if first > last); int64 [rows, queries]."""
    rows, queries = first.shape
    tiles_q, tiles_k = -(-queries // _TILE), -(-keys // _TILE)
    grid = (rows, tiles_q, _TILE)
    pad = ((0, 0), (0, tiles_q * _TILE - queries))
    seen = first <= last
    low = np.pad(np.where(seen, first, keys), pad, constant_values=keys).reshape(grid)
    high = np.pad(np.where(seen, last, -1), pad, constant_values=-1).reshape(grid)
    start, stop = np.arange(tiles_k) * _TILE, np.minimum(np.arange(1, tiles_k + 1) * _TILE, keys)
    touched = (low.min(2)[..., None] < stop) & (high.max(2)[..., None] >= start)  # [rows, tiles_q, tiles_k]
    # A tile is full if all its queries see all its keys; a ragged last tile of queries has some that are none, and stays masked.
    full = (low.max(2)[..., None] <= start) & (high.min(2)[..., None] >= stop - 1) & (stop - start == _TILE)
    some, whole = _listed(touched & ~full, device), _listed(touched & full, device)
    of_first, of_last = (torch.from_numpy(np.ascontiguousarray(x)).to(device) for x in (first, last))
    is_one_row = rows == 1

    def visible(b: torch.Tensor, _: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        row = b * 0 if is_one_row else b
        return (of_first[row, i] <= j) & (j <= of_last[row, i])

    return _flex().BlockMask.from_kv_blocks(
        *some, *whole, BLOCK_SIZE=_TILE, mask_mod=visible, seq_lengths=(queries, keys)
    )


def _listed(tiles: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn bool [rows, tiles_q, tiles_k] into counts [rows, 1, tiles_q] and, set ones first, indices [rows, 1, tiles_q, tiles_k]."""
    order = np.argsort(~tiles, axis=2, kind="stable")
    return tuple(torch.from_numpy(x.astype(np.int32))[:, None].to(device) for x in (tiles.sum(2), order))  # type: ignore[return-value]
