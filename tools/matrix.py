"""Run the matrix of tests/matrix.py, method x layout x mask x option x dtype x kernel x size of the group, and write docs/matrix.md.

    python tools/matrix.py                                  # every triple of values: about 900 cells, a minute or two
    python tools/matrix.py --all                            # every cell; can be stopped, and goes on where it stopped
    python tools/matrix.py --only dtype=float64 kernel=reference
    python tools/matrix.py --page-only                      # write the page from the results there are

Results are JSON lines, one for each portion of cells (runs/matrix.jsonl). They hold for the code they were found with: what was run
with other sources or another PyTorch is run again. Ends with status 1 if a cell is wrong, and names it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import random
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megacp.testing import ranks  # noqa: E402
from tests import matrix  # noqa: E402
from tests.matrix import Cell, Verdict  # noqa: E402

Found = dict[Cell, Verdict]
_ELSEWHERE = ("megacp.testing", "megacp.hosts", "megacp.cli", "megacp.pytorch", "megacp._version")
_KERNELS = {f"megacp.kernels.{name}" for name in (*matrix.KERNELS, "cuts")}


def fingerprint() -> str:
    """Return a digest of the sources that a cell's result depends on, and of PyTorch's version."""
    matrix.run(
        [Cell("ring", "balanced", "causal", "plain", "float64", "reference", 1)]
    )  # imports what attention needs
    digest = hashlib.blake2b(torch.__version__.encode(), digest_size=6)
    for name, module in sorted(sys.modules.items()):
        is_other_kernel = name.startswith("megacp.kernels.") and name not in _KERNELS
        if name.startswith("megacp.") and not name.startswith(_ELSEWHERE) and not is_other_kernel:
            digest.update(Path(str(module.__file__)).read_bytes())
    digest.update(Path(str(matrix.__file__)).read_bytes())
    return digest.hexdigest()


def load(path: Path, code: str) -> tuple[Found, float]:
    """Read the results found with this code, and the seconds that they took."""
    found, seconds = {}, 0.0
    for line in path.read_text().splitlines() if path.exists() else ():
        portion = json.loads(line)
        if portion["code"] == code:
            seconds += portion["seconds"]
            for verdict in portion["verdicts"]:
                found[Cell(*verdict[:7])] = Verdict(*verdict[7:])
    return found, seconds


def ordered(cells: Iterable[Cell]) -> list[Cell]:
    """Put the covering sets first, then full precision, the rest at random: a run that is stopped has seen most kinds."""
    cells = list(cells)
    random.Random(0).shuffle(cells)
    first = {cell: i for i, cell in enumerate(matrix.covering(3))}
    key = {
        cell: (first.get(cell, len(first)), cell.dtype != "float64" or cell.kernel != "reference")
        for cell in cells
    }
    return sorted(cells, key=key.__getitem__)


def portions(cells: Sequence[Cell], size: int) -> Iterator[list[Cell]]:
    """Cut cells into portions of one group size, the sizes in turn."""
    by_size = [[c for c in cells if c.cp_size == n] for n in matrix.SIZES]
    cut = [[c[i : i + size] for i in range(0, len(c), size)] for c in by_size]
    yield from (portion for turn in zip_longest(*cut) for portion in turn if portion)


def run(cells: list[Cell]) -> list[Verdict]:
    """Run cells of one size; if the ranks fail, one by one, so that the cell at fault is known."""
    try:
        results = ranks.run(matrix.run, cells[0].cp_size, cells, timeout=120 + len(cells))
    except ranks.RanksError as error:
        if len(cells) > 1:
            return [verdict for cell in cells for verdict in run([cell])]
        return [Verdict("wrong", detail=str(error)[-500:])]
    return [matrix.judge(cell, [result[i] for result in results]) for i, cell in enumerate(cells)]


def run_all(cells: Sequence[Cell], found: Found, path: Path, code: str, size: int) -> float:
    """Run what is not in ``found``, add it there and to the file; returns the seconds taken."""
    left, wrong, begin = [c for c in cells if c not in found], 0, time.monotonic()
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = (
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, disable=not sys.stderr.isatty()) as progress, path.open("a") as file:
        task = progress.add_task("", total=len(cells), completed=len(cells) - len(left))
        for portion in portions(left, size):
            started = time.monotonic()
            verdicts = run(portion)
            found |= zip(portion, verdicts, strict=True)
            wrong += sum(v.status == "wrong" for v in verdicts)
            rows = [
                [*c, v.status, v.error, v.share, v.detail] for c, v in zip(portion, verdicts, strict=True)
            ]
            line = {
                "code": code,
                "torch": torch.__version__,
                "date": str(date.today()),
                "seconds": time.monotonic() - started,
            }
            file.write(json.dumps({**line, "verdicts": rows}) + "\n")
            file.flush()
            progress.update(
                task, advance=len(portion), description=f"{wrong} wrong" if wrong else "none wrong"
            )
    return time.monotonic() - begin


# -- the page ----------------------------------------------------------------------------------------------------------


class Notes:
    """Reasons for refusals, as letters."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def letter(self, reason: str) -> str:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return "abcdefgh"[self.reasons.index(reason)]

    def lines(self) -> list[str]:
        return [f"- ({'abcdefgh'[i]}) refused: {reason}." for i, reason in enumerate(self.reasons)]


