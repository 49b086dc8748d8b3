"""The package and the scripts around it: what is installed, what an import costs, how a failing check ends."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megacp import __version__

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Give what setup.py tells setuptools."""
    setuptools = pytest.importorskip("setuptools")
    told: dict[str, Any] = {}
    monkeypatch.setattr(setuptools, "setup", told.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return told


def test_the_version_stands_in_one_place(package: dict[str, Any]) -> None:
    assert package["version"] == __version__


def test_only_torch_and_numpy_are_required(package: dict[str, Any]) -> None:
    assert package["install_requires"] == ["torch", "numpy"]
    assert package["python_requires"] == ">=3.10"
    assert set(package["extras_require"]) == {"megatron", "te", "flash", "test"}


def test_every_folder_of_the_package_is_installed(package: dict[str, Any]) -> None:
    folders = {path.parent for path in (ROOT / "megacp").rglob("*.py")}
    assert set(package["packages"]) == {".".join(path.relative_to(ROOT).parts) for path in folders}


def test_importing_megacp_imports_nothing_heavy() -> None:
    code = "import megacp, sys, json; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    heavy = {"torch", "numpy", "megatron", "transformer_engine", "flash_attn", "apex"}
    assert not heavy & set(json.loads(done.stdout))


def run_checks(environment: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "tests" / "run.sh"), *words],
        cwd=environment,
        env={**os.environ, "MEGACP_VENV": str(environment)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


def stand_in(folder: Path, fails: str) -> Path:
    """Make an environment whose tools only say what they were asked, and fail at one of the parts."""
    (folder / "bin").mkdir()
    for name in ("python", "lint-imports"):
        tool = folder / "bin" / name
        tool.write_text(f'#!/bin/sh\necho "{name} $*"\ncase "$*" in *"{fails}"*) exit 3;; esac\n')
        tool.chmod(0o755)
    return folder


def test_the_checks_run_in_order_and_pass_further_words_to_pytest(tmp_path: Path) -> None:
    done = run_checks(stand_in(tmp_path, "nothing"), "-k", "ring")
    assert done.returncode == 0
    asked = [line for line in done.stdout.splitlines() if line.startswith(("python", "lint-imports"))]
    assert asked == [
        "python -m ruff check",
        "python -m ruff format --check",
        "python -m mypy",
        "lint-imports --no-logo",
        "python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile -k ring",
    ]


def test_the_checks_stop_at_the_first_that_fails_and_say_which(tmp_path: Path) -> None:
    done = run_checks(stand_in(tmp_path, "mypy"))
    assert done.returncode == 3
    assert "==== FAILED: types (mypy) (exit status 3). The parts after it were not run." in done.stdout
    assert "pytest" not in done.stdout


def test_an_environment_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    done = run_checks(tmp_path / "..")
    assert done.returncode == 1
    assert "there is no" in done.stderr
    assert "unset MEGACP_VENV" in done.stderr
