"""The tool that simulates steps: what it counts in closed form is what plans count, and its page says what was found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'megacp[test]'")

import megacp
from megacp import Layout, Mask
from megacp.plans import Block
from megacp.slices import UNBOUNDED
from tools import dynamic_table

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("tile", [1, 3, 8])
def test_tiles_of_a_ring_over_zigzagged_documents_are_those_of_its_plan(tile: int) -> None:
    size, lengths = 4, np.array([48, 16, 80])  # chunks of 6, 2 and 10 tokens
    offsets = np.cumsum([0, *lengths])
    layout, mask = Layout.per_document(offsets, size), Mask.documents(offsets)
    plan = megacp.plan(layout, mask, method="ring")
    tiles, slots = dynamic_table.zigzag_tiles(lengths, size, tile)
    assert slots == layout.local_len
    for rank in range(size):
        blocks = [step.blocks for step in plan.steps(rank)]
        assert sum(dynamic_table.block_tiles(b, tile) for b in blocks) == tiles
        assert tile > 1 or tiles == plan.pairs(rank)
        travelled = [plan.bytes_received(rank, backward=is_backward) / 2 for is_backward in (False, True)]
        assert travelled == [(size - 1) * slots, (size - 1) * slots * (1 + 4)]  # gradients have 4 bytes, once


def test_tiles_of_a_block_are_those_with_a_visible_pair() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        q0, k0 = rng.integers(0, 20, 2)
        q1, k1 = q0 + rng.integers(1, 20), k0 + rng.integers(1, 20)
        hi = int(rng.integers(k0 - q1 + 1, k1 - q0 + 5))
        lo = -UNBOUNDED if rng.random() < 0.7 else hi - int(rng.integers(0, 10))
        q, k = np.arange(q0, q1), np.arange(k0, k1)
        delta = k[None] - q[:, None]
        visible = (lo <= delta) & (delta <= hi)
        seen = {((i // 4), (j // 4)) for i, j in np.argwhere(visible)}
        found = dynamic_table.block_tiles((Block(0, q0, q1, k0, k1, lo, hi),), 4)
        assert found >= len(seen)
        if lo == -UNBOUNDED:
            assert found == len(seen)


def test_the_page_is_written_and_a_size_for_each_document_is_below_one_for_all(tmp_path: Path) -> None:
    sizes = [
        "--ranks",
        "8",
        "16",
        "--tokens",
        "1000000",
        "--context",
        "131072",
        "--folder",
        "megacp",
        "tests",
    ]
    subprocess.run(
        [sys.executable, "tools/dynamic_table.py", *sizes, "--out", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=120,
        capture_output=True,
    )
    found = json.loads((tmp_path / "dynamic.json").read_text())
    assert [(run["corpus"], run["ranks"]) for run in found["runs"]] == [
        (name, ranks) for name in ("Python sources", "published lengths") for ranks in (8, 16)
    ]
    for run in found["runs"]:
        summary = run["summary"]
        best = min(summary["fixed"], summary["ring"])
        assert 1 <= summary["dynamic"] <= best * 1.001  # of short sources each has one rank, by either
        assert run["corpus"] == "Python sources" or summary["dynamic"] < best
    page = (tmp_path / "dynamic.md").read_text()
    assert "simulated" in page and page.count("| 16 |") == 2
    assert (tmp_path / "dynamic.png").stat().st_size > 10_000


def test_the_page_in_docs_says_that_every_cluster_is_faster_with_a_size_for_each_document() -> None:
    found = json.loads((ROOT / "docs" / "dynamic.json").read_text())
    assert {run["ranks"] for run in found["runs"]} == {8, 16, 32, 64, 128}
    for run in found["runs"]:
        summary = run["summary"]
        best = min(summary["fixed"], summary["ring"], summary["fixed_all"], summary["ring_all"])
        assert 1 <= summary["dynamic"] < best, run["ranks"]
