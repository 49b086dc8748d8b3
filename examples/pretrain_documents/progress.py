"""What the run says: a line and a JSON record a step, and a progress bar; rank 0 only."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


def peak_memory() -> int:
    """Give this process's largest memory so far, in bytes: the GPU's where there is one, else the process's."""
    allocated = int(torch.cuda.max_memory_allocated())
    return allocated or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class Reporter:
    """Print and record steps on rank 0; elsewhere only collect them. Close it when done."""

    def __init__(self, title: str, total: int, done: int, log_interval: int, log_json: str | None) -> None:
        self.records: list[dict[str, Any]] = []
        self._rank = torch.distributed.get_rank()
        self._log_interval = log_interval
        self._json = Path(log_json) if log_json and self._rank == 0 else None
        if self._json and not done:
            self._json.write_text("")
        console = Console(file=sys.stdout, soft_wrap=True, highlight=False)
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"), TimeRemainingColumn(),
            console=console, disable=self._rank != 0 or not console.is_terminal,
        )  # fmt: skip
        self._task = self._bar.add_task(title, total=total, completed=done, status="")
        self._bar.start()

    def close(self) -> None:
        """Leave the bar as it is and give the terminal back."""
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar, on rank 0."""
        if self._rank == 0:
            self._bar.console.print(text, markup=False)
            self._bar.console.file.flush()

    def step(self, record: dict[str, Any], total: int) -> None:
        """Report one training step."""
        self._write(record)
        status = f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s"
        self._bar.update(self._task, completed=record["iteration"], status=status)
        if record["iteration"] % self._log_interval == 0:
            self.say(
                f"iteration {record['iteration']:6d}/{total} | lm loss {record['loss']:.6f} | grad norm "
                f"{record['grad_norm']:.6f} | lr {record['lr']:.3e} | {record['tokens_per_second']:8,.0f} tokens/s"
                f" | peak memory {record['peak_memory_bytes'] / 2**20:,.0f} MiB"
                + (" | step skipped: gradient overflow" if record["skipped"] else "")
            )

    def evaluation(self, record: dict[str, Any]) -> None:
        """Report one evaluation."""
        self._write(record)
        self.say(f"iteration {record['iteration']:6d} | validation loss {record['validation_loss']:.6f}")

    def _write(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        if self._json:
            with self._json.open("a") as file:
                file.write(json.dumps(record) + "\n")
