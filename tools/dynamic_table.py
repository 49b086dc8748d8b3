"""Simulate steps in which each document has its own context-parallel size, beside steps of one size for all.

    python tools/dynamic_table.py                     # the sources of the running Python and its packages; some minutes
    python tools/dynamic_table.py --ranks 8 16 --steps 1

Documents come from two corpora, packed into global batches by megacp.data.Packer and placed by megacp.data.spread. What a row takes
is not the planner's estimate: each row gets its layout and plan, and the plan's own counts of pairs and keys, rank by rank, are
multiplied by the rates of a cluster. Nothing is measured on one. Writes docs/dynamic.md, dynamic.json and dynamic.png.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import platform
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np
from rich.progress import track

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import megacp  # noqa: E402
from megacp import Layout, Mask  # noqa: E402
from megacp.data import Cost, Packer, Row, spread  # noqa: E402
from megacp.dynamic import row_layout  # noqa: E402
from megacp.layout import chunk_of  # noqa: E402
from megacp.plans import Block  # noqa: E402
from megacp.slices import UNBOUNDED  # noqa: E402

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

FOLDERS = [Path(sysconfig.get_path(name)) for name in ("stdlib", "purelib")]
BYTES_A_TOKEN = 4
MODEL = {
    "layers": 32,
    "hidden": 4096,
    "ffn": 14336,
    "heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "vocab": 128_256,
}
DRAWN = 200_000  # documents of the published distribution


@dataclass(frozen=True)
class Machine:
    """Rates that kernels and links reach: operations and bytes a second of one rank.

    Attributes:
        node: ranks of a node. row: seconds that a row takes whatever it holds. call: that one call of an attention kernel takes to
            start, with the message and the merge that go with it. tile: kernels compute tiles of so many queries and keys.
    """

    matmul_rate: float = 4e14
    attention_rate: float = 3e14
    near_rate: float = 3e11
    far_rate: float = 4e10
    node: int = 8
    row: float = 0.02
    call: float = 2e-5
    tile: int = 128

    def cost(self) -> Cost:
        """Give the planner's figures."""
        return Cost.of(**MODEL, **asdict(self))

    def rate(self, size: int) -> float:
        """Give the bytes a second that reach a rank from its block."""
        return self.near_rate if self.node % size == 0 else self.far_rate


@dataclass
class Passes:
    """Seconds of one row's attention on one rank, all layers: work and travel, forward and backward.

    Attributes:
        own, far: forward work on the rank's own keys, and on others'; the backward pass has 2.5 times as much.
        keys: bringing the others' keys and values, in each pass. back: bringing their gradients home. calls: of one pass, to start.
    """

    own: float
    far: float
    keys: float
    back: float
    calls: float

    def exchange(self) -> float:
        """As megacp's exchange goes: keys come behind own work forward, before all work backward; gradients behind own work."""
        forward = max(self.own, self.keys) + self.far
        return forward + self.keys + 2.5 * self.far + max(2.5 * self.own, self.back) + 2 * self.calls

    def ring(self) -> float:
        """As the best of rings would go: all travel behind all work."""
        work = self.own + self.far
        return max(work, self.keys) + max(2.5 * work, self.keys + self.back) + 2 * self.calls


def priced(row: Row, machine: Machine, lengths: np.ndarray, layout: str = "auto", capacity: int = 0) -> float:
    """Price a row by its plan, in seconds of its slowest rank.

    layout: 'zigzag' (each document alone) with a ring, 'balanced' with an exchange, or 'auto': what :mod:`megacp.dynamic` takes.
    """
    cost, own = machine.cost(), lengths[list(row.documents)]
    if row.size == 1:
        tiles = cost.pair * machine.tile**2 * int(causal_tiles(own, machine.tile).sum())
        return cost.row + cost.token * row.tokens + tiles + 2 * MODEL["layers"] * machine.call
    mask = Mask.documents(np.cumsum([0, *own]))
    name = row_layout(row, capacity, mask).name if layout == "auto" else layout
    is_zigzag = name in ("zigzag", "per_document")
    return zigzag_row(own, row.size, machine) if is_zigzag else balanced_row(mask, row.size, machine)


