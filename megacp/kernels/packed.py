"""Blocks as packed sequences, for libraries that attend to many short sequences in one call ("varlen", "thd").

The parts of a step's blocks become sequences: their queries lie one after another in one tensor, their keys in a second, and
cumulative lengths say where each begins. Parts that share a mask (full, causal, one window) and have no query in common go in one
call. What lies in order already is passed as a view; the rest is gathered by an index, flipped parts backwards. Indices are made once
for a list of blocks, and kept.

Shapes: ``t`` packed queries, ``u`` packed keys; q [t, H, D], k [u, K, D], v [u, K, E], out [t, H, E], lse [H, t] float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch.nn import functional as F

from megacp.kernels import Gradients, Options, Request
from megacp.kernels.cuts import UNLIMITED, Part, parts
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["Call", "Forward", "backward", "capability", "forward", "refusal", "widened"]

_Where = slice | torch.Tensor


@dataclass(frozen=True)
class Call:
    """One call of the library.

    Attributes:
        is_causal, window: the mask of each sequence, as in :class:`~megacp.kernels.cuts.Part`.
        cu_q, cu_k: int32 [n + 1], cumulative lengths in tokens. max_q, max_k: the longest sequence.
        queries, keys: where the packed tokens lie, in all rows' slots one after another.
        box: first and last row and slot (start, stop, start, stop) that the results lie in.
        places: where in the box they lie, or None if they fill it in order.
        returns: for the gradients of keys, pairs (where in the packed keys, where in the slots); no slot twice in one pair.
    """

    is_causal: bool
    window: int
    cu_q: torch.Tensor
    cu_k: torch.Tensor
    max_q: int
    max_k: int
    queries: _Where
    keys: _Where
    box: tuple[int, int, int, int]
    places: torch.Tensor | None
    returns: tuple[tuple[_Where, _Where], ...]

    def partial(self, out: torch.Tensor, lse: torch.Tensor) -> Partial:
        """Bring packed results [t, H, E] and [H, t] back to rows and slots; slots that are no query get 0 and -inf."""
        row, row_stop, start, stop = self.box
        rows, slots, heads = row_stop - row, stop - start, out.shape[1]
        if self.places is not None:
            whole = out.new_zeros(rows * slots, *out.shape[1:])
            out = whole.index_copy_(0, self.places, out)
            whole = lse.new_full((heads, rows * slots), -torch.inf)
            lse = whole.index_copy_(1, self.places, lse)
        out, lse = out.unflatten(0, (rows, slots)), lse.unflatten(1, (rows, slots)).transpose(0, 1)
        return Partial(out, lse, slice(row, row_stop), start, stop)


Forward = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, Call, Options], tuple[torch.Tensor, torch.Tensor]
]
"""(q, k, v, call, options), all packed -> (out, lse), packed."""

Backward = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(d_out, q, k, v, out, lse, call, options), all packed -> (dq, dk, dv), packed."""


def refusal(request: Request, package: str, device: str = "cuda") -> str | None:
    """Refuse another device and what is not 16-bit, as every library of packed sequences does."""
    if request.device != device:
        return f"{package} runs on {device}, not {request.device}"
    if device == "cuda" and capability() < 8:
        return f"{package} needs a CUDA device of compute capability 8 or newer"
    if request.dtype not in (torch.bfloat16, torch.float16):
        return f"{package} computes in bfloat16 and float16, not {request.dtype}"
    return None


def capability() -> int:
    """Return the major compute capability of the current CUDA device, 0 if there is none."""
    return int(torch.cuda.get_device_capability()[0]) if torch.cuda.is_available() else 0


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    blocks: Sequence[Block],
    options: Options,
    attend: Forward,
    windows: bool,
) -> Iterator[Partial]:
    """Give one partial result for each call of the library."""
    q_all, k_all, v_all = (x.flatten(0, 1) for x in (q, k, v))
    for call in _calls(tuple(blocks), q.shape[0], q.shape[1], k.shape[1], q.device, windows):
        keys, values = _taken(k_all, call.keys), _taken(v_all, call.keys)
        yield call.partial(*attend(_taken(q_all, call.queries), keys, values, call, options))


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Sequence[Block],
    options: Options,
    into: Gradients,
    attend_backward: Backward,
    windows: bool,
) -> None:
    """Add the gradients of each call, given the final out and lse."""
    of_queries = [x.flatten(0, 1) for x in (d_out.to(q.dtype), q, out.to(q.dtype))]
    lse_all = lse.float().transpose(0, 1).flatten(1)  # [H, B * S]
    k_all, v_all = k.flatten(0, 1), v.flatten(0, 1)
    sums = [x.view(-1, *x.shape[2:]) for x in (s.tensor for s in into)]
    for call in _calls(tuple(blocks), q.shape[0], q.shape[1], k.shape[1], q.device, windows):
        d_part, q_part, out_part = (_taken(x, call.queries) for x in of_queries)
        lse_part = _taken(lse_all, call.queries, 1).contiguous()
        k_part, v_part = _taken(k_all, call.keys), _taken(v_all, call.keys)
        dq, dk, dv = attend_backward(d_part, q_part, k_part, v_part, out_part, lse_part, call, options)
        _add(sums[0], call.queries, dq)
        for packed, slots in call.returns:
            _add(sums[1], slots, _taken(dk, packed))
            _add(sums[2], slots, _taken(dv, packed))


