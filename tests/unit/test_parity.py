"""assert_cp_parity on scripts that print what a Megatron prints: it finds what differs, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from megacp.testing import parity

LINE = (
    " iteration 1/2 | lm loss: 4.845519E+00 | loss scale: 1.0 | grad norm: {} | number of nan iterations: 0 |"
)


def script(folder: Path, split: str) -> str:
    file = folder / "train.py"
    text = f'import sys\nsize = "--context-parallel-size" in sys.argv\nprint({LINE!r}.format({split!r} if size else "1.786"))\n'
    file.write_text(text.replace("print(", "import os\nif os.environ['RANK'] == '0':\n    print("))
    return str(file)


def test_the_same_numbers_pass(tmp_path: Path) -> None:
    parity.assert_cp_parity([script(tmp_path, "1.786"), "--tensor-model-parallel-size", "1"], cp=2)


def test_a_gradient_norm_that_differs_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"a grad norm, is 1\.786 .* and 0\.893 at size 2"):
        parity.assert_cp_parity(script(tmp_path, "0.893"), cp=2)


def test_a_training_that_fails_shows_its_last_lines(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("raise RuntimeError('no such data')")
    with pytest.raises(AssertionError, match="no such data"):
        parity.assert_cp_parity(str(file), cp=2)


def test_a_size_in_the_command_is_refused() -> None:
    with pytest.raises(ValueError, match="leave --context-parallel-size out"):
        parity.assert_cp_parity("train.py --context-parallel-size 2", cp=2)


def test_printed_numbers_are_losses_and_norms_and_no_scales() -> None:
    assert parity.printed_numbers(LINE.format("1.009")) == [("loss", "4.845519E+00"), ("grad norm", "1.009")]
