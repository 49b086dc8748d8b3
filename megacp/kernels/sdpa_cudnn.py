"""cuDNN's attention, by PyTorch's operators for it with log-sum-exp. Not yet run on a GPU.

The operators know full and square causal attention, so blocks are cut into those, one call each. Head sizes of q and v may differ
(192 and 128 of MLA without filling up). Keys and values are repeated for GQA, and their gradients summed: whether the operator takes
fewer heads of keys than of queries depends on the version of cuDNN, and cannot be asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from megacp.kernels import Gradients, Options, Request, Sum, cuts, not_offered, packed
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "sdpa_cudnn"

_DEVICE = "cuda"
_attend: Any = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_attend_backward: Any = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default


def refuses(request: Request) -> str | None:
    """Refuse other devices, other dtypes than 16-bit, softcap, and head sizes above 128 (q and k: 192)."""
    reason = packed.refusal(request, "cuDNN's attention", _DEVICE)
    if reason is None and request.options.softcap is not None:
        reason = "PyTorch's cuDNN operator has no softcap"
    sizes = (request.head_dim, request.value_dim)
    if reason is None and max(sizes) > 128 and not (sizes[0] <= 192 and sizes[1] <= 128):
        reason = f"cuDNN's attention has head sizes up to 128 (192 of q and k with 128 of v), not {sizes[0]} and {sizes[1]}"
    reason = reason or not_offered(request.options)
    if reason is None and _DEVICE == "cuda" and not torch.backends.cudnn.is_available():
        reason = "this PyTorch is built without cuDNN"
    return reason


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each call of the operator."""
    for part in (part for block in blocks for part in cuts.parts(block, square=True, windows=False)):
        q_part, k_part, v_part = _operands(q, k, v, part)
        out, lse, *_ = _attend(
            q_part, k_part, v_part, None, True, 0.0, part.is_causal, False, scale=options.scale
        )
        out, lse = out[..., : v.shape[-1]].transpose(1, 2), lse.reshape(lse.shape[:3])
        if part.flipped:
            out, lse = out.flip(1), lse.flip(2)
        yield Partial(out, lse, _rows(part), part.q_start, part.q_stop)


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
    for part in (part for block in blocks for part in cuts.parts(block, square=True, windows=False)):
        q_part, k_part, v_part = _operands(q, k, v, part)
        d_part, out_part = (_taken(x.to(q.dtype), part, "q") for x in (d_out, out))
        lse_part = lse[_rows(part), :, part.q_start : part.q_stop].float()
        lse_part = (lse_part.flip(2) if part.flipped else lse_part).contiguous()[..., None]
        seed, offset = (
            torch.zeros((), dtype=torch.int64, device=q.device) for _ in range(2)
        )  # read only with dropout
        dq, dk, dv = _attend_backward(
            d_part,
            q_part,
            k_part,
            v_part,
            out_part,
            lse_part,
            seed,
            offset,
            None,
            None,
            None,
            part.q_stop - part.q_start,
            part.k_stop - part.k_start,
            0.0,
            part.is_causal,
            scale=options.scale,
        )
        _add(into.dq, dq, part, "q")
        _add(into.dk, dk, part, "k")
        _add(into.dv, dv, part, "k")


def _rows(part: cuts.Part) -> slice:
    return slice(None) if part.row < 0 else slice(part.row, part.row + 1)


def _range(part: cuts.Part, which: str) -> slice:
    return slice(part.q_start, part.q_stop) if which == "q" else slice(part.k_start, part.k_stop)


def _operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, part: cuts.Part
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Take a part out, heads before tokens, keys and values repeated to the queries' heads: [b, H, s, size]."""
    times = q.shape[2] // k.shape[2]
    k_part, v_part = (_taken(x, part, "k").repeat_interleave(times, 1) for x in (k, v))
    return _taken(q, part, "q"), k_part, v_part


def _taken(x: torch.Tensor, part: cuts.Part, which: str) -> torch.Tensor:
    x = x[_rows(part), _range(part, which)]
    return packed.widened(x.flip(1) if part.flipped else x)[0].transpose(1, 2)


def _add(total: Sum, grad: torch.Tensor, part: cuts.Part, which: str) -> None:
    """Add a gradient [b, H, s, size], summed over the queries' heads that share one of the keys' and values'."""
    heads, size = total.shape[2:]
    if grad.shape[1] != heads:
        grad = grad.to(total.dtype).unflatten(1, (heads, -1)).sum(2)
    grad = grad.transpose(1, 2)[..., :size]
    total.add(grad.flip(1) if part.flipped else grad, _rows(part), _range(part, which))
