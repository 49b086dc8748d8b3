"""An unmodified `pretrain_gpt.py` of a Megatron-LM without context parallelism: the printed numbers of CP=1 at every size.

MEGACP_OLD_TREES names checkouts of v2.6 or 23.06, separated by ':', whose megatron/data/helpers has been built. Each trains on a data
set and a tokenizer that are written here. Not a part of continuous integration.
"""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from megacp.testing.parity import _digits_apart, printed_numbers

ROOT = Path(__file__).resolve().parents[2]
TREES = [Path(p) for p in os.environ.get("MEGACP_OLD_TREES", "").split(os.pathsep) if p]

pytestmark = pytest.mark.skipif(
    not TREES, reason="MEGACP_OLD_TREES names no Megatron-LM checkout (for example at 23.06 or v2.6)"
)

MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "8",
    "--seq-length",
    "128",
    "--max-position-embeddings",
    "128",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "4",
    "--train-iters",
    "4",
    "--lr",
    "1e-3",
    "--min-lr",
    "1e-4",
    "--lr-decay-iters",
    "10",
    "--attention-dropout",
    "0",
    "--hidden-dropout",
    "0",
    "--num-workers",
    "0",
    "--eval-iters",
    "0",
    "--eval-interval",
    "1000",
    "--log-interval",
    "1",
    "--split",
    "100,0,0",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-masked-softmax-fusion",
    "--use-cpu-initialization",
]
CP2, CP4 = ("--context-parallel-size", "2"), ("--context-parallel-size", "4")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")

# name: (flags of both, ranks of the first, what the second adds, its ranks)
CONFIGURATIONS = {
    "cp2": ((), 1, CP2, 2),
    "cp4": ((), 1, CP4, 4),
    "tp2 cp2": (TP2, 2, CP2, 4),
    "pp2 cp2": (PP2, 2, CP2, 4),
    "dp2 cp2": ((), 2, CP2, 4),
}

NEVER_HOOKED = """
import runpy, sys
from megacp.testing import cpu
cpu.install()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 200 documents as Megatron's preprocessing does, a vocabulary of 127, and the short script that hooks nothing."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    sizes = draw.integers(60, 400, 200).astype(np.int32)
    ids = [np.append(np.minimum(draw.geometric(0.05, n - 1) + 5, 125), 126) for n in sizes]
    (folder / "text.bin").write_bytes(np.concatenate(ids).astype(np.uint16).tobytes())
    starts = (np.cumsum(sizes, dtype=np.int64) - sizes) * 2
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, len(sizes), len(sizes) + 1)
    documents = np.arange(len(sizes) + 1, dtype=np.int64)
    (folder / "text.idx").write_bytes(head + sizes.tobytes() + starts.tobytes() + documents.tobytes())
    words = {**{f"t{i}": i for i in range(126)}, "<|endoftext|>": 126}
    (folder / "vocab.json").write_text(json.dumps(words))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    (folder / "plain.py").write_text(NEVER_HOOKED)
    return folder


@cache
def run(tree: Path, data: Path, flags: tuple[str, ...], ranks: int, hooked: bool = True) -> str:
    files = ["--data-path", str(data / "text"), "--tokenizer-type", "GPT2BPETokenizer"]
    files += ["--vocab-file", str(data / "vocab.json"), "--merge-file", str(data / "merges.txt")]
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    program = ["-m", "megacp"] if hooked else [str(data / "plain.py")]
    paths = os.pathsep.join([str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*start, *program, "pretrain_gpt.py", *MODEL, *files, *flags],
        cwd=tree,
        # These hosts load their own checkpoints with torch.load, which refuses pickled arguments by default now.
        env={
            **os.environ,
            "PYTHONPATH": paths,
            "OMP_NUM_THREADS": "1",
            "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
        },
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def same(one: str, two: str, skip: int = 0) -> None:
    a, b = printed_numbers(one)[skip:], printed_numbers(two)
    assert len(a) == len(b) > 0
    assert all(_digits_apart(x, y) <= 2.01 for (_, x), (_, y) in zip(a, b, strict=True)), f"{a}\n{b}"


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_the_unmodified_script_prints_the_loss_and_grad_norm_of_cp1(
    tree: Path, data: Path, name: str
) -> None:
    flags, ranks, more, more_ranks = CONFIGURATIONS[name]
    alone, split = run(tree, data, flags, ranks), run(tree, data, (*flags, *more), more_ranks)
    same(alone, split)
    for output in (alone, split):
        assert re.findall(r"consumed samples: +(\d+)", output) == ["4", "8", "12", "16"]


@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_a_checkpoint_of_cp2_goes_on_in_the_host_that_was_never_hooked(
    tree: Path, data: Path, tmp_path: Path
) -> None:
    whole = run(tree, data, (), 1, hooked=False)
    save = ("--save", str(tmp_path), "--save-interval", "2", "--exit-interval", "2")
    run(tree, data, (*CP2, *save), 2)
    same(whole, run(tree, data, ("--load", str(tmp_path)), 1, hooked=False), skip=4)
