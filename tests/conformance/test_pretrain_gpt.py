"""An unmodified Megatron-LM `pretrain_gpt.py`: the printed loss and gradient norm of CP=1, at every context-parallel size.

MEGACP_TREES names checkouts of Megatron-LM, separated by ':'. Each is run as a user would, from its own folder. What was found is
printed as one table at the end of the session; what megacp refuses fails, and stands there too.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
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
--mock-data --tokenizer-type NullTokenizer --vocab-size 4096 --position-embedding-type rope --split 100,0,0
--attention-dropout 0 --hidden-dropout 0 --num-workers 0 --eval-iters 0 --eval-interval 1000 --log-interval 1
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
OWN_SPEC = ("--spec", "own_spec", "layer")
LEARNED = ("--position-embedding-type", "learned_absolute")

EXPERTS = shlex.split("""
--num-experts 4 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01
--moe-token-dispatcher-type alltoall --expert-model-parallel-size 2 --disable-bias-linear
""")
LATENT = shlex.split("""
--multi-latent-attention --q-lora-rank 32 --kv-lora-rank 32 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8
--rope-type rope --no-rope-fusion
""")
TWO_AHEAD = ("--mtp-num-layers", "2")
PP4 = ("--pipeline-model-parallel-size", "4", "--num-layers", "4")

DROPOUT = ("--attention-dropout", "0.1", "--hidden-dropout", "0.1", "--megacp-dropout", "positions")
BF16, FP16 = ("--bf16",), ("--fp16", "--initial-loss-scale", "1024")
OVERLAP = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather")
INSTANCES = ("--use-distributed-optimizer", "--num-distributed-optimizer-instances", "2")

PACKED, ANSWERS, COUNTERS = "packed.py", "answer_only.py", "counters.py"

# name: (flags of both, ranks of the first, what the second adds, its ranks, the data)
CONFIGURATIONS: dict[str, tuple[tuple[str, ...], int, tuple[str, ...], int, str]] = {
    "cp2": ((), 1, CP2, 2, ""),
    "cp4": ((), 1, CP4, 4, ""),
    "cp2 all-gather": ((), 1, (*CP2, "--cp-comm-type", "all_gather"), 2, ""),
    "cp2, answers only": ((), 1, CP2, 2, ANSWERS),
    "cp4, answers only": ((), 1, CP4, 4, ANSWERS),
    "cp2, answers only, per-token loss": (("--calculate-per-token-loss",), 1, CP2, 2, ANSWERS),
    "cp4, answers only, per-token loss": (("--calculate-per-token-loss",), 1, CP4, 4, ANSWERS),
    "cp2, documents": (DOCUMENTS, 1, CP2, 2, PACKED),
    "cp2, layer spec of one's own": (OWN_SPEC, 1, CP2, 2, ""),
    "cp2, --use-mcore-models": (("--use-mcore-models",), 1, CP2, 2, ""),
    "cp2, learned positions": (LEARNED, 1, CP2, 2, ""),
    "cp2, full recompute": ((), 1, (*CP2, *FULL_RECOMPUTE), 2, ""),
    "tp2 cp2": (TP2, 2, CP2, 4, ""),
    "tp2 cp2, sequence parallel": ((*TP2, "--sequence-parallel"), 2, CP2, 4, ""),
    "pp2 cp2, documents": ((*PP2, *DOCUMENTS), 2, CP2, 4, PACKED),
    "pp4 cp2, documents": ((*PP4, *DOCUMENTS), 4, CP2, 8, PACKED),
    "ep2 cp2, experts": (tuple(EXPERTS), 2, CP2, 2, ""),
    "cp2, two tokens ahead": (TWO_AHEAD, 1, CP2, 2, ANSWERS),
    "cp2, latent attention": (tuple(LATENT), 1, CP2, 2, ""),
    "dp2 cp2, distributed optimizer": (("--use-distributed-optimizer",), 2, CP2, 4, ""),
    "cp2, micro-batches of 2": (("--micro-batch-size", "2"), 1, CP2, 2, ANSWERS),
    "dp2 cp2, overlap": (OVERLAP, 2, CP2, 4, ""),
    "dp2 cp2, two optimizer instances": (INSTANCES, 2, CP2, 4, ""),
    "cp2, dropout": (DROPOUT, 1, CP2, 2, ""),
    "tp2 cp2, dropout, sequence parallel": ((*TP2, "--sequence-parallel", *DROPOUT), 2, CP2, 4, ""),
    "cp2, bf16": (BF16, 1, CP2, 2, ""),
    "cp2, fp16": (FP16, 1, CP2, 2, ""),
    "cp2, data sent": ((), 1, (*CP2, "--megacp-broadcast-data", "on"), 2, ""),
    "pp2 tp2 cp2, data sent": (
        (*PP2, *TP2),
        4,
        (*CP2, "--megacp-broadcast-data", "on"),
        8,
        ANSWERS,
    ),
}

SIXTEEN_BITS = {
    "cp2, bf16": (2e-3, 2e-2),
    "cp2, fp16": (5e-4, 5e-3),
}  # loss, gradient norm: what rounding leaves

NOT_EVERY_HOST = (
    "ep2 cp2, experts",
    "cp2, two tokens ahead",
    "cp2, latent attention",
    "tp2 cp2, sequence parallel",
    "dp2 cp2, distributed optimizer",
    "cp2, --use-mcore-models",
    "dp2 cp2, overlap",
    "dp2 cp2, two optimizer instances",
    "cp2, bf16",
    "cp2, fp16",
    "tp2 cp2, dropout, sequence parallel",
)  # old ones need Apex for these; new ones have no such flag


# What a checkpoint holds besides tensors are objects of the host's own classes, so the host's modules must load it.
NAMES = """
import json, sys
from megacp.testing import cpu
cpu.install()
import torch
state = torch.load(sys.argv[1], weights_only=False)
found = {name: list(getattr(value, "shape", [])) for name, value in state["model"].items()}
found["samples"] = state["args"].consumed_train_samples
found["operations"] = state.get("num_floating_point_operations_so_far")
print(json.dumps(found))
"""


def environment(tree: Path) -> dict[str, str]:
    """Put the checkout first, as it is where a user starts it."""
    paths = [str(tree), str(HERE.parents[1]), str(HERE), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"}


def in_the_host(tree: Path, program: str, *words: str) -> str:
    """Run a short program with the checkout's modules; give what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@cache
