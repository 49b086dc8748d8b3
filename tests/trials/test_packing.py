"""Trials about packed documents. Each is named after the public report it retells."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import METHODS, Cell, check, inputs, joined, run_cells, vary


def _document_rows(layout, rank, cu_seqlens):
    """How many real tokens of each document a rank holds."""
    positions = layout.positions(rank)
    positions = positions[positions >= 0]
    return [int(((positions >= a) & (positions < b)).sum()) for a, b in itertools.pairwise(cu_seqlens)]


# -- D01: tail padding inside packed documents (TransformerEngine#3331, #1930, #1929; Megatron-LM#1669) -----------------


def test_d01_the_ranks_hold_the_real_tokens_of_padded_documents_unequally():
    layout = Layout.per_document([0, 7, 17, 30], 2)
    assert [_document_rows(layout, rank, [0, 7, 17, 30]) for rank in (0, 1)] == [[3, 4, 5], [4, 6, 8]]
    assert layout.local_len == (8 + 12 + 16) // 2
    long = Layout.per_document([0, 698], 4)
    assert [_document_rows(long, rank, [0, 698])[0] for rank in range(4)] == [170, 176, 176, 176]
    assert long.local_len == 704 // 4


@pytest.mark.parametrize("fill", [0.0, 1e3, math.nan])
@pytest.mark.parametrize("method", METHODS)
def test_d01_padding_between_documents_never_leaks_whatever_it_holds(method, fill):
    cell = Cell(
        mask=("documents", (7, 10, 13)), layout="per_document", heads=(2, 2), method=method, fill=fill
    )
    check([cell], 2)


@pytest.mark.parametrize("method", METHODS)
def test_d01_the_result_is_bit_identical_from_run_to_run_and_for_any_fill(method):
    cells = vary(
        Cell(mask=("documents", (7, 10, 13)), layout="per_document", heads=(2, 2), method=method),
        fill=[0.0, 0.0, 0.0, 1e3, -7.0, math.nan],
    )
    results = ranks.run(run_cells, 2, cells) + ranks.run(run_cells, 2, cells)
    for result in (results[:2], results[2:]):
        for i, cell in enumerate(cells):
            here, first = joined(cell, [r[i] for r in result]), joined(cells[0], [r[0] for r in results[:2]])
            assert all(torch.equal(here[name], first[name]) for name in first), cell


@pytest.mark.parametrize("method", METHODS)
def test_d01_one_long_document_with_a_ragged_end_is_exact_on_four_ranks(method):
    check(
        [
            Cell(
                mask=("documents", (698,)),
                layout="per_document",
                heads=(4, 1),
                batch=1,
                fill=1e3,
                method=method,
            )
        ],
        4,
    )


# -- D02: the ring ignores document boundaries (axolotl#3608, trl#6843) ------------------------------------------------


def _probe(method, layout_name, source, changed):
    """Output of documents [5, 3, 8], with token 0 changed if asked; the boundaries come from `source`."""
    cu_seqlens = [0, 5, 8, 16]
    mask = {
        "lengths": lambda: Mask.documents(cu_seqlens),
        "positions": lambda: Mask.from_positions(torch.tensor([*range(5), *range(3), *range(8)])),
        "tokens": lambda: Mask.from_tokens(torch.tensor([9, 9, 9, 9, 0, 9, 9, 0, *[9] * 8]), eod=0),
    }[source]()
    size, rank = dist.get_world_size(), dist.get_rank()
    makers = {
        "per_document": lambda: Layout.per_document(cu_seqlens, size),
        "zigzag": lambda: Layout.zigzag(16, size),
    }
    layout = makers[layout_name]() if layout_name in makers else Layout.contiguous(16, size)
    x = inputs(Cell(heads=(2, 2), batch=1))
    if changed:
        for name in "qkv":
            x[name][:, 0] += 1.0
    q, k, v = (layout.shard(x[name], rank) for name in "qkv")
    out = megacp.attention(q, k, v, mask=mask, layout=layout, method=method, kernel="reference")
    return megacp.gather(out, layout)


@pytest.mark.parametrize("source", ["lengths", "positions", "tokens"])
@pytest.mark.parametrize("layout_name", ["contiguous", "zigzag", "per_document"])
@pytest.mark.parametrize("method", METHODS)
def test_d02_a_document_sees_only_itself_however_its_boundaries_are_given(method, layout_name, source):
    before, after = (
        ranks.run(_probe, 2, method, layout_name, source, changed)[0] for changed in (False, True)
    )
    changed_rows = (before != after).any(-1).any(-1)[0].nonzero().flatten().tolist()
    assert changed_rows == [0, 1, 2, 3, 4]
    x = inputs(Cell(heads=(2, 2), batch=1))
    true = oracle.attention(x["q"], x["k"], x["v"], oracle.documents([0, 5, 8, 16]), x["d_out"])
    assert oracle.rel(before, true.out) <= 1e-10


# -- D22: the last token of a document is trained on the next one's first (verl#6564, bionemo-recipes#1449) -------------


def test_d22_labels_do_not_cross_documents():
    tokens = torch.tensor([[*range(100, 106), *range(200, 210)]])
    mask, layout = Mask.documents([0, 6, 16]), Layout.zigzag(16, 2)
    labels = mask.labels(tokens)
    batch = {"tokens": tokens, "labels": labels, "loss_mask": (labels != -100).float()}
    parts = [megacp.shard(batch, layout, rank=rank) for rank in (0, 1)]
    assert parts[0]["tokens"][0].tolist() == [100, 101, 102, 103, 206, 207, 208, 209]
    assert parts[0]["labels"][0].tolist() == [101, 102, 103, 104, 207, 208, 209, -100]
    assert parts[1]["tokens"][0].tolist() == [104, 105, 200, 201, 202, 203, 204, 205]
    assert parts[1]["labels"][0].tolist() == [105, -100, 201, 202, 203, 204, 205, 206]
    for part in parts:
        assert torch.equal(part["loss_mask"] == 0, part["labels"] == -100)
    assert sum(float(part["loss_mask"].sum()) for part in parts) == 14


def test_d22_rows_with_documents_of_their_own_get_labels_of_their_own():
    tokens = torch.arange(12).reshape(2, 6)
    labels = Mask.documents([[0, 2, 6], [0, 5, 6]]).labels(tokens)
    assert labels.tolist() == [[1, -100, 3, 4, 5, -100], [7, 8, 9, 10, -100, -100]]
    assert tokens.tolist() == torch.arange(12).reshape(2, 6).tolist()  # the caller's tensor is untouched


# -- D46: gathering leaves padding between documents (ms-swift#10182, #10184) -------------------------------------------


def _gather_codes(lengths, shape):
    layout = Layout.per_document(oracle.offsets(lengths), dist.get_world_size())
    codes = _codes(lengths, shape).requires_grad_()
    local = layout.shard(codes, dist.get_rank())
    full = megacp.gather(local, layout)
    weights = torch.arange(1.0, full.numel() + 1, dtype=full.dtype).reshape(full.shape)
    (full * weights).sum().backward()
    return full.detach(), codes.grad


def _codes(lengths, shape):
    """The value of each row is 100 * document + index."""
    rows = [100.0 * document + index for document, n in enumerate(lengths) for index in range(n)]
    return (
        torch.tensor(rows, dtype=torch.float64)
        .reshape(1, -1, *[1] * len(shape))
        .expand(2, -1, *shape)
        .contiguous()
    )


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)])
@pytest.mark.parametrize("lengths", [[3, 5], [1, 7, 2]])
def test_d46_gathered_rows_split_at_the_real_boundaries(lengths, shape):
    results = ranks.run(_gather_codes, 2, lengths, shape)
    for full, grad in results:
        assert torch.equal(full, _codes(lengths, shape))
        assert grad.shape == full.shape
    second = results[0][0].split(lengths, dim=1)[1].reshape(2, lengths[1], -1)[0, :, 0]
    assert second.tolist() == [100.0 + i for i in range(lengths[1])]
    summed = results[0][1] + results[1][1]  # every token's gradient comes from its one owner
    assert torch.equal(summed.flatten(), torch.arange(1.0, summed.numel() + 1, dtype=summed.dtype))


# -- D57: documents shorter than 2 * cp, and ranks without work (verl#4656, MagiAttention#9, Megatron-LM#4494) ----------


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "per_document"])
@pytest.mark.parametrize("method", METHODS)
def test_d57_documents_of_one_two_and_three_tokens_are_exact_on_four_ranks(method, layout):
    masks = [("documents", (1, 2, 3, 40)), ("documents", (1, 1, 1)), ("documents", (2, 1, 3, 1, 2), False)]
    check(vary(Cell(method=method, layout=layout), mask=masks), 4)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("method", METHODS)
def test_d57_a_rank_that_holds_only_padding_takes_part_and_returns_zeros(method, kernel):
    assert Layout.contiguous(5, 4).ranges(3) == []
    dtype = torch.float64 if kernel == "reference" else torch.float32
    cells = vary(
        Cell(mask=("causal", 5), layout="contiguous", method=method, kernel=kernel, dtype=dtype),
        format=["bshd", "thd"],
    )
    results = ranks.run(run_cells, 4, cells)
    check(cells, 4, results=results)
    last = results[3][0]
    assert last["out"].shape == (2, 2, 4, 8) and last["dk"].shape == (2, 2, 2, 8)
    assert not any(bool(last[name].any()) for name in ("out", "dq", "dk", "dv"))


def test_d57_empty_documents_count_for_nothing():
    with_empty, without = Mask.documents([0, 0, 3, 3, 3, 8, 8]), Mask.documents([0, 3, 8])
    assert torch.equal(with_empty.dense(), without.dense())
    assert torch.equal(with_empty.labels(torch.arange(8)), without.labels(torch.arange(8)))
    assert Layout.per_document([0, 0, 3, 3, 8], 2).local_len == Layout.per_document([0, 3, 8], 2).local_len


# -- D64: other per-token fields (ms-swift#10180) ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_d64_every_field_is_placed_alike_and_keeps_its_dtype(dtype):
    layout = Layout.per_document([0, 3, 8], 2)
    field = torch.arange(1, 9)[None].to(dtype)
    batch = {
        "visual": field,
        "tokens": torch.arange(1, 9)[None],
        "states": torch.arange(1.0, 9.0).reshape(1, 8, 1).expand(1, 8, 3),
    }
    right = [[1, 0, 4, 5, 0, 0], [2, 3, 6, 7, 8, 0]]
    for rank in (0, 1):
        part = megacp.shard(batch, layout, rank=rank, fields={"visual": 1, "states": 1})
        assert part["tokens"][0].tolist() == right[rank]
        assert part["visual"].dtype == dtype and torch.equal(
            part["visual"][0], torch.tensor(right[rank]).to(dtype)
        )
        assert part["states"][0, :, 2].tolist() == right[rank]


# -- D73: padding blow-up (MagiAttention#46) ---------------------------------------------------------------------------


def test_d73_the_layout_tells_how_much_it_pads():
    cu_seqlens = oracle.offsets([17] * 100)
    alone, whole = Layout.per_document(cu_seqlens, 8), Layout.zigzag(1700, 8)
    assert (alone.seq_len, alone.local_len * 8, alone.padding) == (1700, 3200, 1500)
    assert (whole.seq_len, whole.local_len * 8, whole.padding) == (1700, 1712, 12)


def test_d73_the_plan_tells_it_too_and_warns_above_half_as_much_again():
    cu_seqlens = oracle.offsets([17] * 100)
    mask = Mask.documents(cu_seqlens)
    with pytest.warns(
        UserWarning, match=r"'per_document'.* 3,200 slots for 1,700 tokens, 1.88 times .*'balanced'"
    ):
        plan = megacp.plan(Layout.per_document(cu_seqlens, 8), mask)
    assert "1700 tokens in 3200 slots" in repr(plan)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for layout in (Layout.zigzag(1700, 8), Layout.balanced(mask, 8)):
            assert megacp.plan(layout, mask, "exchange").layout.padding <= 12
