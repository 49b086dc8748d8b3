"""The commands of docs/cpu.md, as they stand there, in each checkout that MEGACP_TREES names."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TREES = [Path(p) for p in os.environ.get("MEGACP_TREES", "").split(os.pathsep) if p]
NO_TREE = "MEGACP_TREES names no Megatron-LM checkout (for example MEGACP_TREES=/path/to/Megatron-LM at core_v0.16.1)"


@pytest.mark.skipif(not TREES, reason=NO_TREE)
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_the_commands_of_the_cpu_page_run(tree: Path) -> None:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "cpu.md").read_text(), flags=re.M | re.S)
    assert len(blocks) == 2
    paths = [str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")]
    for block in blocks:
        done = subprocess.run(
            ["bash", "-e", "-c", block],
            cwd=tree,
            env={
                **os.environ,
                "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
                "PYTHONPATH": os.pathsep.join(p for p in paths if p),
                "OMP_NUM_THREADS": "1",
            },
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    assert len(re.findall(r"lm loss: ", done.stdout)) >= 6
