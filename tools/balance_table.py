"""Measure how evenly layouts spread packed documents, and what each makes the exchange and the ring move.

Draws rows of documents, plans each layout for them, and writes docs/balance.md and docs/balance.png::

    python tools/balance_table.py                    # all of it, some minutes
    python tools/balance_table.py --draws 5 --sizes 4 16

Lengths come from tools/data/document_lengths.csv (published with MagiAttention's benchmark) and from the standard library of the
running Python, whose files count a token for each four bytes. A row has 8,192 tokens a rank; no document is longer than a
quarter of the row.
"""

from __future__ import annotations

import argparse
import csv
import heapq
import platform
import random
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

import megacp
from megacp import Layout, Mask
from megacp.balance import least_keys
from megacp.layout import _from_ranges
from megacp.plans import queries_of
from megacp.slices import pairs

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
SHARE = 8192
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
PICTURED = 16
TOLERANCES = np.r_[0, 0.02, 0.05, np.arange(0.1, 4, 0.1)]


@dataclass(frozen=True)
class Figures:
    """What one layout does to one row: work and traffic of each rank, as shares of the mean work and of the row."""

    imbalance: float
    exchange: np.ndarray
    ring: np.ndarray
    milliseconds: float
    extra_pieces: int


def published_lengths() -> Callable[[random.Random], int]:
    """Draw a bin by its count, then a length evenly inside it."""
    lines = (ROOT / "tools" / "data" / "document_lengths.csv").read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    bins = [(int(row["shortest"]), int(row["longest"])) for row in rows]
    counts = [int(row["documents"]) for row in rows]
    return lambda rng: rng.randint(*rng.choices(bins, counts)[0])


