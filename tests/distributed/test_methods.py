"""The methods exchange, all_to_all and hierarchical: every layout, mask and number of heads, in groups of every kind."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask, comm, methods
from megacp.testing import ranks
from tests import oracle
from tests.distributed import cells

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
LAYOUTS = ["zigzag", "contiguous", "per_document", *(["balanced"] if hasattr(Layout, "balanced") else [])]
MASKS = [
    ("causal", 29),
    ("full", 13),
    ("documents", (1, 2, 1, 3, 25)),  # of one token, and shorter than any group
    ("documents", (7, 10, 13), False),
    ("causal", 37, 7),
    ("prefix", 21, 9),
    ("rows", (5, 11), (1, 2, 13)),  # each row of the batch has documents of its own
]
HEADS = [(8, 2), (8, 8), (4, 1), (6, 3)]
HIERARCHIES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 3: [(3, 1)], 4: [(2, 2), (4, 1)], 6: [(2, 3), (3, 2)]}


@dataclass(frozen=True)
class Case:
    method: str
    mask: tuple[Any, ...] = ("causal", 29)
    layout: str = "zigzag"
    heads: tuple[int, int] = (8, 2)
    dims: tuple[int, int] = (6, 4)
    hierarchy: tuple[int, int] | None = None
    has_sinks: bool = False
    seed: int = 0

    @property
    def documents(self) -> list[int]:
        return list(self.mask[1]) if self.mask[0] in ("documents", "rows") else [self.mask[1]]


def our_mask(case: Case) -> Mask:
    kind, size, *more = case.mask
    if kind == "rows":
        return Mask.documents([oracle.offsets(list(lengths)) for lengths in (size, *more)])
    if kind == "documents":
        return Mask.documents(oracle.offsets(list(size)), *more)
    return {"causal": Mask.causal, "full": Mask.full, "prefix": Mask.prefix}[kind](size, *more)


def our_layout(case: Case, cp_size: int) -> Layout:
    if case.layout == "balanced":
        return Layout.balanced(our_mask(case), cp_size)
    if case.layout == "per_document":
        return Layout.per_document(oracle.offsets(case.documents), cp_size)
    return getattr(Layout, case.layout)(sum(case.documents), cp_size)


def inputs(case: Case) -> dict[str, torch.Tensor]:
    make = torch.Generator().manual_seed(case.seed)
    (heads, kv_heads), (d, e), length = case.heads, case.dims, sum(case.documents)
    shapes = {"q": (heads, d), "k": (kv_heads, d), "v": (kv_heads, e), "d_out": (heads, e)}
    made = {
        name: torch.randn(2, length, *s, generator=make, dtype=torch.float64) for name, s in shapes.items()
    }
    return {**made, "sinks": torch.randn(heads, generator=make, dtype=torch.float64)}


@lru_cache(maxsize=1000)
def truth(case: Case) -> oracle.Truth:
    kind, size, *more = case.mask
    if kind == "rows":
        mask = torch.stack([oracle.documents(oracle.offsets(list(x))) for x in (size, *more)])[:, None]
    elif kind == "documents":
        mask = oracle.documents(oracle.offsets(list(size)), *more)
    else:
        mask = {"causal": oracle.causal, "full": oracle.full, "prefix": oracle.prefix}[kind](size, *more)
    x = inputs(case)
    return oracle.attention(
        x["q"], x["k"], x["v"], mask, x["d_out"], sinks=x["sinks"] if case.has_sinks else None
    )


def run_case(case: Case, group: Any = None) -> list[torch.Tensor]:
    """Run one case on this rank of a group; padding slots hold large numbers, to be seen if they leak."""
    layout, rank = our_layout(case, dist.get_world_size(group)), dist.get_rank(group)
    x = inputs(case)
    local = {name: layout.shard(x[name], rank, fill=1e3) for name in ("q", "k", "v", "d_out")}
    q, k, v = (local[name].requires_grad_() for name in "qkv")
    sinks = x["sinks"].requires_grad_() if case.has_sinks else None
    out, lse = megacp.attention(
        q,
        k,
        v,
        mask=our_mask(case),
        layout=layout,
        group=group,
        method=case.method,
        hierarchy=case.hierarchy,
        kernel="reference",
        sinks=sinks,
        return_lse=True,
    )
    out.backward(local["d_out"])
    return [out.detach(), lse, q.grad, k.grad, v.grad, *([sinks.grad] if sinks is not None else [])]


def run_cases(cases: list[Case], members: list[list[int]] | None = None) -> list[list[torch.Tensor]] | None:
    """Run cases on all ranks, or on whichever of several fresh groups this rank is in; no rank warms anything up."""
    group = None
    if members is not None:
        groups = [dist.new_group(ranks) for ranks in members]
        mine = [group for group, ranks in zip(groups, members, strict=True) if dist.get_rank() in ranks]
        if not mine:
            return None
        group = mine[0]
    return [run_case(case, group) for case in cases]


def wrong(case: Case, parts: list[list[torch.Tensor]]) -> dict[str, float]:
    """Put the ranks' parts together, and give what is further than 1e-10 from the truth."""
    layout, true, found = (
        our_layout(case, len(parts)),
        truth(replace(case, method="", layout="", hierarchy=None)),
        {},
    )
    for i, name in enumerate(NAMES[: len(parts[0])]):
        mine = [part[i] for part in parts]
        whole = sum(mine) if name == "dsinks" else layout.unshard(mine, dim=2 if name == "lse" else 1)
        found[name] = oracle.rel(whole, getattr(true, name))
    for rank, part in enumerate(parts):
        pad = layout.positions(rank) < 0
        if any(bool((part[i][:, pad] != 0).any()) for i in (0, 2, 3, 4)):
            found[f"padding of rank {rank}"] = 1.0
        if not case.has_sinks and bool((part[1][:, :, pad] != -torch.inf).any()):
            found[f"lse of the padding of rank {rank}"] = 1.0
    return {name: error for name, error in found.items() if not error <= 1e-10}