def widened(*tensors: torch.Tensor, multiple: int = 8, alike: bool = True) -> list[torch.Tensor]:
    """Fill head sizes with zeros up to the next multiple, and up to the largest of the tensors if they must be alike."""
    widest = max(x.shape[-1] for x in tensors)
    sizes = [widest if alike else x.shape[-1] for x in tensors]
    missing = [size - x.shape[-1] + -size % multiple for x, size in zip(tensors, sizes, strict=True)]
    return [F.pad(x, (0, m)) if m else x.contiguous() for x, m in zip(tensors, missing, strict=True)]


@lru_cache(maxsize=128)
def _calls(
    blocks: tuple[Block, ...], rows: int, q_slots: int, k_slots: int, device: torch.device, windows: bool
) -> tuple[Call, ...]:
    """Sort the blocks' parts into calls. Shapes of the buffers: [rows, q_slots], [rows, k_slots]."""
    found = [part for block in blocks for part in parts(block, windows=windows)]
    found = [p for part in found for p in ([part] if part.row >= 0 else _in_every_row(part, rows))]
    return tuple(
        _made(group, q_slots, k_slots, device)
        for family in _families(found)
        for group in _disjoint(family, "q")
    )


def _in_every_row(part: Part, rows: int) -> list[Part]:
    return [part._replace(row=row) for row in range(rows)]


def _families(found: list[Part]) -> list[list[Part]]:
    """Group parts by mask, in the fewest groups.

    Causal parts no longer than a window's reach join it, the window takes nothing from them; so do single queries, causal or not.
    """
    widest = max((part.window for part in found), default=UNLIMITED)
    if any(part.is_causal for part in found):
        found = [p._replace(is_causal=p.is_causal or p.q_stop - p.q_start == 1) for p in found]
    families: dict[tuple[bool, int], list[Part]] = {}
    for part in found:
        fits = part.is_causal and part.window == UNLIMITED and part.k_stop - part.k_start <= widest + 1
        families.setdefault((part.is_causal, widest if fits else part.window), []).append(part)
    return list(families.values())


def _disjoint(family: list[Part], which: str) -> list[list[Part]]:
    """Divide parts into the fewest groups in which no slot of queries ("q") or keys ("k") lies in two parts."""
    first, last = ("q_start", "q_stop") if which == "q" else ("k_start", "k_stop")
    groups: list[list[Part]] = []
    for part in sorted(family, key=lambda p: (p.row, getattr(p, first))):
        for group in groups:
            if group[-1].row < part.row or getattr(group[-1], last) <= getattr(part, first):
                group.append(part)
                break
        else:
            groups.append([part])
    return groups


def _made(group: list[Part], q_slots: int, k_slots: int, device: torch.device) -> Call:
    queries = _slots(group, q_slots, "q")
    keys = _slots(group, k_slots, "k")
    q_sizes = np.array([part.q_stop - part.q_start for part in group])
    k_sizes = np.array([part.k_stop - part.k_start for part in group])
    box = (
        group[0].row,
        group[-1].row + 1,
        min(part.q_start for part in group),
        max(part.q_stop for part in group),
    )
    places = _in_box(queries, q_slots, box)
    is_filled = np.array_equal(places, np.arange((box[1] - box[0]) * (box[3] - box[2])))
    ends = dict(zip(group, np.cumsum(k_sizes).tolist(), strict=True))
    returns = []
    for distinct in _disjoint(group, "k"):
        packed = np.concatenate([np.arange(ends[p] - (p.k_stop - p.k_start), ends[p]) for p in distinct])
        returns.append((_where(packed, device), _where(_slots(distinct, k_slots, "k"), device)))
    return Call(
        is_causal=group[0].is_causal,
        window=max(part.window for part in group),
        cu_q=_offsets(q_sizes, device),
        cu_k=_offsets(k_sizes, device),
        max_q=int(q_sizes.max()),
        max_k=int(k_sizes.max()),
        queries=_where(queries, device),
        keys=_where(keys, device),
        box=box,
        places=None if is_filled else torch.from_numpy(places).to(device),
        returns=tuple(returns),
    )


def _slots(group: list[Part], slots: int, which: str) -> np.ndarray:
    """List the slots of all parts, in packed order, counted over all rows."""
    runs = []
    for part in group:
        start, stop = (part.q_start, part.q_stop) if which == "q" else (part.k_start, part.k_stop)
        run = np.arange(start, stop) + part.row * slots
        runs.append(run[::-1] if part.flipped else run)
    return np.concatenate(runs)


def _in_box(queries: np.ndarray, slots: int, box: tuple[int, int, int, int]) -> np.ndarray:
    places: np.ndarray = (queries // slots - box[0]) * (box[3] - box[2]) + queries % slots - box[2]
    return places


def _where(index: np.ndarray, device: torch.device) -> _Where:
    """Give a run of slots as a slice, others as an index on the device."""
    start = int(index[0])
    if np.array_equal(index, np.arange(start, start + len(index))):
        return slice(start, start + len(index))
    return torch.from_numpy(np.ascontiguousarray(index)).to(device)


def _offsets(sizes: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.r_[0, np.cumsum(sizes)].astype(np.int32)).to(device)


def _taken(x: torch.Tensor, where: _Where, dim: int = 0) -> torch.Tensor:
    if isinstance(where, slice):
        return x.narrow(dim, where.start, where.stop - where.start)
    return x.index_select(dim, where)


def _add(total: torch.Tensor, where: _Where, x: torch.Tensor) -> None:
    """Add to slots of which none occurs twice, so the order cannot matter."""
    if isinstance(where, slice):
        total[where] += x
    else:
        total.index_add_(0, where, x.to(total.dtype))
