"""Pack documents into rows, place the rows on a cluster, and measure what is padded, how even the work is and what has to move.

    python tools/packing_table.py                     # the sources of the running Python and its packages; some minutes
    python tools/packing_table.py --steps 2 --sizes 8 16

Lengths are those of real files, a token for each four bytes. A step has so many rows for each of four data-parallel ranks; each row is
one micro-batch over a context-parallel group. Writes docs/packing.md and docs/packing.png.
"""

from __future__ import annotations

import argparse
import platform
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megacp  # noqa: E402
from megacp import Layout, Mask  # noqa: E402
from megacp.balance import least_keys  # noqa: E402
from megacp.data import Packer, Step  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RANKS, EACH = 4, 16  # data-parallel ranks, micro-batches of each in a step
CAPACITIES = (32_768, 131_072)
FOLDERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
LAYOUTS = ("balanced", "per_document")
BYTES_A_TOKEN = 4


@dataclass
class Found:
    """What a layout makes of some rows.

    Attributes:
        slots, tokens: over all ranks and rows.
        busiest, mean: work of the busiest rank, and of all by their number, for each row.
        across: a step's busiest data-parallel rank by the mean, where each waits for the busiest rank of each of its rows.
        exchange, ring: keys that reach a rank in the forward pass, as a share of the row. bound: of the exchange, for any placement.
    """

    slots: int = 0
    tokens: int = 0
    busiest: list[int] = field(default_factory=list)
    mean: list[float] = field(default_factory=list)
    across: list[float] = field(default_factory=list)
    exchange: list[float] = field(default_factory=list)
    ring: list[float] = field(default_factory=list)
    bound: list[float] = field(default_factory=list)


def file_lengths(folders: list[Path], pattern: str) -> np.ndarray:
    """Read the sizes of all files, in tokens; order by path, so that every machine with the same files has the same stream."""
    paths = sorted({path for folder in folders for path in folder.rglob(pattern) if path.is_file()})
    return np.array([path.stat().st_size // BYTES_A_TOKEN for path in paths], np.int64)


def place(step: Step, cp_size: int, found: dict[str, Found]) -> None:
    """Place each row of a step, and note what comes of it."""
    slowest: dict[str, list[int]] = {name: [] for name in LAYOUTS}
    total = 0
    for row in step.rows:
        offsets = np.cumsum([0, *(piece.tokens for piece in row)])
        mask = Mask.documents(offsets)
        total += mask.pairs()
        for name in LAYOUTS:
            layout = (
                Layout.balanced(mask, cp_size)
                if name == "balanced"
                else Layout.per_document(offsets, cp_size)
            )
            one = found[name]
            plan = megacp.plan(layout, mask, method="exchange")
            work = [plan.pairs(rank) for rank in range(cp_size)]
            slowest[name].append(max(work))
            one.busiest.append(max(work))
            one.mean.append(sum(work) / cp_size)
            one.slots += layout.seq_len + layout.padding
            one.tokens += layout.seq_len
            moved = sum(plan.bytes_received(rank) for rank in range(cp_size)) / 2  # the unit is half a token
            one.exchange.append(moved / cp_size / layout.seq_len)
            one.ring.append((cp_size - 1) * layout.local_len / layout.seq_len)
            one.bound.append(least_keys(mask, cp_size) / cp_size / layout.seq_len)
    for name in LAYOUTS:
        by_rank = np.array(slowest[name]).reshape(RANKS, EACH).sum(1)
        found[name].across.append(float(by_rank.max() * RANKS * cp_size / total))


def table(
    lengths: np.ndarray, sizes: list[int], steps: int
) -> Iterator[tuple[str, int, int, dict[str, Found]]]:
    """Give a line of the table at a time, with the figures behind it."""
    for capacity in CAPACITIES:
        packer = Packer(lengths, capacity, RANKS * EACH, ranks=RANKS, cut=True)
        packed = [packer.step() for _ in range(steps)]
        unfilled = float(np.mean([step.padding for step in packed]))
        ranks_alone = max(
            float(np.reshape(s.work, (RANKS, EACH)).sum(1).max() * RANKS / sum(s.work)) for s in packed
        )
        for cp_size in sizes:
            found = {name: Found() for name in LAYOUTS}
            for step in packed:
                place(step, cp_size, found)
            for name in LAYOUTS:
                f = found[name]
                padding = 1 - f.tokens / f.slots * (1 - unfilled)
                columns = (
                    f"{padding:.2%}",
                    f"{sum(f.busiest) / sum(f.mean):.3f}",
                    f"{max(np.array(f.busiest) / f.mean):.3f}",
                    f"{ranks_alone:.3f}",
                    f"{max(f.across):.3f}",
                    f"{np.mean(f.exchange):.3f}",
                    f"{np.mean(f.bound):.3f}",
                    f"{np.mean(f.ring):.3f}",
                )
                yield (
                    f"| {capacity:,} | {cp_size} | {name} | " + " | ".join(columns) + " |",
                    capacity,
                    cp_size,
                    found,
                )


def picture(figures: dict[tuple[int, int], dict[str, Found]], path: Path) -> None:
    """Draw for each capacity what moves, over the size of the group."""
    figure, axes = plt.subplots(1, len(CAPACITIES), figsize=(10, 4), dpi=120, sharey=True)
    for ax, capacity in zip(axes, CAPACITIES, strict=True):
        sizes = [cp for c, cp in figures if c == capacity]
        at = [figures[capacity, cp] for cp in sizes]
        ax.plot(sizes, [np.mean(f["per_document"].ring) for f in at], "s-", label="per-document zigzag, ring")
        ax.plot(
            sizes,
            [np.mean(f["per_document"].exchange) for f in at],
            "o-",
            label="per-document zigzag, exchange",
        )
        ax.plot(sizes, [np.mean(f["balanced"].exchange) for f in at], "o-", label="balanced, exchange")
        ax.plot(sizes, [np.mean(f["balanced"].bound) for f in at], "k--", label="lower bound")
        ax.set_xscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.set_xlabel(f"context-parallel size, rows of {capacity:,}")
    axes[0].set_ylabel("keys brought to a rank, share of the row")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Write the page and the picture."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, nargs="+", default=FOLDERS)
    parser.add_argument("--glob", default="*.py")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 32, 64])
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs", help="folder for packing.md and packing.png"
    )
    options = parser.parse_args()
    lengths = file_lengths(options.folder, options.glob)
    lines, figures = [], {}
    count = len(CAPACITIES) * len(options.sizes) * len(LAYOUTS)
    for line, capacity, cp_size, found in track(
        table(lengths, options.sizes, options.steps), "packing", total=count
    ):
        lines.append(line)
        figures[capacity, cp_size] = found
    picture(figures, options.out / "packing.png")
    (options.out / "packing.md").write_text(
        PAGE.format(
            lines="\n".join(lines),
            files=f"{len(lengths):,}",
            megabytes=f"{lengths.sum() * BYTES_A_TOKEN / 1e6:,.0f}",
            median=f"{int(np.median(lengths)):,}",
            longest=f"{lengths.max():,}",
            rows=RANKS * EACH,
            steps=options.steps,
            python=platform.python_version(),
        )
    )


PAGE = """# Packing: padding, work and traffic

Generated by `tools/packing_table.py`; do not edit.

{files} Python sources, {megabytes} MB, a token for each four bytes (median {median} tokens, longest {longest}), packed by
`megacp.data.Packer` into {steps} steps of {rows} rows for 4 data-parallel ranks, 16 micro-batches each. Files longer than a row are
cut into pieces of a row. Each row lies over a context-parallel group of the given size. Python {python}.

- *Padding*: share of all slots that hold no token: what the packer left, and what the layout adds.
- *Work in a group*: (query, key) pairs of the busiest rank by the mean, over all rows; the *worst row* is one of many short documents,
  which has little work.
- *Work of ranks*: the same over the data-parallel ranks, a step's rows together, in the worst step. *Both*: where a data-parallel
  rank waits for the busiest rank of each of its rows.
- *Exchange* and *ring*: keys that reach a rank in the forward pass, as a share of the row. The *bound* holds for any placement with
  equal tokens and no rank above 1.02 of the mean work; none is known to reach it.
- `per_document` is what Megatron does with packed documents: each is padded to a multiple of twice the group and zigzagged alone,
  and a ring moves all keys.

| row | cp | layout | padding | work in a group | worst row | of ranks | both | exchange | bound | ring |
|--|--|--|--|--|--|--|--|--|--|--|
{lines}

![Traffic over the size of the group](packing.png)
"""


if __name__ == "__main__":
    main()