def check(cases: list[Case], cp_size: int, results: Any = None) -> None:
    results = results or ranks.run(run_cases, cp_size, cases, timeout=300)
    bad = {case: w for i, case in enumerate(cases) if (w := wrong(case, [r[i] for r in results]))}
    assert not bad, f"{len(bad)} of {len(cases)} over {cp_size} ranks: " + "\n".join(map(str, bad.items()))


def divided(method: str, heads: tuple[int, int], cp_size: int, **fields: Any) -> list[Case]:
    """Cases of a method for these heads: each hierarchy that the heads allow, none if they allow none."""
    if method == "all_to_all" and heads[0] < cp_size:
        return []
    levels = HIERARCHIES[cp_size] if method == "hierarchical" else [None]
    return [
        Case(method, heads=heads, hierarchy=two, **fields) for two in levels if not two or two[0] <= heads[0]
    ]


@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("method", ["exchange", "all_to_all", "hierarchical"])
def test_every_mask_and_number_of_heads_is_exact(method, layout, cp_size):
    cases = [
        case
        for mask, heads in product(MASKS, HEADS)
        for case in divided(method, heads, cp_size, mask=mask, layout=layout)
    ]
    check(cases, cp_size)


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("method", ["exchange", "all_to_all", "hierarchical"])
def test_sinks_follow_their_heads_and_their_gradients_add_up(method, cp_size):
    masks = [MASKS[0], MASKS[2], MASKS[6]]
    cases = [
        case
        for mask, heads, layout in product(masks, HEADS, ["zigzag", "contiguous"])
        for case in divided(method, heads, cp_size, mask=mask, layout=layout, has_sinks=True)
    ]
    check(cases, cp_size)