def balanced_row(mask: Mask, size: int, machine: Machine) -> float:
    """Price a row with layout balanced and method exchange."""
    cost, layers = machine.cost(), MODEL["layers"]
    layout = Layout.balanced(mask, size)
    plan = megacp.plan(layout, mask, method="exchange")
    sizes = {name: MODEL[name] for name in ("heads", "kv_heads", "head_dim")}
    tile = cost.pair * machine.tile**2 / 3.5
    slowest = 0.0
    for rank in range(size):
        work = [tile * block_tiles(step.blocks, machine.tile) for step in plan.steps(rank)]
        forward = plan.bytes_received(rank, **sizes, itemsize=2)
        both = plan.bytes_received(rank, **sizes, itemsize=2, grad_itemsize=4, backward=True)
        travel = layers * forward / machine.rate(size), layers * (both - forward) / machine.rate(size)
        passes = Passes(work[0], sum(work[1:]), *travel, layers * len(work) * machine.call)
        slowest = max(slowest, passes.exchange())
    return cost.row + cost.token * layout.local_len + slowest


def zigzag_row(lengths: np.ndarray, size: int, machine: Machine) -> float:
    """Price a row with each document zigzagged alone and a ring, as Megatron does.

    In closed form, as a plan of 128 ranks takes seconds; all ranks have the same. See tests/unit/test_dynamic_table.py.
    """
    cost, layers = machine.cost(), MODEL["layers"]
    tiles, slots = zigzag_tiles(lengths, size, machine.tile)
    value = layers * MODEL["kv_heads"] * 2 * MODEL["head_dim"]
    moved = (size - 1) * slots * value / machine.rate(size)
    work = tiles * cost.pair * machine.tile**2 / 3.5
    passes = Passes(work, 0.0, 2 * moved, 4 * moved, layers * size * machine.call)
    return cost.row + cost.token * slots + passes.ring()


