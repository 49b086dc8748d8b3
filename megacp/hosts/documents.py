"""Where documents begin: found on the first pipeline stage, known to all stages.

Only the first stage sees the tokens. It sends each micro-batch's document starts to the later stages as one byte a token, on a
gloo group of its own, so that nothing mixes with the host's activations. The same data reaches all tensor-parallel ranks of
the first stage, and each of them tells the later stages of its own pipeline.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch

from megacp import comm
from megacp.errors import ConfigError, ShapeError
from megacp.groups import Group
from megacp.mask import Mask

__all__ = ["Mailbox", "document_mask", "starts_of"]


def starts_of(
    how: str,
    tokens: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    eod: int | None,
    offsets: Sequence[torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """Mark the first token of each document, uint8 [B, G] on the CPU.

    Args:
        how: 'eod' (a document ends after each token ``eod``), 'positions' (one starts wherever a position does not follow the last) or
            'cu_seqlens' (as the offsets say).
        offsets: of a row's documents, int [n + 1] each: cumulative lengths, and where they lie if each is padded at its end (or None).
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
    elif how == "cu_seqlens":
        starts = _by_offsets(_whole("the model's input_ids", tokens).shape, *offsets)
    else:
        positions = _whole("the model's position_ids", position_ids)
        starts = torch.zeros(positions.shape, dtype=torch.uint8)
        starts[:, 1:] = positions[:, 1:] - positions[:, :-1] != 1
    starts[:, 0] = 1
    return starts


def _by_offsets(
    shape: tuple[int, ...], lengths: torch.Tensor | None, places: torch.Tensor | None
) -> torch.Tensor:
    """Mark where documents start by a row's offsets; what pads a document, or the row, is a document of its own."""
    if lengths is None or lengths.dim() != 1 or shape[0] != 1:
        found = "none" if lengths is None else f"{tuple(lengths.shape)} for {shape[0]} rows"
        raise ShapeError(
            f"megacp: --megacp-documents cu_seqlens reads packed_seq_params.cu_seqlens_q, int [documents + 1], of the one row that a "
            f"micro-batch then has, and found {found}. Pass packed_seq_params to the model, with --micro-batch-size 1."
        )
    ends = lengths.detach().cpu().long()
    at = ends if places is None else places.detach().cpu().long()
    sizes, room = ends.diff(), at.diff()
    rises = len(ends) > 1 and int(ends[0]) == int(at[0]) == 0 and bool((sizes >= 0).all())
    if not rises or at.shape != ends.shape or bool((sizes > room).any()) or int(at[-1]) > shape[1]:
        raise ShapeError(
            f"megacp: cu_seqlens_q {_short(ends)}{'' if places is None else f', padded {_short(at)},'} do not rise from 0 "
            f"within the {shape[1]} tokens of the row. Offsets count the whole row, before it is split over ranks."
        )
    starts = torch.zeros(shape, dtype=torch.uint8)
    marks = torch.cat([at, at[:-1] + sizes])
    starts[0, marks[marks < shape[1]]] = 1
    return starts


def _short(x: torch.Tensor) -> str:
    values = x.tolist()
    return str(values if len(values) <= 8 else [*values[:4], "...", *values[-3:]])


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
