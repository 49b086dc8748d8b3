"""Packed rows as a training loop takes them: tokens, labels, what counts, and positions that say where documents begin.

A packed row is read back by its positions, which start anew with each piece: ``--megacp-documents positions``, or
:meth:`megacp.Mask.from_positions`. Slots that hold no token are pieces of one token each, so they cost no attention, and do not count.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np

from megacp.data.packing import Packer, Piece, Step
from megacp.errors import ConfigError

__all__ = ["Documents", "PackedRows"]

_KEPT = 8
"""Steps that are kept, for readers that do not take them at the same time (the chunks of a pipeline stage)."""


class Documents(Protocol):
    """Where tokens come from; :class:`megacp.data.IndexedDocuments` is one."""

    lengths: np.ndarray

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Give tokens [start, stop) of a document."""


class PackedRows:
    """The rows of each step, from documents and a packer; every rank has its own, and all are alike.

    Args:
        documents: the tokens. packer: made for their lengths. pad_token: an id of the vocabulary, for slots without a token.
        loss: ``token``, where each token counts alike, or ``document``, where each piece does, however long it is.
    Raises: ConfigError for a loss that is neither, or a packer of other documents.
    """

    def __init__(self, documents: Documents, packer: Packer, pad_token: int, *, loss: str = "token") -> None:
        if loss not in ("token", "document"):
            raise ConfigError(f"megacp: loss is {loss!r}; it must be 'token' or 'document'.")
        if not np.array_equal(documents.lengths, packer.lengths):
            raise ConfigError("megacp: the packer was made for other documents. Give it the same lengths.")
        self.documents, self.packer, self.pad_token, self.loss = documents, packer, pad_token, loss
        self._steps: OrderedDict[int, tuple[Step, dict[str, Any]]] = OrderedDict()
        self._next = packer.state_dict()["number"]

    def step(self, number: int) -> Step:
        """Give the rows of a step; steps are packed in order, and the last few can be had again.

        Raises: ConfigError for a step that is no longer, or not yet, to be had.
        """
        if number == self._next:
            self._steps[number] = self.packer.step(), self.packer.state_dict()
            self._next += 1
            if len(self._steps) > _KEPT:
                self._steps.popitem(last=False)
        if number not in self._steps:
            raise ConfigError(
                f"megacp: step {number} of the packed rows cannot be had: {self._next} is next, and the last {_KEPT} are kept. "
                "Take steps in order; to go on from a checkpoint, load its state."
            )
        return self._steps[number][0]

    def row(self, number: int, row: int) -> dict[str, np.ndarray]:
        """Give one row of a step.

        Shapes: tokens, labels, position_ids int64 [capacity]; loss_mask float32 [capacity], which counts each label within
        its piece as 1, or as 1 / (their number) if documents count alike. Labels that lead out of a piece, and slots without a
        token, count 0.
        """
        size = self.packer.capacity
        tokens = np.full(size, self.pad_token, np.int64)
        labels, positions = tokens.copy(), np.zeros(size, np.int64)
        counts = np.zeros(size, np.float32)
        at = 0
        for piece in self.step(number).rows[row]:
            stop = at + piece.tokens
            tokens[at:stop] = self.documents.tokens(piece.document, piece.start, piece.stop)
            labels[at : stop - 1] = tokens[at + 1 : stop]
            positions[at:stop] = np.arange(piece.tokens)
            counts[at : stop - 1] = 1.0 if self.loss == "token" else 1.0 / max(1, piece.tokens - 1)
            at = stop
        return {"tokens": tokens, "labels": labels, "loss_mask": counts, "position_ids": positions}

    def pieces(self, number: int, row: int) -> tuple[Piece, ...]:
        """Name what a row holds."""
        return self.step(number).rows[row]

    def state_dict(self, number: int) -> dict[str, Any]:
        """Say where the stream stands before step ``number``, in plain numbers: what a checkpoint written there keeps.

        Raises: ConfigError for a step further back than those that are kept.
        """
        if number == self._next:
            return self.packer.state_dict()
        if number - 1 in self._steps:
            return self._steps[number - 1][1]
        raise ConfigError(f"megacp: where the packed rows stood before step {number} is forgotten.")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where another stood, of any number of ranks. Raises: ConfigError as the packer's does."""
        self.packer.load_state_dict(state)
        self._steps.clear()
        self._next = self.packer.state_dict()["number"]
