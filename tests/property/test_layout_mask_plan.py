"""Properties that hold for any layout, mask, plan and partial result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megacp
from megacp import Layout, Mask
from megacp.merge import Partial, merge
from megacp.plans import ALL_OWNERS
from tests import oracle

BY_TOKENS = ("all_gather", "ring")  # their steps are those of owners; test_method_plans has all methods
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool]

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")

lengths = st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any)
sizes = st.integers(1, 6)


@st.composite
def layouts(draw, documents=None):
    documents = draw(lengths) if documents is None else documents
    name, cp_size = draw(st.sampled_from(["zigzag", "contiguous", "per_document"])), draw(sizes)
    if name == "per_document":
        return Layout.per_document(oracle.offsets(documents), cp_size)
    return (Layout.zigzag if name == "zigzag" else Layout.contiguous)(sum(documents), cp_size)


@st.composite
def cases(draw):
    """A layout, a mask over the same tokens, and that mask spelt out by the oracle."""
    documents = draw(lengths)
    total, window = sum(documents), draw(st.none() | st.integers(1, 25))
    kind = draw(st.sampled_from(["causal", "full", "documents", "full documents", "prefix"]))
    if kind == "causal":
        pair = Mask.causal(total, window), oracle.causal(total, window)
    elif kind == "full":
        pair = Mask.full(total), oracle.full(total)
    elif kind == "prefix":
        size = draw(st.integers(0, total))
        pair = Mask.prefix(total, size), oracle.prefix(total, size)
    elif kind == "documents":
        cu_seqlens = oracle.offsets(documents)
        pair = Mask.documents(cu_seqlens, window=window), oracle.documents(cu_seqlens, True, window)
    else:
        cu_seqlens = oracle.offsets(documents)
        pair = Mask.documents(cu_seqlens, causal=False), oracle.documents(cu_seqlens, False)
    return draw(layouts(documents)), *pair


def covered(plan):
    """How often each (query, key) pair of global positions is computed, over all ranks, steps and blocks: int [G, G]."""
    layout = plan.layout
    count = np.zeros((layout.seq_len, layout.seq_len), int)
    for rank in range(layout.cp_size):
        queries = layout.positions(rank).numpy()
        for step in plan.steps(rank):
            everything = np.arange(layout.seq_len)
            keys = everything if step.owner == ALL_OWNERS else layout.positions(step.owner).numpy()
            for block in step.blocks:
                for q in range(block.q_start, block.q_stop):
                    for k in range(block.k_start, block.k_stop):
                        if block.lo <= k - q <= block.hi:
                            assert queries[q] >= 0 and keys[k] >= 0, "a padding slot takes part"
                            count[queries[q], keys[k]] += 1
    return count


# -- layout ------------------------------------------------------------------------------------------------------------


@given(
    layouts(),
    st.sampled_from(DTYPES),
    st.integers(0, 2).flatmap(lambda before: st.tuples(st.just(before), st.integers(0, 2))),
    st.booleans(),
)
def test_unshard_after_shard_is_the_identity_for_any_length_dims_and_dtype(layout, dtype, dims, from_the_end):
    before, after = dims
    shape = (*[2, 3][:before], layout.seq_len, *[2, 3][:after])
    x = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    untouched = x.clone()
    dim = before - len(shape) if from_the_end else before
    parts = [layout.shard(x, rank, dim=dim, fill=1) for rank in range(layout.cp_size)]
    assert {part.shape[before] for part in parts} == {layout.local_len}
    back = layout.unshard(parts, dim=dim)
    assert back.dtype == dtype and torch.equal(back, x) and torch.equal(x, untouched)


@given(layouts())
def test_gradients_pass_shard_and_unshard_unchanged(layout):
    x = torch.randn(2, layout.seq_len, 3, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(2, layout.seq_len, 3, dtype=torch.float64)
    layout.unshard([layout.shard(x, rank) for rank in range(layout.cp_size)]).backward(upstream)
    assert torch.equal(x.grad, upstream)


@given(layouts())
def test_every_position_has_one_owner_and_all_views_of_a_layout_agree(layout):
    seen = []
    for rank in range(layout.cp_size):
        positions = layout.positions(rank)
        assert positions.shape == (layout.local_len,) and positions.dtype == torch.int64
        real = positions[positions >= 0].tolist()
        assert real == [p for start, stop in layout.ranges(rank) for p in range(start, stop)]
        pairs = layout.ranges(rank)
        assert all(start < stop for start, stop in pairs)
        sharded = layout.shard(torch.arange(layout.seq_len)[None], rank, fill=-1)[0]
        assert torch.equal(sharded, positions)
        seen += real
    assert sorted(seen) == list(range(layout.seq_len))
    assert layout.padding == layout.cp_size * layout.local_len - layout.seq_len


@given(layouts())
def test_rolling_before_sharding_is_what_a_roll_over_ranks_must_give(layout):
    x = torch.arange(layout.seq_len)[None]
    rolled = [layout.shard(x.roll(-1, 1), rank) for rank in range(layout.cp_size)]
    assert torch.equal(layout.unshard(rolled), x.roll(-1, 1))


@given(st.integers(1, 200), sizes)
def test_zigzag_gives_every_rank_the_first_and_the_mirrored_chunk(length, cp_size):
    chunk = -(-length // (2 * cp_size))
    layout = Layout.zigzag(length, cp_size)
    for rank in range(cp_size):
        right = [*range(rank * chunk, (rank + 1) * chunk)]
        right += range((2 * cp_size - 1 - rank) * chunk, (2 * cp_size - rank) * chunk)
        assert layout.positions(rank).tolist() == [p if p < length else -1 for p in right]


# -- mask --------------------------------------------------------------------------------------------------------------


@given(cases())
def test_a_mask_shows_what_the_oracle_s_shows(case):
    _, mask, theirs = case
    assert torch.equal(mask.dense(), theirs)
    assert mask.pairs() == int(theirs.sum())


@given(lengths)
def test_documents_are_found_again_from_tokens_and_from_positions(documents):
    cu_seqlens = oracle.offsets(documents)
    mask, theirs = Mask.documents(cu_seqlens), oracle.documents(cu_seqlens)
    tokens = torch.ones(sum(documents), dtype=torch.int64)
    tokens[[stop - 1 for stop in cu_seqlens[1:] if stop]] = 0
    assert torch.equal(Mask.from_tokens(tokens, eod=0).dense(), theirs)
    assert torch.equal(Mask.from_positions(mask.document_positions()).dense(), theirs)


@given(lengths)
def test_labels_are_the_next_token_of_the_same_document(documents):
    cu_seqlens = oracle.offsets(documents)
    tokens = torch.arange(1, sum(documents) + 1)
    right = [
        -100 if i + 1 == stop else i + 2
        for start, stop in zip(cu_seqlens, cu_seqlens[1:], strict=False)  # noqa: RUF007
        for i in range(start, stop)
    ]
    assert Mask.documents(cu_seqlens).labels(tokens).tolist() == right


# -- plan --------------------------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(cases(), st.sampled_from(BY_TOKENS))
def test_every_visible_pair_is_computed_exactly_once_and_no_other(case, method):
    layout, mask, theirs = case
    count = covered(megacp.plan(layout, mask, method=method))
    assert np.array_equal(count, theirs.numpy().astype(int))


@settings(max_examples=60)
@given(cases(), st.sampled_from(BY_TOKENS))
def test_pairs_and_flops_agree_with_brute_force(case, method):
    layout, mask, theirs = case
    plan = megacp.plan(layout, mask, method=method)
    for rank in range(layout.cp_size):
        queries = layout.positions(rank)
        pairs = int(theirs[queries[queries >= 0]].sum())
        assert plan.pairs(rank) == pairs == sum(step.pairs for step in plan.steps(rank))
        assert plan.flops(rank) == 4 * pairs
        assert plan.flops(rank, heads=3, head_dim=8, value_dim=5) == 2 * pairs * 3 * (8 + 5)
        assert plan.flops(rank, heads=3, head_dim=8, backward=True) == 2.5 * plan.flops(
            rank, heads=3, head_dim=8
        )


def ring_by_hand(layout, theirs):
    """Buffers of (keys and values, their gradients) that each rank must receive in a ring that stops passing what nobody needs.

    The owner's buffer travels hop by hop up to the last rank that sees any of its keys; every rank on the way receives it.
    Gradients start at the first rank that sees any, follow up to the last, and go from there straight to the owner.
    """
    cp_size = layout.cp_size
    owned = [layout.positions(rank) for rank in range(cp_size)]
    owned = [p[p >= 0] for p in owned]
    received, gradients = [0] * cp_size, [0] * cp_size
    for owner in range(cp_size):
        needs = [
            hop for hop in range(1, cp_size) if theirs[owned[(owner + hop) % cp_size]][:, owned[owner]].any()
        ]
        for hop in range(1, max(needs, default=0) + 1):
            received[(owner + hop) % cp_size] += 1
        for hop in range(min(needs, default=0) + 1, max(needs, default=0) + 1):
            gradients[(owner + hop) % cp_size] += 1
        gradients[owner] += bool(needs)
    return list(zip(received, gradients, strict=True))


@settings(max_examples=60)
@given(cases())
def test_bytes_of_the_ring_agree_with_a_ring_played_by_hand(case):
    layout, mask, theirs = case
    plan = megacp.plan(layout, mask, method="ring")
    for rank, (buffers, gradients) in enumerate(ring_by_hand(layout, theirs)):
        assert plan.bytes_received(rank) == 2 * buffers * layout.local_len
        assert plan.bytes_received(rank, backward=True) == 2 * (buffers + 4 * gradients) * layout.local_len
        sizes = {"kv_heads": 2, "head_dim": 8, "value_dim": 4, "itemsize": 2}
        assert plan.bytes_received(rank, **sizes) == buffers * layout.local_len * 2 * (8 + 4) * 2
        assert buffers == sum(step.receives for step in plan.steps(rank))


@given(cases())
def test_bytes_of_the_all_gather_are_what_the_other_ranks_hold(case):
    layout, mask, _ = case
    plan = megacp.plan(layout, mask, method="all_gather")
    for rank in range(layout.cp_size):
        assert plan.bytes_received(rank) == 2 * (layout.cp_size - 1) * layout.local_len


@settings(max_examples=60)
@given(cases())
def test_each_send_of_the_ring_has_its_receive(case):
    """In a step, whoever sends has a next rank that receives; the gradients' ways match too."""
    layout, mask, _ = case
    plan, cp_size = megacp.plan(layout, mask, method="ring"), layout.cp_size
    steps = [{step.index: step for step in plan.steps(rank)} for rank in range(cp_size)]
    for index in range(cp_size):
        for rank in range(cp_size):
            mine, after = steps[rank].get(index), steps[(rank + 1) % cp_size].get(index)
            assert bool(mine and mine.sends) == bool(after and after.receives), (rank, index)
            if mine is not None:
                assert mine.owner == (rank - index) % cp_size
        sent = {(rank, step[index].grad_to) for rank, step in enumerate(steps) if index in step}
        sent = {(a, b) for a, b in sent if b is not None}
        due = set()
        for rank, step in enumerate(steps):
            if index in step and step[index].grad_follows:
                due.add(((rank - 1) % cp_size, rank))
            if index in step and step[index].grad_home is not None:
                due.add((step[index].grad_home, rank))
        assert sent == due, index


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_zigzag_under_a_causal_mask_is_one_block_a_step_and_equal_work(cp_size):
    plan = megacp.plan(Layout.zigzag(16 * cp_size, cp_size), Mask.causal(16 * cp_size), method="ring")
    assert all(len(step.blocks) == 1 for rank in range(cp_size) for step in plan.steps(rank))
    for index in range(cp_size):
        assert len({plan.steps(rank)[index].pairs for rank in range(cp_size)}) == 1
    assert len({plan.flops(rank) for rank in range(cp_size)}) == 1


