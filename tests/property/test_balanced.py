"""Properties of Layout.balanced for any mask."""

from __future__ import annotations

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp import Layout, Mask
from megacp.balance import GRAIN, least_keys
from tests.oracle import offsets
from tests.unit.test_balanced import cuts, imbalance, work_and_keys

lengths = st.lists(
    st.integers(0, 3) | st.integers(1, 60) | st.integers(1, 700), min_size=1, max_size=14
).filter(any)
sizes = st.integers(1, 9)

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")


@st.composite
def masks(draw):
    documents = draw(lengths)
    total, window = sum(documents), draw(st.none() | st.integers(1, 100))
    kind = draw(st.sampled_from(["documents", "full documents", "causal", "full", "prefix", "rows"]))
    if kind == "documents":
        return Mask.documents(offsets(documents), window=window)
    if kind == "full documents":
        return Mask.documents(offsets(documents), causal=False, window=window)
    if kind == "prefix":
        return Mask.prefix(total, draw(st.integers(0, total)))
    if kind == "rows":
        return Mask.documents([offsets(documents), offsets(documents[::-1])], window=window)
    return (Mask.causal if kind == "causal" else Mask.full)(total, window)


@settings(max_examples=300)
@given(masks(), sizes)
def test_each_token_has_one_owner_and_ranks_differ_by_at_most_one_token(mask, cp_size):
    layout = Layout.balanced(mask, cp_size)
    owners = np.zeros(mask.seq_len, int)
    counts = []
    for rank in range(cp_size):
        for start, stop in layout.ranges(rank):
            owners[start:stop] += 1
        counts.append(sum(stop - start for start, stop in layout.ranges(rank)))
    assert (owners == 1).all()
    assert max(counts) - min(counts) <= 1
    assert layout.local_len == -(-mask.seq_len // cp_size)


@settings(max_examples=100)
@given(masks(), sizes)
def test_unshard_undoes_shard(mask, cp_size):
    layout = Layout.balanced(mask, cp_size)
    x = torch.arange(mask.seq_len)[None]
    assert torch.equal(layout.unshard([layout.shard(x, rank) for rank in range(cp_size)]), x)


@settings(max_examples=100)
@given(masks(), sizes)
def test_the_same_mask_gets_the_same_layout(mask, cp_size):
    first, second = Layout.balanced(mask, cp_size), Layout.balanced(mask, cp_size)
    assert first == second
    assert all((a == b).all() for a, b in zip(first.pieces, second.pieces, strict=True))


@st.composite
def rows(draw):
    """Many documents of moderate length, 2,048 tokens a rank, none longer than a third of the row."""
    cp_size, rng = draw(st.sampled_from([2, 3, 4, 6, 8])), random.Random(draw(st.integers(0, 10**6)))
    total, ends = 2048 * cp_size, [0]
    longest = draw(st.integers(200, total // 3))
    while ends[-1] < total:
        length = rng.randint(1, rng.choice([300, longest]))
        ends.append(min(ends[-1] + length, total))
    return np.array(ends), cp_size


@settings(max_examples=60)
@given(rows())
def test_rows_of_many_documents_are_balanced_with_few_pieces_and_no_more_keys_than_need_be(case):
    ends, cp_size = case
    layout = Layout.balanced(Mask.documents(ends), cp_size)
    work, keys = work_and_keys(layout, ends)
    assert imbalance(work) <= 1.02
    assert sum(len(layout.ranges(rank)) for rank in range(cp_size)) <= len(ends) - 1 + 5 * cp_size
    assert sum(cut % GRAIN != 0 for cut in cuts(layout, ends)) <= cp_size
    assert sum(keys) >= least_keys(Mask.documents(ends), cp_size, tolerance=imbalance(work) - 1)
