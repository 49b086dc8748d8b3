"""An unmodified Megatron-LM `pretrain_gpt.py`: the printed loss and gradient norm of CP=1, at every context-parallel size.

MEGACP_TREES names checkouts of Megatron-LM, separated by ':'. Each is run as a user would, from its own folder.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
TREES = [Path(p) for p in os.environ.get("MEGACP_TREES", "").split(os.pathsep) if p]
NO_TREE = "MEGACP_TREES names no Megatron-LM checkout (for example MEGACP_TREES=/path/to/Megatron-LM at core_v0.16.1)"

pytestmark = pytest.mark.skipif(not TREES, reason=NO_TREE)

MODEL = shlex.split("""
--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128
--micro-batch-size 1 --global-batch-size 4 --train-iters 6 --lr 1e-3 --min-lr 1e-4 --lr-decay-iters 10
--mock-data --tokenizer-type NullTokenizer --vocab-size 100 --position-embedding-type rope --split 100,0,0
--attention-dropout 0 --hidden-dropout 0 --transformer-impl local --distributed-backend gloo
--no-persist-layer-norm --no-gradient-accumulation-fusion --no-masked-softmax-fusion --no-bias-gelu-fusion
--no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --attention-backend unfused
--no-check-for-nan-in-loss-and-grad --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
""")

CP2, CP4 = ("--context-parallel-size", "2"), ("--context-parallel-size", "4")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
DOCUMENTS = ("--megacp-documents", "eod", "--megacp-eod-token", "17")
FULL_RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)
LEARNED = ("--position-embedding-type", "learned_absolute")

# name: (flags of both, ranks of the first, what the second adds, its ranks, answers only)
CONFIGURATIONS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...], int, bool]] = {
    "cp2": ((), 1, CP2, 2, False),
    "cp4": ((), 1, CP4, 4, False),
    "cp2 all-gather": ((), 1, (*CP2, "--cp-comm-type", "all_gather"), 2, False),
    "cp2, answers only": ((), 1, CP2, 2, True),
    "cp4, answers only": ((), 1, CP4, 4, True),
    "cp4, answers only, per-token loss": (("--calculate-per-token-loss",), 1, CP4, 4, True),
    "cp2, documents": (DOCUMENTS, 1, CP2, 2, False),
    "cp2, learned positions": (LEARNED, 1, CP2, 2, False),
    "cp2, full recompute": ((), 1, (*CP2, *FULL_RECOMPUTE), 2, False),
    "tp2 cp2": (TP2, 2, CP2, 4, False),
    "pp2 cp2, documents": ((*PP2, *DOCUMENTS), 2, CP2, 4, False),
    "dp2 cp2, distributed optimizer": (("--use-distributed-optimizer",), 2, CP2, 4, False),
}


@cache
def printed(tree: Path, flags: tuple[str, ...], ranks: int, answers_only: bool) -> tuple[str, ...]:
    """Train six steps and return every printed loss and gradient norm."""
    script = [str(HERE / "answer_only.py"), "pretrain_gpt.py"] if answers_only else ["pretrain_gpt.py"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    paths = [str(tree), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [*command, "-m", "megacp", *script, *MODEL, *flags],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    numbers = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", done.stdout)
    assert len(numbers) == 6, done.stdout[-4000:]
    return tuple(number for pair in numbers for number in pair)


@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_the_unmodified_script_prints_the_loss_and_grad_norm_of_cp1(tree: Path, name: str) -> None:
    flags, ranks, more, more_ranks, answers_only = CONFIGURATIONS[name]
    alone = printed(tree, flags, ranks, answers_only)
    split = printed(tree, (*flags, *more), more_ranks, answers_only)
    assert all(within_a_digit(a, b) for a, b in zip(alone, split, strict=True)), f"{alone}\n{split}"


def within_a_digit(a: str, b: str) -> bool:
    """Compare printed numbers; float32 sums in another order may turn the last digit by one."""
    digits = len(a.partition(".")[2].partition("E")[0])
    scale = 10.0 ** int(a.partition("E")[2] or 0)
    return abs(float(a) - float(b)) <= 1.01 * scale * 10.0**-digits
