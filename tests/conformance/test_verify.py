"""megacp verify: that it finds a training the same at two sizes, and that it cannot miss one that is not."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megacp.errors import ConfigError, MegacpError
from megacp.verify import _Options as Options
from megacp.verify import _train as train
from megacp.verify import compare, resized, verify
from tests.conformance.loop import EXAMPLE

ROOT = Path(__file__).resolve().parents[2]
TREES = [Path(p) for p in os.environ.get("MEGACP_TREES", "").split(os.pathsep) if p]


# -- records written by hand -------------------------------------------------------------------------------------------


def line(step: int, cp: int = 0, **changes: Any) -> dict[str, Any]:
    plain = {
        "step": step,
        "ranks": {"tp": 0, "pp": 0, "dp": 0, "cp": cp},
        "losses": [80.0, 10.0],
        "grad_norm": 2.0,
        "layers": {"1": [4.0, 1.0], "2": [9.0, -2.0]},
        "gradients": {"big": [4.0, 1.5], "small": [1e-6, 1e-4], "none": [0.0, 0.0]},
        "sharded": False,
        "dtype": "float64",
    }
    return {**plain, **changes}


def halves(step: int, **changes: Any) -> list[dict[str, Any]]:
    """What two ranks write: the same losses and gradients, and each the part of the layers' outputs that it holds."""
    parts = [{"1": [3.0, 0.25], "2": [5.0, -3.0]}, {"1": [1.0, 0.75], "2": [4.0, 1.0]}]
    return [line(step, cp, **{"layers": part, **changes}) for cp, part in enumerate(parts)]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, list[dict[str, Any]]], Path]:
    def write(name: str, lines: list[dict[str, Any]]) -> Path:
        (tmp_path / name).mkdir()
        for each in lines:
            with (tmp_path / name / f"rank{each['ranks']['cp']}.jsonl").open("a") as file:
                file.write(json.dumps(each) + "\n")
        return tmp_path / name

    return write


Write = Callable[[str, list[dict[str, Any]]], Path]


def test_two_ranks_that_hold_half_the_tokens_each_are_the_same_training(write: Write) -> None:
    found = compare(write("one", [line(1), line(2)]), write("two", [*halves(1), *halves(2)]), 2)
    assert found.is_same and found.bound == 1e-9 and len(found.steps) == 2
    assert "The same training, within 1e-09 (float64)." in found.table()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"losses": [80.1, 10.0]}, "step 2 differs by 1.2e-03"),
        ({"losses": [80.0]}, "step 2 differs by inf"),
        ({"losses": [float("nan"), 10.0]}, "step 2 differs by inf"),
        ({"grad_norm": 1.0}, "step 2 differs by 5.0e-01"),
        ({"gradients": {"big": [4.0, -1.5], "small": [1e-6, 1e-4], "none": [0.0, 0.0]}}, "parameter big"),
        ({"gradients": {"big": [4.0, 1.5], "small": [4e-6, 1e-4], "none": [0.0, 0.0]}}, "parameter small"),
        ({"gradients": {"big": [4.0, 1.5], "small": [1e-6, 1e-4]}}, r"parameter none \(in one run only\)"),
    ],
    ids=[
        "loss",
        "fewer losses",
        "not a number",
        "norm",
        "a gradient turned round",
        "a small one",
        "one missing",
    ],
)
def test_whatever_differs_is_named_with_its_step(write: Write, changes: dict[str, Any], words: str) -> None:
    found = compare(write("one", [line(1), line(2)]), write("two", [*halves(1), *halves(2, **changes)]), 2)
    assert found.first_difference == 2 and not found.is_same
    assert re.search(words, found.table())


def test_the_first_layer_that_differs_is_named(write: Write) -> None:
    bad = halves(1, losses=[81.0, 10.0])
    bad[1]["layers"] = {"1": [1.0, 0.75], "2": [4.5, 1.0]}
    assert (
        "first layer whose output differs: 2."
        in compare(write("one", [line(1)]), write("two", bad), 2).table()
    )


def test_a_gradient_that_is_rounding_only_is_held_to_the_scale_of_all(write: Write) -> None:
    noise = {"big": [4.0, 1.5], "small": [1e-6, 1e-4], "none": [1e-28, 1e-14]}
    assert compare(write("one", [line(1)]), write("two", halves(1, gradients=noise)), 2).is_same


