"""Masks of every kind against masks spelled out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp import ConfigError, Mask
from tests import oracle


def test_a_dense_mask_of_few_edges_becomes_few_slices() -> None:
    for mask, most in [
        (Mask.causal(30), 1),
        (Mask.full(30), 1),
        (Mask.documents([0, 5, 8, 30]), 3),
        (Mask.causal(30, window=4), 2),
        (Mask.prefix(30, 8), 2),
    ]:
        read = Mask.from_dense(mask.dense())
        assert torch.equal(read.dense(), mask.dense())
        assert len(read.slices) <= most


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.integers(0, 10_000), st.sampled_from([0.1, 0.5, 0.9]))
def test_any_dense_mask_is_read_as_it_is(length: int, seed: int, share: float) -> None:
    visible = torch.rand(length, length, generator=torch.Generator().manual_seed(seed)) < share
    mask = Mask.from_dense(visible)
    assert torch.equal(mask.dense(), visible)
    assert mask.pairs() == int(visible.sum())


def test_a_right_padding_mask_hides_the_padding_only() -> None:
    visible = oracle.causal(12)
    visible[:, 9:] = False
    assert torch.equal(Mask.from_dense(visible).dense(), visible)


def test_a_dense_mask_of_another_shape_or_dtype_is_refused() -> None:
    for wrong in (
        torch.ones(3, 4, dtype=torch.bool),
        torch.ones(3, 3),
        torch.ones(1, 3, 3, dtype=torch.bool),
    ):
        with pytest.raises(ConfigError, match=r"bool \[G, G\]"):
            Mask.from_dense(wrong)


def test_spans_are_seen_both_ways_inside_causal_documents() -> None:
    mask = Mask.documents([0, 10, 30]).with_spans([(12, 20), (2, 6)])
    expected = oracle.documents([0, 10, 30])
    expected[2:6, 2:6] = True
    expected[12:20, 12:20] = True
    assert torch.equal(mask.dense(), expected)


def test_each_row_may_have_spans_of_its_own() -> None:
    mask = Mask.causal(8).with_spans([[(0, 3)], [(2, 5), (6, 8)]])
    expected = torch.stack([oracle.causal(8), oracle.causal(8)])
    expected[0, 0:3, 0:3] = True
    expected[1, 2:5, 2:5] = True
    expected[1, 6:8, 6:8] = True
    assert mask.rows == 2 and torch.equal(mask.dense(), expected)


@pytest.mark.parametrize(
    ("mask", "spans"),
    [
        (Mask.documents([0, 10, 30]), [(5, 12)]),
        (Mask.causal(30), [(2, 6), (4, 8)]),
        (Mask.causal(30), [(20, 31)]),
        (Mask.causal(30, window=2), [(2, 6)]),
        (Mask.full(30), [(2, 6)]),
    ],
    ids=["over two documents", "overlapping", "past the end", "wider than the window", "not causal"],
)
def test_spans_that_cannot_be_exact_are_refused(mask: Mask, spans: list[tuple[int, int]]) -> None:
    with pytest.raises(ConfigError, match="span"):
        mask.with_spans(spans)


def test_a_window_added_to_documents_is_the_window_of_each_document() -> None:
    mask = Mask.documents([0, 7, 8, 20]).within(2, 0)
    assert torch.equal(mask.dense(), oracle.documents([0, 7, 8, 20], window=3))


def test_ends_and_labels_are_by_document_and_row() -> None:
    mask = Mask.documents([[0, 3, 8], [0, 0, 8]])
    assert mask.document_ends().nonzero().tolist() == [[0, 2], [0, 7], [1, 7]]
    labels = mask.labels(torch.arange(16).view(2, 8))
    assert labels.tolist() == [[1, 2, -100, 4, 5, 6, 7, -100], [9, 10, 11, 12, 13, 14, 15, -100]]
