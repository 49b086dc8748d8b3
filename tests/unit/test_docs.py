"""Keep the pages true: every command shown is run by a test, every python block runs, every link leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# command as shown -> the test that runs it
RUN_BY = {
    "bash examples/pretrain_documents/run.sh": "test_the_first_command_trains_and_compares",
    "bash tests/run.sh": "this very run: .ci/run and people start it",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def test_every_command_shown_is_run_by_a_test() -> None:
    shown = [
        (page.name, line) for page in PAGES for block in blocks(page, "bash") for line in block.splitlines()
    ]
    assert shown
    unknown = [
        (page, line)
        for page, line in shown
        if line.strip() and not line.startswith("#") and line not in RUN_BY
    ]
    assert not unknown


def test_the_second_command_is_what_continuous_integration_runs() -> None:
    assert "tests/run.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_every_python_block_runs(page: Path) -> None:
    for block in blocks(page, "python"):
        subprocess.run([sys.executable, "-c", block], check=True, cwd=ROOT, timeout=60)


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def test_the_first_command_trains_and_compares(tmp_path: Path) -> None:
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'"
    )
    done = subprocess.run(
        ["bash", "examples/pretrain_documents/run.sh", "--train-iters", "6", "--eval-iters", "0"],
        cwd=ROOT,
        env={**os.environ, "MEGACP_VENV": sys.prefix, "MEGACP_RUNS": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "megacp is hooked in:" in done.stderr and "2 ranks share each sequence" in done.stderr
    assert "largest relative difference of a parameter" in done.stdout
    assert "The same training" in done.stdout
