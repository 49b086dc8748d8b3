"""Check megacp against the real Transformer Engine: what it hooks is there, is what runs, and gives the gradients of one rank.

    bash tools/te_check/run.sh                  # builds Transformer Engine in an environment of its own, then this
    python tools/te_check [--json FILE]         # where transformer-engine and megatron-core are installed

Without a GPU, GPTs with Transformer Engine's attention between Megatron's own linear layers and norms train on CPU tensors with
megacp's kernels (Transformer Engine's linear layers take none), and a GPT of its whole layers is built. With a GPU, or two,
the whole layers train too, with its kernels. Ends with status 1 if anything is not as it should be, and 2 if a package is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]  # so that a clone need not be installed, also in the ranks

import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from te_check import compiled, training  # noqa: E402

from megacp.kernels import signatures  # noqa: E402
from megacp.testing import cpu, ranks  # noqa: E402

Check = tuple[str, bool, str]  # what, whether it holds, what was found

TE_ATTENTION = (
    "transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention:DotProductAttention"
)
FUSED = "transformer_engine.pytorch.cpp_extensions.fused_attn"
# Beside the seams, which are looked at with megacp's own eyes: what the kernel and the layers' regrouping rely on.
RELIED_ON = {
    f"{TE_ATTENTION}.set_context_parallel_group": (
        "cp_group",
        "cp_global_ranks",
        "cp_stream",
        "cp_comm_type",
    ),
    f"{FUSED}:fused_attn_fwd": ("cu_seqlens_q_padded", "attn_scale", "qkv_layout", "attn_mask_type"),
    f"{FUSED}:fused_attn_bwd": ("aux_ctx_tensors", "do_format", "dqkv_layout", "deterministic"),
}


def main() -> int:
    """Run all checks; print them as they are done."""
    parser = argparse.ArgumentParser(
        prog="te_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write what was found to this file too")
    args = parser.parse_args()
    console = Console(stderr=True)
    packages = ("torch", "transformer-engine", "megatron-core")
    try:
        versions = {name: metadata.version(name) for name in packages}
    except metadata.PackageNotFoundError as error:
        console.print(
            f"te_check: {error.name} is not installed here. bash tools/te_check/run.sh makes an environment with all."
        )
        return 2
    gpus = torch.cuda.device_count()
    if not torch.cuda.is_available():
        cpu.install()
    checks: list[Check] = []

    def note(found: Iterator[Check]) -> None:
        for check in found:
            checks.append(check)
            console.print(f"{verdict(check)}  {check[0]}: {check[2]}", highlight=False)

    note(seams())
    note(signatures_found())
    with mock.patch.dict(
        os.environ, {"CUDA_VISIBLE_DEVICES": ""}
    ):  # for the ranks: the same on every machine
        note(through_python())
        note(trained(console))
        note(built())
        ranks.shutdown()
    note(on_gpus(gpus))
    show(checks, versions, gpus)
    if args.json:
        rows = [{"check": what, "holds": holds, "found": found} for what, holds, found in checks]
        args.json.write_text(json.dumps({"versions": versions, "gpus": gpus, "checks": rows}, indent=1))
    return 0 if all(holds for _, holds, _ in checks) else 1


def verdict(check: Check) -> str:
    """Say in a word how a check stands."""
    _, holds, found = check
    return "WRONG" if not holds else "-" if found.startswith("left out") else "ok"


def seams() -> Iterator[Check]:
    """Look for every seam of the table; those of Transformer Engine must be there."""
    from megacp.doctor import examine
    from megacp.hosts import megatron

    def no_session() -> Any:
        raise RuntimeError("nothing is hooked here")

    for answer in examine(megatron.rows(no_session)):
        if answer.name.startswith("Transformer Engine"):
            place = next((p for p in answer.places if p.is_there), answer.places[0])
            yield f"seam '{answer.name}'", answer.state == "there", place.target
        elif answer.required:
            yield f"seam '{answer.name}'", answer.state != "missing", answer.state


def signatures_found() -> Iterator[Check]:
    """Look for the functions of Transformer Engine, and the parameters, that megacp relies on."""
    for target, wanted in RELIED_ON.items():
        module, _, path = target.partition(":")
        try:
            found: Any = import_module(module)
            for name in path.split("."):
                found = getattr(found, name)
        except (ImportError, AttributeError) as error:
            yield path, False, str(error)
            continue
        missing = signatures.lacks(found, *wanted)
        yield path, missing is None, f"has {', '.join(wanted)}" if missing is None else f"has no {missing}"


def trained(console: Console) -> Iterator[Check]:
    """Train with the hooked class over 1 and 2 ranks, and with Megatron's own attention, never hooked, on one."""
    with console.status("training without megacp, on one rank"):
        right = ranks.run(training.train, 1, training.Job(hooked=False), timeout=300)[0]
    ranks.shutdown()
    for job in training.JOBS:
        with console.status(f"training: {job.name}"):
            found = ranks.run(training.train, job.cp, job, timeout=300)
        yield from compared(job, found, right)
    ranks.shutdown()


