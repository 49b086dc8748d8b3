"""Plain attention in PyTorch: the slow truth. Any device, any dtype, any option.

Queries are taken in tiles, so nothing quadratic is held. 16-bit inputs are computed in float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megacp.dropout import kept
from megacp.kernels import Gradients, Options, Request, not_offered, rows_of
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "reference"

_TILE = 256


def refuses(request: Request) -> str | None:
    """Refuse nothing but options it does not know."""
    known = ("softcap", "alibi_slopes", "dropout_p", "dropout_seed", "max_logit", "where")
    return not_offered(request.options, *known)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Compute softmax(mask(q kᵀ · scale)) v tile by tile."""
    for block in blocks:
        for tile in _tiles(block):
            rows, keys = rows_of(tile), slice(tile.k_start, tile.k_stop)
            logits, _ = _logits(q[rows, tile.q_start : tile.q_stop], k[rows, keys], tile, options)
            lse = torch.logsumexp(logits, -1)  # [b, K, G, s]
            probs = torch.exp(logits - lse[..., None])
            _note_largest(logits, options)
            share = _kept_share(q[rows].shape[0], tile, k.shape[2], options, logits.dtype)
            if share is not None:
                probs = probs * share
            out = torch.einsum("bkgst,btke->bskge", probs, v[rows, keys].to(logits.dtype))
            yield Partial(out.flatten(2, 3), lse.flatten(1, 2), rows, tile.q_start, tile.q_stop)


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
) -> None:
    """Add dq, dk and dv of the blocks. Source: FlashAttention-2 (Dao 2023), algorithm 2."""
    for block in blocks:
        for tile in _tiles(block):
            rows, queries, keys = (
                rows_of(tile),
                slice(tile.q_start, tile.q_stop),
                slice(tile.k_start, tile.k_stop),
            )
            logits, slope = _logits(q[rows, queries], k[rows, keys], tile, options)
            dtype, groups = logits.dtype, k.shape[2]
            q_tile, k_tile, v_tile = (
                q[rows, queries].to(dtype),
                k[rows, keys].to(dtype),
                v[rows, keys].to(dtype),
            )
            d_tile = d_out[rows, queries].to(dtype)
            delta = (d_tile * out[rows, queries].to(dtype)).sum(-1).transpose(1, 2)  # [b, H, s]
            d_tile, q_tile = d_tile.unflatten(2, (groups, -1)), q_tile.unflatten(2, (groups, -1))
            probs = torch.exp(logits - lse[rows, :, queries].to(dtype).unflatten(1, (groups, -1))[..., None])
            d_probs = torch.einsum("bskge,btke->bkgst", d_tile, v_tile)
            share = _kept_share(q_tile.shape[0], tile, groups, options, dtype)
            if share is not None:
                d_probs = d_probs * share
            d_logits = probs * (d_probs - delta.unflatten(1, (groups, -1))[..., None])
            if slope is not None:
                d_logits = d_logits * slope
            d_logits = d_logits * options.scale
            probs = probs if share is None else probs * share
            into.dv.add(torch.einsum("bkgst,bskge->btke", probs, d_tile), rows, keys)
            into.dk.add(torch.einsum("bkgst,bskgd->btkd", d_logits, q_tile), rows, keys)
            dq = torch.einsum("bkgst,btkd->bskgd", d_logits, k_tile)
            into.dq.add(dq.flatten(2, 3), rows, queries)


def _tiles(block: Block) -> Iterator[Block]:
    """Cut a block into tiles of queries, each with only the keys its rows can see."""
    for start in range(block.q_start, block.q_stop, _TILE):
        stop = min(start + _TILE, block.q_stop)
        k_start = max(block.k_start, start + block.lo)
        k_stop = min(block.k_stop, stop + block.hi)
        yield block._replace(q_start=start, q_stop=stop, k_start=k_start, k_stop=k_stop)


def _logits(
    q: torch.Tensor, k: torch.Tensor, tile: Block, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masked logits [b, K, G, s, t] and, under a softcap, the slope of the cap at each."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.to(dtype).unflatten(2, (k.shape[2], -1))
    logits = torch.einsum("bskgd,btkd->bkgst", grouped, k.to(dtype)) * options.scale
    slope = None
    if options.softcap is not None:
        capped = torch.tanh(logits / options.softcap)
        logits, slope = capped * options.softcap, 1 - capped * capped
    if options.alibi_slopes is not None and options.where is not None:
        queries, keys, heads = options.where
        distance = queries[tile.q_start : tile.q_stop, None] - keys[None, tile.k_start : tile.k_stop]
        slopes = options.alibi_slopes[heads].to(dtype).unflatten(0, (k.shape[2], -1))
        logits = logits - slopes[..., None, None] * distance.abs()
    if tile.kind != "full":
        queries = torch.arange(tile.q_start, tile.q_stop, device=q.device)[:, None]
        keys = torch.arange(tile.k_start, tile.k_stop, device=q.device)[None, :]
        hidden = (keys - queries < tile.lo) | (keys - queries > tile.hi)
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits, slope


def _kept_share(
    rows: int, tile: Block, groups: int, options: Options, dtype: torch.dtype
) -> torch.Tensor | None:
    """Return 1 / (1 - p) for pairs that are kept and 0 for those dropped, [b, K, G, s, t]; None without dropout."""
    if not options.dropout_p or options.where is None:
        return None
    queries, keys, heads = options.where
    first = max(tile.row, 0)
    numbers = torch.arange(first, first + rows, device=queries.device)
    keep = kept(
        options.dropout_p,
        options.dropout_seed,
        numbers,
        heads,
        queries[tile.q_start : tile.q_stop],
        keys[tile.k_start : tile.k_stop],
    )
    share: torch.Tensor = keep.unflatten(1, (groups, -1)).to(dtype) / (1 - options.dropout_p)
    return share


def _note_largest(logits: torch.Tensor, options: Options) -> None:
    """Keep the largest visible logit of each head."""
    if options.max_logit is not None and options.where is not None:
        heads = options.where.heads
        largest = logits.flatten(1, 2).amax((0, 2, 3)).to(options.max_logit.dtype)
        options.max_logit[heads] = torch.maximum(options.max_logit[heads], largest)
