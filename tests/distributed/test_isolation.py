"""Documents kept apart are apart to the last bit: another token in one of them moves nothing of any other."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask, methods
from megacp.testing import ranks

LENGTHS = (5, 1, 40, 3, 22, 9)  # the changed token lies in the third, which is cut between ranks
CU = [0, *itertools.accumulate(LENGTHS)]
CHANGED = CU[2] + 17
LAYOUTS = {
    "contiguous": lambda mask, cp: Layout.contiguous(CU[-1], cp),
    "zigzag": lambda mask, cp: Layout.zigzag(CU[-1], cp),
    "per_document": lambda mask, cp: Layout.per_document(CU, cp),
    "balanced": Layout.balanced,
}


def _run_all(kernel: str, windows: list[int | None]) -> dict[tuple[Any, ...], tuple[list[str], bool]]:
    """Attend twice, with one token's query, key, value and upstream gradient replaced; say which outputs of other documents moved."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    found = {}
    for method, layout_name, window in itertools.product(methods.names(), LAYOUTS, windows):
        mask = Mask.documents(CU, window=window)
        layout = LAYOUTS[layout_name](mask, cp)
        at = layout.positions(rank)
        others = (at >= 0) & ((at < CU[2]) | (at >= CU[3]))
        results = []
        for is_changed in (False, True):
            make = torch.Generator().manual_seed(0)
            whole = [torch.randn(1, CU[-1], heads, 8, generator=make) for heads in (4, 2, 2, 4)]
            for x in whole if is_changed else []:
                x[:, CHANGED] = 100 * torch.randn(x.shape[2:], generator=make)
            q, k, v, d_out = (layout.shard(x, rank) for x in whole)
            for x in (q, k, v):
                x.requires_grad_()
            what = {"mask": mask, "layout": layout, "method": method, "kernel": kernel, "return_lse": True}
            out, lse = megacp.attention(q, k, v, **what)
            out.backward(d_out)
            results.append([out.detach(), lse.transpose(1, 2), q.grad, k.grad, v.grad])
        moved = [
            name
            for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), *results, strict=True)
            if not torch.equal(a[:, others], b[:, others])
        ]
        found[method, layout_name, window] = moved, not torch.equal(results[0][0], results[1][0])
    return found


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("cp", [2, 3, 4])
def test_a_token_of_one_document_moves_no_bit_of_another(cp: int, kernel: str) -> None:
    answers = ranks.run(_run_all, cp, kernel, [None, 7], timeout=200)
    assert len(answers[0]) == 5 * 4 * 2
    for case in answers[0]:
        moved = {name for answer in answers for name in answer[case][0]}
        assert not moved, (case, moved)
        assert any(answer[case][1] for answer in answers), f"{case}: the change was not seen at all"