def entry(found: Iterable[tuple[Cell, Verdict]], notes: Notes) -> str:
    """Say what became of some cells: "exact" with the largest float64 error seen, and letters for what is refused."""
    cells = list(found)
    wrong = sum(v.status == "wrong" for _, v in cells)
    exact = [(c, v) for c, v in cells if v.status == "exact"]
    letters = sorted({notes.letter(v.detail) for _, v in cells if v.status == "refused"})
    after = f" ({', '.join(letters)})" if letters else ""
    if wrong:
        return f"**{wrong} wrong**"
    if not exact:
        return f"refused{after}" if letters else "not run"
    full = [v.error for c, v in exact if c.dtype == "float64"]
    return f"exact{f' {max(full):.0e}' if full else ''}{after}"


def table(found: Found, rows: str, columns: str, notes: Notes) -> list[str]:
    """Make a table of two axes over all values of the others."""
    axes = dict(zip(Cell._fields, matrix.AXES, strict=True))
    lines = [
        f"| {rows} | " + " | ".join(map(str, axes[columns])) + " |",
        "|---" * (len(axes[columns]) + 1) + "|",
    ]
    groups: dict[tuple[Any, Any], list[tuple[Cell, Verdict]]] = {}
    for cell, verdict in found.items():
        groups.setdefault((getattr(cell, rows), getattr(cell, columns)), []).append((cell, verdict))
    for row in axes[rows]:
        entries = [entry(groups.get((row, column), []), notes) for column in axes[columns]]
        lines.append(f"| {row} | " + " | ".join(entries) + " |")
    return lines


def precision(found: Found) -> list[str]:
    """Make a table of the largest errors by dtype and kernel, beside what is allowed."""
    lines = [
        "| dtype | kernel | cells exact | refused | largest error | largest share of what is allowed |",
        "|---" * 6 + "|",
    ]
    for dtype in matrix.DTYPES:
        for kernel in matrix.KERNELS:
            some = [v for c, v in found.items() if c.dtype == dtype and c.kernel == kernel]
            exact, refused = (
                [v for v in some if v.status == "exact"],
                sum(v.status == "refused" for v in some),
            )
            if exact:
                worst, share = max(v.error for v in exact), max(v.share for v in exact)
                lines.append(
                    f"| {dtype} | {kernel} | {len(exact):,} | {refused:,} | {worst:.1e} | {share:.2f} |"
                )
    return lines


