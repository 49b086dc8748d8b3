"""Join partial attention results over disjoint keys.

Shapes: ``B`` batch, ``S`` local sequence, ``H`` query heads, ``E`` head size of v.
Partial results and the running state are float32 (float64 for float64 inputs), whatever the inputs are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megacp.errors import ShapeError

__all__ = ["Partial", "State", "merge"]


class Partial(NamedTuple):
    """Attention of some queries over some keys.

    Shapes: out [b, s, H, E]; lse [b, H, s], natural log, of the rows ``rows`` of the batch and queries [q_start, q_stop).
    """

    out: torch.Tensor
    lse: torch.Tensor
    rows: slice = slice(None)
    q_start: int = 0
    q_stop: int | None = None


def merge(a: Partial, b: Partial) -> Partial:
    """Join two attention results of the same queries over disjoint keys.

    Shapes: out [B, S, H, E] float32 or float64; lse [B, H, S], natural log.
    Rows that saw no key have out 0 and lse -inf and merge as the identity; nothing overflows, however large the lse.
    Raises: ShapeError if the query ranges differ.
    Source: Milakov and Gimelshein 2018, eq. 3, in the form with the larger lse taken out.
    """
    if a.out.shape != b.out.shape or a.lse.shape != b.lse.shape or a[2:] != b[2:]:
        raise ShapeError(
            f"megacp: cannot merge results of shapes {tuple(a.out.shape)} and {tuple(b.out.shape)}."
        )
    weight_a, weight_b, lse = _weights(a.lse, b.lse)
    out = a.out * weight_a + b.out * weight_b
    return Partial(out, lse, *a[2:])


def _weights(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return each side's share as [b, s, H, 1], and the joint lse [b, H, s]."""
    top = torch.maximum(a, b)
    base = top.masked_fill(top == -torch.inf, 0)  # rows that neither side saw
    exp_a, exp_b = torch.exp(a - base), torch.exp(b - base)
    total = exp_a + exp_b
    lse = base + torch.log(total)
    total = total.masked_fill(total == 0, 1)
    return (exp_a / total).transpose(1, 2)[..., None], (exp_b / total).transpose(1, 2)[..., None], lse


@dataclass
class State:
    """The running result of all queries of a rank: add partial results, then finish.

    Shapes: out [B, S, H, E], lse [B, H, S], both in the accumulation dtype.
    """

    shape: tuple[int, int, int, int]
    dtype: torch.dtype
    device: torch.device
    out: torch.Tensor | None = None
    lse: torch.Tensor | None = None

    def add(self, part: Partial) -> None:
        """Merge a partial result in, in place."""
        size_b, size_s, heads, _ = self.shape
        stop = size_s if part.q_stop is None else part.q_stop
        if self.out is None or self.lse is None:
            if part.out.shape == self.shape:  # all queries at once: take it over
                self.out, self.lse = part.out.to(self.dtype), part.lse.to(self.dtype)
                return
            self.out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.lse = torch.full((size_b, heads, size_s), -torch.inf, dtype=self.dtype, device=self.device)
        out = self.out[part.rows, part.q_start : stop]
        lse = self.lse[part.rows, :, part.q_start : stop]
        weight_old, weight_new, joint = _weights(lse, part.lse.to(self.dtype))
        out.mul_(weight_old).addcmul_(part.out.to(self.dtype), weight_new)
        lse.copy_(joint)

    def finish(self, sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out, lse); rows that saw no key are 0 and -inf. ``sinks`` [H] are logits that take part but have no value."""
        size_b, size_s, heads, _ = self.shape
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
            self.lse = torch.full((size_b, heads, size_s), -torch.inf, dtype=self.dtype, device=self.device)
        if sinks is not None:
            weight, _, joint = _weights(self.lse, sinks.to(self.dtype).view(1, heads, 1).expand_as(self.lse))
            self.out, self.lse = self.out * weight, joint
        return self.out, self.lse
