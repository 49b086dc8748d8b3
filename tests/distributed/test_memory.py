"""Memory, measured: PyTorch's own record of every allocation during a forward and backward pass, per rank.

The profiler sees each allocation and each free of PyTorch's allocator, operators' inner buffers included, so the figures are
the same on every run and every machine. Memory that stood before the call (inputs, the upstream gradient) does not count.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks


def peak_of(work: Callable[[], Any]) -> int:
    """Return by how many bytes PyTorch's allocations during the work rose above where they stood before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        work()
    assert record.profiler is not None and record.profiler.kineto_results is not None
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events
    now = top = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        top = max(top, now)
    return top


class Shape(NamedTuple):
    local: int = 512
    heads: int = 8
    kv_heads: int = 2
    size: int = 64
    dtype: torch.dtype = torch.bfloat16
    kernel: str = "sdpa"
    document: int | None = None  # length of packed documents; None: one causal sequence
    layout: str = "zigzag"


def _peaks(method: str, shapes: list[Shape]) -> list[int]:
    cp_size, found = dist.get_world_size(), []
    for shape in shapes:
        length = shape.local * cp_size
        starts = range(0, length, shape.document or length)
        mask = Mask.documents([*starts, length])
        layout = getattr(Layout, shape.layout)(length, cp_size)
        make = torch.Generator().manual_seed(dist.get_rank())
        heads = (shape.heads, shape.kv_heads, shape.kv_heads, shape.heads)
        x = [torch.randn(1, shape.local, h, shape.size, generator=make).to(shape.dtype) for h in heads]
        q, k, v = (t.requires_grad_() for t in x[:3])
        what = {"mask": mask, "layout": layout, "method": method, "kernel": shape.kernel}

        def step() -> None:
            out = megacp.attention(q, k, v, **what)  # noqa: B023 - called at once
            out.backward(x[3])  # noqa: B023

        step()  # plans and index tables are made once and kept
        q.grad = k.grad = v.grad = None
        found.append(peak_of(step))
    return found


def peaks(method: str, cp_size: int, shapes: list[Shape]) -> list[int]:
    """Give for each shape the peak of the rank that has the highest, in bytes."""
    return [
        max(found) for found in zip(*ranks.run(_peaks, cp_size, method, shapes, timeout=200), strict=True)
    ]


def test_a_ring_of_eight_takes_at_most_a_tenth_more_than_one_of_two():
    """For heads in groups of eight in 16 bit. With more key/value heads, what is on its way weighs more: see the next test."""
    shapes = [Shape(heads=16), Shape(heads=32, kv_heads=4), Shape(kernel="reference")]
    two, eight = peaks("ring", 2, shapes), peaks("ring", 8, shapes)
    assert all(b <= 1.10 * a for a, b in zip(two, eight, strict=True)), (two, eight)


def test_from_three_ranks_on_a_ring_takes_the_same_at_any_size():
    """Two ranks have nothing on its way while they compute: no keys after the next, no sums of gradients between others."""
    shapes = [Shape(), Shape(dtype=torch.float32, kv_heads=8), Shape(dtype=torch.float32, kernel="reference")]
    three, eight = peaks("ring", 3, shapes), peaks("ring", 8, shapes)
    assert eight == three
    (two,), pair = peaks("ring", 2, shapes[1:2]), 2 * 512 * 8 * 64 * 4  # keys and values in float32
    assert eight[1] - two < 2.5 * pair  # the next keys and values, and sums that come in while others go out


def test_an_exchange_takes_what_its_queries_need_and_not_what_the_group_holds():
    packed = Shape(document=768, layout="contiguous")  # no rank needs more than another's 512 keys
    (three,), (eight,) = peaks("exchange", 3, [packed]), peaks("exchange", 8, [packed])
    assert eight <= 1.10 * three, (three, eight)


def test_the_meter_sees_a_buffer_that_grows_with_the_group():
    (two,), (eight,) = peaks("all_gather", 2, [Shape()]), peaks("all_gather", 8, [Shape()])
    assert eight > 1.5 * two


# -- preparing a batch -------------------------------------------------------------------------------------------------

TOKENS, EOD = 131_072, 0


def _prepared(cp_size: int, layout_name: str, lengths: int) -> None:
    """Do on one rank what happens before the first layer: mask, labels, layout, shards and plans."""
    make = torch.Generator().manual_seed(lengths)
    ids = torch.randint(1, 1000, (2, TOKENS), generator=make)
    ids[:, lengths - 1 :: lengths] = EOD
    mask = Mask.from_tokens(ids, EOD)
    batch = {
        "tokens": ids,
        "labels": mask.labels(ids),
        "position_ids": mask.document_positions().expand(2, -1),
    }
    if layout_name == "balanced":
        layout = Layout.balanced(mask, cp_size)
    elif layout_name == "per_document":
        assert mask.offsets is not None
        layout = Layout.per_document(mask.offsets[0], cp_size)
    else:
        layout = getattr(Layout, layout_name)(TOKENS, cp_size)
    rank = cp_size - 1
    for x in batch.values():
        layout.shard(x, rank)
    for method in ("ring", "all_gather", "exchange"):
        megacp.plan(layout, mask, method).steps(rank)


@pytest.mark.parametrize("lengths", [TOKENS, 1000, 64])
@pytest.mark.parametrize("layout_name", ["zigzag", "per_document", "balanced"])
def test_preparing_131072_tokens_takes_some_bytes_a_token_and_nothing_quadratic(layout_name, lengths):
    peak_of(lambda: _prepared(2, layout_name, TOKENS // 2))  # what is imported once
    tracemalloc.start()
    try:
        in_torch = peak_of(lambda: _prepared(8, layout_name, lengths))
        _, in_python = tracemalloc.get_traced_memory()[:2]
    finally:
        tracemalloc.stop()
    a_token = (in_torch + in_python) / (2 * TOKENS)
    print(f"{layout_name}, documents of {lengths}: {a_token:.0f} bytes a token")
    assert (
        a_token <= 200
    )  # measured 34 to 130, the most for plans of many short pieces; one bit a pair would be 16,384
