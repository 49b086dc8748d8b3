"""Dropout that does not depend on who computes it: whether a pair is dropped follows from its positions alone.

So the same pairs are dropped on one rank and on eight, and again when the forward pass is recomputed, and nothing has to be kept.
"""

from __future__ import annotations

import torch

__all__ = ["kept"]

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


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Spread every bit of x over all 64; int64 arithmetic wraps around, as the generator wants."""
    x = x + _GOLDEN
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - (1 << 64))
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - (1 << 64))
    return x ^ _shifted(x, 31)


def _shifted(x: torch.Tensor, by: int) -> torch.Tensor:
    """Shift right without the sign."""
    return (x >> by) & ((1 << (64 - by)) - 1)
