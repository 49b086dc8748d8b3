"""Where documents start by a script's own offsets, ragged and padded, and which offsets are refused."""

from __future__ import annotations

import pytest
import torch

from megacp.errors import ShapeError
from megacp.hosts.documents import starts_of

ROW = torch.zeros(1, 12, dtype=torch.int64)


def starts(lengths: list[int], places: list[int] | None = None, row: torch.Tensor = ROW) -> list[int]:
    offsets = [torch.tensor(lengths), None if places is None else torch.tensor(places)]
    return starts_of("cu_seqlens", row, None, None, offsets)[0].nonzero().flatten().tolist()


def test_offsets_mark_documents_of_any_length_and_the_tail_is_a_document_of_its_own() -> None:
    assert starts([0, 5, 12]) == [0, 5]
    assert starts([0, 1, 1, 1, 7]) == [0, 1, 7]
    assert starts([0, 12]) == [0]


def test_padding_at_the_end_of_a_document_is_a_document_of_its_own() -> None:
    assert starts([0, 3, 8], [0, 4, 12]) == [0, 3, 4, 9]
    assert starts([0, 4, 8], [0, 4, 12]) == [0, 4, 8]


@pytest.mark.parametrize(
    ("lengths", "places"),
    [
        ([0, 5, 13], None),
        ([1, 5, 12], None),
        ([0, 7, 5, 12], None),
        ([0], None),
        ([0, 5, 12], [0, 4, 12]),
        ([0, 5, 12], [0, 12]),
    ],
)
def test_offsets_that_do_not_fit_the_row_are_refused(lengths: list[int], places: list[int] | None) -> None:
    with pytest.raises(ShapeError, match="do not rise from 0 within the 12 tokens"):
        starts(lengths, places)


@pytest.mark.parametrize("row", [torch.zeros(2, 12, dtype=torch.int64), ROW])
def test_offsets_of_no_row_or_of_several_are_refused(row: torch.Tensor) -> None:
    offsets = [torch.tensor([0, 12]) if len(row) == 2 else None, None]
    with pytest.raises(ShapeError, match="--micro-batch-size 1"):
        starts_of("cu_seqlens", row, None, None, offsets)
