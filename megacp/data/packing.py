"""Pack a stream of documents into rows of a fixed number of tokens, a step at a time, with equal work for all data-parallel ranks.

A step has as many documents as its rows have tokens for. They are placed longest first: into the rank with least attention work, and
there into the fullest row that has room. What room is left is filled from the documents that come next in the stream, again the
longest first. A document that found no room is among the first of the next step.

The stream is an order of all documents that is drawn anew for each epoch. Where it stands is a few numbers, so a run goes on from any
step, with another number of ranks too.

Source: own; longest first into the least loaded is Graham 1969, best fit decreasing Johnson 1973.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from megacp.errors import ConfigError

__all__ = ["Packer", "Piece", "Step", "first_fit_decreasing"]

_AHEAD = 2
"""So many times the tokens of a step are looked at. The more there is to fill gaps from, the less padding."""


class Piece(NamedTuple):
    """Tokens [start, stop) of a document; whole documents unless they are longer than a row and may be cut."""

    document: int
    start: int
    stop: int

    @property
    def tokens(self) -> int:
        """Its length."""
        return self.stop - self.start

    @property
    def work(self) -> int:
        """(query, key) pairs of its causal attention."""
        return self.tokens * (self.tokens + 1) // 2


class Step(NamedTuple):
    """The rows of one step, all data-parallel ranks together.

    Attributes:
        number: which step, from 0. rows: the pieces of each row, in the order of their tokens. capacity: tokens a row can hold.
    """

    number: int
    rows: tuple[tuple[Piece, ...], ...]
    capacity: int

    @property
    def tokens(self) -> list[int]:
        """Tokens of each row."""
        return [sum(piece.tokens for piece in row) for row in self.rows]

    @property
    def work(self) -> list[int]:
        """(query, key) pairs of each row."""
        return [sum(piece.work for piece in row) for row in self.rows]

    @property
    def padding(self) -> float:
        """Share of the slots that hold no token."""
        return 1 - sum(self.tokens) / (len(self.rows) * self.capacity)


class Packer:
    """Give step after step of packed rows, without end: after the last document the next epoch begins, in another order.

    Args:
        lengths: tokens of each document; empty ones are left out.
        capacity: tokens a row. rows: rows a step (the global batch size).
        ranks: the data-parallel size; rank r has the r-th of as many equal parts of a step's rows.
        seed: of the order of documents.
        cut: cut documents longer than a row into pieces of a row; otherwise they are refused.
    Raises: ConfigError for a size below 1, rows that do not divide by the ranks, no documents, or documents that are longer than a row
        and may not be cut.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        capacity: int,
        rows: int,
        *,
        ranks: int = 1,
        seed: int = 0,
        cut: bool = False,
    ) -> None:
        self.lengths = np.asarray(lengths, np.int64)
        if min(capacity, rows, ranks) < 1 or rows % ranks:
            raise ConfigError(
                f"megacp: {rows} rows of {capacity} tokens a step cannot be packed for {ranks} data-parallel ranks. All must be at "
                "least 1, and the rows a multiple of the ranks."
            )
        if self.lengths.ndim != 1 or not (self.lengths > 0).any() or (self.lengths < 0).any():
            raise ConfigError(
                "megacp: there is nothing to pack: give the number of tokens of each document, one at least above 0."
            )
        too_long = np.flatnonzero(self.lengths > capacity)
        if len(too_long) and not cut:
            raise ConfigError(
                f"megacp: {len(too_long)} documents are longer than a row of {capacity} tokens (document {too_long[0]} has "
                f"{self.lengths[too_long[0]]}). Use longer rows, or cut=True to cut them into pieces that do not see each other."
            )
        self.capacity, self.rows, self.ranks, self.seed = capacity, rows, ranks, seed
        self._number, self._epoch, self._next = (
            0,
            0,
            0,
        )  # the step, the epoch, and the next document's place in its order
        self._pending: list[Piece] = []  # drawn from the stream and not yet placed
        self._order = self._drawn(0)

    def step(self) -> Step:
        """Pack the next step."""
        size = self.rows * self.capacity
        ahead = sum(piece.tokens for piece in self._pending)
        while ahead < _AHEAD * size:
            drawn = self._draw()
            self._pending += drawn
            ahead += sum(piece.tokens for piece in drawn)
        reach = np.cumsum([piece.tokens for piece in self._pending])
        due = int(np.searchsorted(reach, size, side="right"))
        rows = _Rows(self.rows, self.capacity, self.ranks)
        left = [*rows.place(self._pending[:due]), *rows.place(self._pending[due:])]
        self._pending = left
        self._number += 1
        return Step(self._number - 1, tuple(map(tuple, rows.pieces)), self.capacity)

    def state_dict(self) -> dict[str, Any]:
        """Say where the stream stands, in plain numbers."""
        return {
            "number": self._number,
            "epoch": self._epoch,
            "next": self._next,
            "pending": [list(piece) for piece in self._pending],
            "made_for": self._made_for(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another packer stood.

        Raises: ConfigError if that one had other documents, rows or another seed, or if the state is none.
        """
        try:
            number, epoch, after = (int(state[name]) for name in ("number", "epoch", "next"))
            pending = [Piece(*map(int, piece)) for piece in state["pending"]]
            made_for = list(state["made_for"])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"megacp: this is no state of a packer: {error!r}.") from error
        if made_for != self._made_for():
            raise ConfigError(
                f"megacp: the packer's state is of {made_for} (documents, tokens, capacity, rows, seed), and this packer has "
                f"{self._made_for()}. Resume with the same documents, sequence length, global batch size and seed."
            )
        sane = min(number, epoch) >= 0 and 0 <= after <= len(self.lengths)
        if not sane or not all(
            0 <= p.document < len(self.lengths) and 0 <= p.start < p.stop <= self.lengths[p.document]
            for p in pending
        ):
            raise ConfigError("megacp: the packer's state names documents or places that there are not.")
        self._number, self._epoch, self._next, self._pending = number, epoch, after, pending
        self._order = self._drawn(epoch)

    def _made_for(self) -> list[int]:
        return [len(self.lengths), int(self.lengths.sum()), self.capacity, self.rows, self.seed]

    def _draw(self) -> list[Piece]:
        """Take the next document of the stream, in pieces no longer than a row."""
        if self._next == len(self._order):
            self._epoch, self._next = self._epoch + 1, 0
            self._order = self._drawn(self._epoch)
        document = int(self._order[self._next])
        self._next += 1
        length = int(self.lengths[document])
        cuts = range(0, length, self.capacity)
        return [Piece(document, start, min(start + self.capacity, length)) for start in cuts]

    def _drawn(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths))


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> list[list[int]]:
    """Pack documents into the fewest rows found: longest first, each into the first row that has room. Gives indices by row.

    For a fixed set, as in fine-tuning; it heeds tokens only, not work.
    Raises: ConfigError for a document longer than a row.
    """
    sizes = np.asarray(lengths, np.int64)
    if len(sizes) and int(sizes.max()) > capacity:
        raise ConfigError(
            f"megacp: a document of {int(sizes.max())} tokens does not fit a row of {capacity}. Use longer rows."
        )
    rows: list[list[int]] = []
    room = np.empty(0, np.int64)
    for document in np.argsort(-sizes, kind="stable").tolist():
        if not sizes[document]:
            continue
        fits = np.flatnonzero(room >= sizes[document])
        if len(fits):
            at = int(fits[0])
        else:
            at = len(rows)
            rows.append([])
            room = np.append(room, capacity)
        rows[at].append(document)
        room[at] -= sizes[document]
    return rows


class _Rows:
    """The rows of a step while they are filled."""

    def __init__(self, rows: int, capacity: int, ranks: int) -> None:
        self.pieces: list[list[Piece]] = [[] for _ in range(rows)]
        self._room = np.full((ranks, rows // ranks), capacity, np.int64)
        self._work = np.zeros(ranks, np.int64)

    def place(self, pieces: list[Piece]) -> list[Piece]:
        """Place pieces, longest first, each in the rank with least work that has room; give those that found none, in their order."""
        left = []
        for at in sorted(range(len(pieces)), key=lambda at: (-pieces[at].tokens, at)):
            piece = pieces[at]
            fits = self._room >= piece.tokens
            if not fits.any():
                left.append(at)
                continue
            rank = int(np.where(fits.any(1), self._work, _NEVER).argmin())
            row = int(np.where(fits[rank], self._room[rank], _NEVER).argmin())
            self.pieces[rank * self._room.shape[1] + row].append(piece)
            self._room[rank, row] -= piece.tokens
            self._work[rank] += piece.work
        return [pieces[at] for at in sorted(left)]


_NEVER = np.iinfo(np.int64).max
