"""Train on a real corpus at several context-parallel sizes, and draw how far the runs are apart.

    python tools/curves.py --data-path runs/corpus --tokenizer-model runs/corpus.model            # 200 steps at sizes 1, 2 and 4
    python tools/curves.py ... --steps 20 --sizes 1 2 --output runs/short

The yardstick is size 1 run twice, with one thread and with two: what the order of float32 sums alone does to a run. Documents are
whole, packed and kept apart. Writes OUTPUT.json and OUTPUT.png; ends with status 1 if a gradient norm of the first 50 steps is off
by more than 1e-4 of it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parents[1]
PRETRAIN = str(ROOT / "examples" / "pretrain_documents" / "pretrain.py")
FIRST, ALLOWED = 50, 1e-4  # steps whose gradient norms are held, and to what of them

Records = list[dict[str, float]]


def train(args: argparse.Namespace, cp: int, threads: int, folder: Path) -> Records:
    """Run one training, and give its records by step."""
    log = folder / f"cp{cp}-threads{threads}.jsonl"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(cp)),
        *("-m", "megacp", PRETRAIN, "--data-path", args.data_path, "--tokenizer-model", args.tokenizer_model),
        *("--num-layers", "4", "--hidden-size", "128", "--num-attention-heads", "4", "--disable-bias-linear"),
        *("--seq-length", str(args.seq_length), "--micro-batch-size", "1", "--global-batch-size", "4"),
        *("--train-iters", str(args.steps), "--lr", "3e-4", "--min-lr", "3e-5", "--lr-warmup-iters", "10"),
        *("--split", "100,0,0", "--pack-documents", "--cut-documents", "--megacp-documents", "positions"),
        *("--context-parallel-size", str(cp), "--log-json", str(log), "--megacp-report", "off"),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"curves: the run at size {cp} failed.\n{done.stderr[-3000:]}")
    return [json.loads(line) for line in log.read_text().splitlines()]


def apart(first: Records, other: Records) -> dict[str, float]:
    """Say how far two runs are apart, relative to the first: norms of the first steps, and losses of all."""

    def relative(name: str, steps: int) -> list[float]:
        pairs = zip(first[:steps], other[:steps], strict=True)
        return [abs(a[name] - b[name]) / abs(a[name]) for a, b in pairs]

    losses = relative("loss", len(first))
    return {
        "grad_norm": max(relative("grad_norm", FIRST)),
        "loss": max(losses),
        "mean_loss": sum(losses) / len(losses),
    }


def draw(runs: dict[str, Records], path: Path) -> None:
    """Draw losses, and differences from the first run on a logarithmic scale."""
    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), sharex=True)
    first = next(iter(runs.values()))
    for number, (name, run) in enumerate(runs.items()):
        steps, color = [r["iteration"] for r in run], f"C{number}"
        above.plot(steps, [r["loss"] for r in run], label=name, linewidth=1, color=color)
        if run is not first:
            gaps = [
                max(abs(a["loss"] - b["loss"]) / a["loss"], 1e-10) for a, b in zip(first, run, strict=True)
            ]
            below.semilogy(steps, gaps, label=name, linewidth=1, color=color)
    above.set_ylabel("loss per token")
    below.set_ylabel("relative difference from the first")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.legend()
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main(argv: list[str] | None = None) -> int:
    """Train, compare, write, and give the exit status."""
    parser = argparse.ArgumentParser(description="Loss curves at several context-parallel sizes.")
    parser.add_argument("--data-path", required=True, help="prefix of a .bin and .idx")
    parser.add_argument("--tokenizer-model", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seq-length", type=int, default=1024)
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--output", type=Path, default=Path("runs/curves"))
    args = parser.parse_args(argv)

    console = Console()
    planned = [("size 1, one thread", 1, 1), ("size 1, two threads", 1, 2)]
    planned += [(f"size {cp}", cp, 1) for cp in args.sizes if cp > 1]
    runs: dict[str, Records] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, cp, threads in planned:
            with console.status(f"{args.steps} steps: {name} ({len(runs) + 1} of {len(planned)})"):
                runs[name] = train(args, cp, threads, Path(folder))
            console.print(f"{name}: loss {runs[name][0]['loss']:.6f} to {runs[name][-1]['loss']:.6f}")
    first = runs[planned[0][0]]
    found: dict[str, dict[str, Any]] = {
        name: apart(first, run) for name, run in runs.items() if run is not first
    }
    table = Table(
        "against size 1 with one thread", f"norm, {FIRST} steps", f"loss, {args.steps} steps", "mean loss"
    )
    for name, gap in found.items():
        table.add_row(name, *(f"{gap[kind]:.1e}" for kind in ("grad_norm", "loss", "mean_loss")))
    console.print(table)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    kept = {
        name: [{k: r[k] for k in ("iteration", "loss", "grad_norm")} for r in run]
        for name, run in runs.items()
    }
    args.output.with_suffix(".json").write_text(json.dumps({"apart": found, "runs": kept}))
    draw(runs, args.output.with_suffix(".png"))
    return int(any(gap["grad_norm"] > ALLOWED for gap in found.values()))


if __name__ == "__main__":
    sys.exit(main())