@pytest.mark.parametrize("hierarchy", [(1, 4), (2, 2), (4, 1)])
def test_every_nesting_of_four_ranks_is_exact(hierarchy):
    check(
        [
            Case("hierarchical", mask=("causal", 32), heads=(4, 4), hierarchy=hierarchy, layout=x)
            for x in LAYOUTS
        ],
        4,
    )


@pytest.mark.parametrize("heads", [(3, 1), (5, 5), (7, 1), (6, 2), (10, 5)])
def test_heads_that_do_not_divide_are_exact(heads):
    cases = [Case(method, heads=heads) for method in ("all_to_all", "hierarchical")]
    check([*cases, replace(cases[1], hierarchy=(3, 1))], 3)
    check([replace(cases[1], hierarchy=(2, 2)), *(cases[:1] if heads[0] >= 4 else [])], 4)


@pytest.mark.parametrize("method", ["exchange", "all_to_all", "hierarchical"])
def test_ranks_without_tokens_take_part_and_give_zeros(method):
    short = [("causal", 5), ("full", 3), ("documents", (1,)), ("documents", (1, 2, 3, 40))]
    check([Case(method, mask=mask, layout=x) for mask in short for x in ("contiguous", "zigzag")], 4)


@pytest.mark.parametrize("method", ["ring", "all_gather", "exchange", "all_to_all", "hierarchical"])
@pytest.mark.parametrize("members", [[[0, 2], [1, 3]], [[2, 3]], [[0, 1], [2, 3]], [[0, 2, 3]]])
def test_the_first_operation_of_a_fresh_group_may_be_attention(method, members):
    cases = [Case(method, mask=mask, seed=seed) for seed, mask in enumerate(MASKS[:3])]
    results = ranks.run(run_cases, 4, cases, members)
    for group in members:
        check(cases, len(group), [results[rank] for rank in group])
    assert all((results[rank] is None) == all(rank not in group for group in members) for rank in range(4))


def _in_other_groups(seeds):
    """Strided groups with data of their own, at the same time."""
    groups = [dist.new_group(list(members)) for members in ((0, 2, 4), (1, 3, 5))]
    mine = dist.get_rank() % 2
    cases = [Case(m, seed=seeds[mine]) for m in ("hierarchical", "exchange", "all_to_all")]
    return [
        run_case(replace(c, hierarchy=(3, 1) if c.method == "hierarchical" else None), groups[mine])
        for c in cases
    ]


def test_nothing_crosses_groups():
    results = ranks.run(_in_other_groups, 6, [3, 4])
    for mine, seed in enumerate([3, 4]):
        cases = [Case(m, seed=seed) for m in ("hierarchical", "exchange", "all_to_all")]
        check(cases, 3, [results[rank] for rank in range(mine, 6, 2)])


# -- what travels ------------------------------------------------------------------------------------------------------


