"""Dropout drawn from positions: the right share, the same on any part of the sequence, another one for every seed (trial D36)."""

from __future__ import annotations

import itertools

import pytest
import torch

from megacp import Layout, dropout


def test_d36_the_right_share_of_a_hidden_state_is_dropped_and_the_mean_is_kept() -> None:
    x = torch.ones(512, 2, 64, dtype=torch.float64)
    out = dropout.drop(x, 0.25, 5, torch.arange(512))
    assert set(out.unique().tolist()) == {0.0, 1 / 0.75}
    share = (out == 0).double()
    assert abs(float(share.mean()) - 0.25) < 0.01
    for dims, bound in (
        ((0, 1), 0.06),
        ((0, 2), 0.01),
        ((1, 2), 0.16),
    ):  # by feature, row and position: 4 sigma
        assert float((share.mean(dims) - 0.25).abs().max()) < bound


@pytest.mark.parametrize("cp", [2, 4])
def test_d36_ranks_drop_what_one_rank_drops_at_their_positions_and_not_the_same_as_each_other(
    cp: int,
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(64, 2, 16, generator=generator, dtype=torch.float64).requires_grad_()
    d_out = torch.randn(64, 2, 16, generator=generator, dtype=torch.float64)
    whole = dropout.drop(x, 0.1, 7, torch.arange(64))
    whole.backward(d_out)
    layout, masks = Layout.zigzag(64, cp), []
    for rank in range(cp):
        local = layout.shard(x.detach(), rank, dim=0).requires_grad_()
        out = dropout.drop(local, 0.1, 7, layout.positions(rank))
        out.backward(layout.shard(d_out, rank, dim=0))
        assert torch.equal(out, layout.shard(whole.detach(), rank, dim=0))
        assert local.grad is not None and x.grad is not None
        assert torch.equal(local.grad, layout.shard(x.grad, rank, dim=0))
        masks.append(out == 0)
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(masks, 2))


def test_large_hidden_states_are_drawn_in_parts_that_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    x, at = torch.ones(40, 2, 8), torch.arange(40)
    whole = dropout.drop(x, 0.5, 3, at)
    monkeypatch.setattr(dropout, "_AT_ONCE", 50)
    assert torch.equal(dropout.drop(x, 0.5, 3, at), whole)


def test_seeds_of_other_numbers_or_another_order_differ_and_fit_into_int64() -> None:
    seeds = [dropout.combined(*numbers) for numbers in itertools.product(range(6), repeat=4)]
    seeds += [dropout.combined(*numbers) for numbers in itertools.product(range(6), repeat=3)]
    assert len(set(seeds)) == len(seeds) and all(0 <= seed < 1 << 63 for seed in seeds)
    assert dropout.combined((1 << 64) - 1, 5) < 1 << 63


def test_masks_of_two_seeds_are_independent() -> None:
    x, at = torch.ones(256, 1, 64), torch.arange(256)
    a, b = (dropout.drop(x, 0.5, dropout.combined(9, n), at) == 0 for n in (1, 2))
    assert abs(float((a & b).double().mean()) - 0.25) < 0.02
