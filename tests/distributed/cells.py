"""One cell of the matrix method x layout x mask x heads x dtype x kernel x format: run it on ranks, hold it against the oracle.

A cell is plain data, so it can be sent to the ranks. Both sides make the same inputs from its seed; the ranks take their
part with the layout, and what they give back is put together with the layout and compared with `tests.oracle`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask, methods
from megacp.testing import ranks
from tests import oracle

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
METHODS = methods.names()  # every test over methods takes them from here
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclass(frozen=True)
class Cell:
    """mask: ("causal", G[, window]), ("full", G), ("documents", lengths[, is_causal[, window]]) or ("prefix", G, size).

    heads: query heads, key/value heads. dims: head size of q and k, head size of v.
    view: "plain"; "transposed" and "expanded" tensors and upstream gradients are not contiguous.
    fill: what padding slots of the local inputs hold.
    """

    mask: tuple[Any, ...] = ("causal", 16)
    method: str = "ring"
    layout: str = "zigzag"
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (8, 8)
    batch: int = 2
    dtype: torch.dtype = torch.float64
    kernel: str = "reference"
    format: str = "bshd"
    view: str = "plain"
    scale: float | None = None
    fill: float = 0.0
    spread: float = 1.0
    options: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def length(self) -> int:
        return sum(self.mask[1]) if self.mask[0] == "documents" else self.mask[1]


def their_mask(cell: Cell) -> torch.Tensor:
    kind, size, *more = cell.mask
    if kind == "documents":
        return oracle.documents(oracle.offsets(list(size)), *more)
    return {"causal": oracle.causal, "full": oracle.full, "prefix": oracle.prefix}[kind](size, *more)


def our_mask(cell: Cell) -> Mask:
    kind, size, *more = cell.mask
    if kind == "documents":
        return Mask.documents(oracle.offsets(list(size)), *more)
    return {"causal": Mask.causal, "full": Mask.full, "prefix": Mask.prefix}[kind](size, *more)


def our_layout(cell: Cell, cp_size: int) -> Layout:
    if cell.layout == "per_document":
        return Layout.per_document(oracle.offsets(list(cell.mask[1])), cp_size)
    return {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}[cell.layout](cell.length, cp_size)


def inputs(cell: Cell) -> dict[str, torch.Tensor]:
    """q, k, v and the upstream gradient, global [B, G, heads, size], already rounded to the cell's dtype."""
    make = torch.Generator().manual_seed(cell.seed)
    (heads, kv_heads), (d, e) = cell.heads, cell.dims
    batch = 1 if cell.format == "thd" else cell.batch

    def draw(n: int, size: int) -> torch.Tensor:
        x = torch.randn(batch, cell.length, n, size, generator=make, dtype=torch.float64)
        return (x[:1].expand_as(x) if cell.view == "expanded" else x).to(cell.dtype)

    made = {"q": draw(heads, d) * cell.spread, "k": draw(kv_heads, d) * cell.spread, "v": draw(kv_heads, e)}
    made["d_out"] = torch.ones_like(draw(heads, e)) if cell.view == "expanded" else draw(heads, e)
    return made


def truth(cell: Cell) -> oracle.Truth:
    x = inputs(cell)
    return oracle.attention(
        x["q"], x["k"], x["v"], their_mask(cell), x["d_out"], scale=cell.scale, **dict(cell.options)
    )


def _formatted(x: torch.Tensor, form: str) -> torch.Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[0]}[form]


def _plain(x: torch.Tensor, form: str) -> torch.Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[None]}[form]


