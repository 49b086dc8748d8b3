"""Trials about the numbers of attention. Each is named after the public report it retells."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import (
    METHODS,
    Cell,
    check,
    errors,
    inputs,
    joined,
    our_layout,
    run_cells,
    truth,
    vary,
)

# -- D04: ring backward uses the first step's keys and values (diffusers#14265) -----------------------------------------


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_d04_each_gradient_is_exact_in_every_chunk_of_every_rank(method, cp_size):
    cells = vary(
        Cell(method=method, heads=(4, 4), dims=(16, 16), batch=1), mask=[("causal", 64), ("full", 64)]
    )
    results = ranks.run(run_cells, cp_size, cells)
    for i, cell in enumerate(cells):
        layout, true = our_layout(cell, cp_size), truth(cell)
        for rank, result in enumerate(results):
            at = 0
            for start, stop in layout.ranges(rank):
                for name in ("dq", "dk", "dv"):
                    chunk = result[i][name][:, at : at + stop - start]
                    assert oracle.rel(chunk, getattr(true, name)[:, start:stop]) <= 1e-10, (cell, rank, name)
                at += stop - start


# -- D11: a sliding window lost (accelerate#4177, prime-rl#2828, Megatron-LM#1160) --------------------------------------


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
def test_d11_a_window_counts_the_visible_keys_itself_included(method, layout):
    masks = [("causal", 64, 8), ("causal", 64), ("causal", 64, 3), ("causal", 64, 1), ("causal", 64, 200)]
    base = Cell(method=method, layout=layout, heads=(4, 4), dims=(16, 16), batch=1)
    check(vary(base, mask=masks), 4)
    check([replace(base, mask=("causal", 64, 8), kernel="sdpa", dtype=torch.float32)], 4)


def test_d11_a_window_of_no_keys_is_refused():
    for window in (0, -1):
        with pytest.raises(megacp.ConfigError, match=f"window {window}"):
            Mask.causal(8, window=window)


# -- D12: the caller's mask is thrown away (accelerate#4177, VeOmni#1085) ------------------------------------------------


def _refusal_of(mask):
    layout = Layout.zigzag(32, 2)
    q = torch.zeros(1, 16, 2, 8)
    try:
        megacp.attention(q, q, q, mask=mask, layout=layout)
    except megacp.UnsupportedError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("kind", ["right padding", "prefix", "all true", "causal", "none"])
def test_d12_a_dense_attention_mask_is_refused_by_name_on_every_rank(kind):
    mask = {
        "right padding": torch.arange(32) < 27,
        "prefix": oracle.prefix(32, 8),
        "all true": oracle.full(32),
        "causal": oracle.causal(32),
        "none": None,
    }[kind]
    refusals = ranks.run(_refusal_of, 2, mask)
    assert refusals[0] == refusals[1] and "attention_mask" in refusals[0] and "Mask.prefix" in refusals[0]


@pytest.mark.parametrize("method", METHODS)
def test_d12_what_such_masks_mean_is_honoured_exactly(method):
    padded = ("documents", (27, *[1] * 5))  # each pad token alone: nothing real sees one
    masks = [padded, ("prefix", 32, 8), ("full", 32), ("causal", 32)]
    check(vary(Cell(method=method), mask=masks, layout=["contiguous", "zigzag"]), 2)


# -- D31: 16-bit error grows with the ring size (ring-flash-attention#42, flash-attention#2723) -------------------------


@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
@pytest.mark.parametrize("method", METHODS)
def test_d31_the_bfloat16_error_does_not_grow_with_the_number_of_ranks(method, kernel):
    length = 1024
    cell = Cell(
        mask=("causal", length),
        heads=(4, 4),
        dims=(64, 64),
        batch=1,
        dtype=torch.bfloat16,
        method=method,
        kernel=kernel,
    )
    true, found = truth(cell), {}
    for cp_size in (1, 2, 4):
        results = ranks.run(run_cells, cp_size, [cell])
        found[cp_size] = errors(cell, joined(cell, [result[0] for result in results]), true)
    for name in ("out", "dq", "dk", "dv"):
        for cp_size in (2, 4):
            assert found[cp_size][name] <= 1.15 * found[1][name], (name, found)
            assert found[cp_size][name] < 1e-2


# -- D32: the merge of log-sum-exps overflows (TransformerEngine#716) ----------------------------------------------------


def _natural_errors(got, true, x):
    """Errors beside the size of what is summed up: with one key taking all the weight, the gradients of q and k are
    small differences of terms as large as the keys and queries, and have no more digits than those terms leave them."""
    size = {"dq": x["k"].norm(), "dk": x["q"].norm()}
    found = {name: oracle.rel(got[name], getattr(true, name)) for name in ("out", "lse", "dv")}
    return found | {
        name: float((got[name] - getattr(true, name)).norm() / size[name]) for name in ("dq", "dk")
    }


@pytest.mark.parametrize("method", METHODS)
def test_d32_logits_of_ten_thousand_neither_overflow_nor_lose_digits(method):
    base = Cell(mask=("causal", 32), method=method, heads=(4, 4), dims=(8, 8))
    large = vary(base, spread=[60.0], layout=["contiguous", "zigzag"])
    results = ranks.run(run_cells, 4, large)
    for i, cell in enumerate(large):
        true, got = truth(cell), joined(cell, [result[i] for result in results])
        assert float(true.lse.max()) > 5e3
        assert max(_natural_errors(got, true, inputs(cell)).values()) <= 1e-10
    single = vary(replace(base, dtype=torch.float32), spread=[60.0], kernel=["reference", "sdpa"])
    results = ranks.run(run_cells, 4, single)
    for i, cell in enumerate(single):
        got = joined(cell, [result[i] for result in results])
        assert all(bool(x.isfinite().all()) for x in got.values())
        assert errors(cell, got)["out"] <= 1e-3  # float32 logits of 1e4 are only known to 1e-3


def _very_negative(method):
    """All logits are about -1e4: q is a constant row, k its negative with a little noise."""
    cell = Cell(mask=("causal", 32), heads=(4, 4), method=method, dtype=torch.float64)
    layout, x, rank = our_layout(cell, dist.get_world_size()), _negative_inputs(cell), dist.get_rank()
    q, k, v = (layout.shard(x[name], rank).requires_grad_() for name in "qkv")
    out, lse = megacp.attention(
        q, k, v, mask=Mask.causal(32), layout=layout, method=method, kernel="reference", return_lse=True
    )
    out.backward(layout.shard(x["d_out"], rank))
    return {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad}


def _negative_inputs(cell):
    x = inputs(cell)
    x["k"] = -60.0 * torch.ones_like(x["q"]) + 0.01 * x["k"]
    x["q"] = 60.0 * torch.ones_like(x["q"]) + 0.01 * x["q"]
    return x


@pytest.mark.parametrize("method", METHODS)
def test_d32_logits_of_minus_ten_thousand_do_not_underflow(method):
    cell = Cell(mask=("causal", 32), heads=(4, 4), method=method)
    x = _negative_inputs(cell)
    true = oracle.attention(x["q"], x["k"], x["v"], oracle.causal(32), x["d_out"])
    assert float(true.lse.max()) < -9e3
    got = joined(cell, ranks.run(_very_negative, 4, method))
    assert max(_natural_errors(got, true, x).values()) <= 1e-10


# -- D40: future tokens change earlier outputs (TransformerEngine#3248) --------------------------------------------------


def _disturbed(method, layout_name, kernel, dtype):
    """out and lse, gathered: undisturbed; with keys and values after 19 times 100; with one key at 5 changed."""
    cell = Cell(mask=("causal", 32), method=method, layout=layout_name, dtype=dtype)
    layout, rank = our_layout(cell, dist.get_world_size()), dist.get_rank()
    results = []
    for disturb in ("", "future", "five"):
        x = inputs(cell)
        if disturb == "future":
            x["k"][:, 20:] *= 100
            x["v"][:, 20:] *= 100
        if disturb == "five":
            x["k"][:, 5] += 1
        q, k, v = (layout.shard(x[name], rank) for name in "qkv")
        what = {"mask": Mask.causal(32), "layout": layout, "method": method, "kernel": kernel}
        out, lse = megacp.attention(q, k, v, return_lse=True, **what)
        results.append((megacp.gather(out, layout), megacp.gather(lse, layout, dim=2)))
    return results


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("method", METHODS)
def test_d40_a_token_changes_no_bit_of_what_stands_before_it(method, kernel):
    for cp_size in (1, 2, 4):
        for layout_name in ("contiguous", "zigzag"):
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                plain, future, five = ranks.run(_disturbed, cp_size, method, layout_name, kernel, dtype)[0]
                case = (cp_size, layout_name, dtype)
                assert torch.equal(plain[0][:, :20], future[0][:, :20]), case
                assert torch.equal(plain[1][:, :, :20], future[1][:, :, :20]), case
                assert torch.equal(plain[0][:, :5], five[0][:, :5]), case
                assert bool((plain[1][:, :, 5:] != five[1][:, :, 5:]).any(-1).all()), case


# -- D59: head sizes of keys and values that differ (TransformerEngine#2868, #1552; MagiAttention#341) -------------------


@pytest.mark.parametrize("method", METHODS)
def test_d59_values_of_another_head_size_with_grouped_heads_are_exact(method):
    cells = vary(Cell(mask=("causal", 32), heads=(8, 2), method=method), dims=[(24, 16), (16, 24), (8, 1)])
    results = ranks.run(run_cells, 2, cells)
    check(cells, 2, results=results)
    for i, cell in enumerate(cells):
        d, e = cell.dims
        shapes = {name: tuple(x.shape) for name, x in results[0][i].items()}
        assert shapes == {
            "out": (2, 16, 8, e),
            "lse": (2, 8, 16),
            "dq": (2, 16, 8, d),
            "dk": (2, 16, 2, d),
            "dv": (2, 16, 2, e),
        }
    check(
        vary(
            Cell(heads=(8, 2), method=method, kernel="sdpa", dtype=torch.float32), dims=[(24, 16), (16, 24)]
        ),
        2,
    )


def test_d59_the_head_sizes_of_latent_attention_in_bfloat16():
    cell = Cell(mask=("causal", 32), heads=(4, 4), dims=(192, 128), dtype=torch.bfloat16, kernel="sdpa")
    got = joined(cell, [result[0] for result in ranks.run(run_cells, 2, [cell])])
    alone = joined(cell, [ranks.run(run_cells, 1, [cell])[0][0]])
    true = truth(cell)
    for name, error in errors(cell, got, true).items():
        assert error <= max(1.3 * errors(cell, alone, true)[name], 1e-6), name
        assert math.isfinite(error)
