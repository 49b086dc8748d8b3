"""Split a batch over ranks and bring per-token results together again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from megacp import comm
from megacp.errors import ConfigError, ShapeError
from megacp.groups import Group, as_group
from megacp.layout import Layout

__all__ = ["PER_TOKEN", "gather", "shard"]

PER_TOKEN: dict[str, int] = {
    "tokens": 1,
    "input_ids": 1,
    "labels": 1,
    "loss_mask": 1,
    "loss_weights": 1,
    "position_ids": -1,
}
"""The fields of a batch that hold one value a token, and the dim of their tokens. Nothing else is split."""

_PAD: dict[str, float] = {"labels": -100}


def shard(
    batch: Mapping[str, Any],
    layout: Layout,
    group: Any = None,
    *,
    rank: int | None = None,
    fields: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Take this rank's part of a batch: declared per-token fields only, everything else (metadata, None, unknown keys) as it is.

    Args:
        rank: whose part; this process's rank in ``group`` if None.
        fields: name -> dim of the tokens, for fields beyond :data:`PER_TOKEN` (or another dim for one of those).
    Padding slots hold 0, and -100 in labels.
    Raises: ShapeError naming the field if a declared field has another length than the layout; ConfigError if the group's size
        is not the layout's.
    """
    if rank is None:
        members = as_group(group)
        _check(members, layout)
        rank = members.rank
    declared = {**PER_TOKEN, **(fields or {})}
    out = dict(batch)
    for name, dim in declared.items():
        value = batch.get(name)
        if isinstance(value, torch.Tensor):
            if not -value.dim() <= dim < value.dim() or value.shape[dim] != layout.seq_len:
                raise ShapeError(
                    f"megacp: field '{name}' of shape {tuple(value.shape)} does not hold {layout.seq_len} tokens on dim {dim}. "
                    "Pass the whole sequence (sharding a part again would lose tokens), or declare its dim in fields."
                )
            out[name] = layout.shard(value, rank, dim, _PAD.get(name, 0))
        elif value is not None:
            raise ShapeError(
                f"megacp: field '{name}' must be a tensor with one value a token, not a {type(value).__name__}."
            )
    return out


def gather(
    x: torch.Tensor,
    layout: Layout,
    group: Any = None,
    dim: int = 1,
    grad_factor: float = 1.0,
    sum_gradients: bool = False,
) -> torch.Tensor:
    """Bring every rank's part of a per-token tensor into global order, on every rank; padding is gone.

    Shapes: S slots on ``dim`` -> G tokens on ``dim``.
    Args:
        grad_factor: what gradients are multiplied by: the group's size where they are averaged over the group afterwards.
        sum_gradients: what the backward pass does with the gradient [.., G, ..] that each rank has of the result. Which is right
            depends on what is done with the result; with the other one gradients are off by up to the group's size a gather.

            - False: each rank keeps its own tokens' gradient as it is; nothing is sent. For work that every rank repeats up to the
              end, as a loss over the whole sequence is: all ranks hold the same gradient already.
            - True: gradients are summed over ranks before each keeps its own tokens'. For ranks that go on differently: each
              takes its own slice of what it computed (``layout.shard``), or has its own part of the loss. The weights between
              then have a part of their gradient on each rank, to be summed by the caller.

    Raises: ShapeError or ConfigError if the tensor or the group does not fit the layout.
    """
    members = as_group(group)
    _check(members, layout)
    if not -x.dim() <= dim < x.dim() or x.shape[dim] != layout.local_len:
        raise ShapeError(
            f"megacp: cannot gather a tensor of shape {tuple(x.shape)} on dim {dim}: layout '{layout.name}' gives each rank "
            f"{layout.local_len} slots. Pass this rank's part, and the dim that holds its tokens."
        )
    full: torch.Tensor = _Gather.apply(x, layout, members, dim % x.dim(), grad_factor, sum_gradients)  # type: ignore[no-untyped-call]
    return full


class _Gather(torch.autograd.Function):
    """All-gather and un-shard; backward takes the rank's own tokens, of its own gradient or of the sum over ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        layout: Layout,
        group: Group,
        dim: int,
        grad_factor: float,
        sum_gradients: bool,
    ) -> torch.Tensor:
        ctx.layout, ctx.group, ctx.dim, ctx.grad_factor, ctx.sums = (
            layout,
            group,
            dim,
            grad_factor,
            sum_gradients,
        )
        return layout.unshard(list(comm.all_gather(group, x, "the gathering of a result")), dim)

    @staticmethod
    def backward(ctx: Any, d_full: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None, None]:
        layout, group = ctx.layout, ctx.group
        if ctx.sums:
            parts = torch.stack([layout.shard(d_full, rank, ctx.dim) for rank in range(group.size)])
            d_x = comm.reduce_scatter(group, parts, "the sum of a gathered result's gradients")
        else:
            d_x = layout.shard(d_full, group.rank, ctx.dim)
        return d_x * ctx.grad_factor, None, None, None, None, None


def _check(group: Group, layout: Layout) -> None:
    if group.size != layout.cp_size:
        raise ConfigError(
            f"megacp: the layout is over cp_size {layout.cp_size}, the context-parallel group has {group.size} ranks. "
            "Make the layout for this group."
        )
