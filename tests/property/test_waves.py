"""Schedules in which each document has ranks of its own: nothing is lost, memory is kept, ranks are equally busy."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp import ConfigError, Mask
from megacp.data import Cost, Row, Waves, block_sizes, spread
from megacp.dynamic import row_layout

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")


@st.composite
def cases(draw):
    """Documents of 0 tokens to as many as all ranks hold, for any number of ranks, and any chain of sizes."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
    sizes = draw(
        st.none() | st.lists(st.sampled_from(block_sizes(ranks)), min_size=1, unique=True).map(sorted)
    )
    capacity = draw(st.integers(1, 40))
    longest = (block_sizes(ranks) if sizes is None else sizes)[-1] * capacity
    few = st.integers(0, min(longest, 5)) | st.integers(1, longest)
    lengths = draw(st.lists(few, min_size=1, max_size=40).filter(any))
    cost = Cost(
        token=draw(st.sampled_from([0.0, 1.0])),
        pair=draw(st.sampled_from([0.01, 0.5])),
        key=draw(st.sampled_from([0.0, 0.3, 50.0])),
        far_key=draw(st.sampled_from([None, 5.0])),
        node=draw(st.sampled_from([1, 2, 8])),
        row=draw(st.sampled_from([0.0, 3.0])),
        call=draw(st.sampled_from([0.0, 0.2])),
        tile=draw(st.sampled_from([1, 4])),
    )
    return lengths, ranks, capacity, cost, sizes


@settings(max_examples=200)
@given(cases())
def test_every_token_is_trained_once_in_the_memory_that_there_is(case):
    lengths, ranks, capacity, cost, sizes = case
    waves = spread(lengths, ranks, capacity, cost, sizes)
    placed = Counter(document for row in waves for document in row.documents)
    assert placed == Counter(i for i, n in enumerate(lengths) if n)
    for row in waves:
        assert row.lengths == tuple(lengths[d] for d in row.documents)
        assert row.local_tokens <= capacity and row.size in waves.sizes
        assert row.first % row.size == 0 and 0 <= row.first < row.first + row.size <= ranks
        layout = row_layout(row, capacity, Mask.documents(np.cumsum([0, *row.lengths])))
        assert layout.cp_size == row.size and layout.local_len <= capacity
        owned = sorted(r for rank in range(row.size) for r in layout.ranges(rank))
        assert owned[0][0] == 0 and owned[-1][1] == row.tokens
        assert all(a[1] == b[0] for a, b in pairwise(owned))


@settings(max_examples=200)
@given(cases())
def test_blocks_of_a_wave_are_disjoint_and_only_ever_part(case):
    waves = spread(*case)
    for wave in waves.waves:
        members = [rank for row in wave for rank in row.ranks]
        assert wave and len(members) == len(set(members))
    for rank in range(waves.ranks):
        rows = waves.rows(rank)
        mine = [row for row in rows if row is not None]
        assert rows[len(mine) :] == [None] * (len(rows) - len(mine))
        assert all(set(after.ranks) <= set(before.ranks) for before, after in pairwise(mine))


@settings(max_examples=200)
@given(cases())
def test_the_step_takes_no_less_than_the_bound_and_no_more_than_one_size_for_all(case):
    lengths, ranks, capacity, cost, sizes = case
    waves = spread(lengths, ranks, capacity, cost, sizes)
    seconds, bound = waves.seconds(cost), waves.bound(cost)
    assert seconds >= bound * (1 - 1e-9)
    works, done = waves.busy(cost)
    assert works == pytest.approx(done)  # no rank waits for one that comes from elsewhere
    for size in waves.sizes:
        if max(lengths) <= size * capacity:
            alone = spread(lengths, ranks, capacity, cost, (size,))
            assert {row.size for row in alone} == {size}
            assert seconds <= alone.seconds(cost) * (1 + 1e-9)


@given(cases())
def test_every_rank_finds_the_same_schedule(case):
    lengths, ranks, capacity, cost, sizes = case
    one, other = (
        spread(kind(lengths), ranks, capacity, cost, sizes)
        for kind in (list, lambda x: np.array(x, np.int32))
    )
    assert one == other and one.digest() == other.digest()
    changed = spread([*lengths, 1], ranks, capacity, cost, sizes)
    assert changed.digest() != one.digest()


def realistic(ranks, capacity, seed):
    """Documents for four full rows a rank; the logarithms of their lengths are normal, as those of files and pages are."""
    drawn = np.random.default_rng(seed).lognormal(7.0, 1.6, 20_000).astype(int) + 1
    drawn = np.minimum(drawn, min(131_072, ranks * capacity))
    return drawn[: np.searchsorted(np.cumsum(drawn), 4 * ranks * capacity)]