@given(cases())
def test_equal_plans_are_the_same_object(case):
    layout, mask, _ = case
    again = Mask.from_positions(mask.document_positions()) if mask.offsets is not None else mask
    assert megacp.plan(layout, mask, method="ring") is megacp.plan(layout, mask, method="ring")
    assert (again == mask) == bool(
        torch.equal(again.dense(), mask.dense()) and again.slices.tolist() == mask.slices.tolist()
    )


# -- merge -------------------------------------------------------------------------------------------------------------


@st.composite
def partials(draw, n):
    """n results of the same queries over disjoint keys; some rows of some see nothing; logits up to 1e4 or down to -1e4."""
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    spread = draw(st.sampled_from([1.0, 100.0, 1e4]))
    shift = draw(st.sampled_from([0.0, 1e4, -1e4]))
    found = []
    for _ in range(n):
        lse = torch.randn(2, 3, 4, generator=make, dtype=torch.float64) * spread + shift
        empty = torch.rand(2, 3, 4, generator=make) < 0.3
        out = torch.randn(2, 4, 3, 5, generator=make, dtype=torch.float64)
        out = out.masked_fill(empty.transpose(1, 2)[..., None], 0.0)
        found.append(Partial(out, lse.masked_fill(empty, -torch.inf)))
    return found


def _same(a, b):
    assert oracle.rel(a.out, b.out) <= 1e-12
    assert oracle.rel(a.lse, b.lse) <= 1e-12


@given(partials(3))
def test_merging_is_associative_and_commutative(three):
    a, b, c = three
    _same(merge(merge(a, b), c), merge(a, merge(b, c)))
    _same(merge(a, b), merge(b, a))


@given(partials(1))
def test_rows_that_saw_nothing_merge_as_the_identity(one):
    nothing = Partial(torch.zeros_like(one[0].out), torch.full_like(one[0].lse, -torch.inf))
    for joined in (merge(one[0], nothing), merge(nothing, one[0])):
        assert torch.equal(joined.out, one[0].out) and torch.equal(joined.lse, one[0].lse)


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(1, 11))
def test_attention_over_keys_in_two_parts_merges_to_attention_over_all(seed, cut):
    make = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 12, 2, 4, generator=make, dtype=torch.float64) for _ in range(3))
    mask = oracle.causal(12)
    first, second = mask.clone(), mask.clone()
    first[:, cut:], second[:, :cut] = False, False
    whole = Partial(*oracle.forward(q, k, v, mask))
    _same(merge(*(Partial(*oracle.forward(q, k, v, part)) for part in (first, second))), whole)
