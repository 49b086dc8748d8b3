"""Outputs and all gradients of megacp.attention against the float64 oracle, over the matrix of what it can do."""

from __future__ import annotations

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
    check_beside_one_rank,
    divisible,
    inputs,
    our_layout,
    our_mask,
    run_cells,
    truth,
    vary,
)

LAYOUTS = ["contiguous", "zigzag"]
PACKED = [(5, 3, 8), (1, 2, 3, 40), (7, 10, 13)]
MASKS = [
    ("causal", 24),
    ("causal", 29),  # divides by nothing
    ("full", 24),
    ("full", 13),
    *[("documents", lengths) for lengths in PACKED],
    ("documents", (5, 3, 8), False),
    ("documents", (1, 2, 3, 40), False),
]
BANDS = [
    ("causal", 24, 1),
    ("causal", 24, 5),
    ("causal", 37, 11),
    ("causal", 24, 100),
    ("documents", (7, 10, 13), True, 4),
    ("prefix", 24, 9),
    ("prefix", 21, 0),
    ("prefix", 16, 16),
]
HEADS = [(8, 2), (3, 1), (2, 2)]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_float64_is_exact_for_every_mask_and_head_count(method, layout, cp_size):
    cells = vary(Cell(method=method, layout=layout), mask=MASKS, heads=HEADS)
    check(divisible(cells, cp_size), cp_size)


@pytest.mark.parametrize("heads", [(2, 2), (3, 1)])
def test_all_to_all_refuses_more_ranks_than_query_heads(heads):
    cell = Cell(method="all_to_all", heads=heads)
    with pytest.raises(ranks.RanksError, match=r"1 of \d ranks would have none") as caught:
        ranks.run(run_cells, heads[0] + 1, [cell])
    assert len(caught.value.failed) == heads[0] + 1


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_windows_and_prefixes_are_exact(method, cp_size):
    check(vary(Cell(method=method), layout=LAYOUTS, mask=BANDS), cp_size)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_documents_that_are_split_one_by_one_are_exact(method, cp_size):
    masks = [("documents", lengths, is_causal) for lengths in PACKED for is_causal in (True, False)]
    check(vary(Cell(method=method, layout="per_document"), mask=masks, fill=[0.0, 1e3]), cp_size)


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4])
@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
def test_float32_is_exact_to_1e_5(kernel, cp_size):
    cells = vary(Cell(dtype=torch.float32, kernel=kernel), method=METHODS, layout=LAYOUTS, mask=MASKS)
    cells += vary(Cell(dtype=torch.float32, kernel=kernel), method=METHODS, heads=HEADS)
    check(divisible(cells, cp_size), cp_size)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_sdpa_kernel_is_exact_in_float64_too(cp_size):
    check(vary(Cell(kernel="sdpa"), method=METHODS, mask=MASKS[:5]), cp_size)


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("cp_size", [2, 3, 4])
def test_bfloat16_is_hardly_worse_than_the_same_kernel_on_one_rank(kernel, cp_size):
    base = Cell(dtype=torch.bfloat16, kernel=kernel, dims=(32, 32), heads=(4, 2))
    masks = [("causal", 128), ("full", 96), ("documents", (37, 20, 71))]
    check_beside_one_rank(vary(base, method=METHODS, mask=masks), cp_size)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_tensor_format_gives_the_same_result(cp_size):
    masks = [("causal", 21), ("documents", (5, 3, 8))]
    check(vary(Cell(), format=["bshd", "sbhd", "thd"], mask=masks, method=METHODS, layout=LAYOUTS), cp_size)
    check(vary(Cell(kernel="sdpa", dtype=torch.float32), format=["sbhd", "thd"], method=METHODS), cp_size)


@pytest.mark.parametrize("cp_size", [2, 3])
def test_views_of_other_memory_are_as_good_as_contiguous_tensors(cp_size):
    cells = vary(
        Cell(mask=("causal", 18)), view=["transposed", "expanded"], method=METHODS, format=["bshd", "sbhd"]
    )
    check(cells + vary(Cell(view="transposed", kernel="sdpa", dtype=torch.float32), method=METHODS), cp_size)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_scale_and_head_sizes_that_differ_are_honoured(cp_size):
    check(
        vary(Cell(mask=("causal", 18)), scale=[0.05, 1.0], dims=[(8, 8), (12, 5), (5, 12)], method=METHODS),
        cp_size,
    )


def _auto(cell):
    layout, x = our_layout(cell, dist.get_world_size()), inputs(cell)
    q, k, v = (layout.shard(x[name], dist.get_rank()) for name in "qkv")
    return megacp.attention(q, k, v, mask=our_mask(cell), layout=layout)


def test_the_defaults_need_nothing_but_tensors_a_mask_and_a_layout():
    cell = Cell(dtype=torch.float32)
    parts = ranks.run(_auto, 2, cell)
    assert oracle.rel(our_layout(cell, 2).unshard(parts), truth(cell).out) <= 1e-5


def test_without_a_process_group_it_is_plain_attention_on_one_rank():
    cell = Cell(mask=("documents", (5, 3, 8)))
    x, true = inputs(cell), truth(cell)
    q, k, v = (x[name].requires_grad_() for name in "qkv")
    out = megacp.attention(q, k, v, mask=our_mask(cell), layout=Layout.zigzag(16, 1), kernel="reference")
    grads = torch.autograd.grad(out, (q, k, v), x["d_out"])
    for got, right in zip((out, *grads), (true.out, true.dq, true.dk, true.dv), strict=True):
        assert oracle.rel(got, right) <= 1e-10


