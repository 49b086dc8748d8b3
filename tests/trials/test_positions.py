"""Trials about positions and rotary tables. Each is named after the public report it retells."""

from __future__ import annotations

import pytest
import torch

import megacp
from megacp import Layout, Mask


def _table(length, dim=8):
    """cos and sin of a plain rotary table, [length, dim / 2, 2]."""
    angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
    return torch.stack([angles.cos(), angles.sin()], -1)


def _rotate(x, rows):
    """Rotate pairs of the last dim, [S, dim]."""
    cos, sin = rows.unbind(-1)
    even, odd = x[:, 0::2], x[:, 1::2]
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(1)


def _found(rotated, table):
    """Which table row was used for each token: the rotation of ones tells."""
    every = _rotate(torch.ones(len(table), 8), table)
    return [int((every == row).all(-1).nonzero()) for row in rotated]


# -- D10: rotary positions of the second and later documents (Megatron-LM#5243, #1473, #4075) ----------------------------


def test_d10_a_table_over_the_packed_row_and_one_that_restarts_are_both_right():
    cu_seqlens, table = [0, 4, 8], _table(8)
    layout, mask = Layout.per_document(cu_seqlens, 2), Mask.documents(cu_seqlens)
    right = {"packed": [[0, 3, 4, 7], [1, 2, 5, 6]], "restart": [[0, 3, 0, 3], [1, 2, 1, 2]]}
    for rank in (0, 1):
        packed = layout.positions(rank)
        restart = layout.shard(mask.document_positions(), rank, dim=0)
        assert packed.dtype == restart.dtype == torch.int64
        assert packed.tolist() == right["packed"][rank] and restart.tolist() == right["restart"][rank]
        ones = torch.ones(4, 8)
        assert _found(_rotate(ones, table[packed]), table) == right["packed"][rank]
        assert _found(_rotate(ones, table[restart]), table) == right["restart"][rank]


@pytest.mark.parametrize("make", [Layout.zigzag, Layout.contiguous])
def test_d10_positions_of_documents_of_six_and_ten(make):
    mask, layout = Mask.documents([0, 6, 16]), make(16, 2)
    restart = mask.document_positions()
    assert restart.tolist() == [*range(6), *range(10)]
    batch = {"tokens": torch.arange(16)[None], "position_ids": restart[None]}
    for rank in (0, 1):
        local = megacp.shard(batch, layout, rank=rank)
        assert torch.equal(local["tokens"][0], layout.positions(rank))
        assert torch.equal(local["position_ids"][0], restart[layout.positions(rank)])


def test_d10_documents_alone_have_the_padding_marked():
    layout = Layout.per_document([0, 6, 16], 2)
    assert layout.positions(0).tolist() == [0, 1, -1, -1, 6, 7, 8, 15, -1, -1]
    assert layout.positions(1).tolist() == [2, 3, 4, 5, 9, 10, 11, 12, 13, 14]


# -- D25: rotary tables built from the local length (Megatron-LM#4977) ---------------------------------------------------


def test_d25_rows_of_the_table_are_those_of_the_global_positions():
    layout, table = Layout.zigzag(32, 4), _table(32)
    assert layout.positions(1).tolist() == [4, 5, 6, 7, 24, 25, 26, 27]
    for rank in range(4):
        local = layout.shard(table, rank, dim=0)
        assert torch.equal(local, table[layout.positions(rank)])
    assert torch.equal(layout.unshard([layout.shard(table, rank, dim=0) for rank in range(4)], dim=0), table)


def test_d25_positions_of_three_kinds_at_once_are_split_on_their_last_dim():
    ids = torch.stack([torch.arange(16), torch.arange(16) * 2, torch.arange(16) * 3])[:, None].expand(
        3, 2, 16
    )
    local = megacp.shard({"position_ids": ids}, Layout.zigzag(16, 2), rank=1)["position_ids"]
    assert local.shape == (3, 2, 8) and local[2, 0].tolist() == [3 * p for p in range(4, 12)]
