"""The documents that are trained on; and what the runs of whole checkouts found, as one table at the end of the session."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOUND = pytest.StashKey[dict[str, dict[str, str]]]()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the prefix of a small indexed dataset; its tokenizer is PREFIX.model."""
    prefix = tmp_path_factory.mktemp("corpus") / "corpus"
    flags = [
        "--stdlib",
        "--max-bytes",
        "200000",
        "--train-tokenizer",
        "--vocab-size",
        "512",
        "--workers",
        "1",
    ]
    command = [sys.executable, str(ROOT / "tools" / "preprocess_documents.py"), *flags]
    command += ["--output-prefix", str(prefix)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return prefix


@pytest.fixture
def record(request: pytest.FixtureRequest) -> Callable[[str, str, str], None]:
    """Note what was found: a column (the checkout), a row (the configuration), and what to print there."""

    def note(checkout: str, configuration: str, what: str) -> None:
        request.config.stash.setdefault(FOUND, {}).setdefault(configuration, {})[checkout] = what

    return note


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print the table; MEGACP_TABLE names a file in which it is kept, and to which later sessions add."""
    found = config.stash.get(FOUND, {})
    if not found:
        return
    kept = os.environ.get("MEGACP_TABLE")
    if kept:
        before = json.loads(Path(kept).read_text()) if Path(kept).exists() else {}
        found = {row: {**before.get(row, {}), **found.get(row, {})} for row in {**before, **found}}
        Path(kept).write_text(json.dumps(found, indent=1))
    terminalreporter.section("largest difference from CP=1: loss / gradient norm")
    for line in lines(found):
        terminalreporter.write_line(line)


def lines(found: dict[str, dict[str, str]]) -> Iterator[str]:
    """Write the table: a row for each configuration, a column for each checkout."""
    columns = list(dict.fromkeys(name for cells in found.values() for name in cells))
    yield "| | " + " | ".join(columns) + " |"
    yield "|" + "---|" * (len(columns) + 1)
    for row, cells in found.items():
        yield f"| {row} | " + " | ".join(cells.get(name, "") for name in columns) + " |"
