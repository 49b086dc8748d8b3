"""PyTorch's own flash attention for the CPU, by its two operators that give and take the log-sum-exp.

The operators know full attention, square causal attention and an additive mask. Blocks are cut into those: a causal block into
one full rectangle and one square triangle, a banded one into narrow masked tiles, so that nothing quadratic is held.
16-bit inputs are computed in float32, which is both exact to the last rounding and, on a CPU, faster.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional as F

from megacp.kernels import Gradients, Options, Request, not_offered, rows_of
from megacp.kernels.cuts import corner
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "sdpa"

_TILE = 128
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refuses(request: Request) -> str | None:
    """Refuse other devices and a softcap."""
    if request.device != "cpu":
        return f"runs on cpu, not {request.device}"
    if request.options.softcap is not None:
        return "PyTorch's flash operator has no softcap"
    return not_offered(request.options)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each call of the operator."""
    for part in (part for block in blocks for part in _parts(block)):
        rows, queries, keys = _slices(part)
        q_part, k_part, v_part, value_dim = _operands(q[rows, queries], k[rows, keys], v[rows, keys])
        out, lse = _flash(
            q_part,
            k_part,
            v_part,
            0.0,
            part.kind == "causal",
            attn_mask=_bias(part, q_part),
            scale=options.scale,
        )
        yield Partial(out.transpose(1, 2)[..., :value_dim], lse, rows, part.q_start, part.q_stop)


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
    """Add the gradients of each call, by the operator's own backward."""
    for part in (part for block in blocks for part in _parts(block)):
        rows, queries, keys = _slices(part)
        q_part, k_part, v_part, value_dim = _operands(q[rows, queries], k[rows, keys], v[rows, keys])
        width = v_part.shape[-1]
        d_part, o_part = _heads_first(d_out[rows, queries], width), _heads_first(out[rows, queries], width)
        dq, dk, dv = _flash_backward(
            d_part,
            q_part,
            k_part,
            v_part,
            o_part,
            lse[rows, :, queries].to(q_part.dtype),
            0.0,
            part.kind == "causal",
            attn_mask=_bias(part, q_part),
            scale=options.scale,
        )
        head_dim = q.shape[-1]
        into.dq.add(dq.transpose(1, 2)[..., :head_dim], rows, queries)
        into.dk.add(dk.transpose(1, 2)[..., :head_dim], rows, keys)
        into.dv.add(dv.transpose(1, 2)[..., :value_dim], rows, keys)


def _parts(block: Block) -> Iterator[Block]:
    """Cut a block into full rectangles, square triangles (kind 'causal') and narrow masked tiles (kind 'banded')."""
    _, q0, q1, k0, k1, lo, hi = block
    if block.kind == "full":
        yield block
    elif block.kind == "causal":
        yield from corner(block)
    else:
        for start in range(q0, q1, _TILE):
            stop = min(start + _TILE, q1)
            yield block._replace(
                q_start=start, q_stop=stop, k_start=max(k0, start + lo), k_stop=min(k1, stop + hi)
            )


def _bias(part: Block, q: torch.Tensor) -> torch.Tensor | None:
    """Return the additive mask of a banded tile, [s, t]."""
    if part.kind != "banded":
        return None
    delta = (
        torch.arange(part.k_start, part.k_stop)[None, :] - torch.arange(part.q_start, part.q_stop)[:, None]
    )
    hidden = (delta < part.lo) | (delta > part.hi)
    return torch.zeros(delta.shape, dtype=q.dtype).masked_fill(hidden, -torch.inf)


def _slices(part: Block) -> tuple[slice, slice, slice]:
    return rows_of(part), slice(part.q_start, part.q_stop), slice(part.k_start, part.k_stop)


def _operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Bring heads forward, [b, heads, s, dim]; the operator wants one head size, so the smaller one is filled with zeros."""
    width = max(q.shape[-1], v.shape[-1])
    return _heads_first(q, width), _heads_first(k, width), _heads_first(v, width), v.shape[-1]


def _heads_first(x: torch.Tensor, width: int) -> torch.Tensor:
    if x.dtype in (torch.bfloat16, torch.float16):
        x = x.float()
    if x.shape[-1] < width:
        x = F.pad(x, (0, width - x.shape[-1]))
    return x.transpose(1, 2)
