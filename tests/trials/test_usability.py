"""Trials about the tests themselves: D77, parity tests that cannot fail (TransformerEngine#3528, #3551; Automodel#3356).

Each fault is put into the attention that the ranks call; the comparison that all distributed tests use must notice it.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask
from megacp.groups import Group
from megacp.testing import ranks
from tests.distributed.cells import METHODS, Cell, check, run_cells, vary

_attention = megacp.attention


def _zeros(q, k, v, **settings):
    out, lse = _attention(q, k, v, **settings)
    return out * 0, lse


def _one_percent(name):
    def attend(q, k, v, **settings):
        tensors = {"q": q, "k": k, "v": v}
        tensors[name] = tensors[name].view_as(tensors[name])
        tensors[name].register_hook(lambda grad: grad * 1.01)
        return _attention(*tensors.values(), **settings)

    return attend


def _without_documents(q, k, v, mask, **settings):
    return _attention(q, k, v, mask=Mask.causal(mask.seq_len), **settings)


def _alone(q, k, v, mask, layout, group, **settings):
    """Each rank attends to what it holds, as if it were the only one."""
    length = layout.local_len
    return _attention(
        q,
        k,
        v,
        mask=Mask.causal(length),
        layout=Layout.contiguous(length, 1),
        group=Group(None, 0, 1, (0,)),
        **settings,
    )


def _wrong_order(q, k, v, layout, **settings):
    """The split is zigzag, but attention takes it for contiguous."""
    return _attention(q, k, v, layout=Layout.contiguous(layout.seq_len, layout.cp_size), **settings)


def _lse_in_other_units(q, k, v, **settings):
    out, lse = _attention(q, k, v, **settings)
    return out, lse / torch.tensor(2.0).log()


FAULTS = {
    "attention is zero": _zeros,
    "dq is off by 1 %": _one_percent("q"),
    "dk is off by 1 %": _one_percent("k"),
    "dv is off by 1 %": _one_percent("v"),
    "documents are ignored": _without_documents,
    "the group is forgotten": _alone,
    "the order is another": _wrong_order,
    "the lse is in base 2": _lse_in_other_units,
}


def _run_with(fault, cells):
    with mock.patch.object(megacp, "attention", FAULTS[fault]):
        return run_cells(cells)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", METHODS)
def test_d77_every_fault_is_noticed(method, fault):
    cells = vary(Cell(mask=("documents", (5, 3, 8)), method=method), dtype=[torch.float64, torch.float32])
    for cell in cells:
        results = ranks.run(_run_with, 2, fault, [cell])
        with pytest.raises(AssertionError, match="1 of 1 cells over 2 ranks are wrong"):
            check([cell], 2, results=results)
        check([cell], 2)  # and without it nothing is


def _gradient_twice(cell):
    """What a rank has after a second reduction of the keys' gradient over the group."""
    (got,) = run_cells([cell])
    dist.all_reduce(got["dk"])
    return [got]


def test_d77_a_gradient_that_is_summed_once_too_often_is_noticed():
    cell = Cell()
    with pytest.raises(AssertionError, match="dk"):
        check([cell], 2, results=ranks.run(_gradient_twice, 2, cell))


def test_d77_each_fault_of_tools_mutate_has_its_one_place():
    root = Path(__file__).resolve().parents[2]
    spec = importlib.util.spec_from_file_location("mutate", root / "tools" / "mutate.py")
    mutate = importlib.util.module_from_spec(spec)
    with mock.patch.dict(sys.modules, mutate=mutate):
        spec.loader.exec_module(mutate)
    places = {fault.name: (root / fault.file).read_text().count(fault.old) for fault in mutate.FAULTS}
    assert len(places) == len(mutate.FAULTS) and set(places.values()) == {1}, places