def compared(job: training.Job, found: list[training.Trained], right: training.Trained) -> Iterator[Check]:
    """Hold what the ranks found against one rank that never had megacp."""
    worst = max(training.distance(one, right) for one in found)
    yield (
        job.name,
        worst <= 1e-10,
        f"losses and every gradient of {training.STEPS} steps off by {worst:.0e}, relative",
    )
    first = found[0]
    layers = " and ".join(first.methods[: training.LAYERS])
    are_right = first.methods == job.expected * training.STEPS
    yield f"{job.name}: methods of the layers", are_right, layers
    yield attended(job.name, first)


def attended(what: str, found: training.Trained) -> Check:
    """Say whose attention ran."""
    own = found.own_forwards, found.own_context_parallel
    said = (
        f"Transformer Engine's own forward was called {own[0]} times, its context parallelism {own[1]} times"
    )
    return (
        f"{what}: whose attention ran",
        own == (0, 0) and found.ours > 0,
        f"{said}, megacp {found.ours} times",
    )


def through_python() -> Iterator[Check]:
    """Run megacp's kernel through Transformer Engine's Python, up to the compiled functions."""
    what = "kernel 'transformer_engine', up to the compiled functions"
    try:
        calls, worst = ranks.run(compiled.through_python, 1, timeout=300)[0]
    except ranks.RanksError as error:
        yield what, False, str(error)
        return
    took = ", ".join(f"{name} took its arguments {n} times" for name, n in calls.items())
    yield what, worst <= 1e-2 and all(calls.values()), f"{took}; off by {worst:.0e}, relative, in bfloat16"


def built() -> Iterator[Check]:
    """Build a GPT of Transformer Engine's whole layers over two ranks, and set a group that is not the model's."""
    layers = ranks.run(training.whole, 2, timeout=300)[0]
    yield (
        "a GPT of whole Transformer Engine layers, over 2 ranks",
        layers == 2,
        f"{layers} attention layers hooked",
    )
    refused = ranks.run(training.refused, 2, timeout=300)[0]
    yield "a group of other ranks, set on a layer", "refused" in refused, refused


def on_gpus(gpus: int) -> Iterator[Check]:
    """Train whole layers with Transformer Engine's kernels, over two GPUs, or on the one that there is."""
    cp = min(gpus, 2)
    if not cp:
        yield "whole Transformer Engine layers on GPUs", True, "left out: there is no GPU"
        return
    what = f"whole Transformer Engine layers over {cp} GPU{'s' * (cp > 1)}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = ranks.run(training.on_gpus, cp, f"{folder}/meeting", timeout=600)[0]
        except ranks.RanksError as error:
            yield what, False, str(error)
            return
    ranks.shutdown()
    yield (
        what,
        found.off <= 2 * found.allowed,
        f"loss and gradients in bfloat16 off those in float32 by {found.off:.0e}, relative, and Transformer Engine's own by "
        f"{found.allowed:.0e}; kernel: {found.kernel}",
    )
    yield attended(what, found.trained)


def show(checks: list[Check], versions: dict[str, str], gpus: int) -> None:
    """Print the table that docs/transformer-engine.md holds."""
    table = Table(title=", ".join(f"{n} {v}" for n, v in versions.items()) + f", {gpus} GPUs", box=None)
    for title in ("", "check", "found"):
        table.add_column(title, overflow="fold")
    for what, holds, found in checks:
        table.add_row(verdict((what, holds, found)), what, found)
    Console(width=160).print(table, highlight=False)


if __name__ == "__main__":
    sys.exit(main())
