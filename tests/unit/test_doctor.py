"""`megacp doctor` on stand-ins for a Megatron checkout: what is there, what is missing, and what follows from it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from megacp.hosts import megatron

REPOSITORY = Path(__file__).resolve().parents[2]


def checkout(folder: Path, without: str = "", instead: str = "", preamble: str = "") -> Path:
    """Write a host that offers every target of the table but ``without``, and ``instead`` of it."""
    modules: dict[str, dict[str, dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    for row in megatron.rows(lambda: None):  # type: ignore[arg-type, return-value]
        for target in row.targets:
            module, _, path = target.partition(":")
            owner, _, leaf = path.rpartition(".")
            if target != without:
                modules[module][owner][leaf] = ", ".join([*(["self"] if owner else []), *row.needs])
    for module, owners in modules.items():
        file = folder.joinpath(*module.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        lines = [preamble]
        for owner, functions in owners.items():
            lines += [f"class {owner}:"] if owner else []
            for name, parameters in functions.items():
                lines.append(f"{'    ' if owner else ''}def {name}({parameters}): pass")
        file.write_text("\n".join(lines) + "\n")
    (folder / "megatron" / "core" / "__init__.py").write_text("__version__ = '1.2.3'\n")
    if instead:
        file = folder.joinpath(*without.partition(":")[0].split(".")).with_suffix(".py")
        file.write_text(file.read_text() + instead + "\n")
    return folder


def doctor(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, "-m", "megacp", "doctor", *words],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def seam(found: dict[str, Any], name: str) -> dict[str, Any]:
    (one,) = (answer for answer in found["seams"] if answer["name"] == name)
    return dict(one)


def test_a_host_that_offers_everything_can_be_run(tmp_path: Path) -> None:
    done = doctor(str(checkout(tmp_path)))
    assert done.returncode == 0, done.stderr
    assert f"Megatron at {tmp_path}, megatron-core 1.2.3" in done.stdout
    assert "Every seam that is needed is there." in done.stdout and "missing" not in done.stdout
    assert "megatron.core.models.gpt.gpt_model:GPTModel.forward" in done.stdout


LOSS = "megatron.core.pipeline_parallel.schedules:forward_step_calc_loss"
STEP = "megatron.core.pipeline_parallel.schedules:forward_step"
MODEL = "megatron.core.models.gpt.gpt_model:GPTModel.forward"


def test_a_missing_seam_that_is_needed_is_named_with_what_was_tried(tmp_path: Path) -> None:
    path = checkout(tmp_path, MODEL, "    def froward(self): pass")
    done = doctor(str(path))
    assert done.returncode == 1
    assert "It cannot be run without 'model'" in done.stdout and "megacp.seams" in done.stdout
    assert "there is no 'forward' in" in done.stdout and "close to it: froward" in done.stdout
    assert "  GPT models" in done.stdout.partition("Not supported on this host:")[2]


def test_another_signature_is_told_apart_from_a_missing_name(tmp_path: Path) -> None:
    path = checkout(tmp_path, MODEL, "    def forward(self, tokens): pass")
    found = json.loads(doctor(str(path), "--json").stdout)
    (place,) = seam(found, "model")["places"]
    assert place["found"].startswith("its parameters are (self, tokens); it lacks input_ids")
    assert not found["can_run"]


def test_what_is_optional_is_only_not_supported(tmp_path: Path) -> None:
    target = "megatron.core.datasets.gpt_dataset:GPTDatasetConfig.__post_init__"
    found = json.loads(doctor(str(checkout(tmp_path, target)), "--json").stdout)
    assert found["can_run"] and found["host"]["megatron-core"] == "1.2.3"
    assert found["unsupported"] == ["--megacp-documents eod without --megacp-eod-token"]
    assert seam(found, "tokenizer")["state"] == "missing"


def test_the_first_candidate_that_is_there_counts(tmp_path: Path) -> None:
    found = json.loads(doctor(str(checkout(tmp_path, LOSS)), "--json").stdout)
    assert [place["target"] for place in seam(found, "loss scale")["places"]] == [LOSS, STEP]
    assert seam(found, "loss scale")["state"] == "there" and found["can_run"]


def test_a_module_that_fails_when_imported_is_reported_not_raised(tmp_path: Path) -> None:
    path = checkout(tmp_path)
    file = path / "megatron" / "core" / "utils.py"
    file.write_text("print('noise')\nimport library_that_is_not_there\n")
    (path / "megatron" / "training" / "utils.py").write_text("raise SystemExit('no GPU')\n")
    found = json.loads(doctor(str(path), "--json").stdout)
    first, second = seam(found, "batch")["places"]
    assert "it needs library_that_is_not_there, which is not installed" in first["found"]
    assert second["found"].endswith("SystemExit: no GPU")


def test_a_folder_without_a_megatron_is_refused(tmp_path: Path) -> None:
    done = doctor(str(tmp_path))
    assert done.returncode == 1 and "holds no Megatron" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("words", [("--jsno",), ("a", "b")])
def test_a_wrong_command_line_is_answered_by_the_usage(words: tuple[str, ...]) -> None:
    done = doctor(*words)
    assert done.returncode == 1 and "usage: megacp doctor [PATH] [--json]" in done.stderr


def test_help_needs_no_megatron() -> None:
    done = doctor("--help")
    assert done.returncode == 0 and "usage: megacp doctor" in done.stdout
