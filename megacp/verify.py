"""``megacp verify SCRIPT ARGS...``: the same training at context-parallel size 1 and N, step by step, held against each other.

Two runs of the user's own command, each started by torchrun with ``-m megacp``, write down what every step computes (see
``megacp.hosts.megatron.record``). Here they are started and compared; nothing of it needs torch or a Megatron.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from megacp.config import value_of
from megacp.errors import ConfigError, MegacpError

__all__ = ["Comparison", "Step", "compare", "verify"]

FLAG = "--context-parallel-size"
OTHER_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")

BOUNDS = {"float64": 1e-9, "float32": 1e-3, "float16": 5e-2, "bfloat16": 5e-2}
"""Largest relative difference that rounding may make, by the dtype of the parameters; Adam makes it grow from step to step."""

FLOOR = 1e-3
"""A gradient is held to its own norm, or to this share of the norm of all: one that is 0 but for rounding has no own scale."""

HELP = f"""usage: megacp verify [options] SCRIPT ARGS... {FLAG} N
       megacp verify [options] -m package.module ARGS... {FLAG} N

Train with the same command at context-parallel size 1 and N and compare each step: losses, gradient norms, the gradient of
every parameter, the output of every layer. ARGS must end the training after a few steps (--train-iters 4, or --exit-interval 4).
Exit status: 0 if all differences are within the bound, 1 if not, or if a run failed.

