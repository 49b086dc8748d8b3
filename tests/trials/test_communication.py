"""Trials about groups, exchanges and hangs. Each is named after the public report it retells."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import METHODS, Cell, check, inputs, our_layout, our_mask, run_cell, vary


def _my_group(groups):
    """Make every group, as torch wants it on all ranks, and return the one that this rank is in, and its index."""
    made = [dist.new_group(members) for members in groups]
    for i, members in enumerate(groups):
        if dist.get_rank() in members:
            return made[i], i
    return None, None


# -- D48: the first exchange in a fresh sub-group (pytorch#74701, nccl#783, ring-attention-pytorch#9) --------------------


def _first_thing_in_a_fresh_group(cell, only_first):
    group, index = _my_group([[0, 1], [2, 3]])
    if only_first and index == 1:
        return None
    return run_cell(cell, group)


@pytest.mark.parametrize("method", METHODS)
def test_d48_the_ring_may_be_the_first_use_of_a_group(method):
    cell = Cell(mask=("causal", 32), method=method)
    results = ranks.run(_first_thing_in_a_fresh_group, 4, cell, False)
    check([cell], 2, results=[[results[0]], [results[1]]])
    check([cell], 2, results=[[results[2]], [results[3]]])


@pytest.mark.parametrize("method", METHODS)
def test_d48_one_group_does_not_need_the_other(method):
    cell = Cell(mask=("causal", 32), method=method)
    results = ranks.run(_first_thing_in_a_fresh_group, 4, cell, True)
    check([cell], 2, results=[[results[0]], [results[1]]])
    assert results[2] is results[3] is None


def _large_messages(method, width):
    """Values of `width` equal columns: what leaves for the next rank is large, what comes back is its first column."""
    group, index = _my_group([[0, 1], [2, 3]])
    if index == 1:
        return None
    cell = Cell(batch=1, heads=(2, 2), dims=(8, 1))
    layout, rank = our_layout(cell, 2), dist.get_rank(group)
    local = {name: layout.shard(x, rank) for name, x in inputs(cell).items()}
    q, k, v = (x.requires_grad_() for x in (local["q"], local["k"], local["v"].repeat(1, 1, 1, width)))
    what = {"mask": our_mask(cell), "layout": layout, "group": group, "method": method, "kernel": "reference"}
    out, lse = megacp.attention(q, k, v, return_lse=True, **what)
    out.backward((local["d_out"] / width).expand_as(out))
    wide = [out.detach(), v.grad * width]
    assert all(torch.allclose(x, x[..., :1], rtol=1e-12, atol=1e-12) for x in wide)
    first, dv = (x[..., :1] for x in wide)
    return [{"out": first, "lse": lse, "dq": q.grad, "dk": k.grad, "dv": dv}]


@pytest.mark.parametrize("method", METHODS)
def test_d48_messages_of_32_megabytes_pass_as_the_first_thing(method):
    width = 2**18  # times 8 tokens of 2 heads of 8 bytes: 32 MiB
    results = ranks.run(_large_messages, 4, method, width)
    check([Cell(batch=1, heads=(2, 2), dims=(8, 1))], 2, results=results[:2])


# -- D50: the rank in the group and in the world mixed up (ART#919, pytorch#187924, vllm#55804) --------------------------


def _every_group_its_own_data(groups, method, form):
    group, index = _my_group(groups)
    if group is None:
        return None
    cell = Cell(mask=("causal", 18), method=method, format=form, seed=10 + index)
    layout = Layout.zigzag(18, dist.get_world_size(group))
    loss = torch.arange(18.0, dtype=torch.float64)[None] + 100 * index
    weights = torch.ones_like(loss)
    local = layout.shard(loss, dist.get_rank(group))
    mean = megacp.masked_mean(local, layout.shard(weights, dist.get_rank(group)), group)
    batch = megacp.shard({"tokens": loss}, layout, group)
    return index, run_cell(cell, group), float(mean), megacp.gather(batch["tokens"], layout, group)


@pytest.mark.parametrize("form", ["bshd", "thd"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("world_size", "groups"),
    [
        (4, [[0, 2], [1, 3]]),
        (4, [[2, 3]]),
        (4, [[3, 1], [0, 2]]),
        (4, [[1], [0, 2, 3]]),
        (6, [[1, 3, 5], [0, 4]]),
    ],
)
def test_d50_groups_of_any_ranks_are_exact_and_nothing_crosses_them(world_size, groups, method, form):
    results = ranks.run(_every_group_its_own_data, world_size, groups, method, form)
    for index, members in enumerate(groups):
        cell = Cell(mask=("causal", 18), method=method, format=form, seed=10 + index)
        ordered = sorted(members)  # torch gives group ranks in the order of world ranks
        assert [results[rank][0] for rank in ordered] == [index] * len(members)
        check([cell], len(members), results=[[results[rank][1]] for rank in ordered])
        for rank in members:
            assert results[rank][2] == 8.5 + 100 * index
            assert results[rank][3].flatten().tolist() == [i + 100.0 * index for i in range(18)]
    outside = set(range(world_size)) - {rank for members in groups for rank in members}
    assert all(results[rank] is None for rank in outside)


def _asks_for_another_s_group():
    group, index = _my_group([[0, 1]])
    try:
        run_cell(Cell(), group if index == 0 else dist.GroupMember.NON_GROUP_MEMBER)
    except megacp.ConfigError as error:
        return str(error)
    except ValueError as error:  # torch itself says so when asked for the group's size
        return str(error)
    return "ran"


def test_d50_a_rank_outside_the_group_is_refused():
    answers = ranks.run(_asks_for_another_s_group, 3)
    assert answers[:2] == ["ran", "ran"] and answers[2] != "ran"


# -- D52: recompute (VeOmni#1076, trl#4314, MagiAttention#125) -----------------------------------------------------------


class _Layer(torch.nn.Module):
    def __init__(self, what, method):
        super().__init__()
        self.what, self.method = what, method
        self.into = torch.nn.Linear(16, 48, dtype=torch.float64)
        self.back = torch.nn.Linear(16, 16, dtype=torch.float64)

    def attend(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, 4, 4)).unbind(2)
        return megacp.attention(q, k, v, method=self.method, kernel="reference", **self.what).flatten(2)

    def forward(self, x, recompute="", reentrant=False):
        if recompute == "attention":
            return x + self.back(checkpoint(self.attend, x, use_reentrant=reentrant))
        return x + self.back(self.attend(x))


def _recomputed(method, recompute, reentrant, thread):
    """Gradients of two layers, with some of it computed again in the backward pass."""
    layout, rank = Layout.zigzag(20, dist.get_world_size()), dist.get_rank()
    what = {"mask": Mask.documents([0, 7, 20]), "layout": layout}
    torch.manual_seed(0)
    layers = [_Layer(what, method) for _ in range(2)]
    x = layout.shard(torch.randn(2, 20, 16, dtype=torch.float64), rank).requires_grad_()
    h = x
    for i, layer in enumerate(layers):
        if recompute == "layer" or (recompute == "first layer" and i == 0):
            h = checkpoint(layer, h, use_reentrant=reentrant)
        else:
            h = layer(h, recompute, reentrant)
    if thread:  # a backward that is started elsewhere than the forward
        other = threading.Thread(target=lambda: h.square().sum().backward())
        other.start()
        other.join()
    else:
        h.square().sum().backward()
    return [x.grad, *(p.grad for layer in layers for p in layer.parameters())]


@pytest.mark.parametrize("method", METHODS)
def test_d52_recomputing_gives_the_same_bits(method):
    plain = ranks.run(_recomputed, 2, method, "", False, False)
    for recompute in ("attention", "layer", "first layer"):
        for reentrant in (False, True):
            again = ranks.run(_recomputed, 2, method, recompute, reentrant, False)
            for rank in (0, 1):
                same = [torch.equal(a, b) for a, b in zip(plain[rank], again[rank], strict=True)]
                assert all(same), (recompute, reentrant)
    elsewhere = ranks.run(_recomputed, 2, method, "layer", False, True)
    assert all(
        torch.equal(a, b) for rank in (0, 1) for a, b in zip(plain[rank], elsewhere[rank], strict=True)
    )


def _eval_between(method):
    """Train, evaluate another length without gradients, train: the second training step equals the first."""
    cell, other = (
        Cell(mask=("causal", 18), method=method),
        Cell(mask=("full", 10), method=method, heads=(6, 3)),
    )
    first = run_cell(cell)
    layout, rank = Layout.zigzag(10, dist.get_world_size()), dist.get_rank()
    with torch.no_grad():
        q, k, v = (layout.shard(inputs(other)[name], rank) for name in "qkv")
        out = megacp.attention(q, k, v, mask=Mask.full(10), layout=layout, method=method, kernel="reference")
    second = run_cell(cell)
    return out.requires_grad, all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("method", METHODS)
def test_d52_evaluation_between_training_steps_changes_nothing(method):
    assert ranks.run(_eval_between, 2, method) == [(False, True)] * 2


# -- D53: the ring beside other traffic (nccl#522, pytorch#175145) -------------------------------------------------------


def _beside_other_traffic(method, loops):
    """Ring on the cp group while an all-reduce on the dp group and a broadcast on the world are in flight."""
    rank = dist.get_rank()
    cp_group, _ = _my_group([[0, 1], [2, 3]])
    dp_group, _ = _my_group([[0, 2], [1, 3]])
    cell = Cell(mask=("causal", 12), method=method, batch=1, heads=(2, 1), seed=rank // 2)
    first, same, sums = None, True, []
    for loop in range(loops):
        if loop == loops // 2 and rank == 1:
            time.sleep(2)
        reduced, sent = torch.full((10_000,), float(rank + loop)), torch.full((10_000,), float(rank * loop))
        works = [
            dist.all_reduce(reduced, group=dp_group, async_op=True),
            dist.broadcast(sent, 0, async_op=True),
        ]
        got = run_cell(cell, cp_group)
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        sums.append((float(reduced[0]), float(reduced[-1]), float(sent[0])))
        first = first or got
        same = same and all(torch.equal(got[name], first[name]) for name in got)
    pair = sum([0, 2] if rank % 2 == 0 else [1, 3])
    right = [(pair + 2.0 * loop, pair + 2.0 * loop, 0.0) for loop in range(loops)]
    return first, same, sums == right


@pytest.mark.parametrize("method", METHODS)
def test_d53_other_collectives_in_flight_change_nothing(method):
    results = ranks.run(_beside_other_traffic, 4, method, 100)
    for replica in (0, 1):
        cell = Cell(mask=("causal", 12), method=method, batch=1, heads=(2, 1), seed=replica)
        check([cell], 2, results=[[results[2 * replica][0]], [results[2 * replica + 1][0]]])
    assert all(same and right for _, same, right in results)


# -- D55: a rank with only padding skips a collective (Automodel#3243) ---------------------------------------------------


def _mostly_padding(method):
    """5 real tokens on 4 ranks: every rank has a gradient of every parameter, and their sum is right."""
    layout, rank = Layout.contiguous(5, dist.get_world_size()), dist.get_rank()
    torch.manual_seed(0)
    layer = _Layer({"mask": Mask.causal(5), "layout": layout}, method)
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    out = layer(layout.shard(x, rank))
    weights = layout.shard(torch.ones(1, 5, dtype=torch.float64), rank)
    megacp.masked_mean(out.square().sum(-1), weights, reduction="sum").backward()
    grads = []
    for p in layer.parameters():
        dist.all_reduce(p.grad)
        grads.append(p.grad)
    return grads


@pytest.mark.parametrize("method", METHODS)
def test_d55_ranks_of_padding_have_gradients_and_take_part_in_their_reduction(method):
    alone = ranks.run(_mostly_padding, 1, method)[0]
    for grads in ranks.run(_mostly_padding, 4, method):
        assert max(oracle.rel(a, b) for a, b in zip(grads, alone, strict=True)) <= 1e-10


# -- D68: tensors that are not contiguous, and what gloo lacks (hyper-parallel#626, PiPPy#490) ---------------------------


@pytest.mark.parametrize("kernel", ["reference", "sdpa"])
@pytest.mark.parametrize("method", METHODS)
def test_d68_views_give_the_result_of_contiguous_copies_in_every_dtype(method, kernel):
    base = Cell(mask=("documents", (5, 3, 8)), method=method, kernel=kernel)
    exact = [torch.float64, torch.float32] if kernel == "reference" else [torch.float32]
    check(vary(base, dtype=exact, view=["transposed", "expanded"], layout=["contiguous", "zigzag"]), 3)
    half = vary(base, dtype=[torch.bfloat16, torch.float16], view=["transposed", "expanded"])
    check(half, 3, tolerance=2e-2)


def _as_is_and_copied(method, dtype):
    """Outputs and gradients for transposed inputs, and for contiguous copies of them."""
    layout, rank = Layout.zigzag(16, dist.get_world_size()), dist.get_rank()
    x = inputs(Cell(dtype=dtype))
    got = []
    for copy in (False, True):
        local = [
            layout.shard(x[name], rank).transpose(1, 2).contiguous().transpose(1, 2)
            for name in ("q", "k", "v", "d_out")
        ]
        assert not any(t.is_contiguous() for t in local)
        local = [t.contiguous() if copy else t for t in local]
        leaves = [t.detach().requires_grad_() for t in local[:3]]
        out = megacp.attention(*leaves, mask=Mask.causal(16), layout=layout, method=method)
        got.append([out.detach(), *torch.autograd.grad(out, leaves, local[3])])
    return [torch.equal(a, b) for a, b in zip(*got, strict=True)]


@pytest.mark.parametrize("method", METHODS)
def test_d68_views_and_copies_agree_to_the_bit(method):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert ranks.run(_as_is_and_copied, 2, method, dtype) == [[True] * 4] * 2, dtype
