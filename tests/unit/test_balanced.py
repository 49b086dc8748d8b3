"""Layout.balanced: hand-made rows, the published document lengths, and what is refused."""

from __future__ import annotations

import csv
import random
from pathlib import Path

import numpy as np
import pytest

from megacp import ConfigError, Layout, Mask
from megacp.balance import GRAIN, least_keys, place

TABLE = Path(__file__).parents[2] / "tools" / "data" / "document_lengths.csv"
SHARE = 8192


def draw(cp_size: int, seed: int) -> np.ndarray:
    """Cumulative lengths of one row: a bin by its count, a length evenly inside it, none above a quarter of the row."""
    rng = random.Random(seed)
    rows = list(csv.DictReader(line for line in TABLE.open() if not line.startswith("#")))
    counts = [int(row["documents"]) for row in rows]
    total, offsets = SHARE * cp_size, [0]
    while offsets[-1] < total:
        row = rng.choices(rows, counts)[0]
        length = min(rng.randint(int(row["shortest"]), int(row["longest"])), total // 4)
        offsets.append(min(offsets[-1] + length, total))
    return np.array(offsets)


def work_and_keys(layout: Layout, offsets: np.ndarray) -> tuple[list[int], list[int]]:
    """Pairs and foreign keys of each rank, for causal documents, from the ranges alone."""
    work, keys = [], []
    for rank in range(layout.cp_size):
        pairs, ends, owned = 0, {}, 0
        for start, stop in layout.ranges(rank):
            for document in range(
                np.searchsorted(offsets, start, "right") - 1, np.searchsorted(offsets, stop, "left")
            ):
                low = max(start - offsets[document], 0)
                high = min(stop, offsets[document + 1]) - offsets[document]
                pairs += (high * (high + 1) - low * (low + 1)) // 2
                ends[document] = max(ends.get(document, 0), high)
            owned += stop - start
        work.append(int(pairs))
        keys.append(int(sum(ends.values()) - owned))
    return work, keys


def imbalance(work: list[int]) -> float:
    return max(work) * len(work) / sum(work)


def cuts(layout: Layout, offsets: np.ndarray) -> list[int]:
    """Places inside documents at which a piece starts, counted from the start of the document."""
    starts = [start for rank in range(layout.cp_size) for start, _ in layout.ranges(rank)]
    return [int(s - offsets[np.searchsorted(offsets, s, "right") - 1]) for s in starts if s not in offsets]


@pytest.mark.parametrize("cp_size", [4, 8, 16, 32])
def test_published_lengths_are_balanced_in_every_draw_with_few_keys_and_few_aligned_pieces(cp_size):
    brought = []
    for seed in range(12 if cp_size < 32 else 5):
        offsets = draw(cp_size, seed)
        layout = Layout.balanced(Mask.documents(offsets), cp_size)
        work, keys = work_and_keys(layout, offsets)
        assert imbalance(work) <= 1.02
        assert all(sum(b - a for a, b in layout.ranges(rank)) == SHARE for rank in range(cp_size))
        assert all(cut % GRAIN == 0 for cut in cuts(layout, offsets))
        assert sum(len(layout.ranges(rank)) for rank in range(cp_size)) <= len(offsets) - 1 + 4 * cp_size
        assert sum(keys) >= least_keys(Mask.documents(offsets), cp_size)
        brought.append(np.mean(keys) / offsets[-1])
    assert np.mean(brought) <= 0.13


@pytest.mark.parametrize(("seq_len", "cp_size"), [(65536, 8), (8192, 8), (512, 8), (128 * 5, 5)])
def test_one_causal_document_gets_a_zigzag(seq_len, cp_size):
    balanced, zigzag = Layout.balanced(Mask.causal(seq_len), cp_size), Layout.zigzag(seq_len, cp_size)
    assert [balanced.ranges(r) for r in range(cp_size)] == [zigzag.ranges(r) for r in range(cp_size)]


def test_one_full_document_gets_one_stretch_a_rank():
    layout = Layout.balanced(Mask.full(8192), 4)
    assert [len(layout.ranges(rank)) for rank in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "mask",
    [
        Mask.causal(32768, window=3000),
        Mask.full(32768, window=1000),
        Mask.prefix(32768, 10000),
        Mask.documents([0, 9000, 18000, 32768], causal=False),
        Mask.documents([0, 9000, 18000, 32768], window=500),
        Mask.documents([[0, 3000, 32768], [0, 10000, 20000, 32768]]),
    ],
    ids=lambda mask: mask.kind,
)
def test_every_kind_of_mask_is_balanced(mask):
    from megacp.plans import queries_of
    from megacp.slices import pairs

    layout = Layout.balanced(mask, 4)
    work = [int(pairs(queries_of(layout, mask, rank)).sum()) for rank in range(4)]
    assert imbalance(work) <= 1.02
    assert sum(work) == mask.pairs()


def test_short_documents_of_one_length_stay_whole():
    offsets = np.arange(0, 65536 + 1, 256)
    layout = Layout.balanced(Mask.documents(offsets), 8)
    assert cuts(layout, offsets) == []


def test_documents_of_one_token_are_balanced():
    offsets = np.arange(4096 + 1)
    layout = Layout.balanced(Mask.documents(offsets), 8)
    assert imbalance(work_and_keys(layout, offsets)[0]) == 1


def test_empty_documents_change_nothing():
    with_empty = Mask.documents([0, 0, 700, 700, 3000, 8192, 8192])
    without = Mask.documents([0, 700, 3000, 8192])
    assert place(with_empty, 4) == place(without, 4)


@pytest.mark.parametrize(("seq_len", "cp_size"), [(1, 4), (3, 8), (9, 8), (4097, 8), (1001, 3)])
def test_lengths_that_do_not_divide_are_padded_by_at_most_one_slot_a_rank(seq_len, cp_size):
    layout = Layout.balanced(Mask.causal(seq_len), cp_size)
    counts = [sum(b - a for a, b in layout.ranges(rank)) for rank in range(cp_size)]
    assert layout.local_len == -(-seq_len // cp_size)
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == seq_len


def test_one_rank_owns_everything():
    layout = Layout.balanced(Mask.documents([0, 5, 100]), 1)
    assert layout.ranges(0) == [(0, 100)]


def test_a_cp_size_that_is_no_size_is_refused():
    with pytest.raises(ConfigError, match="cp_size is 0; it must be a whole number of at least 1"):
        Layout.balanced(Mask.causal(8), 0)


def test_least_keys_of_one_document_on_two_ranks():
    # Two ranks of 50 tokens, 5,050 pairs: half of them are those of the tokens from 71 on, but a rank has room for 50.
    assert least_keys(Mask.causal(100), 2, tolerance=0.0) == int((100 * 101 - 5050) ** 0.5 - 1)
    assert least_keys(Mask.documents([0, 50, 100]), 2) == 0


def test_equal_masks_get_equal_layouts_and_others_do_not():
    a, b = Mask.documents([0, 3000, 8192]), Mask.documents([0, 3001, 8192])
    assert Layout.balanced(a, 4) == Layout.balanced(Mask.documents([0, 3000, 8192]), 4)
    assert hash(Layout.balanced(a, 4)) == hash(Layout.balanced(a, 4))
    assert Layout.balanced(a, 4) != Layout.balanced(b, 4)
