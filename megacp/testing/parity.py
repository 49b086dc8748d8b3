"""One assertion for a fork's own tests: training prints the same losses and gradient norms at every context-parallel size.

    from megacp.testing.parity import assert_cp_parity

    def test_context_parallelism_is_exact():
        assert_cp_parity("pretrain_gpt.py --num-layers 2 ... --train-iters 4", cp=4)

Only what the host prints is read, so any Megatron will do. ``megacp verify`` compares more, where it can be hooked.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from megacp.config import value_of

__all__ = ["assert_cp_parity", "printed_numbers"]

FLAG = "--context-parallel-size"
_OTHER_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")
_NUMBER = re.compile(r"\b(loss|grad norm): *([-+]?[0-9][0-9.]*(?:E[-+]?[0-9]+)?)\b", flags=re.IGNORECASE)


def assert_cp_parity(
    command: str | Sequence[str],
    cp: int,
    *,
    data_parallel: int = 1,
    cwd: str | Path | None = None,
    last_digits: float = 2.01,
    timeout: float = 600.0,
) -> None:
    """Train twice, at context-parallel size 1 and ``cp``, and compare every loss and gradient norm that is printed.

    Args:
        command: script and arguments, as they follow ``torchrun -m megacp``, without a context-parallel size. Keep it to a few steps.
        data_parallel: ranks that read other samples, in both runs. cwd: the folder of the script, if it is not the current one.
        last_digits: how far printed numbers may be apart, in units of their last digit. timeout: seconds for each run.
    Raises: AssertionError naming the first number that differs, or with the last lines of a run that failed or printed nothing.
    """
    words = shlex.split(command) if isinstance(command, str) else list(command)
    if value_of(words, FLAG) is not None:
        raise ValueError(f"megacp: leave {FLAG} out of the command; it is added to it.")
    ranks = prod(int(value_of(words, name) or "1") for name in _OTHER_SIZES) * data_parallel
    alone = _train(words, ranks, cwd, timeout)
    split = _train([*words, FLAG, str(cp)], ranks * cp, cwd, timeout)
    assert len(alone) == len(split), (
        f"{len(alone)} numbers are printed at size 1, and {len(split)} at size {cp}"
    )
    for at, ((name, one), (_, two)) in enumerate(zip(alone, split, strict=True)):
        assert _digits_apart(one, two) <= last_digits, (
            f"number {at} that is printed, a {name}, is {one} at context-parallel size 1 and {two} at size {cp}"
        )


def printed_numbers(output: str) -> list[tuple[str, str]]:
    """Find the losses and gradient norms that a Megatron has printed: (what, number as printed), in order."""
    return [(what.lower(), number) for what, number in _NUMBER.findall(output)]


def _train(words: Sequence[str], ranks: int, cwd: str | Path | None, timeout: float) -> list[tuple[str, str]]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    done = subprocess.run(
        [*start, "-m", "megacp", *words],
        cwd=cwd,
        env={"OMP_NUM_THREADS": "1", **os.environ},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    said = "\n".join((done.stdout + done.stderr).splitlines()[-60:])
    assert done.returncode == 0, f"the training ended with status {done.returncode}:\n{said}"
    numbers = printed_numbers(done.stdout)
    assert numbers, f"the training printed neither a loss nor a gradient norm:\n{said}"
    return numbers


def _digits_apart(one: str, two: str) -> float:
    """Give the difference of two printed numbers in units of the last digit of the first."""
    mantissa, _, exponent = one.upper().partition("E")
    unit = 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))
    return abs(float(one) - float(two)) / unit
