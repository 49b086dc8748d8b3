"""Dropout that does not depend on who computes it: whether a pair is dropped follows from its positions alone.

So the same pairs are dropped on one rank and on eight, and again when the forward pass is recomputed, and nothing has to be kept.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["combined", "drop", "kept"]

_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)


def kept(
    p: float, seed: int, rows: torch.Tensor, heads: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Say which (query, key) pairs are kept, each with probability 1 - p, bool [b, h, s, t].

    Args:
        rows [b], heads [h], queries [s], keys [t]: int64 numbers of the row of the micro-batch, the head of the whole model, and the
            global positions.
    Source: the generator is SplitMix64 (Steele, Lea and Flood 2014), used as a hash of its counters.
    """
    state = _mixed(torch.tensor(seed, dtype=torch.int64, device=queries.device))
    state = _mixed(state + rows[:, None] * _GOLDEN)  # [b, 1]
    state = _mixed(state + heads * _GOLDEN)  # [b, h]
    state = _mixed(state[..., None] + queries * _GOLDEN)  # [b, h, s]
    state = _mixed(state[..., None] + keys * _GOLDEN)  # [b, h, s, t]
    uniform = _shifted(state, 11).to(torch.float64) * 2.0**-53
    return uniform >= p


def drop(x: torch.Tensor, p: float, seed: int, positions: torch.Tensor) -> torch.Tensor:
    """Set each element to 0 with probability p and divide the others by 1 - p; which ones follows from seed and position.

    Shapes: x [S, B, hidden]; positions int64 [S], global. Nothing is kept for the backward pass, it draws the same again.
    """
    out: torch.Tensor = _Drop.apply(x, p, seed, positions)  # type: ignore[no-untyped-call]
    return out


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, p: float, seed: int, positions: torch.Tensor) -> torch.Tensor:
        ctx.what = p, seed, positions
        return _scaled(x, p, seed, positions)

    @staticmethod
    def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _scaled(d_out, *ctx.what), None, None, None


_AT_ONCE = 1 << 22  # elements; the generator takes some 40 bytes for each


def _scaled(x: torch.Tensor, p: float, seed: int, positions: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(x.shape[1], device=x.device)
    features = torch.arange(x.shape[2], device=x.device)
    positions, one = positions.to(x.device), rows.new_zeros(1)
    out = torch.empty_like(x)
    step = max(1, _AT_ONCE // max(1, x.shape[1] * x.shape[2]))
    for i in range(0, x.shape[0], step):
        keep = kept(p, seed, rows, one, positions[i : i + step], features)[:, 0].transpose(0, 1)
        out[i : i + step] = torch.where(keep, x[i : i + step] / (1 - p), 0)
    return out


def combined(*numbers: int) -> int:
    """Make one seed of several numbers, 0 <= seed < 2**63; another one if any of them, or their order, differs."""
    state = 0
    for number in numbers:
        state = _mixed_int(state + (number + 1) * (_GOLDEN & _ALL))
    return state >> 1


_ALL = (1 << 64) - 1


def _mixed_int(x: int) -> int:
    """Do what :func:`_mixed` does, to a number without sign."""
    x = (x + _GOLDEN) & _ALL
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _ALL
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _ALL
    return x ^ (x >> 31)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Spread every bit of x over all 64; int64 arithmetic wraps around, as the generator wants."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
