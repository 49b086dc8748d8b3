"""PyTorch's own flash attention for CUDA, by its operators of packed sequences with log-sum-exp. Not yet run on a GPU.

These are the operators under ``torch.nn.attention.varlen``: full, causal and window masks aligned at the bottom right, GQA without
expansion. There is no softcap. Head sizes that differ, or are no multiple of 8, are filled up with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch

from megacp.kernels import Gradients, Options, Request, not_offered, packed, signatures
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "sdpa_cuda"

_DEVICE = "cuda"
_flash: Any = torch.ops.aten._flash_attention_forward.default
_flash_backward: Any = torch.ops.aten._flash_attention_backward.default


def refuses(request: Request) -> str | None:
    """Refuse other devices, other dtypes than 16-bit, softcap, and head sizes above 256."""
    reason = packed.refusal(request, "PyTorch's flash operator", _DEVICE)
    if reason is None and request.options.softcap is not None:
        reason = "PyTorch's flash operator has no softcap"
    if reason is None and max(request.head_dim, request.value_dim) > 256:
        reason = f"PyTorch's flash operator has head sizes up to 256, not {max(request.head_dim, request.value_dim)}"
    return reason or not_offered(request.options) or _unfit()


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each mask among the blocks."""
    return packed.forward(q, k, v, blocks, options, _attend, windows=True)


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
    packed.backward(d_out, q, k, v, out, lse, blocks, options, into, _attend_backward, windows=True)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: packed.Call, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    value_dim = v.shape[-1]
    q, k, v = packed.widened(q, k, v)
    out, lse, *_ = _flash(
        q,
        k,
        v,
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.is_causal,
        False,
        scale=options.scale,
        window_size_left=call.window,
        window_size_right=0 if call.is_causal else -1,
    )
    return out[..., :value_dim], lse


def _attend_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: packed.Call,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    d_out, q, k, v, out = packed.widened(d_out, q, k, v, out)
    # The state of the generator is read only with dropout.
    state, unused = torch.zeros(2, dtype=torch.uint64, device=q.device), q.new_empty(0)
    dq, dk, dv = _flash_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        call.cu_q,
        call.cu_k,
        call.max_q,
        call.max_k,
        0.0,
        call.is_causal,
        state,
        unused,
        scale=options.scale,
        window_size_left=call.window,
        window_size_right=0 if call.is_causal else -1,
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


@lru_cache(maxsize=1)
def _unfit() -> str | None:
    """Say why this PyTorch's operators are not those relied on; shapes are asked of their description, without a device."""
    wanted = (
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "is_causal",
        "scale",
        "window_size_left",
        "window_size_right",
    )
    for operator in (_flash, _flash_backward):
        missing = signatures.lacks(operator, *wanted)
        if missing is not None:
            return f"this PyTorch's {operator.name()} has no parameter {missing}"
    q, cu = (
        torch.empty(4, 2, 8, dtype=torch.bfloat16, device="meta"),
        torch.empty(2, dtype=torch.int32, device="meta"),
    )
    lse = _flash(q, q, q, cu, cu, 4, 4, 0.0, True, False)[1]
    if lse.shape != (2, 4):
        return f"this PyTorch's flash operator pads the log-sum-exp of packed sequences to {tuple(lse.shape)}"
    return None
