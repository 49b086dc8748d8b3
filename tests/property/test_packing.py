"""Packing a stream of documents: nothing is lost or comes twice, rows hold what they can, and a run goes on anywhere."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp import ConfigError
from megacp.data import Packer, Piece, first_fit_decreasing

settings.register_profile("megacp", deadline=None, derandomize=True)
settings.load_profile("megacp")

lengths = st.lists(st.integers(0, 50), min_size=4, max_size=40).filter(lambda sizes: sum(sizes) > 50)


def seen(steps):
    return Counter(piece for step in steps for row in step.rows for piece in row)


@settings(max_examples=40)
@given(lengths, st.integers(50, 90), st.integers(1, 3), st.integers(1, 3), st.integers(0, 9))
def test_every_document_comes_once_an_epoch_and_rows_hold_no_more_than_they_can(
    sizes, capacity, each, ranks, seed
):
    packer = Packer(sizes, capacity, each * ranks, ranks=ranks, seed=seed)
    steps = [packer.step() for _ in range(6)]
    for step in steps:
        assert len(step.rows) == each * ranks and max(step.tokens) <= capacity
    state = packer.state_dict()
    drawn = seen(steps) + Counter(Piece(*piece) for piece in state["pending"])
    whole = {Piece(i, 0, size) for i, size in enumerate(sizes) if size}
    epochs = state["epoch"]
    assert set(drawn) <= whole
    assert all(epochs <= drawn[piece] <= epochs + 1 for piece in whole)  # the last epoch is under way


@settings(max_examples=30)
@given(lengths, st.integers(0, 4), st.sampled_from([1, 3, 6]))
def test_a_run_goes_on_at_any_step_as_if_it_had_not_stopped(sizes, stop, other_ranks):
    def made(ranks):
        return Packer(sizes, 60, 6, ranks=ranks, seed=3)

    whole, before = made(2), made(2)
    steps = [whole.step() for _ in range(8)]
    for _ in range(stop):
        before.step()
    state = json.loads(json.dumps(before.state_dict()))
    same = made(2)
    same.load_state_dict(state)
    assert [same.step() for _ in range(8 - stop)] == steps[stop:]
    other = made(other_ranks)  # with other ranks nothing is lost or comes twice
    other.load_state_dict(state)
    more = [other.step() for _ in range(4)]
    drawn = seen(steps[:stop]) + seen(more) + Counter(Piece(*p) for p in other.state_dict()["pending"])
    epochs = other.state_dict()["epoch"]
    assert all(epochs <= drawn[Piece(i, 0, n)] <= epochs + 1 for i, n in enumerate(sizes) if n)


@given(st.lists(st.integers(0, 200), min_size=1, max_size=20).filter(any))
def test_documents_longer_than_a_row_are_cut_only_if_asked(sizes):
    if max(sizes) > 64:
        with pytest.raises(ConfigError, match=r"longer than a row of 64 tokens .*cut=True"):
            Packer(sizes, 64, 2)
    packer = Packer(sizes, 64, 2, cut=True)
    found = Counter()
    while packer.state_dict()["epoch"] < 2:
        for row in packer.step().rows:
            for piece in row:
                assert piece.tokens <= 64 and (piece.tokens == 64 or piece.stop == sizes[piece.document])
                found[piece.document] += piece.tokens
    assert all(found[i] % n == 0 or found[i] > n for i, n in enumerate(sizes) if n)


def realistic(count=4000, longest=32_768):
    """Lengths whose logarithm is normal, as those of files and pages are."""
    return np.minimum(np.random.default_rng(0).lognormal(7.5, 1.3, count).astype(int) + 1, longest)


def test_ranks_have_equal_work_and_rows_are_full():
    packer = Packer(realistic(), 32_768, 64, ranks=4)
    for _ in range(10):
        step = packer.step()
        work = np.array(step.work).reshape(4, -1).sum(1)
        assert work.max() <= 1.05 * work.mean()
        assert step.padding <= 0.01


def test_no_document_waits_for_ever():
    packer = Packer([*realistic(400, 4096).tolist(), 4096], 4096, 4)
    epochs = []
    while len(epochs) < 3:
        if any(piece.document == 400 for row in packer.step().rows for piece in row):
            epochs.append(packer.state_dict()["epoch"])
    assert epochs[0] <= 1 and epochs[2] <= 3


@given(st.lists(st.integers(0, 30), max_size=40), st.integers(30, 50))
def test_first_fit_decreasing_takes_each_document_once_and_few_rows(sizes, capacity):
    rows = first_fit_decreasing(sizes, capacity)
    assert sorted(i for row in rows for i in row) == [i for i, n in enumerate(sizes) if n]
    fill = [sum(sizes[i] for i in row) for row in rows]
    assert all(n <= capacity for n in fill)
    assert len(rows) <= 11 / 9 * -(-sum(sizes) // capacity) * 1.5 + 1


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ConfigError, match="nothing to pack"):
        Packer([0, 0], 8, 1)
    with pytest.raises(ConfigError, match=r"6 rows .* 4 data-parallel ranks"):
        Packer([3], 8, 6, ranks=4)
    with pytest.raises(ConfigError, match="does not fit a row of 8"):
        first_fit_decreasing([9], 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"made_for": [1, 2, 3, 4, 5]}, "same documents"),
        ({"pending": [[99, 0, 1]]}, "that there are not"),
        ({"pending": [[0, 2, 1]]}, "that there are not"),
        ({"pending": "x"}, "no state"),
        ({"next": -1}, "that there are not"),
        ({"epoch": None}, "no state"),
    ],
)
def test_a_state_of_something_else_is_refused(change, words):
    packer = Packer([3, 4, 5], 8, 2)
    with pytest.raises(ConfigError, match=words):
        packer.load_state_dict({**packer.state_dict(), **change})
