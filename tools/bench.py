"""Time context-parallel attention on this machine's CPU: one process, every method of megacp, and the peers that are installed.

    python tools/bench.py                                   # 4,096 and 16,384 tokens over 2 ranks, packed documents over 2 and 4
    python tools/bench.py --tokens 4096 --dtype bfloat16 --repeats 9 --output runs/bench

One process runs PyTorch's attention with all cores; the others run with one core a rank, forward and backward, on the same tensors.
Each result is first held against the one process's; a wrong one is not timed. Then all take turns, in another order each round,
and every time is divided by that of the one process in the same round, so that a machine that is busy with other things disturbs
all alike. Beside the time on the clock stands the processor time of the busiest rank, which such a machine disturbs less, and which
alone means something where there are more ranks than cores (for one process it is divided by the cores). Memory is the growth of
the resident set at its peak, the largest rank's. Writes OUTPUT.json and OUTPUT.png.

Peers are optional (pip install deepspeed yunchang axolotl-ringmaster) and left out with a sentence where they cannot run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import random
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # so that a clone need not be installed, also in the ranks

import bench_contestants as ranked  # noqa: E402
from bench_contestants import ALONE, NAMES, Case  # noqa: E402

from megacp.testing.ranks import Pool, RanksError  # noqa: E402

LENGTHS = ROOT / "tools" / "data" / "document_lengths.csv"
BALANCED = "exchange, balanced"
ALLOWED = {
    "float64": 1e-10,
    "float32": 1e-5,
    "bfloat16": 3e-2,
    "float16": 5e-3,
}  # relative to the largest value
TURN_LIMIT = 600.0  # seconds


def documents(tokens: int, table: Path, seed: int = 0) -> tuple[int, ...]:
    """Draw documents until they fill a row: a bin by its count, a length in it, at most a quarter of the row."""
    lines = [line for line in table.read_text().splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    bins = [(int(row["shortest"]), int(row["longest"])) for row in rows]
    counts = [int(row["documents"]) for row in rows]
    draw, lengths = random.Random(seed), []
    while sum(lengths) < tokens:
        low, high = draw.choices(bins, counts)[0]
        lengths.append(max(1, min(draw.randint(low, high), tokens // 4, tokens - sum(lengths))))
    return tuple(lengths)


def cases(args: argparse.Namespace) -> list[Case]:
    """List what is asked for."""
    what = {"heads": args.heads, "head_dim": args.head_dim, "dtype": args.dtype}
    found = [
        Case(f"{tokens:,} tokens, {ranks} ranks", tokens, ranks=ranks, **what)
        for tokens in args.tokens
        for ranks in args.ranks
    ]
    for ranks in args.packed_ranks if args.lengths.exists() else []:
        for draw in range(args.draws):
            tokens = args.packed_tokens * ranks
            lengths = documents(tokens, args.lengths, draw)
            name = f"{tokens:,} tokens in {len(lengths)} documents (draw {draw}), {ranks} ranks"
            found.append(Case(name, tokens, ranks=ranks, documents=lengths, **what))
    return found


class Bench:
    """Runs turns in processes that are kept, and keeps what they took."""

    def __init__(self, case: Case, threads: int, only: list[str]) -> None:
        self.case, self.threads = case, threads
        self.alone, self.split = Pool(1), Pool(case.ranks)
        self.names = [c.name for c in ranked.contestants(case) if not only or c.name in {ALONE, *only}]
        self.absent: dict[str, str] = {}
        self.errors: dict[str, dict[str, float]] = {}
        self.times: dict[str, list[float]] = {name: [] for name in self.names}
        self.worked: dict[str, list[float]] = {name: [] for name in self.names}
        self.memory: dict[str, int] = {}
        self._truth: list[torch.Tensor] = []

    def check(self, name: str) -> None:
        """Run a contestant once without counting the time, and hold its result against the one process's."""
        results = self._turn(name, True)
        if results is None:
            return
        layout = ranked.layout_of(self._layout(name), self.case)
        got = [layout.unshard([r["result"][i] for r in results]).float() for i in range(len(NAMES))]
        if name == ALONE:
            self._truth = got
        self.errors[name] = {
            what: float((x - y).abs().max() / y.abs().max())
            for what, x, y in zip(NAMES, got, self._truth, strict=True)
        }
        if not max(self.errors[name].values()) <= ALLOWED[self.case.dtype]:
            self.absent[name] = f"is wrong: {self.errors[name]}"

    def round(self, names: list[str]) -> None:
        """Let each contestant run once more."""
        for name in names:
            results = self._turn(name, False)
            if results is not None:
                self.times[name].append(max(r["seconds"] for r in results))
                share = self.threads if name == ALONE else 1
                self.worked[name].append(max(r["worked"] for r in results) / share)
                self.memory[name] = max(self.memory.get(name, 0), *(r["memory"] for r in results))

    def close(self) -> None:
        """End the processes."""
        self.alone.close()
        self.split.close()

    def report(self) -> dict[str, Any]:
        """Give what was found, ready for JSON."""
        rows = []
        for name in self.names:
            one = next(c for c in ranked.contestants(self.case) if c.name == name)
            row: dict[str, Any] = {"name": name, "whose": one.whose, "layout": one.layout}
            if name in self.absent:
                rows.append(row | {"absent": self.absent[name]})
                continue
            row |= {
                "seconds": self.times[name],
                "median_s": statistics.median(self.times[name]),
                "min_s": min(self.times[name]),
                "ratio": _ratio(self.times[name], self.times[ALONE]),
                "ratio_of_min": min(self.times[name]) / min(self.times[ALONE]),
                "worked_s": self.worked[name],
                "ratio_of_worked": _ratio(self.worked[name], self.worked[ALONE]),
                "memory_bytes": self.memory[name],
                "error": self.errors[name],
            }
            rows.append(row)
        return {"case": asdict(self.case), "results": rows}

    def _layout(self, name: str) -> str:
        return next(c.layout for c in ranked.contestants(self.case) if c.name == name)

    def _turn(self, name: str, wants_result: bool) -> list[dict[str, Any]] | None:
        pool, threads = (self.alone, self.threads) if name == ALONE else (self.split, 1)
        try:
            results = pool.run(ranked.turn, self.case, name, threads, wants_result, timeout=TURN_LIMIT)
        except RanksError as error:
            if name == ALONE:
                raise
            self.absent[name] = "fails: " + str(error).strip().splitlines()[-1]
            return None
        if "absent" in results[0]:
            self.absent[name] = results[0]["absent"]
            return None
        return results


