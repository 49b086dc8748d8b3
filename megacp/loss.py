"""Losses over tokens that are split over ranks: sums and counts first, then one division."""

from __future__ import annotations

from typing import Any

import torch

from megacp import comm
from megacp.errors import ConfigError, ShapeError
from megacp.groups import Group, as_group

__all__ = ["masked_mean"]


def masked_mean(
    loss_per_token: torch.Tensor, weights: torch.Tensor, group: Any = None, reduction: str = "mean"
) -> torch.Tensor:
    """Average the loss over all valid tokens of all ranks; the same number on every rank.

    A token of weight 0 takes no part, even if its loss is NaN. A rank without valid tokens takes part in every exchange.
    With no valid token anywhere the mean is 0.

    Shapes: loss_per_token and weights of one shape, any dims -> a scalar in the loss's dtype.

    Args:
        reduction: how the caller reduces gradients over the group afterwards: "mean" (as Megatron's data parallelism does) or "sum".
            The gradient of this rank's tokens is scaled so that the reduced gradient is the one a single rank would have.
    Raises: ConfigError for another reduction; ShapeError if the shapes differ.
    """
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"megacp: reduction {reduction!r} is not known. Use 'mean' or 'sum'.")
    if loss_per_token.shape != weights.shape:
        raise ShapeError(
            f"megacp: a loss of shape {tuple(loss_per_token.shape)} and weights of shape {tuple(weights.shape)} differ."
        )
    members = as_group(group)
    wide = torch.promote_types(loss_per_token.dtype, torch.float32)  # 16 bit cannot count to 257
    kept = torch.where(weights != 0, loss_per_token.to(wide) * weights.to(wide), 0)
    local = torch.stack([kept.sum(), weights.sum(dtype=wide)])
    factor = members.size if reduction == "mean" else 1
    mean: torch.Tensor = _MeanOverRanks.apply(local, members, factor)  # type: ignore[no-untyped-call]
    return mean.to(loss_per_token.dtype)


class _MeanOverRanks(torch.autograd.Function):
    """[sum, count] of this rank -> sum over ranks / count over ranks."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, group: Group, factor: int) -> torch.Tensor:
        summed, count = comm.total(group, local, "the sum of the loss").unbind()
        count = torch.where(count == 0, torch.ones_like(count), count)
        ctx.save_for_backward(count)
        ctx.factor = factor
        return summed / count

    @staticmethod
    def backward(ctx: Any, d_mean: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (count,) = ctx.saved_tensors
        d_sum = d_mean * ctx.factor / count
        return torch.stack([d_sum, torch.zeros_like(d_sum)]), None, None