def library_lengths() -> Callable[[random.Random], int]:
    """Draw a file of the standard library and count a token for each four bytes."""
    top = Path(sysconfig.get_path("stdlib"))
    files = sorted(
        path for path in top.rglob("*.py") if not SKIPPED & set(path.relative_to(top).parent.parts)
    )
    sizes = [max(1, path.stat().st_size // 4) for path in files]
    return lambda rng: rng.choice(sizes)


def draw_row(draw: Callable[[random.Random], int], cp_size: int, rng: random.Random) -> np.ndarray:
    """Return the cumulative lengths of one packed row."""
    total, offsets = SHARE * cp_size, [0]
    while offsets[-1] < total:
        offsets.append(min(offsets[-1] + min(draw(rng), total // 4), total))
    return np.array(offsets)


def dealt(mask: Mask, cp_size: int, chunk: int) -> Layout:
    """Deal chunks of fixed size, most work first, to the rank with least work that has room."""
    starts = range(0, mask.seq_len, chunk)
    whole = _from_ranges("chunks", mask.seq_len, 1, [[(0, mask.seq_len)]])
    queries = queries_of(whole, mask, 0)
    work = []
    for start in starts:
        cut = queries[(queries[:, 2] > start) & (queries[:, 1] < start + chunk)].copy()
        cut[:, 1:3] = np.clip(cut[:, 1:3], start, start + chunk)
        work.append(int(pairs(cut).sum()))
    heap = [(0, rank) for rank in range(cp_size)]
    ranks: list[list[tuple[int, int]]] = [[] for _ in heap]
    for at in sorted(range(len(work)), key=lambda at: -work[at]):
        load, rank = heapq.heappop(heap)
        ranks[rank].append((starts[at], starts[at] + chunk))
        if len(ranks[rank]) * chunk * cp_size < mask.seq_len:
            heapq.heappush(heap, (load + work[at], rank))
    return _from_ranges(f"dealt {chunk}", mask.seq_len, cp_size, ranks)


LAYOUTS: dict[str, Callable[[Mask, np.ndarray, int], Layout]] = {
    "contiguous": lambda mask, offsets, cp: Layout.contiguous(mask.seq_len, cp),
    "zigzag": lambda mask, offsets, cp: Layout.zigzag(mask.seq_len, cp),
    "per_document": lambda mask, offsets, cp: Layout.per_document(offsets, cp),
    "chunks of 2,048": lambda mask, offsets, cp: dealt(mask, cp, 2048),
    "chunks of 512": lambda mask, offsets, cp: dealt(mask, cp, 512),
    "balanced": lambda mask, offsets, cp: Layout.balanced(mask, cp),
}


def measure(name: str, mask: Mask, offsets: np.ndarray, cp_size: int) -> Figures:
    """Plan one layout for one row; the time is the processor's, the least of seven."""
    seconds = []
    for _ in range(1 if "chunks" in name else 7):
        begin = time.thread_time()
        layout = LAYOUTS[name](mask, offsets, cp_size)
        seconds.append(time.thread_time() - begin)
    work = [int(pairs(queries_of(layout, mask, rank)).sum()) for rank in range(cp_size)]
    shares = []
    for method in ("exchange", "ring"):
        plan = megacp.plan(layout, mask, method=method)
        tokens = [plan.bytes_received(rank) // 2 for rank in range(cp_size)]  # the unit is half a token
        shares.append(np.array(tokens) / mask.seq_len)
    documents = int((np.diff(offsets) > 0).sum())
    pieces = sum(len(layout.ranges(rank)) for rank in range(cp_size))
    return Figures(
        max(work) / float(np.mean(work)), shares[0], shares[1], min(seconds) * 1e3, pieces - documents
    )


def table_of(
    draw: Callable[[random.Random], int], sizes: list[int], draws: int
) -> tuple[list[str], dict[int, dict[str, list[Figures]]], dict[int, np.ndarray]]:
    """Return the lines of a table, all figures by cp_size and layout, and the bound by cp_size and tolerance."""
    lines = [
        "| cp | layout | work, max/mean | worst | exchange brings a rank | most | ring | planning, ms | pieces over documents |",
        "|--|--|--|--|--|--|--|--|--|",
    ]
    figures: dict[int, dict[str, list[Figures]]] = {}
    bounds: dict[int, np.ndarray] = {}
    for cp_size in sizes:
        rng = random.Random(cp_size)
        count = max(draws * 16 // max(cp_size, 16), 3)
        rows = [draw_row(draw, cp_size, rng) for _ in range(count)]
        masks = [Mask.documents(offsets) for offsets in rows]
        for name in LAYOUTS:
            found = [measure(name, mask, row, cp_size) for mask, row in zip(masks, rows, strict=True)]
            figures.setdefault(cp_size, {})[name] = found
            imbalance = [f.imbalance for f in found]
            columns = [
                f"{np.mean(imbalance):.3f}",
                f"{max(imbalance):.3f}",
                f"{np.mean([f.exchange.mean() for f in found]):.3f}",
                f"{max(f.exchange.max() for f in found):.3f}",
                f"{np.mean([f.ring.mean() for f in found]):.3f}",
                "" if "chunks" in name else f"{np.mean([f.milliseconds for f in found]):.2f}",
                f"{np.mean([f.extra_pieces for f in found]):.0f}",
            ]
            lines.append(f"| {cp_size} | {name} | " + " | ".join(columns) + " |")
            print(lines[-1], flush=True)
        bounds[cp_size] = np.mean(
            [
                [least_keys(mask, cp_size, tolerance) / mask.seq_len / cp_size for tolerance in TOLERANCES]
                for mask in masks
            ],
            axis=0,
        )
        lines.append(
            f"| {cp_size} | *lower bound at 1.02* | | | {bounds[cp_size][1]:.3f} | | | | ({count} draws) |"
        )
    return lines, figures, bounds


def picture(figures: dict[str, list[Figures]], bound: np.ndarray, cp_size: int, path: Path) -> None:
    """Draw imbalance against traffic, a dot for each draw and a ring for the mean, with the lower bound."""
    figure, axes = plt.subplots(figsize=(8, 5), dpi=120)
    for index, (name, found) in enumerate(figures.items()):
        traffic, imbalance = [f.exchange.mean() for f in found], [f.imbalance for f in found]
        color = f"C{index}"
        axes.scatter(traffic, imbalance, s=6, alpha=0.25, color=color, linewidths=0)
        axes.scatter(
            [np.mean(traffic)],
            [np.mean(imbalance)],
            s=90,
            color=color,
            edgecolors="black",
            label=name,
            zorder=3,
        )
    axes.plot(bound, 1 + TOLERANCES, color="black", linestyle="--", label="lower bound (mean)")
    axes.set_yscale("log")
    axes.set_ylim(0.97, None)
    axes.set_yticks([1, 1.1, 1.35, 2, 3, 5, 8], ["1", "1.1", "1.35", "2", "3", "5", "8"])
    axes.minorticks_off()
    axes.set_xlabel("keys brought to a rank by the exchange, mean, as a share of the row")
    axes.set_ylabel("attention work, max / mean")
    axes.set_title(f"Packed documents over {cp_size} ranks: dots are draws, large dots their means")
    axes.legend(loc="upper right")
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draws", type=int, default=100, help="rows for each size up to 16 ranks")
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 8, 16, 32, 64])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="folder for balance.md and balance.png"
    )
    options = parser.parse_args()
    published, figures, bounds = table_of(published_lengths(), options.sizes, options.draws)
    library, _, _ = table_of(library_lengths(), options.sizes, options.draws)
    shown = PICTURED if PICTURED in options.sizes else options.sizes[-1]
    picture(figures[shown], bounds[shown], shown, options.out / "balance.png")
    (options.out / "balance.md").write_text(
        PAGE.format(
            published="\n".join(published),
            library="\n".join(library),
            python=platform.python_version(),
            numpy=np.__version__,
            shown=shown,
            share=f"{SHARE:,}",
        )
    )


PAGE = """# Balance and traffic of the layouts

Generated by `tools/balance_table.py`; do not edit.

Rows of packed causal documents, {share} tokens a rank, no document longer than a quarter of the row. *Work* is the number of
visible (query, key) pairs of a rank; the busiest rank sets the pace, so 1.000 is best. *Exchange* and *ring* are the keys and values
that reach a rank in the forward pass with these methods, as a share of the row; the ring does not send what nobody needs. *Planning*
is the processor time to build the layout (Python {python}, NumPy {numpy}, one core of a busy machine), the least of seven, mean over
draws. *Pieces* are stretches of consecutive tokens of one rank.

- `contiguous`, `zigzag`: the whole row cut into 1 or 2 chunks a rank. `per_document`: each document zigzagged alone.
- `chunks of n`: chunks of fixed size dealt by work from a heap, a simple way that MagiAttention also offers; here for comparison only.
- `balanced`: `Layout.balanced(mask, cp_size)`. Short documents stay whole, long ones are cut so that little moves. The numbers of
  tokens are equal and cuts inside documents are multiples of 64 tokens from the document's start, where lengths permit.
- The *lower bound* holds for any placement with equal tokens and no rank above 1.02 of the mean work: each document alone, had it
  all ranks to itself, needs at least so many keys moved (`megacp.balance.least_keys`). No placement is known to reach it.

![Imbalance against traffic](balance.png)

The picture shows {shown} ranks, published lengths.

## Published document lengths

Bins with counts of a large pretraining corpus, published with MagiAttention's benchmark (`tools/data/document_lengths.csv`).

{published}

## The Python standard library

Files of the standard library without its tests, drawn at random; a token is taken to be four bytes.

{library}
"""


if __name__ == "__main__":
    main()
