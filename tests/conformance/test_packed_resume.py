"""A run on packed documents is killed at any moment and goes on with other sizes: no document is lost, and none comes twice."""

from __future__ import annotations

import collections
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = str(ROOT / "examples" / "pretrain_documents" / "pretrain.py")
LIMIT = 120.0


def train(corpus: Path, folder: Path, cp: int, *flags: str) -> subprocess.Popen[str]:
    """Start a run on two ranks in a process group of its own."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
        *("-m", "megacp", PRETRAIN, "--data-path", str(corpus), "--tokenizer-model", f"{corpus}.model"),
        *("--num-layers", "1", "--hidden-size", "16", "--num-attention-heads", "2", "--seq-length", "1024"),
        *(
            "--micro-batch-size",
            "1",
            "--global-batch-size",
            "4",
            "--train-iters",
            "200",
            "--split",
            "100,0,0",
        ),
        *("--pack-documents", "--cut-documents", "--megacp-documents", "positions"),
        *("--context-parallel-size", str(cp), "--save", str(folder / "saved"), "--save-interval", "3"),
        *("--load", str(folder / "saved"), "--log-documents", str(folder / f"cp{cp}"), *flags),
    ]
    return subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def lines(folder: Path) -> list[tuple[int, int, tuple[int, ...], str]]:
    """Read what all ranks of a run have noted; a last line that was cut off by a kill is left out."""
    found = set()
    for path in folder.glob("rank*.jsonl"):
        for line in path.read_text().splitlines():
            if line.endswith("}"):
                one = json.loads(line)
                found.add((one["step"], one["row"], tuple(one["piece"]), one["hash"]))
    return sorted(found)


def saved_step(folder: Path) -> int:
    tracker = folder / "saved" / "latest_checkpointed_iteration.txt"
    return int(tracker.read_text()) if tracker.exists() else 0


def kill_at_a_random_moment(run: subprocess.Popen[str], folder: Path) -> None:
    """Wait for the second checkpoint, then for some moment within the steps after it, and kill every process."""
    deadline = time.monotonic() + LIMIT
    while saved_step(folder) < 6:
        assert run.poll() is None, run.stdout and run.stdout.read()[-3000:]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(random.uniform(0.0, 0.5))
    os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def test_a_killed_run_goes_on_at_other_sizes_without_losing_or_repeating_a_document(
    corpus: Path, tmp_path: Path
) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    kill_at_a_random_moment(train(corpus, tmp_path, 1), tmp_path)  # two replicas
    stop = saved_step(tmp_path)
    again = train(corpus, tmp_path, 2, "--exit-interval", str(stop + 9))  # one replica over two ranks
    out, _ = again.communicate(timeout=LIMIT)
    assert again.returncode == 0, out[-3000:]

    before, after = lines(tmp_path / "cp1"), lines(tmp_path / "cp2")
    assert before[-1][0] >= stop and after[0][0] == stop + 1 and after[-1][0] == stop + 9
    trained = [line for line in before if line[0] <= stop] + after
    assert len({line[:3] for line in trained}) == len(trained)  # ranks that share a row have read the same

    state = json.loads((tmp_path / "saved" / f"iter_{stop + 9:07d}" / "packed_documents.json").read_text())
    dataset = IndexedDataset(str(corpus))
    lengths = [len(dataset[i]) for i in range(len(dataset))]
    tokens = collections.Counter()
    for _, _, (document, start, end), digest in trained:
        text = np.asarray(dataset[document][start:end], np.int64).tobytes()
        assert hashlib.blake2b(text, digest_size=8).hexdigest() == digest
        tokens.update(dict.fromkeys([(document, t) for t in range(start, end)], 1))
    for document, start, end in state["pending"]:  # drawn, and still to come
        tokens.update(dict.fromkeys([(document, t) for t in range(start, end)], 1))
    counts = [{tokens[document, t] for t in range(length)} for document, length in enumerate(lengths)]
    assert all(len(count) <= 1 for count in counts)  # all tokens of a document equally often
    often = collections.Counter(next(iter(count)) for count in counts if count)
    drawn = {state["epoch"]: len(lengths) - state["next"], state["epoch"] + 1: state["next"]}
    assert often == {n: documents for n, documents in drawn.items() if documents}
    assert state["epoch"] >= 1
