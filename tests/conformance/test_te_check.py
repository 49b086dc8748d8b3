"""tools/te_check, where the real Transformer Engine is installed (``bash tools/te_check/run.sh`` makes an environment that has it)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_engine") is None,
    reason="Transformer Engine is not installed; bash tools/te_check/run.sh builds it and runs this check",
)
def test_the_hooked_transformer_engine_gives_the_gradients_of_one_rank() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "te_check")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr
