"""tools/curves.py: how far two runs are apart, and the picture of it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "curves.py"
spec = importlib.util.spec_from_file_location("curves", TOOL)
assert spec and spec.loader
curves = importlib.util.module_from_spec(spec)
spec.loader.exec_module(curves)


def run(norm: float, loss: float) -> list[dict[str, float]]:
    """Sixty steps; the tenth has another norm, the last another loss."""
    steps = [{"iteration": i + 1, "grad_norm": 2.0, "loss": 4.0} for i in range(60)]
    steps[9]["grad_norm"] = norm
    steps[-1]["loss"] = loss
    return steps


def test_runs_are_apart_by_the_largest_share_of_any_step() -> None:
    gap = curves.apart(run(2.0, 4.0), run(2.02, 4.4))
    assert gap["grad_norm"] == pytest.approx(0.01)
    assert gap["loss"] == pytest.approx(0.1) and gap["mean_loss"] == pytest.approx(0.1 / 60)


def test_norms_are_held_for_the_first_fifty_steps_only() -> None:
    other = run(2.0, 4.0)
    other[55]["grad_norm"] = 3.0
    assert curves.apart(run(2.0, 4.0), other)["grad_norm"] == 0


def test_runs_of_other_lengths_are_no_pair() -> None:
    with pytest.raises(ValueError, match="shorter"):
        curves.apart(run(2.0, 4.0), run(2.0, 4.0)[:-1])


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    curves.draw({"a": run(2.0, 4.0), "b": run(2.0, 4.4)}, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
