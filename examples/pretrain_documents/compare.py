"""Compare two runs of pretrain.py that should be the same training: losses, gradient norms and parameters.

Reads each run's --log-json and --dump-parameters::

    python examples/pretrain_documents/compare.py runs/pretrain_documents/cp1 runs/pretrain_documents/cp2

Exits with 1 when the runs differ by more than --tolerance, relative to the first.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

Steps = dict[int, dict[str, Any]]


def read_steps(run: Path) -> Steps:
    """Read the training steps of a run by number; after a resumed run the last record of a step counts."""
    records = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {record["iteration"]: record for record in records if "loss" in record}


def relative(first: float, second: float) -> float:
    """Give the difference as a part of the first value; a NaN differs by infinity."""
    difference = abs(first - second) / max(abs(first), 1e-300)
    return difference if difference == difference else float("inf")


def parameter_differences(first: Path, second: Path) -> list[tuple[float, str]]:
    """Give each parameter's difference with its name, largest first: norm of the difference over the norm."""
    names = [{path.name for path in (run / "parameters").glob("*.pt")} for run in (first, second)]
    if not names[0] or names[0] != names[1]:
        raise SystemExit(
            f"compare: the runs have different shards: {sorted(names[0])} and {sorted(names[1])}."
        )
    found = []
    for shard in sorted(names[0]):
        a, b = (torch.load(run / "parameters" / shard, weights_only=True) for run in (first, second))
        if a.keys() != b.keys():
            raise SystemExit(f"compare: {shard} has different parameters: {sorted(a.keys() ^ b.keys())}.")
        for name, value in a.items():
            norm = float((value.double() - b[name].double()).norm() / value.double().norm().clamp(min=1e-300))
            found.append(
                (norm if norm == norm else float("inf"), name if len(names[0]) == 1 else f"{shard}: {name}")
            )
    return sorted(found, reverse=True)


def table(first: Steps, second: Steps, labels: list[str], rows: int) -> str:
    """Draw the steps that both runs took, thinned out evenly to about `rows`."""
    a, b = labels
    lines = [
        f"{'step':>5} | {'loss ' + a:>10} {'loss ' + b:>10} {'relative':>9}"
        f" | {'norm ' + a:>10} {'norm ' + b:>10} {'relative':>9}"
    ]
    lines.append("-" * len(lines[0]))
    steps = sorted(first)
    every = max(1, -(-len(steps) // rows))
    for step in [s for s in steps if s == steps[0] or s % every == 0 or s == steps[-1]]:
        cells = [f"{step:>5}"]
        for key in ("loss", "grad_norm"):
            x, y = first[step][key], second[step][key]
            cells.append(f"{x:>10.6f} {y:>10.6f} {relative(x, y):>9.1e}")
        lines.append(" | ".join(cells))
    return "\n".join(lines)


def draw(first: Steps, second: Steps, labels: list[str], path: Path) -> str:
    """Write both loss curves as a picture where matplotlib is installed; give a sentence on it."""
    try:
        import matplotlib
    except ImportError:
        return "No picture of the losses: matplotlib is not installed."
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for steps, label, style in ((first, labels[0], "-"), (second, labels[1], "--")):
        axes.plot(list(steps), [record["loss"] for record in steps.values()], style, label=label, linewidth=2)
    axes.set(xlabel="step", ylabel="loss", title="The same training, with and without context parallelism")
    axes.legend()
    figure.savefig(path, dpi=150)
    return f"Loss curves: {path}"


def main(argv: list[str] | None = None) -> int:
    """Print the comparison; give 0 if the runs agree, else 1."""
    parser = argparse.ArgumentParser(description="Compare two runs of pretrain.py.", allow_abbrev=False)
    parser.add_argument("first", type=Path, help="folder with log.jsonl and parameters/")
    parser.add_argument("second", type=Path)
    parser.add_argument("--labels", nargs=2, default=["CP=1", "CP=2"])
    parser.add_argument("--tolerance", type=float, default=1e-4)
    parser.add_argument("--rows", type=int, default=12, help="steps to print, about")
    parser.add_argument("--picture", type=Path, default=None, help="where to draw the losses as PNG")
    args = parser.parse_args(argv)
    first, second = read_steps(args.first), read_steps(args.second)
    if not first or first.keys() != second.keys():
        raise SystemExit(f"compare: the runs took different steps: {len(first)} and {len(second)}.")
    print(table(first, second, args.labels, args.rows))
    losses, norms = (max(relative(first[s][k], second[s][k]) for s in first) for k in ("loss", "grad_norm"))
    parameters, name = parameter_differences(args.first, args.second)[0]
    print(
        f"\nlargest relative difference over {len(first)} steps: loss {losses:.1e}, gradient norm {norms:.1e}"
    )
    print(f"largest relative difference of a parameter at the end: {parameters:.1e} ({name})")
    for label, steps in zip(args.labels, (first, second), strict=True):
        last = list(steps.values())[len(steps) // 2 :]
        speed = sum(record["tokens_per_second"] for record in last) / len(last)
        print(
            f"{label}: {speed:,.0f} tokens/s, at most {last[-1]['peak_memory_bytes'] / 2**20:,.0f} MiB a process"
        )
    if args.picture:
        print(draw(first, second, args.labels, args.picture))
    agree = max(losses, norms, parameters) <= args.tolerance
    print(f"{'The same training' if agree else 'NOT the same training'}, within {args.tolerance:.0e}.")
    return 0 if agree else 1


if __name__ == "__main__":
    sys.exit(main())