def _ratio(times: list[float], base: list[float]) -> float:
    """Divide round by round, and take the median."""
    return statistics.median(mine / other for mine, other in zip(times, base, strict=True))


def run(case: Case, args: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Check everybody, then let them take turns."""
    bench = Bench(case, args.threads, args.only)
    task = progress.add_task(case.name, total=len(bench.names) * (args.repeats + 1))
    try:
        for name in bench.names:
            bench.check(name)
            progress.advance(task)
        present = [name for name in bench.names if name not in bench.absent]
        progress.update(task, total=len(bench.names) + len(present) * args.repeats)
        for i in range(args.repeats):
            order = random.Random(i).sample(present, len(present))
            for name in order:
                bench.round([name])
                progress.advance(task)
    finally:
        bench.close()
    return bench.report()


def show(report: dict[str, Any], console: Console) -> None:
    """Print a case as a table, and who was left out."""
    table = Table(title=report["case"]["name"], title_justify="left")
    for column in (
        "",
        "layout",
        "median",
        "least",
        "of one process",
        "by processor",
        "memory",
        "largest error",
    ):
        is_name = column in ("", "layout")
        table.add_column(column, justify="left" if is_name else "right", no_wrap=is_name)
    for row in report["results"]:
        if "absent" in row:
            continue
        table.add_row(
            row["name"] if row["whose"] != "megacp" else f"megacp {row['name']}",
            row["layout"],
            f"{row['median_s'] * 1e3:.0f} ms",
            f"{row['min_s'] * 1e3:.0f} ms",
            f"{row['ratio']:.2f} x",
            f"{row['ratio_of_worked']:.2f} x",
            f"{row['memory_bytes'] / 2**20:.0f} MiB",
            f"{max(row['error'].values()):.1e}",
        )
    console.print(table)
    for row in report["results"]:
        if "absent" in row:
            console.print(f"left out: {row['name']} {row['absent']}", highlight=False)


def gains(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare the balanced exchange with the ring over whole rows, over all draws of documents."""
    found = []
    for ranks in dict.fromkeys(r["case"]["ranks"] for r in reports if r["case"]["documents"]):
        ratios: dict[str, list[float]] = {"clock": [], "processor": []}
        for report in reports:
            rows = {row["name"]: row for row in report["results"] if "absent" not in row}
            if (
                report["case"]["documents"]
                and report["case"]["ranks"] == ranks
                and {"ring", BALANCED} <= rows.keys()
            ):
                ratios["clock"].append(_ratio(rows["ring"]["seconds"], rows[BALANCED]["seconds"]))
                ratios["processor"].append(_ratio(rows["ring"]["worked_s"], rows[BALANCED]["worked_s"]))
        if ratios["clock"]:
            means = {name: statistics.geometric_mean(values) for name, values in ratios.items()}
            found.append({"ranks": ranks, "draws": len(ratios["clock"]), **means})
    return found


def draw(reports: list[dict[str, Any]], path: Path) -> None:
    """Draw each case's times, relative to the one process, beside its memory."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    colours = {"one process": "#888888", "megacp": "#1f6fb4", "peer": "#e08a2e"}
    present = [[row for row in report["results"] if "absent" not in row] for report in reports]
    heights = [0.9 + 0.32 * len(rows) for rows in present]
    figure, axes = plt.subplots(
        len(reports),
        2,
        figsize=(11, sum(heights)),
        squeeze=False,
        height_ratios=heights,
        layout="constrained",
    )
    for (times, memory), rows, report in zip(axes, present, reports, strict=True):
        names = [row["name"] if row["whose"] != "megacp" else f"megacp {row['name']}" for row in rows]
        paint = [colours[row["whose"]] for row in rows]
        base = next(row for row in rows if row["whose"] == "one process")["seconds"]
        for i, row in enumerate(rows):
            ratios = [a / b for a, b in zip(row["seconds"], base, strict=True)]
            times.plot(ratios, [i] * len(ratios), ".", color="black", markersize=3, zorder=3)
        bars = times.barh(names, [row["ratio"] for row in rows], color=paint)
        labels = [f"{row['ratio']:.2f}" for row in rows]
        times.bar_label(bars, labels, label_type="center", color="white", fontsize=8)
        times.axvline(1, color="black", linewidth=0.8)
        times.set_title(report["case"]["name"], loc="left", fontsize=9)
        times.set_xlabel("time, forward and backward, of one process with all cores = 1", fontsize=8)
        bars = memory.barh(names, [row["memory_bytes"] / 2**20 for row in rows], color=paint)
        memory.bar_label(bars, fmt="%.0f", padding=3, fontsize=8)
        memory.set_yticks([])
        memory.set_xlabel("peak growth of a rank's memory, MiB", fontsize=8)
        for axis in (times, memory):
            axis.invert_yaxis()
            axis.margins(x=0.15)
            axis.tick_params(labelsize=8)
            axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> int:
    """Run what was asked for, and write it down."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--tokens", type=int, nargs="*", default=[4096, 16384], help="lengths of a whole causal row"
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[2], help="numbers of ranks for those")
    parser.add_argument(
        "--packed-ranks", type=int, nargs="*", default=[2, 4], help="numbers of ranks for packed documents"
    )
    parser.add_argument("--packed-tokens", type=int, default=8192, help="tokens a rank of packed documents")
    parser.add_argument("--draws", type=int, default=3, help="rows of documents that are drawn")
    parser.add_argument(
        "--lengths",
        type=Path,
        default=LENGTHS,
        help="a csv of document lengths: columns shortest, longest, documents",
    )
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=sorted(ALLOWED), default="float32")
    parser.add_argument("--repeats", type=int, default=7, help="rounds that count")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="cores of the one process")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="of the others, only these")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/bench"), help="writes OUTPUT.json and OUTPUT.png"
    )
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if args.packed_ranks and not args.lengths.exists():
        console.print(
            f"left out: packed documents; there are no document lengths at {args.lengths}", highlight=False
        )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    reports = []
    with Progress(
        *columns, console=console, disable=not sys.stderr.isatty() and not console.is_terminal
    ) as progress:
        for case in cases(args):
            reports.append(run(case, args, progress))
            show(reports[-1], console)
    for gain in gains(reports):
        console.print(
            f"packed documents over {gain['ranks']} ranks, {gain['draws']} draws: the balanced exchange is {gain['clock']:.2f} times "
            f"as fast as the zigzag ring; its busiest rank needs {gain['processor']:.2f} times less processor time",
            highlight=False,
        )
    args.output.parent.mkdir(parents=True, exist_ok=True)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    text = json.dumps(
        {
            "machine": machine,
            "threads_of_one_process": args.threads,
            "cases": reports,
            "packed": gains(reports),
        },
        indent=1,
    )
    args.output.with_suffix(".json").write_text(text + "\n")
    draw(reports, args.output.with_suffix(".png"))
    console.print(
        f"written: {args.output.with_suffix('.json')} and {args.output.with_suffix('.png')}", highlight=False
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