def _leaf(x: torch.Tensor, view: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a leaf and the (perhaps not contiguous) view of it that attention gets."""
    if view == "expanded":
        leaf = x[:1].clone().requires_grad_()
        return leaf, leaf.expand_as(x)
    if view == "transposed":
        leaf = x.transpose(1, 2).contiguous().requires_grad_()
        return leaf, leaf.transpose(1, 2)
    leaf = x.contiguous().requires_grad_()
    return leaf, leaf


def _gradient(leaf: torch.Tensor, view: str) -> torch.Tensor:
    assert leaf.grad is not None
    return leaf.grad.transpose(1, 2) if view == "transposed" else leaf.grad


def run_cell(cell: Cell, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
    """Run one cell on this rank, and return the local out, lse and gradients in the plain [B, S, ...] format."""
    cp_size, rank = dist.get_world_size(group), dist.get_rank(group)
    layout = our_layout(cell, cp_size)
    local = {name: layout.shard(x, rank, dim=1, fill=cell.fill) for name, x in inputs(cell).items()}
    leaves, args = zip(*(_leaf(local[name], cell.view) for name in "qkv"), strict=True)
    sent = [_formatted(x, cell.format) for x in args]
    if cell.view == "plain":
        sent = [x.contiguous() for x in sent]
    out, lse = megacp.attention(
        *sent,
        mask=our_mask(cell),
        layout=layout,
        group=group,
        method=cell.method,
        kernel=cell.kernel,
        format=cell.format,
        scale=cell.scale,
        return_lse=True,
        **dict(cell.options),
    )
    d_out = _formatted(local["d_out"], cell.format)
    if cell.view == "expanded":
        d_out = torch.ones(1, dtype=out.dtype).expand(out.shape)
    elif cell.view == "transposed":
        d_out = d_out.transpose(-1, -2).contiguous().transpose(-1, -2)
    out.backward(d_out)
    grads = [_gradient(leaf, cell.view) for leaf in leaves]
    lse = lse if lse.dim() == 3 else lse[None]
    return dict(zip(NAMES, [_plain(out, cell.format).detach(), lse.detach(), *grads], strict=True))


def run_cells(cells: list[Cell]) -> list[dict[str, torch.Tensor]]:
    return [run_cell(cell) for cell in cells]


def joined(cell: Cell, parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Put the ranks' parts together in global order."""
    layout = our_layout(cell, len(parts))
    return {name: layout.unshard([p[name] for p in parts], dim=2 if name == "lse" else 1) for name in NAMES}


def padding_is_silent(cell: Cell, parts: list[dict[str, torch.Tensor]]) -> bool:
    """Say whether the rows of padding slots have zero output and zero gradients, on every rank."""
    layout = our_layout(cell, len(parts))
    for rank, part in enumerate(parts):
        pad = layout.positions(rank) < 0
        if any(bool((part[name][:, pad] != 0).any()) for name in ("out", "dq", "dk", "dv")):
            return False
        if not cell.options and bool((part["lse"][:, :, pad] != -math.inf).any()):
            return False
    return True


def errors(cell: Cell, got: dict[str, torch.Tensor], true: oracle.Truth | None = None) -> dict[str, float]:
    """Relative error of everything, against the oracle."""
    true = true or truth(cell)
    found = {}
    for name in NAMES:
        right = getattr(true, name)
        if cell.view == "expanded" and name[0] == "d":
            right = right.sum(0, keepdim=True)
        found[name] = oracle.rel(got[name], right)
    return found


def check(cells: list[Cell], cp_size: int, tolerance: float | None = None, results: Any = None) -> None:
    """Run cells on cp_size ranks in one go, and assert that each is exact; the message names the cells that are not."""
    results = results or ranks.run(run_cells, cp_size, cells)
    bad = []
    for i, cell in enumerate(cells):
        parts = [result[i] for result in results]
        allowed = TOLERANCE[cell.dtype] if tolerance is None else tolerance
        wrong = {name: e for name, e in errors(cell, joined(cell, parts)).items() if not e <= allowed}
        kinds = {
            name: parts[0][name].dtype
            for name in ("out", "dq", "dk", "dv")
            if parts[0][name].dtype != cell.dtype
        }
        if wrong or kinds:
            bad.append(f"{cell}: {wrong} {kinds}")
        if not padding_is_silent(cell, parts):
            bad.append(f"{cell}: padding slots have output or gradients")
    assert not bad, f"{len(bad)} of {len(cells)} cells over {cp_size} ranks are wrong:\n" + "\n".join(bad)


def check_beside_one_rank(cells: list[Cell], cp_size: int, allowed: float = 1.3) -> None:
    """Assert that the error against float64 is at most `allowed` times the same kernel's on one rank."""
    alone, split = ranks.run(run_cells, 1, cells), ranks.run(run_cells, cp_size, cells)
    bad = []
    for i, cell in enumerate(cells):
        true = truth(cell)
        one = errors(cell, joined(cell, [alone[0][i]]), true)
        many = errors(cell, joined(cell, [result[i] for result in split]), true)
        for name in NAMES:
            if not (math.isfinite(many[name]) and many[name] <= max(allowed * one[name], 1e-6)):
                bad.append(f"{cell}: {name} is off by {many[name]:.2e}, on one rank by {one[name]:.2e}")
    assert not bad, "\n".join(bad)


def divisible(cells: list[Cell], cp_size: int) -> list[Cell]:
    """The cells whose heads suffice for their method: all_to_all refuses more ranks than query heads."""
    return [cell for cell in cells if cell.method != "all_to_all" or cell.heads[0] >= cp_size]


def vary(cell: Cell, **choices: list[Any]) -> list[Cell]:
    """All combinations of the given fields, the rest as in `cell`."""
    cells = [cell]
    for name, values in choices.items():
        cells = [replace(c, **{name: value}) for c in cells for value in values]
    return cells
