"""How exact: errors that do not grow with the group, results that are the same bits run to run, and on how many ranks.

docs/numerics.md has the figures and the derivation of the merge.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch

from megacp.testing import ranks
from tests.distributed.cells import Cell, errors, joined, run_cell, run_cells, truth, vary

METHODS = ["ring", "all_gather", "exchange", "all_to_all", "hierarchical"]
KERNELS = ["reference", "sdpa"]
HALF = Cell(mask=("causal", 1024), heads=(8, 4), dims=(32, 32), batch=1, dtype=torch.bfloat16)


@cache
def _truth(dtype):
    return truth(Cell(**{**vars(HALF), "dtype": dtype}))


def growth(dtype: torch.dtype, kernel: str, sizes: list[int]) -> dict[tuple[str, int], dict[str, float]]:
    """Give for each method and size of the group the error of each result, as a share of that on one rank."""
    cells = vary(Cell(**{**vars(HALF), "dtype": dtype, "kernel": kernel}), method=METHODS)
    true, found = _truth(dtype), {}
    one = errors(cells[0], joined(cells[0], [ranks.run(run_cells, 1, cells[:1])[0][0]]), true)
    for size in sizes:
        results = ranks.run(run_cells, size, cells, timeout=200)
        for i, cell in enumerate(cells):
            many = errors(cell, joined(cell, [result[i] for result in results]), true)
            found[cell.method, size] = {name: many[name] / one[name] for name in one}
    return found


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_error_does_not_grow_with_the_number_of_ranks(dtype, kernel):
    found = growth(dtype, kernel, [2, 4, 8])
    worst = {case: max(ratios[name] for name in ("out", "dq", "dk", "dv")) for case, ratios in found.items()}
    print(dtype, kernel, {case: f"{ratio:.3f}" for case, ratio in worst.items()})
    assert max(worst.values()) <= 1.15, worst


# -- the same bits -----------------------------------------------------------------------------------------------------


def _again(cells):
    """Say for each cell whether three runs give the same bits, the last with PyTorch's deterministic mode."""
    same = []
    for cell in cells:
        runs = [run_cell(cell), run_cell(cell)]
        torch.use_deterministic_algorithms(True)
        try:
            runs.append(run_cell(cell))
        finally:
            torch.use_deterministic_algorithms(False)
        same.append(all(torch.equal(run[name], runs[0][name]) for run in runs[1:] for name in run))
    return same


@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_every_method_gives_the_same_bits_run_to_run_backward_included(cp_size):
    masks = [("causal", 61), ("documents", (7, 10, 13, 31))]
    base = Cell(heads=(8, 2), layout="zigzag")
    cells = vary(base, method=METHODS, kernel=KERNELS, mask=masks, dtype=[torch.float32, torch.bfloat16])
    for same in ranks.run(_again, cp_size, cells, timeout=200):
        assert all(same), [cell for cell, good in zip(cells, same, strict=True) if not good]


def _forward_is_equal(cell: Cell, sizes: list[int]) -> bool:
    """Say whether out and lse of the whole sequence are the same bits on each of these numbers of ranks."""
    wholes = [joined(cell, [r[0] for r in ranks.run(run_cells, size, [cell], timeout=200)]) for size in sizes]
    return all(torch.equal(whole[name], wholes[0][name]) for whole in wholes[1:] for name in ("out", "lse"))


@pytest.mark.parametrize("kernel", KERNELS)
def test_all_to_all_has_the_same_bits_on_any_number_of_ranks(kernel):
    masks = [("causal", 509), ("documents", (300, 131, 78)), ("causal", 512, 100)]
    for dtype in (torch.float32, torch.bfloat16):
        for cell in vary(
            Cell(**{**vars(HALF), "dtype": dtype, "kernel": kernel, "method": "all_to_all"}), mask=masks
        ):
            assert _forward_is_equal(cell, [1, 2, 4]), cell


@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
def test_all_gather_has_the_same_bits_where_chunks_are_whole_tiles_of_the_reference_kernel(layout):
    """Tiles of 256 queries: then every row is computed beside the same neighbours, wherever it is."""
    sizes = [1, 2, 4] if layout == "contiguous" else [1, 2]
    base = Cell(method="all_gather", layout=layout, heads=(2, 1), dims=(32, 32), batch=1)
    for cell in vary(
        base, mask=[("causal", 1024), ("full", 1024), ("causal", 1024, 100)], dtype=[torch.float32]
    ):
        assert _forward_is_equal(cell, sizes), cell


def test_a_ring_has_not():
    """It adds the owners' shares in another order on each rank; the difference is in the last bit."""
    cell = Cell(**{**vars(HALF), "dtype": torch.float32, "kernel": "reference"})
    assert not _forward_is_equal(cell, [1, 2])