def _counted(cases):
    """Run cases, and count the bytes that each pass received, by watching megacp.comm."""
    received = [0]
    exchange, post, gather, reduce = comm.exchange, comm.post, comm.all_gather, comm.reduce_scatter

    def watched_exchange(group, send, sent, coming, what):
        received[0] += (sum(coming) - coming[group.rank]) * send.element_size()
        return exchange(group, send, sent, coming, what)

    def watched_post(group, sends, receives, what):
        received[0] += sum(x.nbytes for x, _ in receives)
        return post(group, sends, receives, what)

    def watched_gather(group, x, what):
        received[0] += (group.size - 1) * x.nbytes
        return gather(group, x, what)

    def watched_reduce(group, x, what):
        received[0] += (group.size - 1) * x[0].nbytes
        return reduce(group, x, what)

    comm.exchange, comm.post, comm.all_gather, comm.reduce_scatter = (
        watched_exchange,
        watched_post,
        watched_gather,
        watched_reduce,
    )
    try:
        counts = []
        for case, dtype in cases:
            layout, rank = our_layout(case, dist.get_world_size()), dist.get_rank()
            x = {name: layout.shard(x, rank).to(dtype) for name, x in inputs(case).items() if name != "sinks"}
            q, k, v = (x[name].requires_grad_() for name in "qkv")
            what = {
                "mask": our_mask(case),
                "layout": layout,
                "method": case.method,
                "hierarchy": case.hierarchy,
            }
            received[0] = 0
            out = megacp.attention(q, k, v, kernel="reference", **what)
            counts.append([received[0]])
            out.backward(x["d_out"])
            counts[-1].append(received[0] - counts[-1][0])
        return counts
    finally:
        comm.exchange, comm.post, comm.all_gather, comm.reduce_scatter = exchange, post, gather, reduce


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_the_plan_counts_the_bytes_that_really_come_in(cp_size):
    cases = [
        (replace(case, layout=layout), dtype)
        for method in methods.names()
        for heads, mask in [((8, 2), MASKS[0]), ((6, 3), MASKS[2]), ((4, 1), MASKS[4]), ((8, 8), MASKS[1])]
        for case in divided(method, heads, cp_size, mask=mask)
        for layout in ("zigzag", "per_document")
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
    ]
    results = ranks.run(_counted, cp_size, cases, timeout=120)
    for i, (case, dtype) in enumerate(cases):
        plan = megacp.plan(our_layout(case, cp_size), our_mask(case), case.method, case.hierarchy)
        for rank in range(cp_size):
            for is_backward in (False, True):
                counted = plan.bytes_received(
                    rank,
                    heads=case.heads[0],
                    kv_heads=case.heads[1],
                    head_dim=case.dims[0],
                    value_dim=case.dims[1],
                    itemsize=dtype.itemsize,
                    grad_itemsize=8 if dtype == torch.float64 else 4,
                    backward=is_backward,
                )
                assert results[rank][i][is_backward] == 2 * counted, (case, dtype, rank, is_backward)


def _calls(case):
    """Count how often the exchange calls a collective."""
    exchange, calls = comm.exchange, []
    comm.exchange = lambda *args: calls.append(args[-1]) or exchange(*args)
    try:
        run_case(case)
    finally:
        comm.exchange = exchange
    return calls


def test_where_nobody_needs_anything_nothing_is_exchanged():
    case = Case("exchange", mask=("documents", (8, 8)), layout="contiguous")
    assert ranks.run(_calls, 2, case) == [[], []]
    assert [len(calls) for calls in ranks.run(_calls, 2, replace(case, mask=("causal", 16)))] == [3, 3]


def _twice(case):
    return [run_case(case) for _ in range(3)]


@pytest.mark.parametrize("method", ["exchange", "all_to_all", "hierarchical"])
def test_repeated_runs_are_equal_to_the_last_bit(method):
    for runs in ranks.run(
        _twice, 4, Case(method, layout="per_document", mask=("documents", (7, 10, 13)), heads=(8, 2))
    ):
        assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


# -- other dtypes and kernels -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [2, 4])
def test_the_sdpa_kernel_is_exact_to_1e_5_in_float32(cp_size):
    base = cells.Cell(dtype=torch.float32, kernel="sdpa", heads=(4, 2))
    masks = [("causal", 29), ("documents", (1, 2, 3, 40)), ("causal", 24, 5)]
    names = ["exchange", "all_to_all", "hierarchical"]
    cells.check(cells.vary(base, method=names, mask=masks, layout=["zigzag", "contiguous"]), cp_size)
    cells.check(cells.vary(base, method=names, format=["sbhd", "thd"], view=["plain", "transposed"]), cp_size)


def test_bfloat16_is_hardly_worse_than_on_one_rank():
    base = cells.Cell(dtype=torch.bfloat16, dims=(32, 32), heads=(4, 2), mask=("causal", 96))
    names = ["exchange", "all_to_all", "hierarchical"]
    cells.check_beside_one_rank(cells.vary(base, method=names, kernel=["reference", "sdpa"]), 4)