def run(tree: Path, flags: tuple[str, ...], ranks: int, data: str) -> subprocess.CompletedProcess[str]:
    """Train six steps as a user would."""
    script = [str(HERE / data), "pretrain_gpt.py"] if data else ["pretrain_gpt.py"]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*command, "-m", "megacp", *script, *MODEL, *flags],
        cwd=tree,
        env=environment(tree),
        capture_output=True,
        text=True,
        timeout=300,
    )


def host_error(tree: Path, flags: tuple[str, ...], ranks: int, data: str) -> str:
    """Return what the host itself raises without context parallelism, if it cannot run a configuration here."""
    done = run(tree, flags, ranks, data)
    raised = re.findall(
        r"^(?:\[rank\d+\]: )?(\w+(?:Error|Exception): .*|.* error: unrecognized .*)", done.stderr, flags=re.M
    )
    return str(raised[0]) if done.returncode and raised and "megacp [rank" not in done.stderr else ""


def printed(tree: Path, flags: tuple[str, ...], ranks: int, data: str) -> tuple[str, ...] | str:
    """Return every printed loss and gradient norm, or megacp's refusal if all ranks printed one."""
    done = run(tree, flags, ranks, data)
    refusals = dict(re.findall(r"^megacp \[rank (\d+)\]: (.*)", done.stderr, flags=re.M))
    if len(refusals) == ranks and len(set(refusals.values())) == 1:
        return str(refusals["0"])
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    numbers = re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", done.stdout)
    assert len(numbers) == 6, done.stdout[-4000:]
    return tuple(number for pair in numbers for number in pair)


@pytest.mark.parametrize("name", CONFIGURATIONS)
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_the_unmodified_script_prints_the_loss_and_grad_norm_of_cp1(
    tree: Path, name: str, record: Callable[[str, str, str], None]
) -> None:
    flags, ranks, more, more_ranks, data = CONFIGURATIONS[name]
    if name in NOT_EVERY_HOST and (why := host_error(tree, flags, ranks, data)):
        record(tree.name, name, "not at CP=1 either")
        pytest.skip(f"this host cannot run it without context parallelism, on this machine: {why}")
    alone = printed(tree, flags, ranks, data)
    split = printed(tree, (*flags, *more), more_ranks, data)
    for result in (alone, split):
        if isinstance(result, str):
            record(tree.name, name, f"refused: {result}")
            pytest.fail(f"megacp refuses it: {result}")
    record(tree.name, name, " / ".join(f"{apart(alone[i::2], split[i::2]):.0e}" for i in (0, 1)))
    if name in SIXTEEN_BITS:
        assert all(apart(alone[i::2], split[i::2]) <= SIXTEEN_BITS[name][i] for i in (0, 1)), (
            f"{alone}\n{split}"
        )
        return
    assert all(within_a_digit(a, b) for a, b in zip(alone, split, strict=True)), f"{alone}\n{split}"


# -- D47: counters, D43: evaluation, D42: from one size to another -------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_d47_operations_and_samples_are_counted_as_at_cp1(tree: Path, size: int) -> None:
    def counts(*flags: str, ranks: int) -> list[str]:
        done = run(tree, ("--log-throughput", *flags), ranks, COUNTERS)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        samples = re.findall(r"consumed samples: +(\d+)", done.stdout)
        assert samples == ["4", "8", "12", "16", "20", "24"]
        return re.findall("counted: .*", done.stdout)

    alone, split = counts(ranks=1), counts("--context-parallel-size", str(size), ranks=size)
    assert alone == split and len(alone) >= 6