@pytest.mark.parametrize("ranks", [8, 32, 128])
def test_real_lengths_keep_all_ranks_busy_near_the_bound(ranks):
    cost = Cost(token=1.1e-4, pair=6e-9, key=1.7e-6, far_key=1.3e-5, row=0.02)
    for seed in range(3):
        waves = spread(realistic(ranks, 16_384, seed), ranks, 16_384, cost)
        assert waves.seconds(cost) <= 1.03 * waves.bound(cost)
        assert len({row.size for row in waves}) >= 2


def test_a_row_begins_when_the_last_of_its_ranks_is_free():
    rows = (Row(0, 1, (0,), (4,)), Row(1, 1, (1,), (2,))), (Row(0, 2, (2,), (6,)),)
    waves = Waves(2, 8, (1, 2), (4, 2, 6), rows)
    works, done = waves.busy(Cost(token=1.0, pair=0.0))
    assert works == [8.0, 6.0] and done == [8.0, 8.0]  # the row of two ranks is padded to chunks of 2 tokens
    assert waves.seconds(lambda row: 10.0) == 20.0


def test_sizes_of_blocks_are_powers_of_two_as_far_as_they_divide():
    assert block_sizes(1) == (1,)
    assert block_sizes(8) == (1, 2, 4, 8)
    assert block_sizes(12) == (1, 2, 4, 12)
    assert block_sizes(45) == (1, 3, 9, 45)


def test_the_cost_of_a_model_is_that_of_its_operations_and_bytes():
    sizes = {"layers": 2, "hidden": 8, "ffn": 16, "heads": 4, "kv_heads": 2, "head_dim": 2, "vocab": 10}
    cost = Cost.of(**sizes, matmul_rate=10, attention_rate=5, near_rate=2, far_rate=1, row=3, call=0.5)
    weights = 2 * (8 * 8 + 8 * 4 + 8 * 4 + 8 * 8 + 3 * 8 * 16) + 8 * 10
    assert cost.token == pytest.approx(6 * weights / 10)
    assert cost.pair == pytest.approx(2 * 4 * 2 * (2 + 2) * 3.5 / 5)
    assert cost.key == pytest.approx(2 * 2 * (2 + 2) * (2 + 2 + 4) / 2) and cost.far_key == 2 * cost.key
    assert (cost.key_over(8), cost.key_over(16)) == (cost.key, cost.far_key)
    assert cost.of_row(4) == 3 + 4 * 2 * 2 * 0.5  # each of two passes, layers and four ranks


def test_a_document_takes_its_slots_and_tiles_and_the_keys_that_are_not_hidden():
    cost = Cost(token=1.0, pair=0.5, tile=4)
    assert cost.document(6, 1) == 6 + 0.5 * 3 * 16  # tiles of 4 x 4: two on the diagonal, one below
    assert (
        cost.document(16, 2) == 8 + 0.5 * (3 + 2) * 16
    )  # own two chunks of 4, then both of them on one of the other rank
    assert cost.document(13, 2) == cost.document(16, 2)  # padded
    assert Cost(token=1.0, pair=0.5, tile=4, key=9.0).document(16, 2) == 8 + 9 * 8


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": [0, 0]}, "nothing to place"),
        ({"lengths": [3, -1]}, "nothing to place"),
        ({"lengths": [0.5]}, "nothing to place"),
        (
            {"lengths": [3, 33]},
            "document 1 has 33 tokens, and the largest block of 4 ranks, 8 tokens each, holds 32",
        ),
        ({"capacity": 0}, "capacity is 0"),
        ({"ranks": 0}, "ranks is 0"),
        ({"sizes": (2, 3)}, r"blocks of \[2, 3\] ranks do not fit 4 ranks"),
        ({"sizes": (4, 2)}, "do not fit 4 ranks"),
        ({"sizes": (8,)}, "do not fit 4 ranks"),
        ({"sizes": ()}, "do not fit 4 ranks"),
        ({"sizes": (2, 2)}, "given twice"),
    ],
)
def test_what_cannot_be_placed_is_refused(change, words):
    asked = {"lengths": [3, 5], "ranks": 4, "capacity": 8, "cost": Cost(1.0, 1.0)}
    with pytest.raises(ConfigError, match=words):
        spread(**{**asked, **change})


@pytest.mark.parametrize(
    "figures", [{"token": -1.0}, {"token": 0.0, "pair": 0.0}, {"node": 0}, {"tile": 0}, {"key": float("inf")}]
)
def test_a_cost_that_is_none_is_refused(figures):
    with pytest.raises(ConfigError, match="is no cost"):
        Cost(**{"token": 1.0, "pair": 1.0, **figures})