options, before the script:
  --nproc-per-node W   ranks of the run at size N; the run at size 1 has W / N of them (default: tensor x pipeline x N)
  --bound X            largest relative difference (default: by the parameters' dtype, {BOUNDS})
  --keep FOLDER        keep records and output there, as cp1/ and cpN/
  --timeout SECONDS    limit of each run (default: 3600)
  --json               print the comparison as JSON
  --megacp-...         go to both runs, wherever they stand

Gradients of parameters are not compared under the distributed optimizer, which shards them; their norm is."""


@dataclass(frozen=True)
class Step:
    """Relative differences of one step: a worst value, and whose it is. None where nothing was recorded.

    layer: the first one, in the order of the model, whose output differs by more than the bound.
    """

    step: int
    loss: float | None
    grad_norm: float | None
    gradient: float | None
    parameter: str | None
    layer: str | None

    def worst(self) -> float:
        """Give the largest difference of losses and gradients."""
        return max((d for d in (self.loss, self.grad_norm, self.gradient) if d is not None), default=0.0)


@dataclass(frozen=True)
class Comparison:
    """Two runs held against each other. first_difference: the number of the first step that is out of bound, or None."""

    size: int
    bound: float
    dtype: str
    steps: tuple[Step, ...]
    first_difference: int | None
    notes: tuple[str, ...] = ()

    @property
    def is_same(self) -> bool:
        """Say whether every step is within the bound."""
        return self.first_difference is None

    def table(self) -> str:
        """Draw a line for each step, then what was found."""
        lines = [
            f"context-parallel size 1 and {self.size}: relative differences",
            " step |    loss | grad norm | gradient, the worst parameter",
        ]
        for step in self.steps:
            numbers = [_short(value) for value in (step.loss, step.grad_norm, step.gradient)]
            lines.append(
                f"{step.step:5d} | {numbers[0]:>7s} | {numbers[1]:>9s} | {numbers[2]} {step.parameter or ''}".rstrip()
            )
        lines += ["", *self.notes]
        if self.is_same:
            return "\n".join([*lines, f"The same training, within {self.bound:g} ({self.dtype})."])
        bad = next(step for step in self.steps if step.step == self.first_difference)
        where = [
            f"parameter {bad.parameter}" if bad.gradient is not None and bad.gradient > self.bound else "",
            f"first layer whose output differs: {bad.layer}" if bad.layer else "",
        ]
        said = "; ".join(filter(None, where))
        return "\n".join(
            [
                *lines,
                f"NOT the same: step {bad.step} differs by {bad.worst():.1e}, more than {self.bound:g} ({self.dtype})"
                + (f"; {said}." if said else "."),
            ]
        )


def verify(words: list[str]) -> int:
    """Run one command at two sizes and print how they compare; 0 if they are the same training.

    words: options of this command, then the script and its arguments.
    Raises: ConfigError for a command that cannot be verified; MegacpError if a run fails or records nothing.
    """
    if not words or words[0] in ("-h", "--help"):
        print(HELP)
        return 0
    options, command = _options(words)
    size = _size(command)
    folder = Path(options.keep) if options.keep else Path(tempfile.mkdtemp(prefix="megacp-verify-"))
    given = [int(value_of(command, name) or "1") for name in OTHER_SIZES]
    ranks = options.ranks or size * prod(given)
    if ranks % size:
        raise ConfigError(
            f"megacp: {ranks} ranks cannot be shared out to groups of {size}. Give --nproc-per-node a multiple of {size}."
        )
    for cp, count in ((1, ranks // size), (size, ranks)):
        _train(resized(command, cp), count, folder / f"cp{cp}", options)
    found = compare(folder / "cp1", folder / f"cp{size}", size, options.bound)
    print(json.dumps({**asdict(found), "same": found.is_same}, indent=1) if options.json else found.table())
    return 0 if found.is_same else 1


@dataclass
class _Options:
    ranks: int | None = None
    bound: float | None = None
    keep: str | None = None
    timeout: float = 3600.0
    json: bool = False
    passed_on: list[str] = field(default_factory=list)


_READ = {
    "--nproc-per-node": ("ranks", int),
    "--bound": ("bound", float),
    "--keep": ("keep", str),
    "--timeout": ("timeout", float),
}


def _options(words: list[str]) -> tuple[_Options, list[str]]:
    """Take what stands before the script; ``--megacp-*`` flags there go with the command."""
    options, rest = _Options(), list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        name, equals, value = rest.pop(0).partition("=")
        if name == "--json":
            options.json = True
            continue
        if name not in _READ and not name.startswith("--megacp-"):
            raise ConfigError(
                f"megacp: verify has no option {name}. It has: {', '.join([*_READ, '--json'])}."
            )
        if not equals:
            if not rest:
                raise ConfigError(f"megacp: {name} needs a value.")
            value = rest.pop(0)
        if name not in _READ:
            options.passed_on += [name, value]
            continue
        key, read = _READ[name]
        try:
            number = read(value)
        except ValueError:
            raise ConfigError(f"megacp: {name} is {value!r}; it must be a number.") from None
        if not isinstance(number, str) and not number > 0:
            raise ConfigError(f"megacp: {name} is {value}; it must be above 0.")
        setattr(options, key, number)
    if not rest:
        raise ConfigError(
            "megacp: verify needs the command to run: megacp verify SCRIPT ARGS... " + FLAG + " N"
        )
    return options, rest


def _size(command: Sequence[str]) -> int:
    """Read the size to be verified. Raises: ConfigError if there is none above 1, or if the runs would get in each other's way."""
    text = value_of(command, FLAG)
    if text is None or not text.isdecimal() or int(text) < 2:
        raise ConfigError(
            f"megacp: verify compares {FLAG} 1 with the size in the command, which is {text or 'not there'}. Give {FLAG} 2 or more."
        )
    if value_of(command, "--save") is not None:
        raise ConfigError(
            "megacp: both runs would write their checkpoints to the same --save folder. Leave --save away."
        )
    return int(text)


def resized(command: Sequence[str], size: int) -> list[str]:
    """Give the command with another context-parallel size."""
    out = list(command)
    for at, word in enumerate(out):
        if word == FLAG and at + 1 < len(out):
            out[at + 1] = str(size)
        elif word.startswith(FLAG + "="):
            out[at] = f"{FLAG}={size}"
    return out


def _train(command: list[str], ranks: int, folder: Path, options: _Options) -> None:
    """Run one training under torchrun, its output in FOLDER/output.txt.

    Raises: MegacpError with the end of that output if it fails or takes too long.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("rank*.jsonl"):
        old.unlink()
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    whole = [*launch, "-m", "megacp", *options.passed_on, *command]
    print(f"megacp verify: {shlex.join(whole[2:])}", file=sys.stderr, flush=True)
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "MEGACP_RECORD": str(folder.resolve())}
    output = folder / "output.txt"
    with output.open("w") as file:
        try:
            status = subprocess.run(
                whole,
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=environment,
                timeout=options.timeout,
            ).returncode
        except subprocess.TimeoutExpired:
            raise MegacpError(
                f"megacp: the run took longer than --timeout {options.timeout:g} s; see {output}."
            ) from None
    if status != 0:
        raise MegacpError(
            f"megacp: the run ended with status {status}; see {output}. Its end:\n{_end(output)}"
        )


def _end(output: Path) -> str:
    """Give what matters of a failed run's output: megacp's refusal, or the last lines before torchrun's own report."""
    lines = output.read_text(errors="replace").splitlines()
    refusals = [line for line in lines if line.startswith("megacp [rank 0]: ")]
    last = next(
        (
            at
            for at, line in enumerate(lines)
            if "torch/distributed/elastic" in line or "failed (exitcode" in line
        ),
        len(lines),
    )
    return "\n".join(refusals or lines[:last][-15:])


# -- comparing ------------------------------------------------------------------------------------------------------------


def compare(alone: Path, split: Path, size: int, bound: float | None = None) -> Comparison:
    """Hold the records of two runs against each other.

    alone, split: folders of rank*.jsonl, at context-parallel size 1 and ``size``. bound: by the parameters' dtype if None.
    Raises: MegacpError if a run has recorded nothing, or another number of steps.
    """
    a, b = _records(alone), _records(split)
    if not a or a.keys() != b.keys():
        raise MegacpError(
            f"megacp: the runs recorded {len(a)} and {len(b)} steps, in {alone} and {split}. Both must take the same steps, in a "
            "training that goes through megatron-core's schedules and optimizers."
        )
    dtypes = {line["dtype"] for lines in a.values() for line in lines if "dtype" in line}
    dtype = max(dtypes, key=lambda name: BOUNDS.get(name, 0.0), default="float32")
    limit = BOUNDS.get(dtype, BOUNDS["float32"]) if bound is None else bound
    steps = tuple(_step(number, a[number], b[number], limit) for number in sorted(a))
    first = next((step.step for step in steps if not step.worst() <= limit), None)
    notes = []
    if any(line["sharded"] for lines in a.values() for line in lines):
        notes.append(
            "The distributed optimizer shards gradients: parameter by parameter they are not compared."
        )
    return Comparison(size, limit, dtype, steps, first, tuple(notes))


def _records(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Read the lines of all ranks, by step."""
    out: dict[int, list[dict[str, Any]]] = {}
    for file in sorted(folder.glob("rank*.jsonl")):
        for text in file.read_text().splitlines():
            line = json.loads(text)
            out.setdefault(line["step"], []).append(line)
    return out


def _step(number: int, a: list[dict[str, Any]], b: list[dict[str, Any]], bound: float) -> Step:
    pairs = _pairs(a, b)
    losses = [
        _apart(x, y) if len(one["losses"]) == len(two["losses"]) else math.inf
        for one, two in pairs
        for x, y in zip(one["losses"], two["losses"], strict=False)
    ]
    norms = [_apart(_norm(one), _norm(two)) for one, two in pairs]
    places = {_place(line)[:2] for line in a}
    gradients = [
        (apart, name if len(places) == 1 else "{} (tensor rank {}, stage {})".format(name, *_place(one)))
        for one, two in pairs
        for apart, name in _gradients(one["gradients"], two["gradients"])
    ]
    gradient, parameter = max(gradients) if gradients else (None, None)
    layer = _first_layer(a, b, bound)
    return Step(number, max(losses, default=None), max(norms, default=None), gradient, parameter, layer)


def _pairs(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Put every rank of the second run beside the one of the first with its place in the tensor, pipeline and data groups."""
    place = {_place(line): line for line in a}
    missing = [line["ranks"] for line in b if _place(line) not in place]
    if missing:
        raise MegacpError(
            f"megacp: the run at size 1 has no rank at {missing[0]}. Both must have the same other sizes."
        )
    return [(place[_place(line)], line) for line in b]


def _place(line: Mapping[str, Any]) -> tuple[int, int, int]:
    ranks = line["ranks"]
    return ranks["tp"], ranks["pp"], ranks["dp"]


def _norm(line: Mapping[str, Any]) -> float:
    """Give the norm that the host gives; hosts that do not clip give none or 0, then it is that of the rank's own parameters."""
    given = line["grad_norm"]
    return given if given else math.sqrt(sum(square for square, _ in line["gradients"].values()))


def _gradients(a: Mapping[str, list[float]], b: Mapping[str, list[float]]) -> Iterable[tuple[float, str]]:
    """Give each parameter's difference, relative to its norm or to a share of the norm of all."""
    total = math.sqrt(sum(value[0] for value in a.values()))
    for name in [*a, *(name for name in b if name not in a)]:
        if name not in a or name not in b:
            yield math.inf, f"{name} (in one run only)"
            continue
        (square_a, along_a), (square_b, along_b) = a[name], b[name]
        scale = max(math.sqrt(square_a), FLOOR * total, 1e-300)
        apart = max(abs(math.sqrt(square_a) - math.sqrt(square_b)), abs(along_a - along_b)) / scale
        yield (apart if apart == apart else math.inf), name


def _first_layer(a: list[dict[str, Any]], b: list[dict[str, Any]], bound: float) -> str | None:
    """Name the first layer whose output, summed over all ranks' tokens, differs."""

    def total(lines: list[dict[str, Any]]) -> dict[int, list[float]]:
        sums: dict[int, list[float]] = {}
        for line in lines:
            for name, found in line["layers"].items():
                sums[int(name)] = [x + y for x, y in zip(sums.get(int(name), [0.0, 0.0]), found, strict=True)]
        return sums

    one, two = total(a), total(b)
    for number in sorted(one):
        (square_a, along_a), (square_b, along_b) = one[number], two.get(number, [math.nan, math.nan])
        apart = max(
            abs(square_a - square_b) / max(square_a, 1e-300),
            abs(along_a - along_b) / math.sqrt(max(square_a, 1e-300)),
        )
        if not apart <= bound:
            return str(number)
    return None


def _apart(x: float, y: float) -> float:
    """Give the relative difference; infinity where one is not a number."""
    apart = abs(x - y) / max(abs(x), abs(y), 1e-300)
    return apart if apart == apart else math.inf


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