def test_runs_that_cannot_be_compared_are_refused(write: Write) -> None:
    one = write("one", [line(1), line(2)])
    with pytest.raises(MegacpError, match="recorded 2 and 1 steps"):
        compare(one, write("two", halves(1)), 2)
    with pytest.raises(MegacpError, match="recorded 0 and 0 steps"):
        compare(write("none", []), write("neither", []), 2)
    other = [line(n, ranks={"tp": 1, "pp": 0, "dp": 0, "cp": 0}) for n in (1, 2)]
    with pytest.raises(MegacpError, match="no rank at"):
        compare(one, write("other", other), 2)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_size_is_changed_in_both_spellings() -> None:
    flag = "--context-parallel-size"
    assert resized(["a.py", flag, "4", "--lr", "4"], 1) == ["a.py", flag, "1", "--lr", "4"]
    assert resized(["a.py", f"{flag}=4"], 1) == ["a.py", f"{flag}=1"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("a.py", "which is not there"),
        ("a.py --context-parallel-size 1", "which is 1"),
        ("a.py --context-parallel-size 2 --save here", "--save"),
        ("--bund 3 a.py --context-parallel-size 2", "no option --bund. It has: --nproc-per-node"),
        ("--bound x a.py --context-parallel-size 2", "--bound is 'x'"),
        ("--nproc-per-node 3 a.py --context-parallel-size 2", "multiple of 2"),
        ("--json", "needs the command to run"),
    ],
)
def test_a_command_that_cannot_be_verified_is_refused(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        verify(shlex.split(words))


FAULT = """
import runpy, sys
from megacp import attend

plain = attend.attention

def attention(q, k, v, **settings):
    if settings["group"].size > 1:
        k.register_hook(lambda grad: grad * 1.01)
    return plain(q, k, v, **settings)

attend.attention = attention
sys.path.insert(0, {folder!r})
runpy.run_path({script!r}, run_name="__main__")
"""


def command(corpus: Path, *before: str, script: str = str(EXAMPLE / "pretrain.py")) -> list[str]:
    flags = "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --micro-batch-size 2 --global-batch-size 4"
    more = "--train-iters 2 --lr 1e-2 --split 100,0,0 --params-dtype float64 --clip-grad 0 --context-parallel-size 2"
    data = ["--data-path", str(corpus), "--tokenizer-model", f"{corpus}.model"]
    return [sys.executable, "-m", "megacp", "verify", *before, script, *data, *shlex.split(f"{flags} {more}")]


def run(words: list[str], cwd: Path = ROOT, **more: Any) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.run(words, cwd=cwd, env=env, capture_output=True, text=True, timeout=300, **more)


def test_the_example_is_verified_and_an_error_of_one_percent_in_a_key_s_gradient_is_found(
    corpus: Path, tmp_path: Path
) -> None:
    pytest.importorskip(
        "megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'"
    )
    done = run(command(corpus, "--keep", str(tmp_path / "good"), "--json", "--megacp-documents", "eod"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["same"] and found["dtype"] == "float64" and len(found["steps"]) == 2
    assert all(step["gradient"] < 1e-9 and step["parameter"] for step in found["steps"])

    broken = tmp_path / "broken.py"
    broken.write_text(FAULT.format(folder=str(EXAMPLE), script=str(EXAMPLE / "pretrain.py")))
    words = command(corpus, script=str(broken))
    train(
        words[words.index("verify") + 1 :],
        2,
        tmp_path / "bad",
        Options(passed_on=["--megacp-documents", "eod"]),
    )
    faulty = compare(tmp_path / "good" / "cp1", tmp_path / "bad", 2)
    assert re.search(
        r"NOT the same: step 1 .*; parameter decoder\.layers\.\d.self_attention\S+\.$", faulty.table()
    )  # and no layer, as the fault is in the backward pass


def test_the_exit_status_says_whether_the_trainings_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write(words: list[str], ranks: int, folder: Path, options: Any) -> None:
        folder.mkdir(parents=True)
        loss = 80.0 if ranks == 1 else float(words[0])
        (folder / "rank0.jsonl").write_text(json.dumps(line(1, losses=[loss, 10.0])))

    monkeypatch.setattr("megacp.verify._train", write)
    for loss, status in ((80.0, 0), (80.1, 1)):
        words = ["--keep", str(tmp_path / str(loss)), "--json", str(loss), "--context-parallel-size", "2"]
        assert verify(words) == status
        assert json.loads(capsys.readouterr().out)["same"] == (status == 0)


def test_a_run_that_fails_is_shown_with_its_own_refusal(corpus: Path, tmp_path: Path) -> None:
    done = run([*command(corpus, "--keep", str(tmp_path)), "--megacp-layout", "zigzga"])
    assert done.returncode == 1 and str(tmp_path / "cp1" / "output.txt") in done.stderr
    assert "--megacp-layout is 'zigzga'" in done.stderr, done.stderr


# -- the page and the workflow -----------------------------------------------------------------------------------------


def page_command() -> str:
    (block,) = re.findall(r"^```bash\n(.*?)^```", (ROOT / "docs" / "ci.md").read_text(), flags=re.M | re.S)
    return str(block)


def test_the_workflow_is_valid_and_runs_the_command_of_the_page() -> None:
    yaml = pytest.importorskip("yaml", reason="pyyaml is not installed")
    workflow = yaml.safe_load((ROOT / "examples" / "ci" / "verify-context-parallel.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert workflow["name"] and (workflow.get("on") or workflow[True]) == [
        "pull_request"
    ]  # YAML 1.1 reads on as True
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    (verified,) = [step["run"] for step in job["steps"] if "megacp verify" in step.get("run", "")]
    assert verified.replace(" ${{ matrix.flags }}", "").split() == page_command().split()
    (built,) = [step["run"] for step in job["steps"] if "make" in step.get("run", "")]
    assert built in (ROOT / "docs" / "cpu.md").read_text()


@pytest.mark.skipif(not TREES, reason="MEGACP_TREES names no Megatron-LM checkout")
@pytest.mark.parametrize("tree", TREES, ids=[t.name for t in TREES])
def test_the_command_of_the_page_runs_with_the_flags_of_the_workflow(tree: Path, tmp_path: Path) -> None:
    text = (ROOT / "examples" / "ci" / "verify-context-parallel.yml").read_text()
    for flags in re.findall(r'^ {10}- "(.*)"$', text, flags=re.M):
        words = shlex.split(page_command().replace("\\\n", " ") + flags)
        words[0], words[words.index("verified")] = sys.executable, str(tmp_path)
        path = os.pathsep.join([str(tree), str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, timeout=400)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "The same training" in done.stdout
