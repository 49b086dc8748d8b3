"""Keep the pages true: every command shown is run by a test, every python block runs, every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import megacp.methods

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# command as shown (its first words, if it goes on over several lines) -> the test that runs it
RUN_BY = {
    "make -C megatron/core/datasets": "tests/conformance/test_cpu_page.py, where MEGACP_TREES names a checkout",
    "torchrun --nproc-per-node 2 -m megacp pretrain_gpt.py": "tests/conformance/test_cpu_page.py",
    "python -m megacp verify --keep verified pretrain_gpt.py": "tests/conformance/test_verify.py",
    "bash examples/pretrain_documents/run.sh": "test_the_first_command_trains_and_compares",
    "bash examples/long_documents.sh": "test_the_other_examples_train_and_compare",
    "bash examples/answers_only.sh": "test_the_other_examples_train_and_compare",
    "python examples/multimodal_row.py": "test_the_multimodal_row_is_exact",
    "bash tests/run.sh": "this very run: .ci/run and people start it",
    "torchrun --nproc-per-node 4 examples/dynamic_cp.py": "tests/distributed/test_dynamic.py, tests/conformance/test_dynamic.py",
    "python tools/gpu_check.py": "test_the_gpu_check_says_that_there_is_no_gpu",
    "python tools/gpu_check.py --device cpu": "test_the_gpu_check_finds_the_cpu_kernels_exact",
}


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), flags=re.M | re.S)


def test_every_command_shown_is_run_by_a_test() -> None:
    shown = [
        (page.name, command)
        for page in PAGES
        for block in blocks(page, "bash")
        for command in block.replace("\\\n", " ").splitlines()
        if command.strip() and not command.startswith("#")
    ]
    assert shown
    unknown = [(page, command) for page, command in shown if not command.startswith(tuple(RUN_BY))]
    assert not unknown


def test_the_second_command_is_what_continuous_integration_runs() -> None:
    assert "tests/run.sh" in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_every_python_block_runs(page: Path, tmp_path: Path) -> None:
    for block in blocks(page, "python"):
        script = tmp_path / "block.py"  # a file, as ranks that are started import it again
        script.write_text(block)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        subprocess.run(
            [sys.executable, str(script)],
            check=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path},
            timeout=60,
        )


@pytest.mark.parametrize("page", PAGES, ids=[p.name for p in PAGES])
def test_every_link_leads_to_a_file(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), link


def trained(script: str, runs: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """Run an example that trains twice and compares; it has to end well."""
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'"
    )
    done = subprocess.run(
        ["bash", f"examples/{script}", "--eval-iters", "0", *flags],
        cwd=ROOT,
        env={**os.environ, "MEGACP_VENV": sys.prefix, "MEGACP_RUNS": str(runs)},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "The same training" in done.stdout
    return done


def test_the_first_command_trains_and_compares(tmp_path: Path) -> None:
    done = trained("pretrain_documents/run.sh", tmp_path, "--train-iters", "6")
    assert "megacp is hooked in:" in done.stderr and "2 ranks share each sequence" in done.stderr
    assert "largest relative difference of a parameter" in done.stdout


@pytest.mark.parametrize(
    ("name", "cp"), [("long_documents", 4), ("answers_only", 2)], ids=["long documents", "answers only"]
)
def test_the_other_examples_train_and_compare(name: str, cp: int, tmp_path: Path) -> None:
    small = ["--train-iters", "2", "--lr-warmup-iters", "0", "--num-layers", "1", "--seq-length", "512"]
    assert f"{cp} ranks share each sequence" in trained(f"{name}.sh", tmp_path, *small).stderr


def test_the_multimodal_row_is_exact() -> None:
    command = [sys.executable, "examples/multimodal_row.py"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert done.stdout.count("relative error") == 4


def gpu_check(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/gpu_check.py", *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU: run tools/gpu_check.py itself")
def test_the_gpu_check_says_that_there_is_no_gpu() -> None:
    done = gpu_check()
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1 and "no CUDA device" in done.stdout


def test_the_gpu_check_finds_the_cpu_kernels_exact(tmp_path: Path) -> None:
    masks = ["--mask", "causal", "--mask", "documents+window"]
    few = ["--tokens", "48", "--timed-tokens", "64", "--times", "1", "--json", str(tmp_path / "report.json")]
    done = gpu_check("--device", "cpu", *masks, *few)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    checked = {(row["kernel"], row["method"]) for row in report["rows"] if row["result"] == "exact"}
    ways = {"attention()", *megacp.methods.names()}
    assert checked == {(kernel, way) for kernel in ("sdpa", "reference") for way in ways}
    assert {line["kernel"] for line in report["times"] if "ratio" in line} == {"sdpa", "reference"}
    assert report["counts"]["WRONG"] == report["counts"]["FAILED"] == 0