def _some_gradients(wanted):
    cell = Cell()
    layout, x = our_layout(cell, dist.get_world_size()), inputs(cell)
    rank = dist.get_rank()
    local = {name: layout.shard(x[name], rank).requires_grad_(name in wanted) for name in "qkv"}
    out = megacp.attention(*local.values(), mask=our_mask(cell), layout=layout, kernel="reference")
    if wanted:
        out.backward(layout.shard(x["d_out"], rank))
    return out.requires_grad, [local[name].grad for name in "qkv"]


@pytest.mark.parametrize("wanted", ["", "q", "k", "v", "kv"])
def test_gradients_come_for_just_the_inputs_that_ask_for_them(wanted):
    layout, true = Layout.zigzag(16, 2), truth(Cell())
    results = ranks.run(_some_gradients, 2, wanted)
    assert all(result[0] == bool(wanted) for result in results)
    for i, (name, right) in enumerate(zip("qkv", (true.dq, true.dk, true.dv), strict=True)):
        grads = [result[1][i] for result in results]
        if name in wanted:
            assert oracle.rel(layout.unshard(grads), right) <= 1e-10
        else:
            assert grads == [None, None]


def _rows_with_their_own_documents(method, layout_name):
    """Row 0 is [5, 11], row 1 is [16]: the boundaries differ inside one micro-batch."""
    cell = Cell(batch=2)
    layout = {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}[layout_name](
        16, dist.get_world_size()
    )
    x, rank = inputs(cell), dist.get_rank()
    q, k, v = (layout.shard(x[name], rank).requires_grad_() for name in "qkv")
    mask = Mask.documents([[0, 5, 16], [0, 16]])
    out = megacp.attention(q, k, v, mask=mask, layout=layout, method=method, kernel="reference")
    out.backward(layout.shard(x["d_out"], rank))
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("layout_name", LAYOUTS)
@pytest.mark.parametrize("method", METHODS)
def test_rows_of_a_batch_may_have_documents_of_their_own(method, layout_name):
    x = inputs(Cell(batch=2))
    mask = torch.stack([oracle.documents([0, 5, 16]), oracle.causal(16)])[:, None]
    true = oracle.attention(x["q"], x["k"], x["v"], mask, x["d_out"])
    results = ranks.run(_rows_with_their_own_documents, 2, method, layout_name)
    layout = {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}[layout_name](16, 2)
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        assert oracle.rel(layout.unshard([r[i] for r in results]), getattr(true, name)) <= 1e-10, name


def _with_options(cells):
    """Run cells that have sinks or a softcap; gives also each rank's share of the sinks' gradient."""
    results = []
    for cell in cells:
        layout, x, options = our_layout(cell, dist.get_world_size()), inputs(cell), dict(cell.options)
        if "sinks" in options:
            options["sinks"] = options["sinks"].clone().to(cell.dtype).requires_grad_()
        local = {name: layout.shard(t, dist.get_rank(), fill=cell.fill) for name, t in x.items()}
        q, k, v = (local[name].requires_grad_() for name in "qkv")
        what = {
            "mask": our_mask(cell),
            "layout": layout,
            "method": cell.method,
            "kernel": cell.kernel,
            **options,
        }
        out, lse = megacp.attention(q, k, v, return_lse=True, **what)
        out.backward(local["d_out"])
        d_sinks = options["sinks"].grad if "sinks" in options else torch.zeros(())
        results.append(
            {"out": out.detach(), "lse": lse, "dq": q.grad, "dk": k.grad, "dv": v.grad, "d_sinks": d_sinks}
        )
    return results


def _check_options(cells, cp_size):
    results = ranks.run(_with_options, cp_size, cells)
    check(cells, cp_size, results=results)
    for i, cell in enumerate(cells):
        if "sinks" in dict(cell.options):
            summed = sum(result[i]["d_sinks"] for result in results)
            assert oracle.rel(summed, truth(cell).dsinks) <= (
                1e-10 if cell.dtype == torch.float64 else 1e-5
            ), cell


SINKS = torch.tensor([0.5, -1.0, 3.0, 0.0], dtype=torch.float64)


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_sinks_and_softcap_are_exact_with_their_gradients(cp_size):
    options = [(("sinks", SINKS),), (("softcap", 1.5),), (("sinks", SINKS), ("softcap", 1.5))]
    masks = [("causal", 21), ("full", 16), ("documents", (7, 10, 13)), ("causal", 24, 5)]
    _check_options(vary(Cell(), options=options, mask=masks, method=METHODS), cp_size)
    packed = Cell(layout="per_document", mask=("documents", (7, 10, 13)), fill=1e3)
    _check_options(vary(packed, options=options, method=METHODS), cp_size)
    _check_options(
        vary(Cell(dtype=torch.float32, kernel="sdpa"), options=options[:1], method=METHODS), cp_size
    )
    _check_options(vary(Cell(dtype=torch.float32, kernel="auto"), options=options, method=METHODS), cp_size)


def test_a_softcap_that_the_kernel_does_not_know_is_refused_by_name():
    q = torch.zeros(1, 4, 2, 8)
    with pytest.raises(megacp.UnsupportedError, match=r"sdpa.*softcap"):
        megacp.attention(q, q, q, mask=Mask.causal(4), kernel="sdpa", softcap=2.0)
