"""Properties of the plans of all methods, teams and levels included, for random layouts, masks and heads; no process group."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import megacp
from megacp import Layout, Mask, methods
from megacp.heads import shares
from megacp.plans import OTHERS, Block, Sizes
from megacp.slices import UNBOUNDED, pairs
from tests.property.test_layout_mask_plan import cases, layouts

METHODS = methods.names()


@st.composite
def plans(draw):
    """A plan of any method (and any hierarchy), and its mask spelt out by the oracle."""
    layout, mask, theirs = draw(cases())
    method, cp_size = draw(st.sampled_from(METHODS)), layout.cp_size
    inner = draw(st.sampled_from([n for n in range(1, cp_size + 1) if cp_size % n == 0]))
    hierarchy = (inner, cp_size // inner) if method == "hierarchical" else None
    return megacp.plan(layout, mask, method, hierarchy), theirs.numpy().astype(int)


def computed(plan, rank):
    """How often a rank computes each (query, key) pair of global positions: int [G, G]."""
    count = np.zeros((plan.layout.seq_len,) * 2, int)
    for step in plan.steps(rank):
        for block in step.blocks:
            queries = step.queries[block.q_start : block.q_stop]
            keys = step.keys[block.k_start : block.k_stop]
            assert (queries >= 0).all() and (keys >= 0).all(), "a padding slot takes part"
            delta = np.arange(block.k_start, block.k_stop) - np.arange(block.q_start, block.q_stop)[:, None]
            np.add.at(count, np.ix_(queries, keys), (block.lo <= delta) & (delta <= block.hi))
    return count


@settings(max_examples=150)
@given(plans(), st.integers(1, 12))
def test_every_visible_pair_is_computed_once_for_every_head_and_no_other(plan_and_mask, heads):
    plan, theirs = plan_and_mask
    seen = np.zeros((heads, *theirs.shape), int)
    for rank in range(plan.layout.cp_size):
        count = computed(plan, rank)
        assert count.sum() == plan.pairs(rank)
        seen[list(plan.heads(rank, heads))] += count
        assert rank in plan.team(rank) and all(
            plan.team(other) == plan.team(rank) for other in plan.team(rank)
        )
    assert (seen == theirs).all()


@given(plans(), st.integers(1, 12))
def test_the_ranks_operations_add_up_to_the_mask_s(plan_and_mask, heads):
    plan, theirs = plan_and_mask
    flops = [plan.flops(rank, heads=heads, head_dim=8, value_dim=5) for rank in range(plan.layout.cp_size)]
    assert sum(flops) == 2 * int(theirs.sum()) * heads * (8 + 5)


@given(cases())
def test_an_exchange_brings_what_is_seen_and_nothing_else(case):
    layout, mask, theirs = case
    plan, theirs = megacp.plan(layout, mask, "exchange"), theirs.numpy()
    owned = [p[p >= 0] for p in (layout.positions(rank).numpy() for rank in range(layout.cp_size))]
    for rank in range(layout.cp_size):
        seen = theirs[owned[rank]].any(0)
        brought = np.zeros(layout.seq_len, int)
        for receiver, owner, start, stop in plan.needs:
            if receiver == rank:
                brought[start:stop] += 1
                assert set(range(start, stop)) <= set(owned[owner].tolist()) and owner != rank
        seen[owned[rank]] = False
        assert (brought == seen).all()
        far = [step for step in plan.steps(rank) if step.owner == OTHERS]
        assert [step.keys.tolist() for step in far] == ([np.flatnonzero(seen).tolist()] if seen.any() else [])
        returned = sum(
            int(theirs[owned[r]].any(0)[owned[rank]].sum()) for r in range(layout.cp_size) if r != rank
        )
        assert plan.bytes_received(rank) == 2 * seen.sum()
        assert plan.bytes_received(rank, backward=True) == 2 * seen.sum() + 8 * returned


@given(layouts(), st.integers(1, 6))
def test_joined_ranks_hold_the_same_tokens_in_order(layout, inner):
    assume(layout.cp_size % inner == 0)
    joined = layout.joined(inner)
    assert joined.cp_size * inner == layout.cp_size and joined.seq_len == layout.seq_len
    for rank in range(joined.cp_size):
        members = [layout.positions(inner * rank + i) for i in range(inner)]
        right = sorted(p for m in members for p in m.tolist() if p >= 0)
        assert joined.positions(rank).tolist() == right + [-1] * (joined.local_len - len(right))
    assert joined == layout.joined(inner) and hash(joined) == hash(layout.joined(inner))


def test_ranks_that_cannot_be_joined_are_refused():
    with pytest.raises(megacp.ConfigError, match="6 ranks cannot be joined by 4"):
        Layout.zigzag(24, 6).joined(4)


@pytest.mark.parametrize("hierarchy", [(1, 6), (2, 3), (3, 2), (6, 1)])
def test_zigzag_stays_one_block_a_step_and_equal_work_under_a_hierarchy(hierarchy):
    plan = megacp.plan(Layout.zigzag(96, 6), Mask.causal(96), "hierarchical", hierarchy)
    for rank in range(6):
        assert [len(step.blocks) for step in plan.steps(rank)] == [1] * hierarchy[1]
    assert len({plan.flops(rank, heads=6) for rank in range(6)}) == 1


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 9))
def test_each_query_head_meets_its_own_key_head(kv_heads, group, cp_size):
    divided = shares(kv_heads * group, kv_heads, cp_size)
    assert [head for share in divided for head in share.queries] == list(range(kv_heads * group))
    sizes = [len(share.queries) for share in divided]
    assert max(sizes) - min(sizes) <= 1
    for share in divided:
        local = list(share.keys) if share.repeats is None else [share.keys[i] for i in share.repeats]
        if not share.queries:
            assert not local
            continue
        assert len(share.queries) % len(local) == 0
        run = len(share.queries) // len(local)
        assert [local[i // run] for i in range(len(share.queries))] == [
            head // group for head in share.queries
        ]
        assert set(local) == set(share.keys)


def test_key_heads_are_sent_once_where_they_divide_and_repeated_only_where_a_group_is_cut():
    assert [share.keys for share in shares(8, 4, 4)] == [range(i, i + 1) for i in range(4)]
    assert [share.keys for share in shares(8, 2, 4)] == [range(i // 2, i // 2 + 1) for i in range(4)]
    assert all(share.repeats is None for share in (*shares(8, 4, 4), *shares(8, 2, 4), *shares(6, 3, 4)))
    assert [share.repeats for share in shares(6, 3, 2)] == [(0, 0, 1), (0, 1, 1)]


@given(st.lists(st.integers(0, 30), min_size=4, max_size=4), st.integers(-40, 40), st.integers(-40, 40))
def test_a_block_counts_its_pairs_as_the_mask_does(corners, lo, hi):
    for low, high in ((lo, hi), (-UNBOUNDED, hi), (lo, UNBOUNDED), (-UNBOUNDED, UNBOUNDED)):
        block = Block(-1, *corners, low, high)
        assert block.pairs == int(pairs(np.array([block], np.int64))[0])


# -- choosing ----------------------------------------------------------------------------------------------------------


def test_the_levels_are_the_largest_that_fit_the_key_heads_and_the_node():
    levels = methods.resolve("hierarchical").levels
    assert levels(8, None, kv_heads=8) == (8, 1)
    assert levels(8, None, kv_heads=4) == (4, 2)
    assert levels(6, None, kv_heads=4) == (2, 3)
    assert levels(8, None, kv_heads=8, nodes=[0, 0, 1, 1, 2, 2, 3, 3]) == (2, 4)
    assert levels(4, None, kv_heads=8, nodes=[0, 0, 0, 1]) == (1, 4)
    assert levels(8, None) == (2, 4) and levels(9, None) == (3, 3) and levels(5, None) == (1, 5)
    assert levels(8, [4, 2]) == (4, 2)
    assert megacp.plan(Layout.zigzag(64, 8), Mask.causal(64), "a2a+p2p").hierarchy == (2, 4)


def test_auto_takes_the_exchange_for_documents_and_says_why_in_figures():
    cu_seqlens = [*range(0, 8192, 300), 8192]  # few cross from one rank to the next
    layout, mask = Layout.contiguous(8192, 4), Mask.documents(cu_seqlens)
    choice = methods.choose(layout, mask, Sizes(8, 2, 64, 64))
    assert choice.method == "exchange"
    received = [
        max(megacp.plan(layout, mask, m).bytes_received(r) for r in range(4)) for m in ("exchange", "ring")
    ]
    assert received[0] * 5 < received[1]
    assert "times as fast as" in choice.reason and "MB received against" in choice.reason


def test_auto_gives_the_balance_of_heads_its_due_where_a_layout_has_none():
    """A causal mask over contiguous chunks: the last rank of a ring has nearly twice the mean's work, a share of heads has not."""
    layout, mask = Layout.contiguous(65536, 8), Mask.causal(65536)
    choice = methods.choose(layout, mask, Sizes(32, 8, 128, 128))
    assert choice.method == "all_to_all"
    assert "busiest rank 1.00 times the mean against 1.8" in choice.reason


def test_auto_says_which_methods_were_left_out():
    choice = methods.choose(Layout.zigzag(64, 8), Mask.causal(64), Sizes(4, 1, 8, 8))
    assert choice.method != "all_to_all" and "all_to_all is left out" in choice.reason


def test_auto_on_one_rank_has_nothing_to_choose():
    assert methods.choose(Layout.zigzag(8, 1), Mask.causal(8), Sizes(4, 4, 8, 8)).method in METHODS
