"""tools/bench.py at tiny sizes: every method of ours is checked and timed, and both files are written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_bench_checks_and_times_every_method_and_writes_both_files(tmp_path):
    command = [
        sys.executable,
        "tools/bench.py",
        "--tokens",
        "128",
        "--packed-tokens",
        "128",
        "--packed-ranks",
        "2",
    ]
    sizes = [
        "--draws",
        "1",
        "--heads",
        "2",
        "--head-dim",
        "16",
        "--repeats",
        "2",
        "--output",
        str(tmp_path / "new" / "bench"),
    ]
    done = subprocess.run([*command, *sizes], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "new" / "bench.json").read_text())
    assert (tmp_path / "new" / "bench.png").read_bytes().startswith(b"\x89PNG")
    whole, packed = found["cases"]
    assert sum(packed["case"]["documents"]) == packed["case"]["tokens"] == 256
    for report, ours in ((whole, 5), (packed, 5)):
        rows = report["results"]
        present = [row for row in rows if "absent" not in row]
        assert rows[0]["name"] == "one process" and rows[0]["ratio"] == 1
        assert sum(row["whose"] == "megacp" for row in present) == ours, rows
        for row in present:
            assert (
                max(row["error"].values()) <= 1e-5 and len(row["seconds"]) == 2 and row["memory_bytes"] >= 0
            )
            assert row["min_s"] <= row["median_s"] and row["name"] in done.stdout
        for row in rows:
            assert "absent" not in row or f"left out: {row['name']} " in done.stdout.replace("\n", " ")
    assert found["packed"][0]["draws"] == 1 and found["packed"][0]["clock"] > 0
