"""A seeded part of the matrix on every change: each triple of values of different axes. All of it: python tools/matrix.py --all.

MEGACP_MATRIX_SEED draws another part.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections import Counter
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch

import megacp
from megacp import methods
from megacp.testing import ranks
from tests import matrix
from tests.matrix import Cell

SAMPLE = cache(matrix.covering)
TOOL = Path(__file__).resolve().parents[2] / "tools" / "matrix.py"


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("cp_size", matrix.SIZES)
def test_every_cell_of_the_sample_is_exact_or_refused_by_name(cp_size):
    seed = int(os.environ.get("MEGACP_MATRIX_SEED", "0"))
    cells = [cell for cell in SAMPLE(3, seed) if cell.cp_size == cp_size]
    results = ranks.run(matrix.run, cp_size, cells, timeout=300)
    found = {c: matrix.judge(c, [result[i] for result in results]) for i, c in enumerate(cells)}
    wrong = [f"{cell.name}: {v.detail}" for cell, v in found.items() if v.status == "wrong"]
    assert not wrong, f"{len(wrong)} of {len(cells)} cells, seed {seed}, are wrong:\n" + "\n".join(wrong)
    assert {v.status for v in found.values()} == {"exact", "refused"}


def test_the_sample_has_every_triple_of_values_and_the_product_every_cell():
    assert set(matrix.METHODS) == {m for m in methods.names() if m in matrix.METHODS}
    sample, total = SAMPLE(3, 0), sum(1 for _ in matrix.everything())
    assert total == math.prod(map(len, matrix.AXES)) == len(set(matrix.everything()))
    assert len(sample) < total / 100 and matrix.covering(3, 0) == sample != SAMPLE(3, 1)
    seen = Counter((c.method, c.option, c.kernel) for c in sample)
    assert len(seen) == len(matrix.METHODS) * len(matrix.OPTIONS) * len(matrix.KERNELS)
    for field, axis in zip(Cell._fields, matrix.AXES, strict=True):
        assert {getattr(c, field) for c in sample} == set(axis)


# -- the matrix can fail -----------------------------------------------------------------------------------------------

_attention = megacp.attention


def _changed(**change):
    """Attention with some arguments replaced by what a function makes of them."""

    def attend(*tensors, **settings):
        known = {
            name: make(settings[name]) for name, make in change.items() if settings.get(name) is not None
        }
        return _attention(*tensors, **{**settings, **known})

    return attend


def _sinks_half(*tensors, sinks=None, **settings):
    if sinks is not None:
        sinks = sinks.view_as(sinks)
        sinks.register_hook(lambda grad: grad / 2)
    return _attention(*tensors, sinks=sinks, **settings)


def _refusing(*tensors, **settings):
    raise megacp.UnsupportedError("megacp: not today.")


def _reading_padding(q, k, v, *, layout, **settings):
    out, *more = _attention(q, k, v, layout=layout, **settings)
    return (out + 1e-30 * q.sum(), *more)


FAULTS: dict[str, tuple[Any, str]] = {
    "the gradient of the sinks is halved": (_sinks_half, "sinks"),
    "other pairs are dropped": (_changed(dropout_seed=lambda seed: seed + 1), "dropout"),
    "the penalty on distance is another": (_changed(alibi_slopes=lambda slopes: slopes * 1.001), "ALiBi"),
    "the softcap is not met": (_changed(softcap=lambda cap: None), "softcap"),
    "the scale is not met": (_changed(scale=lambda scale: None), "scale"),
    "padding is read": (_reading_padding, "return lse"),
    "what can be done is refused": (_refusing, "plain"),
}


def _faulty(fault, cells):
    with mock.patch.object(megacp, "attention", FAULTS[fault][0]):
        return matrix.run(cells)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_makes_cells_wrong(fault):
    cells = [
        Cell(method, "per_document", "documents", FAULTS[fault][1], dtype, "reference", 2)
        for method in matrix.METHODS
        for dtype in ("float64", "float32")
    ]
    results = ranks.run(_faulty, 2, fault, cells)
    for i, cell in enumerate(cells):
        assert matrix.judge(cell, [result[i] for result in results]).status == "wrong", cell.name
    sound = ranks.run(matrix.run, 2, cells)
    for i, cell in enumerate(cells):
        assert matrix.judge(cell, [result[i] for result in sound]).status == "exact", cell.name


def test_a_refusal_must_come_from_every_rank_in_the_right_words():
    cell = Cell("ring", "zigzag", "causal", "softcap", "float64", "sdpa", 2)
    right = ("UnsupportedError", "megacp: no kernel: sdpa has no softcap")
    done = matrix.attend(cell._replace(kernel="reference", cp_size=1))
    assert matrix.judge(cell, [right, right]).status == "refused"
    for answers in ([right, done], [done, done], [right, ("UnsupportedError", "sdpa: softcap!")]):
        assert matrix.judge(cell, answers).status == "wrong"
    for other in (("ConfigError", right[1]), ("UnsupportedError", "megacp: no.")):
        assert matrix.judge(cell, [other, other]).status == "wrong"


# -- the tool ----------------------------------------------------------------------------------------------------------


def _tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tool_goes_on_where_it_stopped_and_writes_the_page(tmp_path):
    tool, results, page = _tool(), tmp_path / "matrix.jsonl", tmp_path / "matrix.md"
    few = [
        "layout=zigzag",
        "mask=causal,dense",
        "option=MQA,softcap",
        "dtype=float64,bfloat16",
        "cp_size=1,2",
    ]
    arguments = ["--results", str(results), "--page", str(page), "--only", *few]
    assert tool.main([*arguments, "--only", "method=ring"]) == 0
    assert tool.main([*arguments, "--portion", "20"]) == 0
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    cells = [tuple(verdict[:7]) for line in lines for verdict in line["verdicts"]]
    assert len(cells) == len(set(cells)) == 5 * 2 * 2 * 2 * 2 * 2
    before = results.read_text()
    assert tool.main(arguments) == 0 and results.read_text() == before
    text = page.read_text()
    assert "80 of" in text or "160 of" in text
    assert "refused" in text and "ring" in text and torch.__version__ in text
