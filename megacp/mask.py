"""What may attend to what, held as slices, never as a G x G tensor.

A slice is a rectangle of queries and keys with two diagonals: key k is visible to query q if q is in [q_start, q_stop),
k in [k_start, k_stop), and lo <= k - q <= hi. Causal is hi = 0, a window adds lo, full has neither. Slices of one mask are
disjoint. Every mask megacp knows, documents, prefixes and windows included, is a short list of these.

Shapes: ``G`` global sequence length, ``B`` rows of a micro-batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megacp.errors import ConfigError
from megacp.layout import as_offsets
from megacp.slices import ALL_ROWS, COLUMNS, UNBOUNDED, pairs, read_dense, trim

__all__ = ["Mask"]

Window = int | tuple[int | None, int | None] | None


@dataclass(frozen=True, eq=False)
class Mask:
    """Which keys each query may see, for one sequence or for each row of a micro-batch.

    Attributes:
        kind: words for people ("causal", "documents (12, causal)"). seq_len: ``G``, in tokens.
        slices: int64 [n, 7], columns :data:`COLUMNS`, sorted by row and first query.
        rows: ``B`` if rows differ, else None (the mask holds for any number of rows).
        offsets: per row the cumulative document lengths, or None for masks without documents.
    """

    kind: str
    seq_len: int
    slices: np.ndarray = field(repr=False)
    rows: int | None = None
    offsets: tuple[np.ndarray, ...] | None = field(default=None, repr=False)
    _key: bytes = field(default=b"", repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mask) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @staticmethod
    def causal(seq_len: int, window: Window = None) -> Mask:
        """Let each query see itself and the keys before it; of those only the last ``window`` (itself included)."""
        _check_length(seq_len)
        lo, hi = _diagonals(True, window)
        kind = "causal" if window is None else f"causal, window {window}"
        return _make(kind, seq_len, [(ALL_ROWS, 0, seq_len, 0, seq_len, lo, hi)])

    @staticmethod
    def full(seq_len: int, window: Window = None) -> Mask:
        """Let every query see every key; with ``window``, only keys less than ``window`` away in either direction."""
        _check_length(seq_len)
        lo, hi = _diagonals(False, window)
        kind = "full" if window is None else f"full, window {window}"
        return _make(kind, seq_len, [(ALL_ROWS, 0, seq_len, 0, seq_len, lo, hi)])

    @staticmethod
    def documents(cu_seqlens: Any, causal: bool = True, window: Window = None) -> Mask:
        """Keep packed documents apart.

        Args:
            cu_seqlens: int [n + 1], cumulative lengths in tokens from 0 to G; or a list of such, one for each row of the batch.
            causal: within a document, see only itself and what is before it.
            window: as in :meth:`causal` and :meth:`full`.
        Raises: ConfigError for offsets that do not rise from 0, or rows of different lengths.
        """
        rows = [as_offsets(c) for c in cu_seqlens] if _is_nested(cu_seqlens) else [as_offsets(cu_seqlens)]
        return _documents(rows, causal, window)

    @staticmethod
    def from_tokens(ids: torch.Tensor, eod: int, causal: bool = True, window: Window = None) -> Mask:
        """Read documents from token ids: a document ends after each ``eod`` token.

        Shapes: ids int [G] or [B, G].
        """
        table = _table("ids", ids)
        ends = table == eod
        rows = [np.unique(np.r_[0, np.flatnonzero(row) + 1, table.shape[1]]) for row in ends]
        return _documents(rows, causal, window)

    @staticmethod
    def from_positions(position_ids: torch.Tensor, causal: bool = True, window: Window = None) -> Mask:
        """Read documents from position ids: a document starts wherever a position does not follow the one before it.

        Shapes: position_ids int [G] or [B, G].
        """
        table = _table("position_ids", position_ids)
        starts = np.diff(table, axis=1) != 1
        rows = [np.unique(np.r_[0, np.flatnonzero(row) + 1, table.shape[1]]) for row in starts]
        return _documents(rows, causal, window)

    @staticmethod
    def prefix(seq_len: int, prefix: int) -> Mask:
        """Let the first ``prefix`` tokens see each other in both directions; the rest is causal.

        Raises: ConfigError for a prefix outside 0..seq_len.
        """
        _check_length(seq_len)
        if not 0 <= prefix <= seq_len:
            raise ConfigError(f"megacp: prefix {prefix} is outside the sequence of {seq_len} tokens.")
        rows = [
            (ALL_ROWS, 0, prefix, 0, prefix, -UNBOUNDED, UNBOUNDED),
            (ALL_ROWS, prefix, seq_len, 0, seq_len, -UNBOUNDED, 0),
        ]
        return _make(f"prefix {prefix}, then causal", seq_len, rows)

    @staticmethod
    def from_dense(visible: torch.Tensor) -> Mask:
        """Read a mask that somebody has spelled out, True where a query (first dim) may see a key, bool [G, G].

        Reads G x G values, so it is for masks of other systems and for small cases. What is not made of few straight edges becomes
        many slices.
        Raises: ConfigError for another shape or dtype.
        """
        table = (
            np.asarray(visible.detach().cpu()) if isinstance(visible, torch.Tensor) else np.asarray(visible)
        )
        if table.dtype != bool or table.ndim != 2 or table.shape[0] != table.shape[1] or not table.size:
            raise ConfigError(
                f"megacp: a dense mask must be bool [G, G], True where a key is visible, not {table.dtype} {table.shape}."
            )
        return _make("dense", len(table), read_dense(table))

    def with_spans(self, spans: Any) -> Mask:
        """Let the tokens of each span see each other in both directions, as images do inside causal text.

        Args:
            spans: pairs (start, stop) of global positions; or a list of such lists, one for each row of the batch.
        Raises: ConfigError for spans that overlap, leave the sequence, or whose tokens may not all see what is before them in the span
            (a span over two documents, or wider than a window).
        """
        nested = bool(len(spans)) and not isinstance(spans[0][0] if len(spans[0]) else (), (int, np.integer))
        rows = [sorted(map(tuple, row)) for row in spans] if nested else [sorted(map(tuple, spans))]
        batch = self.rows or (len(rows) if nested else None)
        if nested and len(rows) != batch:
            raise ConfigError(f"megacp: spans for {len(rows)} rows do not fit a mask of {batch} rows.")
        out = []
        for row in range(batch or 1):
            base = self._of_row(row)
            own = rows[row] if nested else rows[0]
            _check_spans(own, base, self.seq_len)
            out.append(base.copy())
            out.append(np.array([(0, a, b, a, b, 1, UNBOUNDED) for a, b in own], np.int64).reshape(-1, 7))
            for part in out[-2:]:
                part[:, 0] = row if batch else ALL_ROWS
        return _make(
            f"{self.kind}, {sum(map(len, rows))} spans seen both ways",
            self.seq_len,
            np.concatenate(out),
            batch,
            self.offsets,
        )

    def within(self, left: int | None, right: int | None) -> Mask:
        """Add a sliding window: at most ``left`` keys before the query and ``right`` after it (None: no bound).

        Source: the (left, right) convention of flash-attn and Megatron-LM's window_size; -1 is no bound there and here.
        """
        slices = self.slices.copy()
        if left is not None and left >= 0:
            slices[:, 5] = np.maximum(slices[:, 5], -left)
        if right is not None and right >= 0:
            slices[:, 6] = np.minimum(slices[:, 6], right)
        return _make(f"{self.kind}, window ({left}, {right})", self.seq_len, slices, self.rows, self.offsets)

    def visible(self, i: int, j: int, row: int = 0) -> bool:
        """Say whether query ``i`` may see key ``j`` (global positions) in a row of the micro-batch."""
        s = self._of_row(row)
        hit = (
            (s[:, 1] <= i)
            & (i < s[:, 2])
            & (s[:, 3] <= j)
            & (j < s[:, 4])
            & (s[:, 5] <= j - i)
            & (j - i <= s[:, 6])
        )
        return bool(hit.any())

    def dense(self) -> torch.Tensor:
        """Spell the mask out, bool [G, G] (or [B, G, G] if rows differ); for tests and pictures of small cases."""
        index = np.arange(self.seq_len)
        delta = index[None, :] - index[:, None]
        out = np.zeros((self.rows or 1, self.seq_len, self.seq_len), bool)
        for row in range(len(out)):
            for _, q0, q1, k0, k1, lo, hi in self._of_row(row):
                part = delta[q0:q1, k0:k1]
                out[row, q0:q1, k0:k1] |= (lo <= part) & (part <= hi)
        return torch.from_numpy(out if self.rows else out[0])

    def pairs(self, rows: int = 1) -> int:
        """Count the visible (query, key) pairs, over ``rows`` rows where the rows are alike."""
        return int(pairs(self.slices).sum()) * (1 if self.rows else rows)

    def document_positions(self) -> torch.Tensor:
        """Return positions that restart at each document, int64 [G] (or [B, G] if rows differ).

        Raises: ConfigError for a mask without documents.
        """
        out = np.stack([np.arange(o[-1]) - np.repeat(o[:-1], np.diff(o)) for o in self._documents()])
        return torch.from_numpy(out if self.rows else out[0])

    def document_ends(self) -> torch.Tensor:
        """Mark the last token of each document (of the sequence, if there are none), bool [1, G], or [B, G] if rows differ."""
        rows = self.offsets or (np.array([0, self.seq_len]),)
        out = torch.zeros(len(rows), self.seq_len, dtype=torch.bool)
        for row, offsets in enumerate(rows):
            out[row, torch.from_numpy(offsets[1:][np.diff(offsets) > 0] - 1)] = True
        return out

    def labels(self, tokens: torch.Tensor, ignore: int = -100) -> torch.Tensor:
        """Shift whole rows of tokens into next-token labels that never cross a document.

        The last token of each document gets ``ignore``. Do this before sharding, never after.
        Shapes: tokens int [G] or [B, G] -> the same.
        Raises: ConfigError if the tokens have another length, or another number of rows than the mask.
        """
        if tokens.shape[-1] != self.seq_len or (self.rows and tokens.shape[0] != self.rows):
            raise ConfigError(
                f"megacp: tokens of shape {tuple(tokens.shape)} do not fit a mask of {self.seq_len} tokens"
                + (f" and {self.rows} rows." if self.rows else ".")
            )
        labels = torch.roll(tokens, -1, -1)
        ends = self.document_ends().to(labels.device)
        return labels.masked_fill(ends if self.rows else ends[0], ignore)

    def _documents(self) -> tuple[np.ndarray, ...]:
        if self.offsets is None:
            raise ConfigError(f"megacp: a mask of kind '{self.kind}' has no documents.")
        return self.offsets

    def _of_row(self, row: int) -> np.ndarray:
        kept: np.ndarray = self.slices[(self.slices[:, 0] == ALL_ROWS) | (self.slices[:, 0] == row)]
        return kept


def _check_spans(spans: list[tuple[int, ...]], slices: np.ndarray, seq_len: int) -> None:
    last = 0
    for span in spans:
        if len(span) != 2 or not last <= span[0] <= span[1] <= seq_len:
            raise ConfigError(
                f"megacp: span {span} overlaps the one before it or leaves the sequence of {seq_len} tokens. Give (start, stop) pairs."
            )
        start, last = span
        inside = slices.copy()
        for low, high in ((1, 2), (3, 4)):
            inside[:, low] = np.maximum(inside[:, low], start)
            inside[:, high] = np.minimum(inside[:, high], last)
        inside[:, 6] = np.minimum(inside[:, 6], 0)
        above = slices.copy()
        above[:, 5] = np.maximum(above[:, 5], 1)
        size = last - start
        if pairs(inside).sum() != size * (size + 1) // 2 or pairs(above).sum():
            raise ConfigError(
                f"megacp: span {span} cannot be seen both ways: the mask must be causal, and let each of its tokens see all before "
                "it in the span. Keep spans inside one document, and out of windows."
            )


def _make(
    kind: str,
    seq_len: int,
    rows: Sequence[tuple[int, ...]] | np.ndarray,
    batch: int | None = None,
    offsets: tuple[np.ndarray, ...] | None = None,
) -> Mask:
    slices = trim(np.asarray(rows, np.int64).reshape(-1, len(COLUMNS)))
    slices = slices[np.lexsort((slices[:, 3], slices[:, 1], slices[:, 0]))]
    slices.setflags(write=False)
    # Offsets tell apart masks of the same pairs with other documents (two documents that a window of 1 keeps apart anyway).
    parts = [np.array([seq_len, batch or 0], np.int64), slices, *(offsets or ())]
    key = hashlib.blake2b(b"".join(p.tobytes() for p in parts), digest_size=16).digest()
    return Mask(kind, seq_len, slices, batch, offsets, key)


def _documents(rows: list[np.ndarray], causal: bool, window: Window) -> Mask:
    lengths = {int(row[-1]) for row in rows}
    if len(lengths) != 1 or 0 in lengths:
        raise ConfigError(
            f"megacp: the rows of a micro-batch must have one length of at least 1 token, but have {sorted(lengths)}. "
            "Let the last offset of each row be the padded length."
        )
    if all(np.array_equal(row, rows[0]) for row in rows):
        rows = rows[:1]
    lo, hi = _diagonals(causal, window)
    table = []
    for index, offsets in enumerate(rows):
        start, stop = offsets[:-1], offsets[1:]
        full = np.full_like(start, index if len(rows) > 1 else ALL_ROWS)
        table.append(
            np.stack([full, start, stop, start, stop, np.full_like(start, lo), np.full_like(start, hi)], 1)
        )
    count = "/".join(str(int((np.diff(o) > 0).sum())) for o in rows[:4]) + ("/..." if len(rows) > 4 else "")
    words = "causal" if causal else "full"
    kind = (
        f"documents ({count}, {words})"
        if window is None
        else f"documents ({count}, {words}, window {window})"
    )
    batch = len(rows) if len(rows) > 1 else None
    return _make(kind, lengths.pop(), np.concatenate(table), batch, tuple(rows))


def _diagonals(causal: bool, window: Window) -> tuple[int, int]:
    if window is None:
        return -UNBOUNDED, 0 if causal else UNBOUNDED
    left, right = window if isinstance(window, tuple) else (window - 1, 0 if causal else window - 1)
    for side in (left, right):
        if side is not None and side < 0:
            raise ConfigError(
                f"megacp: window {window} is not a window. Give the number of keys seen including the query itself (at least 1), "
                "a pair (keys to the left, keys to the right), or None for no window."
            )
    lo = -UNBOUNDED if left is None else -left
    hi = UNBOUNDED if right is None else right
    return lo, min(hi, 0) if causal else hi


def _check_length(seq_len: int) -> None:
    if isinstance(seq_len, bool) or not isinstance(seq_len, int) or seq_len < 1:
        raise ConfigError(f"megacp: seq_len is {seq_len!r}; it must be a whole number of at least 1.")


def _is_nested(value: Any) -> bool:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return value.ndim == 2
    return isinstance(value, (list, tuple)) and len(value) > 0 and not isinstance(value[0], (int, np.integer))


def _table(name: str, value: torch.Tensor) -> np.ndarray:
    table = np.asarray(value.detach().cpu() if isinstance(value, torch.Tensor) else value)
    if table.ndim not in (1, 2) or table.shape[-1] == 0 or table.dtype.kind not in "iu":
        raise ConfigError(
            f"megacp: {name} must be integers of shape [G] or [B, G], not {table.dtype} {table.shape}."
        )
    return table.reshape(-1, table.shape[-1])