@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_d54_data_that_is_sent_is_read_by_one_rank(tree: Path) -> None:
    reads = []
    for sent in ("off", "on"):
        done = run(tree, (*CP2, "--megacp-broadcast-data", sent), 2, COUNTERS)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        reads.append([done.stdout.count(f"read by rank {rank}") for rank in (0, 1)])
    assert reads == [[24, 24], [24, 0]]


@pytest.mark.parametrize("data", ["", ANSWERS])
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_d43_the_validation_loss_is_that_of_cp1(tree: Path, data: str) -> None:
    def losses(*flags: str, ranks: int) -> list[str]:
        evaluate = ("--split", "80,20,0", "--eval-iters", "3", "--eval-interval", "3")
        done = run(tree, (*evaluate, *flags), ranks, data)
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        return re.findall(r"validation loss at .*?lm loss value: (\S+) ", done.stdout)

    alone, split, four = losses(ranks=1), losses(*CP2, ranks=2), losses(*CP4, ranks=4)
    assert len(alone) >= 2 and len(set(alone)) >= 2
    for other in (split, four):
        assert all(within_a_digit(a, b) for a, b in zip(alone, other, strict=True)), f"{alone}\n{other}"


@pytest.mark.parametrize("format", ["torch", "torch_dist"])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4), (2, 2)])
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_d42_a_checkpoint_of_one_size_goes_on_at_another_as_if_never_stopped(
    tree: Path, before: int, after: int, format: str, tmp_path: Path
) -> None:
    """With dropout, so that the random state goes on too."""
    if not old_format(tree) and format != "torch":
        pytest.skip("this host has one format")
    optimizer = ("--use-distributed-optimizer",) if format == "torch_dist" else ()
    kind = ("--ckpt-format", format) if old_format(tree) else ()
    flags = (*DROPOUT, *optimizer)
    whole = printed(tree, flags, 1, "")
    if format == "torch_dist" and isinstance(whole, str):
        pytest.skip(f"this host cannot: {whole}")
    folder = str(tmp_path)

    def size(n: int) -> tuple[str, ...]:
        return ("--context-parallel-size", str(n)) if n > 1 else ()

    save = ("--save", folder, "--save-interval", "3", "--exit-interval", "3")
    done = run(tree, (*flags, *size(before), *kind, *save), before, "")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    done = run(tree, (*flags, *size(after), *kind, "--load", folder), after, "")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert re.findall(r"consumed samples: +(\d+)", done.stdout) == ["16", "20", "24"]
    losses, norms = zip(*re.findall(r"lm loss: (\S+) .*?grad norm: (\S+) ", done.stdout), strict=True)
    assert all(within_a_digit(a, b) for a, b in zip(whole[7::2], norms, strict=True)), f"{whole}\n{norms}"
    for i in (0, 2):
        assert within_a_digit(whole[6 + 2 * i], losses[i]), f"{whole}\n{losses}"
    # Some hosts print the mean of the first two steps in a run's second line.
    first, second = map(float, losses[:2])
    assert min(abs(x / float(whole[8]) - 1) for x in (second, 2 * second - first)) < 1e-6


def apart(a: tuple[str, ...], b: tuple[str, ...]) -> float:
    """Return the largest relative difference of printed numbers."""
    return max(abs(float(x) - float(y)) / abs(float(x)) for x, y in zip(a, b, strict=True))


def within_a_digit(a: str, b: str) -> bool:
    """Compare printed numbers; float32 sums in another order may turn the last digit by two (one step of float32 at 8 is 9.5e-7)."""
    digits = len(a.partition(".")[2].partition("E")[0])
    scale = 10.0 ** int(a.partition("E")[2] or 0)
    return abs(float(a) - float(b)) <= 2.01 * scale * 10.0**-digits


@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_a_checkpoint_has_the_names_and_shapes_and_counts_of_cp1(
    tree: Path, tmp_path: Path, record: Callable[[str, str, str], None]
) -> None:
    saved = []
    for flags, ranks in (((), 1), (CP2, 2)):
        folder = tmp_path / str(ranks)
        save = ("--save", str(folder), "--save-interval", "6", *old_format(tree))
        done = run(tree, (*flags, *save), ranks, "")
        assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        (file,) = folder.glob("iter_0000006/mp_rank_00/model_optim_rng.pt")
        saved.append(json.loads(in_the_host(tree, NAMES, str(file))))
    record(tree.name, "names in a checkpoint", "equal" if saved[0] == saved[1] else "differ")
    assert saved[0] == saved[1] and len(saved[0]) > 10


def old_format(tree: Path) -> tuple[str, ...]:
    """Ask for one file a rank, where there is a choice."""
    return ("--ckpt-format", "torch") if "--ckpt-format" in (tree / ARGUMENTS).read_text() else ()


ARGUMENTS = Path("megatron") / "training" / "arguments.py"