def page(found: Found, seconds: float) -> str:
    """Write the page about some results."""
    notes, total = Notes(), sum(1 for _ in matrix.everything())
    by_option = table(found, "option", "method", notes)
    parts = {
        "float64, kernel reference": list(matrix.everything(dtype=["float64"], kernel=["reference"])),
        "every triple of values of different axes": matrix.covering(3),
    }
    covered = [
        f"{name}: {sum(c in found for c in cells):,} of {len(cells):,}" for name, cells in parts.items()
    ]
    count = {s: sum(v.status == s for v in found.values()) for s in ("exact", "refused", "wrong")}
    return PAGE.format(
        run=f"{len(found):,}",
        total=f"{total:,}",
        covered="; ".join(covered),
        date=date.today(),
        torch=torch.__version__,
        python=platform.python_version(),
        minutes=f"{seconds / 60:.0f}",
        by_option="\n".join(by_option),
        by_mask="\n".join(table(found, "mask", "method", notes)),
        by_layout="\n".join(table(found, "layout", "method", notes)),
        by_size="\n".join(table(found, "cp_size", "method", notes)),
        precision="\n".join(precision(found)),
        notes="\n".join(notes.lines()),
        **{name: f"{number:,}" for name, number in count.items()},
    )


PAGE = """# What is exact, and what is refused

Generated by `tools/matrix.py`; do not edit.

Every cell names a method, a layout, a mask, an option, a dtype, a kernel and a number of ranks. It is run on that many processes
over gloo. Out, lse and all gradients (those of sinks too) of real tokens are held against a float64 oracle that shares no code with
the package, and padding slots, filled with 1000, must give zeros. *Exact* is a relative error (norm of the difference by norm) of
at most 1e-10 in float64 and 1e-5 in float32; in 16 bit at most 1.3 times that of the same kernel on one rank. *Refused* is an error
whose text names the setting, the same on every rank. The numbers are the largest relative errors in float64 over all cells of an
entry.

**{run} of {total} cells were run: {exact} exact, {refused} refused, {wrong} wrong.** Of these, {covered}.
{date}, torch {torch}, Python {python}, CPU, {minutes} minutes. Each change runs the triples; `python tools/matrix.py --all` runs every
cell, and goes on where it was stopped.

The row has 37 tokens, which divide by no number of ranks, in documents of 1, 2, 11, 16 and 7; heads 8 and 4 of size 8 unless the
option says otherwise (GQA 8 and 2, MQA 5 and 1, Dk != Dv 12 and 5). *Spans* are seen in both directions inside causal text, *dense*
is a mask of random blocks in which one token sees nothing, *documents by row* has other documents in each row of the micro-batch.
Hierarchical runs as 2x1, 3x1, 2x2, 5x1, 2x3 and 4x2.

## Options

{by_option}

## Masks

{by_mask}

## Layouts

{by_layout}

## Sizes of the group

{by_size}

## Precision

{precision}

## Refusals

{notes}
"""


def chosen(terms: Sequence[str]) -> dict[str, list[Any]]:
    """Read AXIS=VALUE,VALUE terms."""
    axes, out = dict(zip(Cell._fields, matrix.AXES, strict=True)), {}
    for name, _, values in (term.partition("=") for term in terms):
        known = {str(value): value for value in axes.get(name, ())}
        wanted = [v for v in known if v in values.split(",") or v == values]
        if not wanted:
            raise SystemExit(
                f"{name}={values} names no cells. Axes: " + "; ".join(f"{n}: {v}" for n, v in axes.items())
            )
        out[name] = [known[v] for v in wanted]
    return out


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cells, write the page, and name what is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--all", action="store_true", help="run every cell")
    what.add_argument("--page-only", action="store_true", help="run nothing")
    parser.add_argument(
        "--only", nargs="+", action="extend", metavar="AXIS=VALUE", help="run the product of these values"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "runs" / "matrix.jsonl")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "matrix.md")
    parser.add_argument(
        "--portion", type=int, default=200, metavar="N", help="cells in one call of the ranks"
    )
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the ranks need the cores
    code = fingerprint()
    found, seconds = load(options.results, code)
    if options.only or options.all:
        cells = ordered(matrix.everything(**chosen(options.only or [])))
    else:
        cells = [] if options.page_only else matrix.covering(3)
    seconds += run_all(cells, found, options.results, code, options.portion)
    options.page.write_text(page(found, seconds))
    torch.set_num_threads(threads)
    wrong = [f"{c.name}: {v.detail}" for c, v in found.items() if v.status == "wrong"]
    print("\n".join([*wrong, f"{len(found)} cells, {len(wrong)} wrong: {options.page}"]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
