"""tools/te_check, where the real Transformer Engine is installed (``bash tools/te_check/run.sh`` makes an environment that has it)."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


HAS_ENGINE = importlib.util.find_spec("transformer_engine") is not None


@pytest.mark.skipif(
    not HAS_ENGINE,
    reason="Transformer Engine is not installed; bash tools/te_check/run.sh builds it and runs this check",
)
def test_the_hooked_transformer_engine_gives_the_gradients_of_one_rank() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "te_check")], capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(HAS_ENGINE, reason="Transformer Engine is installed")
def test_without_transformer_engine_the_check_says_how_to_get_it() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "te_check")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2, done.stderr
    assert "is not installed here. bash tools/te_check/run.sh" in " ".join(done.stderr.split())


def test_without_nvcc_the_build_says_what_to_install_and_installs_nothing(tmp_path: Path) -> None:
    path = "/usr/bin:/bin"
    if shutil.which("nvcc", path=path):
        pytest.skip("nvcc is among the system's own programs")
    done = subprocess.run(
        ["bash", str(ROOT / "tools" / "te_check" / "run.sh")],
        env={"PATH": path, "MEGACP_TE_VENV": str(tmp_path / "venv")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2, done.stderr
    assert "there is no nvcc. Install the CUDA toolkit" in done.stderr and "CUDA_HOME" in done.stderr
    assert not list(tmp_path.iterdir())