def causal_tiles(lengths: np.ndarray, tile: int) -> np.ndarray:
    """Count the tiles that causal attention within documents touches."""
    side = -(-lengths // tile)
    return side * (side + 1) // 2


def zigzag_tiles(lengths: np.ndarray, size: int, tile: int) -> tuple[int, int]:
    """Count the tiles of a rank over a ring's steps, and its slots, if each document is zigzagged alone.

    Its own two chunks are one causal block; of each other owner's it sees half: both query chunks and one of keys, or one and both.
    """
    chunk = chunk_of(lengths, size)
    one, both = -(-chunk // tile), -(-2 * chunk // tile)
    return int((causal_tiles(2 * chunk, tile) + (size - 1) * one * both).sum()), int(2 * chunk.sum())


def block_tiles(blocks: tuple[Block, ...], tile: int) -> int:
    """Count the tiles that blocks touch, each block tiled from its own first query and key."""
    if not blocks:
        return 0
    _, q0, q1, k0, k1, lo, hi = np.array(blocks, np.int64).T
    rows = -(-(q1 - q0) // tile)
    which = np.repeat(np.arange(len(blocks)), rows)
    first = q0[which] + tile * (np.arange(len(which)) - np.repeat(np.cumsum(rows) - rows, rows))
    last = np.minimum(first + tile, q1[which]) - 1
    begin = np.maximum(k0[which], first + np.maximum(lo[which], -UNBOUNDED // 2)) - k0[which]
    end = np.minimum(k1[which], last + np.minimum(hi[which], UNBOUNDED // 2) + 1) - k0[which]
    return int(np.maximum(-(-end // tile) - begin // tile, 0)[end > begin].sum())


@dataclass
class Found:
    """Seconds of one step. by_size: of fixed sizes, with megacp's layout and exchange, and as Megatron does.

    Attributes:
        dynamic, estimate: priced by plans, and as the planner thought. bound: no schedule is below. planning: of the planner itself.
        documents, tokens, rows: of the step; rows by the size of their block.
    """

    dynamic: float
    estimate: float
    bound: float
    planning: float
    documents: int
    tokens: int
    rows: dict[int, int]
    balanced: dict[int, float]
    zigzag: dict[int, float]


def simulate(lengths: np.ndarray, ranks: int, capacity: int, machine: Machine) -> Found:
    """Simulate one step at every fixed size that has the memory, and with a size for each document."""
    cost = machine.cost()
    begin = time.process_time()
    waves = spread(lengths, ranks, capacity, cost)
    planning = time.process_time() - begin
    price = partial(priced, machine=machine, lengths=lengths, capacity=capacity)
    balanced, zigzag = {}, {}
    for size in waves.sizes:
        if lengths.max() <= size * capacity:
            balanced[size] = spread(lengths, ranks, capacity, cost, (size,)).seconds(
                partial(price, layout="balanced")
            )
        padded = -(-lengths // (2 * size)) * 2 * size
        if padded.max() <= size * capacity:
            rows = spread(padded, ranks, capacity, cost, (size,))
            zigzag[size] = rows.seconds(partial(price, layout="zigzag"))
    by_size = {size: sum(row.size == size for row in waves) for size in waves.sizes}
    return Found(
        waves.seconds(price),
        waves.seconds(cost),
        waves.bound(cost),
        planning,
        len(lengths),
        int(lengths.sum()),
        by_size,
        balanced,
        zigzag,
    )


def batches(
    lengths: np.ndarray, ranks: int, capacity: int, context: int, each: int, steps: int
) -> Iterator[np.ndarray]:
    """Give the documents of one global batch after another: ``each`` full rows of every rank; long files cut into pieces."""
    rows = max(1, ranks * capacity * each // context)
    packer = Packer(lengths, context, rows, cut=True)
    for _ in range(steps):
        yield np.array([piece.tokens for row in packer.step().rows for piece in row], np.int64)


def source_lengths(folders: list[Path], pattern: str) -> np.ndarray:
    """Read the sizes of all files, in tokens; order by path, so that every machine with the same files has the same stream."""
    paths = sorted({path for folder in folders for path in folder.rglob(pattern) if path.is_file()})
    return np.array([path.stat().st_size // BYTES_A_TOKEN for path in paths], np.int64)


def published_lengths() -> np.ndarray:
    """Draw a bin by its count, then a length evenly inside it."""
    text = (ROOT / "tools" / "data" / "document_lengths.csv").read_text().splitlines()
    bins = [[int(x) for x in row] for row in list(csv.reader(line for line in text if line[0] != "#"))[1:]]
    low, high, count = np.array(bins, np.int64).T
    rng = np.random.default_rng(0)
    chosen = rng.choice(len(low), DRAWN, p=count / count.sum())
    return rng.integers(low[chosen], high[chosen], endpoint=True)


def summary(found: list[Found]) -> dict[str, float]:
    """Give the time of all steps by their bounds; the best fixed size is chosen for all steps together."""

    def over(values: list[float]) -> float:
        return sum(values) / sum(f.bound for f in found)

    def best(name: str) -> tuple[int, float]:
        tables = [getattr(f, name) for f in found]
        sizes = set.intersection(*(set(table) for table in tables))
        return min(((size, over([t[size] for t in tables])) for size in sizes), key=lambda one: one[1])

    whole = max(found[0].balanced)
    size, balanced = best("balanced")
    ring_size, zigzag = best("zigzag")
    return {
        "bound_s": float(np.mean([f.bound for f in found])),
        "dynamic": over([f.dynamic for f in found]),
        "least_gain": min(gain(f) for f in found),
        "fixed_size": size,
        "fixed": balanced,
        "ring_size": ring_size,
        "ring": zigzag,
        "fixed_all": over([f.balanced[whole] for f in found]),
        "ring_all": over([f.zigzag.get(whole, math.nan) for f in found]),
        "estimate": float(np.mean([f.estimate / f.dynamic for f in found])),
        "planning_ms": 1e3 * float(np.mean([f.planning for f in found])),
        "steps": len(found),
        "documents": float(np.mean([f.documents for f in found])),
    }


def gain(found: Found) -> float:
    """Give the time of the best single size, in either layout, by that of a size for each document."""
    return min(*found.balanced.values(), *found.zigzag.values()) / found.dynamic


def line(ranks: int, found: list[Found]) -> str:
    """Write one line of the table."""
    s = summary(found)
    rows = ", ".join(
        f"{sum(f.rows[size] for f in found) / len(found):.3g} of {size}"
        for size in found[0].rows
        if any(f.rows[size] for f in found)
    )
    gains = f"{s['fixed'] / s['dynamic']:.3f} | {s['ring'] / s['dynamic']:.3f}"
    return (
        f"| {ranks} | {s['documents']:,.0f} | {s['bound_s']:.2f} | **{s['dynamic']:.3f}** | "
        f"{s['fixed']:.3f} (cp {s['fixed_size']:.0f}) | {s['fixed_all']:.3f} | "
        f"{s['ring']:.3f} (cp {s['ring_size']:.0f}) | {s['ring_all']:.3f} | {gains} | {rows} | {s['planning_ms']:.0f} |"
    )


def picture(figures: Figures, path: Path) -> None:
    """Draw for each corpus the step's time over the bound, by the number of ranks."""
    figure, axes = plt.subplots(1, len(figures), figsize=(4 * len(figures), 4), dpi=120, squeeze=False)
    kinds = {
        "ring": ("s-", "one size, zigzag and ring (best size)"),
        "fixed": ("o-", "one size, balanced and exchange (best size)"),
        "dynamic": ("o-", "a size for each document"),
    }
    for ax, ((name, context), by_ranks) in zip(axes[0], figures.items(), strict=True):
        at = {ranks: summary(found) for ranks, found in by_ranks.items()}
        for kind, (style, label) in kinds.items():
            ax.plot(list(at), [s[kind] for s in at.values()], style, label=label)
        ax.axhline(1, color="k", linestyle="--", label="lower bound")
        ax.set_xscale("log", base=2)
        ax.set_xticks(list(at), [str(ranks) for ranks in at])
        ax.set_xlabel(f"ranks; {name}, up to {context:,} tokens", fontsize=8)
    axes[0][0].set_ylabel("simulated step time over the bound")
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


Figures = dict[tuple[str, int], dict[int, list[Found]]]
"""By corpus and longest document, then by the number of ranks: what steps gave."""


def parsed() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, nargs="+", default=FOLDERS)
    parser.add_argument("--glob", default="*.py")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--tokens", type=int, default=1 << 25, help="steps are simulated for so many tokens")
    parser.add_argument("--capacity", type=int, default=16_384, help="tokens of a rank in one row")
    parser.add_argument(
        "--context", type=int, nargs="+", default=[131_072, 1_048_576], help="longer documents are cut"
    )
    parser.add_argument("--rows", type=int, default=4, help="full rows of each rank in a step")
    for name, rate in asdict(Machine()).items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=type(rate), default=rate, help="see Machine in this file"
        )
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for dynamic.md and the rest")
    return parser.parse_args()


def main() -> None:
    """Write the page, its figures and the picture."""
    options = parsed()
    warnings.filterwarnings("ignore", "megacp: layout")  # the last row of a large group may have few tokens
    machine = Machine(**{name: getattr(options, name) for name in asdict(Machine())})
    sources = source_lengths(options.folder, options.glob)
    corpora = {"Python sources": sources, "published lengths": published_lengths()}
    todo = [
        (name, context, ranks) for context in options.context for name in corpora for ranks in options.ranks
    ]
    figures: Figures = {}
    for name, context, ranks in track(todo, "simulating"):
        longest = min(context, ranks * options.capacity)
        steps = -(-options.tokens // (ranks * options.capacity * options.rows))
        drawn = batches(corpora[name], ranks, options.capacity, longest, options.rows, steps)
        found = [simulate(batch, ranks, options.capacity, machine) for batch in drawn]
        figures.setdefault((name, context), {})[ranks] = found
    picture(figures, options.out / "dynamic.png")
    settings = {
        "capacity": options.capacity,
        "rows": options.rows,
        "model": MODEL,
        "machine": asdict(machine),
    }
    runs = [
        {"corpus": name, "context": context, "ranks": ranks, "summary": summary(found)}
        for (name, context), by_ranks in figures.items()
        for ranks, found in by_ranks.items()
    ]
    (options.out / "dynamic.json").write_text(json.dumps(settings | {"runs": runs}, indent=1) + "\n")
    (options.out / "dynamic.md").write_text(page(figures, sources, options, machine))


def page(figures: Figures, sources: np.ndarray, options: argparse.Namespace, machine: Machine) -> str:
    """Write the page."""
    everyone = [f for by_ranks in figures.values() for found in by_ranks.values() for f in found]
    gains = [gain(f) for f in everyone]
    tables = [
        f"## {name[0].upper()}{name[1:]}, up to {context:,} tokens\n\n{HEAD}\n"
        + "\n".join(line(ranks, found) for ranks, found in by_ranks.items())
        for (name, context), by_ranks in figures.items()
    ]
    return PAGE.format(
        tables="\n\n".join(tables),
        files=f"{len(sources):,}",
        megabytes=f"{sources.sum() * BYTES_A_TOKEN / 1e6:,.0f}",
        median=f"{int(np.median(sources)):,}",
        longest=f"{sources.max():,}",
        tokens=f"{options.tokens / 1e6:.0f}",
        capacity=f"{options.capacity:,}",
        rows=options.rows,
        below=sum(gain > 1 for gain in gains),
        simulated=len(gains),
        same=sum(gain == 1 for gain in gains),
        most=f"{max(gains):.2f}",
        matmul=f"{machine.matmul_rate / 1e12:g}",
        attention=f"{machine.attention_rate / 1e12:g}",
        near=f"{machine.near_rate / 1e9:g}",
        far=f"{machine.far_rate / 1e9:g}",
        node=machine.node,
        row=f"{machine.row * 1e3:g}",
        call=f"{machine.call * 1e6:g}",
        tile=machine.tile,
        steps_of=", ".join(
            f"{len(found)} on {ranks} ranks" for ranks, found in next(iter(figures.values())).items()
        ),
        python=platform.python_version(),
    )


HEAD = (
    "| ranks | documents | bound, s | dynamic | fixed | all | ring | ring, all | gain on fixed | gain on ring "
    "| rows | planning, ms |\n" + "|--" * 12 + "|"
)

PAGE = """# Context-parallel size per document, simulated

Generated by `tools/dynamic_table.py`; do not edit. **Everything here is simulated: no cluster was measured.**
What it is and how to use it: [documents](documents.md#context-parallel-size-per-document).

A step has {rows} full rows for every rank, and a rank has memory for {capacity} tokens of one row. Documents longer than the number of
tokens that a table names, or than all ranks hold, are cut. Times are those of {tokens} million tokens by their lower bound, all steps
together ({steps_of}).

- *Dynamic*: `megacp.data.spread` gives each document its own size; *rows* says how many rows blocks of each size had in a step.
- *Fixed*: one size for all documents, the best one that has the memory, with megacp's `balanced` layout and `exchange`. Rows are
  placed by the same planner, so a group may have more of them than another. *All* is one group of all ranks.
- *Ring*: the same with each document zigzagged alone and a ring, as Megatron does it, all travel hidden behind attention as well
  as it could be. *Gain* is the time of *fixed*, and of *ring*, by that of *dynamic*.
- The *lower bound* is all work divided evenly, with no exchange at all and only full rows, or the longest document alone on all ranks,
  whichever is more. No schedule is below it; none is known to reach it.
- *Planning* is the planner's processor time for one step, on one core of a busy machine (Python {python}).

In {below} of {simulated} simulated steps dynamic is below every fixed size in either layout, in {same} it is the same schedule (all
documents of the step fill all ranks); the best single size for a step takes up to {most} times as long. Where one size inside a node
has memory for all documents, little is to be gained: 1 to 3 %. The longer the longest document, the more.

## Cost

Seconds of a row are those of its slowest rank: the matrix products of its slots, its attention, and the keys, values and gradients
that it receives, by the row's own plan (its blocks and `bytes_received`, rank by rank), times these rates, plus {row} ms for each row
and {call} microseconds for each call of an attention kernel. Zigzagged rows have their plan's counts in closed form, which tests hold
against plans. Kernels compute tiles of {tile} x {tile} pairs, so short pieces cost more than their pairs. Ranks of a block that lies
in one node of {node} receive {near} GB/s, others {far}; a rank does {matmul} TFLOP/s in matrix products and {attention} in attention.
The model is a decoder of 32 layers, hidden size 4096, 32 heads and 8 key/value heads of 128, gated MLPs of 14336, 128,256 words.
These are round figures, and arguments of the tool.

A row begins when all ranks of its block are free; there is no barrier between rows, as there is none in plain data parallelism. Where
weights are gathered anew for each micro-batch, over all ranks, rows wait for each other and these figures do not hold. The sum of
gradients at the end is the same for all and left out.

The Python sources are {files} files, {megabytes} MB, a token for each four bytes (median {median} tokens, longest {longest}). The
published lengths are bins with counts of a large pretraining corpus (`tools/data/document_lengths.csv`).

{tables}

![Step time over the bound](dynamic.png)
"""


if __name__ == "__main__":
    main()
