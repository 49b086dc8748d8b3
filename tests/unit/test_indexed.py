"""megacp.data reads what Megatron writes, and says in one sentence what is wrong with a file that nobody should have written."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacp import ConfigError
from megacp.data import IndexedDocuments, PackedRows, Packer

DOCUMENTS = [[5, 6, 7, 3], [3], [], [8] * 40, [1, 2]]


@pytest.fixture
def written(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write the documents with Megatron's own builder; the second and third are two sequences of one document."""
    indexed = pytest.importorskip(
        "megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed"
    )
    dtype, multimodal = getattr(request, "param", (np.int32, False))
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "d.bin"), dtype=dtype, multimodal=multimodal)
    for i, ids in enumerate(DOCUMENTS):
        builder.add_item(torch.tensor(ids, dtype=torch.int64), mode=1)
        if i != 1:
            builder.end_document()
    builder.finalize(str(tmp_path / "d.idx"))
    return tmp_path / "d"


@pytest.mark.parametrize(
    "written", [(np.int32, False), (np.uint16, False), (np.uint8, True)], indirect=True, ids=str
)
def test_what_megatron_writes_is_read_as_it_was(written: Path) -> None:
    documents = IndexedDocuments(written)
    expected = [DOCUMENTS[0], DOCUMENTS[1] + DOCUMENTS[2], DOCUMENTS[3], DOCUMENTS[4]]
    assert len(documents) == 4 and documents.lengths.tolist() == [4, 1, 40, 2]
    assert [documents.tokens(i).tolist() for i in range(4)] == expected
    assert documents.tokens(2, 3, 7).tolist() == [8] * 4 and documents.tokens(0, 4).tolist() == []


@pytest.mark.parametrize("place", [(4, 0, None), (-1, 0, None), (0, 3, 2), (0, 0, 5), (0, -1, 2)])
def test_a_place_that_there_is_not_is_refused(written: Path, place: tuple[int, int, int | None]) -> None:
    with pytest.raises(ConfigError, match="has 4 documents, and no tokens"):
        IndexedDocuments(written).tokens(*place)


def test_sequences_of_a_document_that_lie_apart_are_joined(written: Path) -> None:
    head = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 4, 2, 2)
    tables = np.array([2, 3], "<i4").tobytes() + np.array([8, 0], "<i8").tobytes()
    written.with_suffix(".idx").write_bytes(head + tables + np.array([0, 2], "<i8").tobytes())
    assert IndexedDocuments(written).tokens(0).tolist() == [7, 3, 5, 6, 7]


def test_a_missing_half_is_named(tmp_path: Path, written: Path) -> None:
    written.with_suffix(".bin").unlink()
    with pytest.raises(ConfigError, match=r"d\.bin cannot be read"):
        IndexedDocuments(written)


@given(data=st.data())
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_malformed_index_is_one_clear_error_or_reads_right_and_takes_no_memory(
    written: Path, data: st.DataObject
) -> None:
    good = bytearray(written.with_suffix(".idx").read_bytes())
    broken = bytearray(good)
    for _ in range(data.draw(st.integers(1, 3))):
        kind = data.draw(st.sampled_from(["byte", "word", "cut", "longer"]))
        at = data.draw(st.integers(0, max(0, len(broken) - 9)))
        if kind == "byte" and broken:
            broken[at] = data.draw(st.integers(0, 255))
        elif kind == "word" and len(broken) > 8:
            broken[at : at + 8] = struct.pack("<q", data.draw(st.sampled_from([-1, 0, 1, 2**40, 2**62, 7])))
        elif kind == "cut":
            del broken[at:]
        elif kind == "longer":
            broken += bytes(data.draw(st.integers(1, 20)))
    path = written.with_name("broken")
    path.with_suffix(".idx").write_bytes(broken)
    path.with_suffix(".bin").write_bytes(written.with_suffix(".bin").read_bytes())
    tracemalloc.start()
    try:
        documents = IndexedDocuments(path)
        for i in range(len(documents)):
            assert len(documents.tokens(i)) == documents.lengths[i]
    except ConfigError as error:
        assert "broken" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        written.with_suffix(".idx").write_bytes(good)
    assert peak < 1_000_000


class InMemory:
    """Documents that are lists of numbers."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = np.array(lengths)

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        return np.arange(self.lengths[document])[start:stop] + 1000 * document


def rows_of(lengths: list[int], loss: str = "token", **more: int) -> PackedRows:
    documents = InMemory(lengths)
    return PackedRows(documents, Packer(documents.lengths, 16, 4, **more), 9, loss=loss)


def test_a_row_holds_its_documents_with_labels_that_stay_within_them() -> None:
    rows = rows_of([5, 1, 9, 16, 3, 2, 0, 7] * 5)
    for number in range(3):
        for row in range(4):
            got, at = rows.row(number, row), 0
            for piece in rows.pieces(number, row):
                of = slice(at, at + piece.tokens)
                whole = rows.documents.tokens(piece.document, piece.start, piece.stop)
                assert got["tokens"][of].tolist() == whole.tolist()
                assert got["position_ids"][of].tolist() == list(range(piece.tokens))
                assert got["labels"][of][:-1].tolist() == whole[1:].tolist()
                assert got["loss_mask"][of].tolist() == [1.0] * (piece.tokens - 1) + [0.0]
                at += piece.tokens
            assert (got["tokens"][at:] == 9).all() and not got["loss_mask"][at:].any()
            assert not got["position_ids"][at:].any()


def test_each_document_counts_alike_if_asked() -> None:
    rows = rows_of([5, 2, 9, 16, 3, 2, 7] * 5, "document")
    for row in range(4):
        total = rows.row(0, row)["loss_mask"].sum()
        assert total == pytest.approx(len(rows.pieces(0, row)), abs=1e-5)


def test_readers_may_be_a_few_steps_apart_and_a_state_goes_on_from_any_of_them() -> None:
    ahead = rows_of([5, 1, 9, 16, 3, 2, 7] * 9)
    taken = [ahead.step(n) for n in range(6)]
    assert ahead.step(2) == taken[2]
    again = rows_of([5, 1, 9, 16, 3, 2, 7] * 9, ranks=2)
    again.load_state_dict(ahead.state_dict(4))
    fresh = rows_of([5, 1, 9, 16, 3, 2, 7] * 9)
    fresh.load_state_dict(ahead.state_dict(4))
    assert fresh.step(4) == taken[4] and fresh.step(5) == taken[5]
    assert again.step(4).tokens  # other ranks, the same stream


def test_steps_out_of_reach_are_refused() -> None:
    rows = rows_of([5, 3, 2] * 9)
    with pytest.raises(ConfigError, match="cannot be had"):
        rows.step(1)
    for number in range(12):
        rows.step(number)
    with pytest.raises(ConfigError, match="cannot be had"):
        rows.step(0)
    with pytest.raises(ConfigError, match="is forgotten"):
        rows.state_dict(1)


def test_a_packer_of_other_documents_and_an_unknown_loss_are_refused() -> None:
    with pytest.raises(ConfigError, match="other documents"):
        PackedRows(InMemory([4, 4]), Packer([4, 5], 16, 4), 9)
    with pytest.raises(ConfigError, match="'token' or 'document'"):
        rows_of([4, 4], "row")
