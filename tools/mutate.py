"""Break megacp in one place at a time, and see whether its tests notice (trial D77: parity tests that cannot fail).

    python tools/mutate.py                 # every fault, one after the other: some minutes
    python tools/mutate.py --list
    python tools/mutate.py documents loss  # those with one of these words in their name

Works on a copy of this checkout. The tests that are to notice a fault are run unbroken first, and have to pass. Exit status: 0 if
every fault was noticed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

LOOP = "tests/conformance/test_example_loop.py"
TRIALS = "tests/trials"


@dataclass(frozen=True)
class Fault:
    """One place that is broken: ``old`` becomes ``new`` in ``file``, and one of ``tests`` (words for pytest) has to fail."""

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


ATTENTION = (f"{TRIALS}/test_sharding.py", "-k", "d37")
PACKED = (f"{TRIALS}/test_packing.py",)
LOSS = (f"{TRIALS}/test_loss.py",)
WIRES = (f"{TRIALS}/test_communication.py", f"{TRIALS}/test_numerics.py")
SHARDING = (f"{TRIALS}/test_sharding.py", "-k", "d58 or d13 or d21")
POSITIONS = ("tests/conformance/test_rotary.py",)
ANSWERS = (LOOP, "-k", "answer_only and 2")
DOCUMENTS = (LOOP, "-k", "with_documents and 2")
SIZES = ("tests/distributed/test_dynamic.py", "-k", "gradients")
SIZES_IN_MEGATRON = ("tests/conformance/test_dynamic.py", "-k", "gradients")
WAVES = ("tests/property/test_waves.py",)
WHEELS = ("tests/conformance/test_wheels.py", "-k", "0.12 and per-token")

FAULTS = (
    # the five of the trial
    Fault(
        "attention is zero",
        "megacp/attend.py",
        "        out = out.to(q.dtype)\n",
        "        out = out.to(q.dtype) * 0\n",
        ATTENTION,
    ),
    Fault(
        "1 % error in dK", "megacp/attend.py", "dk.to(k.dtype), dv", "(dk * 1.01).to(k.dtype), dv", ATTENTION
    ),
    Fault(
        "documents are ignored",
        "megacp/mask.py",
        "        start, stop = offsets[:-1], offsets[1:]\n",
        "        start, stop = offsets[[0]], offsets[[-1]]\n",
        PACKED,
    ),
    Fault(
        "labels are shifted after the split",
        "megacp/sharding.py",
        "_PAD.get(name, 0))\n",
        "_PAD.get(name, 0))\n            if name == 'labels':\n                out[name] = out[name].roll(-1, dim)\n",
        DOCUMENTS,
    ),
    Fault(
        "group is None in attention",
        "megacp/attend.py",
        "members = as_group(group)",
        "members = as_group(None)",
        WIRES,
    ),
    # the engine
    Fault(
        "1 % error in dK of the reference kernel",
        "megacp/kernels/reference.py",
        "into.dk.add(torch.einsum(",
        "into.dk.add(1.01 * torch.einsum(",
        ATTENTION,
    ),
    Fault(
        "group is None in the loss",
        "megacp/loss.py",
        "members = as_group(group)",
        "members = as_group(None)",
        LOSS,
    ),
    Fault(
        "loss is not summed over the group",
        "megacp/loss.py",
        'comm.total(group, local, "the sum of the loss")',
        "local",
        LOSS,
    ),
    Fault(
        "ring's backward pass uses the first keys",
        "megacp/methods/ring.py",
        "call.kernel.backward(d_out, q, *buffers.here,",
        "call.kernel.backward(d_out, q, *buffers._own,",
        ATTENTION,
    ),
    Fault(
        "merge without its largest logit",
        "megacp/merge.py",
        "base = top.masked_fill(top == -torch.inf, 0)",
        "base = torch.zeros_like(top)",
        WIRES,
    ),
    Fault(
        "group rank is used as world rank",
        "megacp/comm.py",
        "dist.isend, t, group.global_ranks[peer]",
        "dist.isend, t, peer",
        WIRES,
    ),
    Fault(
        "windows are one key wider",
        "megacp/mask.py",
        "window - 1, 0 if causal",
        "window, 0 if causal",
        (f"{TRIALS}/test_validation.py", "-k", "oracle_s_own"),
    ),
    Fault(
        "metadata is split",
        "megacp/sharding.py",
        '"position_ids": -1,',
        '"position_ids": -1,\n    "trap": 0,',
        SHARDING,
    ),
    Fault(
        "gather keeps another rank's gradient",
        "megacp/sharding.py",
        "layout.shard(d_full, group.rank, ctx.dim)",
        "layout.shard(d_full, 0, ctx.dim)",
        SHARDING,
    ),
    Fault("gather never sums gradients", "megacp/sharding.py", "if ctx.sums:", "if False:", SHARDING),
    # the host
    Fault(
        "labels cross documents",
        "megacp/hosts/entry.py",
        "    seen.masked_fill_(ends.to(seen.device), 0)\n",
        "",
        ("tests/unit/test_loss_contracts.py", "-k", "last_label"),
    ),
    Fault(
        "gradients are averaged over the group",
        "megacp/hosts/megatron/model.py",
        "factor = group.size if session().is_averaged and share is None else 1",
        "factor = 1",
        ANSWERS,
    ),
    Fault(
        "rotary positions by contiguous parts",
        "megacp/hosts/megatron/layer.py",
        "        return layout.shard(table, group.rank, dim=0)\n",
        "        return table.chunk(group.size)[group.rank]\n",
        POSITIONS,
    ),
    Fault(
        "tokens of one rank are counted",
        "megacp/hosts/megatron/loss.py",
        "        if run.token_divisor != 1:\n",
        "        if False:\n",
        WHEELS,
    ),
    Fault(
        "copies made before a late install stay",
        "megacp/hosts/hooks.py",
        "                names[key] = new\n",
        "                pass\n",
        ("tests/unit/test_seams.py",),
    ),
    Fault(
        "offsets: the second document is part of the first",
        "megacp/hosts/documents.py",
        "    starts[0, marks[marks < shape[1]]] = 1\n",
        "    starts[0, marks[marks < shape[1]]] = 1\n    starts[0, marks[1]] = 0\n",
        ("tests/unit/test_starts.py",),
    ),
    Fault(
        "every micro-batch has the first one's positions",
        "megacp/hosts/session.py",
        "            return self.split.layout\n",
        '            return fixed("zigzag", seq_len, cp_size)\n',
        (LOOP, "-k", "every_layout and balanced"),
    ),
    Fault(
        "old hosts: gradients are averaged over the group",
        "megacp/hosts/legacy/model.py",
        "dim=1, grad_factor=group.size)",
        "dim=1, grad_factor=1)",
        ("tests/conformance/test_toy_fork.py",),
    ),
    Fault(
        "packed rows: labels run on into the next document",
        "megacp/data/batches.py",
        "            counts[at : stop - 1] = ",
        "            counts[at:stop] = ",
        ("tests/unit/test_indexed.py", "-k", "labels"),
    ),
    Fault(
        "packed rows: a checkpoint keeps where the stream stood a step before",
        "megacp/data/batches.py",
        "            return self._steps[number - 1][1]\n",
        "            return self._steps[max(number - 2, 0)][1]\n",
        ("tests/unit/test_indexed.py", "-k", "readers"),
    ),
    Fault(
        "a token more than a sequence has is read beyond its file",
        "megacp/data/indexed.py",
        "        if (places > data - sizes * width).any():\n",
        "        if False:\n",
        ("tests/unit/test_indexed.py", "-k", "malformed"),
    ),
    Fault(
        "sizes: each row is a mean of its own",
        "megacp/dynamic.py",
        "        return weighed.sum()\n",
        "        return weighed.sum() / max(float(noted[1]), 1) * 3\n",
        SIZES,
    ),
    Fault(
        "sizes: a rank without a row gives no gradient",
        "megacp/dynamic.py",
        "        for bucket in _buckets(parameters):\n",
        "        for bucket in _buckets(parameters if self.shares else []):\n",
        ("tests/distributed/test_dynamic.py", "-k", "without_any"),
    ),
    Fault(
        "sizes: positions run on through the row",
        "megacp/dynamic.py",
        "        places = self.mask.document_positions()\n",
        "        places = torch.arange(self.layout.seq_len)\n",
        SIZES,
    ),
    Fault(
        "sizes: every rank of a block counts the whole row",
        "megacp/dynamic.py",
        "is_counted = not whole or self.group.rank == 0",
        "is_counted = True",
        SIZES_IN_MEGATRON,
    ),
    Fault(
        "sizes: Megatron's rotary table is that of the row",
        "megacp/hosts/shares.py",
        "table[share.positions().to(table.device)]",
        "share.layout.shard(torch.cat([table] * 99)[: share.layout.seq_len], share.group.rank, 0)",
        SIZES_IN_MEGATRON,
    ),
    Fault(
        "sizes: Megatron's gradients count a row once for each rank",
        "megacp/hosts/megatron/model.py",
        "session().is_averaged and share is None else 1",
        "session().is_averaged else 1",
        SIZES_IN_MEGATRON,
    ),
    Fault(
        "sizes: a row holds one token more than there is memory for",
        "megacp/data/waves.py",
        "first_fit_decreasing(lengths, size * capacity)",
        "first_fit_decreasing(lengths, size * capacity + size)",
        WAVES,
    ),
    Fault(
        "sizes: blocks of a wave overlap",
        "megacp/data/waves.py",
        "            for rank in range(first, first + size):\n                begun",
        "            for rank in range(first, first + 1):\n                begun",
        WAVES,
    ),
)


def run(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests in a tree; give pytest's exit status and its last words."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    path = os.pathsep.join(p for p in (str(tree), os.environ.get("PYTHONPATH", "")) if p)
    env = {"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=900)
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return done.returncode, (failed or done.stdout.strip().splitlines() or [""])[-1 if not failed else 0]


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="of the faults' names; all faults if none is given")
    parser.add_argument("--list", action="store_true", help="name the faults, and run nothing")
    args = parser.parse_args()
    faults = [f for f in FAULTS if not args.words or any(word in f.name for word in args.words)]
    if args.list:
        print("\n".join(fault.name for fault in faults))
        return 0
    survived = 0
    with tempfile.TemporaryDirectory(prefix="megacp-mutate-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "*cache*", "runs"))
        for tests in dict.fromkeys(fault.tests for fault in faults):
            status, last = run(tree, tests)
            print(f"{'passes' if status == 0 else 'FAILS'} unbroken: {' '.join(tests)} ({last})", flush=True)
            if status != 0:
                return 1
        for fault in faults:
            file, begin = tree / fault.file, time.monotonic()
            text = file.read_text()
            if text.count(fault.old) != 1:
                raise SystemExit(
                    f"mutate: {fault.file} has {text.count(fault.old)} places like {fault.old!r}, not one."
                )
            file.write_text(text.replace(fault.old, fault.new))
            status, last = run(tree, fault.tests)
            file.write_text(text)
            survived += status != 1
            word = "noticed" if status == 1 else "SURVIVED"
            print(f"{word}: {fault.name} ({time.monotonic() - begin:.0f} s): {last}", flush=True)
    print(f"{len(faults) - survived} of {len(faults)} faults were noticed.")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
