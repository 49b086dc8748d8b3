"""Where documents begin: found on the first pipeline stage, known to all stages.

Only the first stage sees the tokens. It sends each micro-batch's document starts to the later stages as one byte a token, on a
gloo group of its own, so that nothing mixes with the host's activations. The same data reaches all tensor-parallel ranks of
the first stage, and each of them tells the later stages of its own pipeline.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch

from megacp import comm
from megacp.errors import ConfigError, ShapeError
from megacp.groups import Group
from megacp.mask import Mask

__all__ = ["Mailbox", "document_mask", "starts_of"]


def starts_of(
    how: str, tokens: torch.Tensor | None, position_ids: torch.Tensor | None, eod: int | None
) -> torch.Tensor:
    """Mark the first token of each document, uint8 [B, G] on the CPU.

    Args:
        how: 'eod' (a document ends after each token ``eod``) or 'positions' (one starts wherever a position does not follow the last).
    Raises: ConfigError or ShapeError if what is needed to find documents is not there.
    """
    if how == "eod":
        if eod is None:
            raise ConfigError(
                "megacp: --megacp-documents eod needs the id of the token that ends a document, and the host's tokenizer gave none. "
                "Add --megacp-eod-token ID."
            )
        ids = _whole("the model's input_ids", tokens)
        starts = torch.zeros(ids.shape, dtype=torch.uint8)
        starts[:, 1:] = ids[:, :-1] == eod
    else:
        positions = _whole("the model's position_ids", position_ids)
        starts = torch.zeros(positions.shape, dtype=torch.uint8)
        starts[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
    starts[:, 0] = 1
    return starts


def document_mask(starts: torch.Tensor) -> Mask:
    """Make the causal mask that keeps the marked documents apart."""
    length = torch.tensor([starts.shape[1]])
    return Mask.documents(
        [torch.cat([torch.nonzero(row).flatten(), length]).numpy() for row in starts.bool()]
    )


class Mailbox:
    """Document starts of micro-batches on their way from the first pipeline stage to the others.

    Every model chunk of every stage takes each micro-batch once and in the same order, so messages need no names.
    """

    def __init__(self, group: Group | None, chunks: int) -> None:
        self._group = group
        self._taken = [0] * chunks
        self._first = 0  # number of the oldest entry kept
        self._kept: deque[torch.Tensor] = deque()
        self._sent: deque[comm.Posted] = deque()

    @property
    def is_first(self) -> bool:
        """Say whether this process is the first stage of its pipeline."""
        return self._group is None or self._group.rank == 0

    def put(self, starts: torch.Tensor) -> None:
        """Tell the later stages of this micro-batch's documents (first chunk of the first stage)."""
        if self._group is None:
            return
        self._kept.append(starts)
        sends = [(starts, stage) for stage in range(1, self._group.size)]
        self._sent.append(
            comm.post(self._group, sends, [], "sending document starts to later pipeline stages")
        )
        while len(self._sent) > 64:
            self._sent.popleft().wait()
        self._take(0)

    def get(self, chunk: int, rows: int, seq_len: int) -> torch.Tensor:
        """Return the next micro-batch's document starts for a chunk, waiting for them if need be, uint8 [rows, seq_len]."""
        if self._group is None:
            raise ShapeError(
                "megacp: a model chunk without tokens asked for documents, but there is no pipeline."
            )
        if self._taken[chunk] - self._first >= len(self._kept):
            starts = torch.empty(rows, seq_len, dtype=torch.uint8)
            comm.post(
                self._group, [], [(starts, 0)], "receiving document starts from the first pipeline stage"
            ).wait()
            self._kept.append(starts)
        return self._take(chunk)

    def _take(self, chunk: int) -> torch.Tensor:
        starts = self._kept[self._taken[chunk] - self._first]
        self._taken[chunk] += 1
        while min(self._taken) > self._first:
            self._kept.popleft()
            self._first += 1
        return starts


def _whole(name: str, x: Any) -> torch.Tensor:
    if not isinstance(x, torch.Tensor) or x.dim() != 2:
        shape = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ShapeError(
            f"megacp: documents are read from {name}, which must be [batch, sequence], not {shape}."
        )
    return x.detach().cpu()
