"""Who owns which token: the one owner of token placement.

A layout is a permutation of the global tokens over the slots of all ranks, and its inverse. Every other
part of megacp that needs to know where a token lives asks this file; no index formula stands elsewhere.

Shapes: ``G`` global sequence length, ``S`` slots of one rank (the same on every rank; slots that hold no token are
padding and never leave megacp).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megacp.errors import ConfigError, ShapeError

if TYPE_CHECKING:
    from megacp.mask import Mask

__all__ = ["Layout", "as_offsets", "chunk_of"]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which global token positions each context-parallel rank holds, in local order.

    Make one with :meth:`zigzag`, :meth:`contiguous`, :meth:`per_document` or :meth:`balanced`. Needs no process group: ranks
    are plain ints.

    Attributes:
        name: the family ("zigzag", ...). seq_len: ``G``, in tokens. cp_size: number of ranks.
        local_len: ``S``, slots a rank, padding included.
        pieces: per rank int64 [n, 3] rows (start, stop, slot): tokens [start, stop) lie from local slot ``slot`` on.
    """

    name: str
    seq_len: int
    cp_size: int
    local_len: int
    pieces: tuple[np.ndarray, ...] = field(repr=False)
    _key: tuple[Any, ...] = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @staticmethod
    def contiguous(seq_len: int, cp_size: int, pad: bool = True) -> Layout:
        """Give rank r the r-th of cp_size equal stretches.

        Raises: ConfigError for a size below 1, or, with ``pad=False``, a length that is no multiple of cp_size.
        """
        return _chunked("contiguous", seq_len, cp_size, 1, pad)

    @staticmethod
    def zigzag(seq_len: int, cp_size: int, pad: bool = True) -> Layout:
        """Cut the row into 2·cp_size chunks and give rank r chunks r and 2·cp_size-1-r.

        Under a causal mask every rank then has the same number of (query, key) pairs in every ring step.
        A length that is no multiple of 2·cp_size is padded at its end, invisibly; ``pad=False`` refuses it instead.

        Raises: ConfigError for a size below 1 or, with ``pad=False``, a length that does not divide.
        Source: zhuzilin/ring-flash-attention (zigzag), Megatron-LM's get_batch_on_this_cp_rank.
        """
        return _chunked("zigzag", seq_len, cp_size, 2, pad)

    @staticmethod
    def per_document(cu_seqlens: Any, cp_size: int) -> Layout:
        """Zigzag each document alone, after padding it to a multiple of 2·cp_size.

        Args:
            cu_seqlens: int [n + 1], cumulative document lengths in tokens, from 0 to G.
        Raises: ConfigError for offsets that do not rise from 0.
        """
        offsets = as_offsets(cu_seqlens)
        _check_sizes(int(offsets[-1]), cp_size)
        starts, lengths = offsets[:-1], np.diff(offsets)
        chunk = chunk_of(lengths, cp_size)
        stops = starts + lengths
        ranks = []
        for rank in range(cp_size):
            first = np.stack([starts + rank * chunk, chunk, stops], 1)
            last = np.stack([starts + (2 * cp_size - 1 - rank) * chunk, chunk, stops], 1)
            ranks.append(np.stack([first, last], 1).reshape(-1, 3))
        return _from_chunks("per_document", int(offsets[-1]), cp_size, ranks, offsets.tobytes())

    @staticmethod
    def balanced(mask: Mask, cp_size: int) -> Layout:
        """Place documents so that ranks have equal tokens and equal attention work, and few keys have to move.

        Short documents stay whole on one rank, long ones are cut, at multiples of 64 tokens from their start where the
        numbers of tokens permit it. Meant for method "exchange", which moves only the keys a rank's queries see. A row of one
        document gets a zigzag. A length that is no multiple of cp_size is padded, one slot on some ranks, invisibly.

        Raises: ConfigError for a size below 1.
        Source: own; see megacp.balance.
        """
        from megacp.balance import place

        _check_sizes(mask.seq_len, cp_size)
        return _from_ranges("balanced", mask.seq_len, cp_size, place(mask, cp_size))

    @property
    def padding(self) -> int:
        """Slots over all ranks that hold no token."""
        return self.local_len * self.cp_size - self.seq_len

    def ranges(self, rank: int) -> list[tuple[int, int]]:
        """List the global token ranges (start, stop) of a rank in local order; padding is not a range."""
        return [(int(a), int(b)) for a, b, _ in self._of(rank)]

    def positions(self, rank: int, device: torch.device | str | None = None) -> torch.Tensor:
        """Return the global position of each local slot, int64 [S]; -1 in padding slots."""
        self._of(rank)
        return _positions(self, rank).to(device) if device is not None else _positions(self, rank).clone()

    def padding_slots(self, rank: int) -> torch.Tensor | None:
        """Mark the local slots that hold no token, bool [S]; None if all do."""
        self._of(rank)
        return _positions(self, rank) < 0 if _has_padding(self, rank) else None

    def owner_slots(self) -> torch.Tensor:
        """Return for each global position its slot in the ranks' concatenation, int64 [G]: rank · S + local slot."""
        return _inverse(self).clone()

    def shard(self, x: torch.Tensor, rank: int, dim: int = 1, fill: float = 0) -> torch.Tensor:
        """Take a rank's part of a per-token tensor, differentiably; ``x`` is left untouched.

        Shapes: x has G tokens on ``dim`` -> S slots on ``dim``, dtype kept; padding slots hold ``fill``.
        Raises: ShapeError if ``x`` has another length on ``dim``.
        """
        self._of(rank)
        if not -x.dim() <= dim < x.dim() or x.shape[dim] != self.seq_len:
            raise ShapeError(
                f"megacp: cannot shard a tensor of shape {tuple(x.shape)} on dim {dim}: layout '{self.name}' places "
                f"{self.seq_len} tokens. Pass the whole sequence, and the dim that holds it."
            )
        positions = _positions(self, rank, x.device)
        local = x.index_select(dim, positions.clamp(min=0))
        if bool(_has_padding(self, rank)):
            shape = [1] * x.dim()
            shape[dim] = self.local_len
            local = local.masked_fill((positions < 0).view(shape), fill)
        return local

    def unshard(self, parts: Sequence[torch.Tensor], dim: int = 1) -> torch.Tensor:
        """Put every rank's part together again, pads gone: the inverse of :meth:`shard`.

        Shapes: cp_size tensors with S slots on ``dim`` -> G tokens on ``dim``.
        Raises: ShapeError for another number of parts or another length.
        """
        if len(parts) != self.cp_size or any(p.shape[dim] != self.local_len for p in parts):
            raise ShapeError(
                f"megacp: cannot unshard {len(parts)} parts of lengths {[p.shape[dim] for p in parts]}: layout "
                f"'{self.name}' has {self.cp_size} parts of {self.local_len} slots. Pass one part a rank, in rank order."
            )
        return self.restore(torch.cat(list(parts), dim), dim)

    def restore(self, joined: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring the ranks' concatenation (cp_size · S slots on ``dim``) into global order, pads gone (G tokens)."""
        return joined.index_select(dim, _inverse(self, joined.device))

    def spread(self, x: torch.Tensor, dim: int = 1) -> torch.Tensor:
        """Bring a global tensor (G tokens on ``dim``) into the ranks' concatenation (cp_size · S slots, pads zero)."""
        return torch.cat([self.shard(x, rank, dim) for rank in range(self.cp_size)], dim)

    def joined(self, inner: int) -> Layout:
        """Take each ``inner`` consecutive ranks as one, their tokens in global order and without padding between them.

        Gives a layout over cp_size / inner ranks. With ``inner`` = cp_size it is the whole sequence on one rank.
        Raises: ConfigError if ``inner`` does not divide cp_size.
        """
        if inner < 1 or self.cp_size % inner:
            raise ConfigError(
                f"megacp: {self.cp_size} ranks cannot be joined by {inner}; it must divide them."
            )
        return _joined(self, inner)

    def _of(self, rank: int) -> np.ndarray:
        if not 0 <= rank < self.cp_size:
            raise ConfigError(f"megacp: rank {rank} is not in a layout over cp_size {self.cp_size}.")
        return self.pieces[rank]


def chunk_of(lengths: np.ndarray, cp_size: int) -> np.ndarray:
    """Return the slots of one of the 2·cp_size chunks of each document that is zigzagged alone, padding included, int64 [n]."""
    return -(-lengths // (2 * cp_size))


def as_offsets(cu_seqlens: Any) -> np.ndarray:
    """Read cumulative document lengths (list, array or int tensor) as int64 [n + 1].

    Raises: ConfigError unless they are whole numbers on one dim that start at 0 and never fall.
    """
    if isinstance(cu_seqlens, torch.Tensor):
        cu_seqlens = cu_seqlens.detach().cpu().numpy()
    offsets = np.asarray(cu_seqlens)
    if offsets.ndim != 1 or offsets.size < 1 or offsets.dtype.kind not in "iu":
        raise ConfigError(
            f"megacp: cu_seqlens must be whole numbers on one dim, not {offsets.dtype} of shape {offsets.shape}."
        )
    offsets = offsets.astype(np.int64)
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise ConfigError(
            f"megacp: cu_seqlens must start at 0 and never fall, but is {offsets[:8].tolist()}... "
            "Pass cumulative lengths, e.g. [0, 5, 8] for documents of 5 and 3 tokens."
        )
    return offsets


def _check_sizes(seq_len: int, cp_size: int) -> None:
    for name, value in (("seq_len", seq_len), ("cp_size", cp_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"megacp: {name} is {value!r}; it must be a whole number of at least 1.")


def _chunked(name: str, seq_len: int, cp_size: int, per_rank: int, pad: bool) -> Layout:
    _check_sizes(seq_len, cp_size)
    unit = per_rank * cp_size
    if not pad and seq_len % unit:
        legal = -(-seq_len // unit) * unit
        other = "" if per_rank == 1 else f", or use layout 'contiguous' (a multiple of {cp_size})"
        product = f"{per_rank} * cp_size" if per_rank > 1 else "cp_size"
        raise ConfigError(
            f"megacp: sequence length {seq_len} cannot be split by layout '{name}' over cp_size {cp_size}. "
            f"It needs a multiple of {product} = {unit}. Pad to {legal}{other}."
        )
    chunk = -(-seq_len // unit)
    ranks = []
    for rank in range(cp_size):
        chunks = [rank] if per_rank == 1 else [rank, unit - 1 - rank]
        ranks.append(np.array([(c * chunk, chunk, seq_len) for c in chunks], np.int64))
    return _from_chunks(name, seq_len, cp_size, ranks, b"")


def _from_chunks(name: str, seq_len: int, cp_size: int, ranks: list[np.ndarray], extra: bytes) -> Layout:
    """Build a layout from rows (start, slots, limit) a rank: tokens [start, min(start + slots, limit)), then padding."""
    pieces = []
    for rows in ranks:
        start, slots, limit = rows.T
        slot = np.cumsum(slots) - slots
        stop = np.minimum(start + slots, limit)
        kept = np.stack([start, stop, slot], 1)[stop > start]
        if len(kept) > 1:  # join what is adjacent in both orders
            joined = (kept[1:, 0] == kept[:-1, 1]) & (
                kept[1:, 2] == kept[:-1, 2] + kept[:-1, 1] - kept[:-1, 0]
            )
            heads = np.flatnonzero(np.r_[True, ~joined])
            tails = np.r_[heads[1:] - 1, len(kept) - 1]
            kept = np.stack([kept[heads, 0], kept[tails, 1], kept[heads, 2]], 1)
        kept.setflags(write=False)
        pieces.append(kept)
    local_len = int(ranks[0][:, 1].sum())
    digest = hashlib.blake2b(extra, digest_size=16).digest() if extra else b""
    return Layout(name, seq_len, cp_size, local_len, tuple(pieces), (name, seq_len, cp_size, digest))


@lru_cache(maxsize=128)
def _joined(layout: Layout, inner: int) -> Layout:
    ranks = []
    for first in range(0, layout.cp_size, inner):
        start, stop, _ = np.concatenate(layout.pieces[first : first + inner]).T
        order = np.argsort(start)
        ranks.append(np.stack([start, stop - start, stop], 1)[order])
    local_len = max(int(rows[:, 1].sum()) for rows in ranks)
    joined = _from_chunks(f"{layout.name} by {inner}", layout.seq_len, len(ranks), ranks, b"")
    return replace(joined, local_len=local_len, _key=(joined.name, inner, *layout._key))


def _from_ranges(name: str, seq_len: int, cp_size: int, ranks: list[list[tuple[int, int]]]) -> Layout:
    """Build a layout from ranges (start, stop) a rank; each rank gets them in global order, then padding."""
    counts = [len(ranges) for ranges in ranks]
    rank = np.repeat(np.arange(cp_size), counts)
    start, stop = np.array([r for ranges in ranks for r in ranges], np.int64).reshape(-1, 2).T
    order = np.lexsort((start, rank))
    rank, start, stop = rank[order], start[order], stop[order]
    heads = np.flatnonzero(np.r_[True, (start[1:] != stop[:-1]) | (rank[1:] != rank[:-1])])
    rank, start, stop = rank[heads], start[heads], stop[np.r_[heads[1:] - 1, len(stop) - 1]]
    slot = np.cumsum(stop - start) - (stop - start)
    borders = np.searchsorted(rank, np.arange(cp_size + 1))
    slot -= np.r_[slot, 0][borders[rank]]
    table = np.stack([start, stop, slot], 1)
    table.setflags(write=False)
    pieces = tuple(table[a:b] for a, b in pairwise(borders.tolist()))
    digest = hashlib.blake2b(table.tobytes() + borders.tobytes(), digest_size=16).digest()
    return Layout(name, seq_len, cp_size, -(-seq_len // cp_size), pieces, (name, seq_len, cp_size, digest))


@lru_cache(maxsize=512)
def _positions(layout: Layout, rank: int, device: torch.device | None = None) -> torch.Tensor:
    if device is not None and device.type != "cpu":
        return _positions(layout, rank).to(device)
    out = np.full(layout.local_len, -1, np.int64)
    for start, stop, slot in layout.pieces[rank]:
        out[slot : slot + stop - start] = np.arange(start, stop)
    return torch.from_numpy(out)


@lru_cache(maxsize=512)
def _has_padding(layout: Layout, rank: int) -> bool:
    pieces = layout.pieces[rank]
    return int((pieces[:, 1] - pieces[:, 0]).sum()) != layout.local_len


@lru_cache(maxsize=128)
def _inverse(layout: Layout, device: torch.device | None = None) -> torch.Tensor:
    if device is not None and device.type != "cpu":
        return _inverse(layout).to(device)
    shift = np.array([0, 0, layout.local_len])
    rows = np.concatenate([pieces + rank * shift for rank, pieces in enumerate(layout.pieces)])
    start, stop, slot = rows[np.argsort(rows[:, 0])].T  # the pieces cover 0..G without gaps
    return torch.from_numpy(np.repeat(slot - start, stop - start) + np.arange(layout.seq_len))