# -- refusals -----------------------------------------------------------------------------------------------------------


def _refused(what, shape=(1, 8, 4, 8), cp_size=4):
    """Ask for something that is refused, and return the error's words."""
    layout = Layout.zigzag(8 * cp_size, cp_size)
    q = torch.zeros(*shape)
    k = q[:, :, :1] if shape[2] < 4 else q
    try:
        megacp.attention(q, k, k, mask=Mask.causal(8 * cp_size), layout=layout, **what)
    except ValueError as error:
        return type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("hierarchy", [(2, 3), (4, 2), (3, 1), (2,), (2, 2, 1), (0, 4), (-2, -2), 4, "2x2"])
def test_a_hierarchy_that_is_not_the_group_is_refused_on_every_rank(hierarchy):
    errors = ranks.run(_refused, 4, {"method": "a2a+p2p", "hierarchy": hierarchy})
    assert len(set(errors)) == 1
    assert errors[0][0] == "ConfigError"
    assert "4 ranks" in errors[0][1] and "(1, 4), (2, 2), (4, 1)" in errors[0][1]


def test_a_hierarchy_for_a_method_of_one_level_is_refused():
    for method in ("ring", "all_to_all", "auto"):
        error = ranks.run(_refused, 4, {"method": method, "hierarchy": (2, 2)})
        assert "has one level" in error[0][1] and len(set(error)) == 1


def test_more_ranks_than_query_heads_are_refused_with_the_sizes_that_would_do():
    errors = ranks.run(_refused, 4, {"method": "all_to_all"}, shape=(1, 8, 3, 8))
    assert len(set(errors)) == 1 and errors[0][0] == "UnsupportedError"
    assert (
        "3 query heads" in errors[0][1]
        and "1 of 4 ranks" in errors[0][1]
        and "at most 3 ranks" in errors[0][1]
    )
    errors = ranks.run(_refused, 4, {"method": "hierarchical", "hierarchy": (4, 1)}, shape=(1, 8, 3, 8))
    assert len(set(errors)) == 1 and "inner size of at most 3" in errors[0][1]


def _which_rows_move(case):
    """Change token 0, and say whether this rank's output changes."""
    layout, rank, x = our_layout(case, dist.get_world_size()), dist.get_rank(), inputs(case)
    outs = []
    for shift in (0.0, 1.0):
        k = x["k"].clone()
        k[:, 0] += shift
        local = [layout.shard(t, rank) for t in (x["q"], k, x["v"])]
        what = {"mask": our_mask(case), "layout": layout, "hierarchy": case.hierarchy}
        outs.append(megacp.attention(*local, method=case.method, kernel="reference", **what))
    return bool((outs[0] != outs[1]).any())


@pytest.mark.parametrize("hierarchy", [None, (2, 2)])
def test_the_hybrid_mode_never_leaves_a_rank_to_itself(hierarchy):
    assert ranks.run(_which_rows_move, 4, Case("a2a+p2p", hierarchy=hierarchy)) == [True] * 4


# -- auto ---------------------------------------------------------------------------------------------------------------


def _auto(cases):
    found = []
    for case in cases:
        x = inputs(case)
        sizes = megacp.plans.Sizes(*case.heads, *case.dims)
        layout = our_layout(case, dist.get_world_size())
        choice = methods.choose(layout, our_mask(case), sizes, x["q"].element_size(), "cpu")
        found.append((choice, run_case(case)))
    return found


def test_auto_is_exact_and_takes_the_same_method_on_every_rank():
    cases = [Case("auto", mask=mask, layout=x) for mask in MASKS for x in ("zigzag", "contiguous")]
    results = ranks.run(_auto, 4, cases)
    check(cases, 4, [[one[1] for one in result] for result in results])
    for i in range(len(cases)):
        assert len({result[i][0] for result in results}) == 1
