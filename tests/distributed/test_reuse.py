"""One attention used again: recomputed, evaluated between steps, beside others, compiled, in another thread, beside other traffic."""

from __future__ import annotations

import contextlib
import threading
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

import megacp
from megacp import Layout, Mask, comm
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import Cell, check, inputs, our_layout, our_mask, run_cell

METHODS = ["ring", "all_gather", "exchange", "all_to_all", "hierarchical"]
LENGTH, WIDTH, HEADS = 20, 32, 4


class Layer(torch.nn.Module):
    """Attention with a norm on queries and keys between two matrices, and a way round it."""

    def __init__(
        self, method: str, cp_size: int, length: int = LENGTH, heads: int = HEADS, dropout: float = 0.0
    ):
        super().__init__()
        self.heads, self.what = heads, {"method": method, "kernel": "reference", "dropout_p": dropout}
        self.what |= {"mask": Mask.documents([0, 7, length]), "layout": Layout.zigzag(length, cp_size)}
        self.into = torch.nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.back = torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norms = torch.nn.ParameterList(
            torch.nn.Parameter(1 + 0.1 * torch.randn(WIDTH // heads, dtype=torch.float64)) for _ in range(2)
        )

    def attend(self, x):
        q, k, v = self.into(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        q, k = (
            torch.nn.functional.rms_norm(t, t.shape[-1:], w) for t, w in zip((q, k), self.norms, strict=True)
        )
        return megacp.attention(q, k, v, **self.what).flatten(2)

    def forward(self, x, recompute="", reentrant=False):
        if recompute == "attention":
            return x + self.back(checkpoint(self.attend, x, use_reentrant=reentrant))
        return x + self.back(self.attend(x))


def make(method, count=2, length=LENGTH, **options):
    """Layers, and this rank's part of an input that needs a gradient."""
    torch.manual_seed(0)
    cp_size, rank = dist.get_world_size(), dist.get_rank()
    layers = [Layer(method, cp_size, length, **options) for _ in range(count)]
    x = Layout.zigzag(length, cp_size).shard(torch.randn(2, length, WIDTH, dtype=torch.float64), rank)
    return layers, x.requires_grad_()


def step(layers, x, call=None):
    """Run the layers forward and backward; give the output and all gradients."""
    for leaf in (x, *(p for layer in layers for p in layer.parameters())):
        leaf.grad = None
    h = x
    for layer in layers:
        h = layer(h) if call is None else call(layer, h)
    h.square().sum().backward()
    return [h.detach(), x.grad, *(p.grad for layer in layers for p in layer.parameters())]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


# -- recompute ---------------------------------------------------------------------------------------------------------


def _recomputed(method, dropout):
    layers, x = make(method, dropout=dropout)
    torch.manual_seed(1)
    plain, same = step(layers, x), {}
    for reentrant in (False, True):
        ways = {
            "attention": lambda layer, h, how=reentrant: layer(h, "attention", how),
            "layer": lambda layer, h, how=reentrant: checkpoint(layer, h, use_reentrant=how),
            "first layer": lambda layer, h, how=reentrant: (
                checkpoint(layer, h, use_reentrant=how) if layer is layers[0] else layer(h)
            ),
        }
        for name, call in ways.items():
            torch.manual_seed(1)
            same[name, reentrant] = equal(step(layers, x, call), plain)
    return same


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("method", METHODS)
def test_recomputing_gives_the_same_bits(method, dropout):
    for same in ranks.run(_recomputed, 2, method, dropout):
        assert len(same) == 6 and all(same.values()), same


# -- other threads, and no gradients -----------------------------------------------------------------------------------


def _elsewhere(method):
    """Backward in a thread that has seen no forward, and forward in one that ends before backward."""
    layers, x = make(method)
    plain, found = step(layers, x), []

    def in_a_thread(work):
        other = threading.Thread(target=lambda: found.append(work()))
        other.start()
        other.join()
        return found[-1]

    out = layers[1](layers[0](x))
    leaves = [x, *(p for layer in layers for p in layer.parameters())]
    backward = in_a_thread(lambda: torch.autograd.grad(out.square().sum(), leaves))
    again = in_a_thread(lambda: layers[1](layers[0](x)))
    forward = torch.autograd.grad(again.square().sum(), leaves)
    with torch.no_grad():  # backward does not ask for the mode it is called in
        inside = torch.autograd.grad(loss_of(layers, x), leaves)
    return [equal(grads, plain[1:]) for grads in (backward, forward, inside)]


def loss_of(layers, x):
    with torch.enable_grad():
        return layers[1](layers[0](x)).square().sum()


@pytest.mark.parametrize("method", METHODS)
def test_forward_and_backward_may_run_in_different_threads_and_modes(method):
    assert ranks.run(_elsewhere, 3, method) == [[True] * 3] * 3


def _eval_between(method):
    layers, x = make(method)
    first, outs = step(layers, x), []
    others, y = make(method, length=26)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            outs.append(layers[1](layers[0](x)))
            others[0](y)  # another shape
    second = step(layers, x)
    return [
        not any(out.requires_grad for out in outs),
        *(torch.equal(o, first[0]) for o in outs),
        equal(first, second),
    ]


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_between_training_steps_changes_nothing_and_equals_them(method):
    assert ranks.run(_eval_between, 2, method) == [[True] * 4] * 2


def _twice(method):
    """Backward twice through one graph, and the gradient of a gradient."""
    layers, x = make(method, count=1)
    once, out = step(layers, x), layers[0](x)
    x.grad = None
    loss = out.square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    doubled = torch.equal(x.grad, 2 * once[1])
    (grad,) = torch.autograd.grad(layers[0](x).square().sum(), x, create_graph=True)
    try:
        grad.sum().backward()
    except RuntimeError as error:
        return doubled, str(error)
    return doubled, "nothing was raised"


@pytest.mark.parametrize("method", METHODS)
def test_a_graph_may_be_kept_for_two_backwards_but_has_no_second_derivative(method):
    for doubled, text in ranks.run(_twice, 2, method):
        assert doubled and "once_differentiable" in text


# -- several in one process (D19) --------------------------------------------------------------------------------------

A = Cell(mask=("causal", 32), heads=(8, 2))
B = Cell(mask=("documents", (20, 28)), heads=(12, 4), dims=(16, 8), batch=1)


def _by_turns():
    """A, B, A for every two methods, A on all ranks and B on all and on half of them."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, same = pairs[dist.get_rank() // 2], []
    for first in METHODS:
        for second in METHODS:
            a, b = replace(A, method=first), replace(B, method=second)
            before = run_cell(a)
            run_cell(b), run_cell(b, pair)
            after = run_cell(a)
            same.append((first, second, all(torch.equal(before[n], after[n]) for n in before)))
    return (
        same,
        [run_cell(replace(A, method=m)) for m in METHODS],
        [run_cell(replace(B, method=m), pair) for m in METHODS],
    )


def test_d19_models_with_other_shapes_groups_and_methods_leave_nothing_for_each_other():
    results = ranks.run(_by_turns, 4, timeout=120)
    for same, _, _ in results:
        assert all(good for _, _, good in same), same
    check([replace(A, method=m) for m in METHODS], 4, results=[a for _, a, _ in results])
    for pair in (results[:2], results[2:]):
        check([replace(B, method=m) for m in METHODS], 2, results=[b for _, _, b in pair])


def _both_in_one_graph():
    """Two modules of different methods and shapes in one graph, one backward for both."""
    a, x = make("ring", count=1)
    b, y = make("all_to_all", count=1, length=26, heads=8)
    alone = [step(a, x), step(b, y)]
    for t in (x, y, *a[0].parameters(), *b[0].parameters()):
        t.grad = None
    (a[0](x).square().sum() + b[0](y).square().sum()).backward()
    got = [[t.grad for t in (z, *m[0].parameters())] for z, m in ((x, a), (y, b))]
    return [equal(g, one[1:]) for g, one in zip(got, alone, strict=True)]


def test_two_modules_may_share_one_backward_pass():
    assert ranks.run(_both_in_one_graph, 2) == [[True, True]] * 2


# -- torch.compile -----------------------------------------------------------------------------------------------------


def _compiled(method):
    layers, x = make(method, count=1)
    plain = step(layers, x)
    torch._dynamo.reset()
    compiled = torch.compile(layers[0], backend="aot_eager")
    found = [step(layers, x, lambda _, h: compiled(h)) for _ in range(2)]
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    torch._dynamo.reset()
    try:
        torch.compile(layers[0], backend="aot_eager", fullgraph=True)(x)
    except Exception as error:  # what it raises has another name in each version
        return [max(map(oracle.rel, got, plain)) for got in found], breaks, type(error).__module__
    return [max(map(oracle.rel, got, plain)) for got in found], breaks, ""


@pytest.mark.parametrize("method", METHODS)
def test_compiling_around_attention_breaks_the_graph_and_not_the_result(method):
    for errors, breaks, raised in ranks.run(_compiled, 2, method, timeout=200):
        assert max(errors) <= 1e-13
        assert breaks > 0 and raised.startswith("torch._dynamo")  # who wants one graph is told


def _imports_a_compiler():
    import sys

    x = torch.zeros(1, 4, 2, 8)
    before = "torch._dynamo" in sys.modules
    megacp.attention(x, x, x, mask=Mask.causal(8), layout=Layout.zigzag(8, 2))
    return before or "torch._dynamo" not in sys.modules


def test_attention_alone_does_not_import_the_compiler():
    with ranks.Pool(2) as pool:
        assert pool.run(_imports_a_compiler, timeout=60) == [True, True]


# -- D29: tokens that every rank holds ---------------------------------------------------------------------------------

SHARDED, SHARED = 24, 8


def _with_shared_tokens(method):
    """8 tokens, a prefix, present on every rank: as keys of every rank; then placed by the layout, as it must be."""
    rank, cp_size = dist.get_rank(), dist.get_world_size()
    x = inputs(Cell(mask=("full", SHARED + SHARDED)))
    short = Layout.contiguous(SHARDED, cp_size)
    q, k, v = (torch.cat([x[n][:, :SHARED], short.shard(x[n][:, SHARED:], rank)], 1) for n in "qkv")
    what = {"mask": Mask.full(SHARDED), "layout": short, "method": method, "kernel": "reference"}
    refused = []
    for queries in (q[:, SHARED:], q):
        try:
            megacp.attention(queries, k, v, **what)
        except megacp.ConfigError as error:
            refused.append(str(error))
    layout = Layout.zigzag(SHARED + SHARDED, cp_size)
    shared = [x[n][:, :SHARED].clone().requires_grad_() for n in "qkv"]  # replicated leaves
    rest = [x[n][:, SHARED:].clone().requires_grad_() for n in "qkv"]
    local = [layout.shard(torch.cat(pair, 1), rank) for pair in zip(shared, rest, strict=True)]
    out = megacp.attention(*local, **{**what, "mask": Mask.full(SHARED + SHARDED), "layout": layout})
    out.backward(layout.shard(x["d_out"], rank))
    return refused, out.detach(), [torch.cat([a.grad, b.grad], 1) for a, b in zip(shared, rest, strict=True)]


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_d29_tokens_on_every_rank_are_refused_as_keys_and_exact_as_part_of_the_sequence(method, cp_size):
    results = ranks.run(_with_shared_tokens, cp_size, method)
    first = results[0][0]
    assert len(first) == 2 and all(refused == first for refused, _, _ in results)
    assert "same tokens" in first[0] and "local sequence has" in first[1]
    x = inputs(Cell(mask=("full", SHARED + SHARDED)))
    true = oracle.attention(x["q"], x["k"], x["v"], oracle.full(SHARED + SHARDED), x["d_out"])
    out = Layout.zigzag(SHARED + SHARDED, cp_size).unshard([out for _, out, _ in results])
    assert oracle.rel(out, true.out) <= 1e-10
    for i, right in enumerate((true.dq, true.dk, true.dv)):  # each rank has a share, as of any parameter
        assert oracle.rel(sum(grads[i] for _, _, grads in results), right) <= 1e-10


# -- D30: with and without overlap -------------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_overlaps():
    """Wait for every message as soon as it is posted."""
    post, exchange = comm.post, comm.exchange

    def at_once(*args, **kwargs):
        posted = post(*args, **kwargs)
        posted.wait()
        return posted

    def exchanged_at_once(*args, **kwargs):
        out, posted = exchange(*args, **kwargs)
        posted.wait()
        return out, posted

    with mock.patch.object(comm, "post", at_once), mock.patch.object(comm, "exchange", exchanged_at_once):
        yield


def _overlapped(method):
    layers, x = make(method, count=1, length=48, heads=8)
    with nothing_overlaps():
        waited = step(layers, x)
    return waited, all(equal(step(layers, x), waited) for _ in range(20))


@pytest.mark.parametrize("cp_size", [2, 3])
@pytest.mark.parametrize("method", METHODS)
def test_d30_overlap_changes_no_bit_also_of_the_norms_before_attention(method, cp_size):
    results = ranks.run(_overlapped, cp_size, method)
    assert all(same for _, same in results)
    alone, _ = ranks.run(_overlapped, 1, "ring")[0]
    layout = Layout.zigzag(48, cp_size)
    for i, right in enumerate(alone):
        mine = [result[0][i] for result in results]
        got = layout.unshard(mine) if i < 2 else sum(mine)  # parameters: each rank has its tokens' share
        assert oracle.rel(got, right) <= 1e-10, i


# -- D53: beside other traffic -----------------------------------------------------------------------------------------


def _beside_other_traffic(method, loops):
    rank = dist.get_rank()
    groups = [dist.new_group(members) for members in ([0, 1], [2, 3], [0, 2], [1, 3])]
    cp_group, dp_group = groups[rank // 2], groups[2 + rank % 2]
    cell = Cell(mask=("causal", 12), method=method, batch=1, heads=(2, 1), seed=rank // 2)
    layout, x = our_layout(cell, 2), inputs(cell)
    local = {name: layout.shard(t, dist.get_rank(cp_group)) for name, t in x.items()}
    first, same, right = None, True, True
    for loop in range(loops):
        if loop == loops // 2 and rank == 1:
            time.sleep(2)
        reduced, sent = torch.full((10_000,), float(rank + loop)), torch.full((10_000,), float(rank + loop))
        works = [
            dist.all_reduce(reduced, group=dp_group, async_op=True),
            dist.broadcast(sent, 3, async_op=True),
        ]
        q, k, v = (local[name].clone().requires_grad_() for name in "qkv")
        out = megacp.attention(
            q, k, v, mask=our_mask(cell), layout=layout, group=cp_group, method=method, kernel="reference"
        )
        works += [
            dist.all_reduce(torch.ones(5000), group=dp_group, async_op=True)
        ]  # between forward and backward
        out.backward(local["d_out"])
        for work in works if rank % 2 else works[::-1]:
            work.wait()
        got = [out.detach(), q.grad, k.grad, v.grad]
        first = first or got
        same = same and equal(got, first)
        right = right and bool((reduced == 2 * loop + 2 + 2 * (rank % 2)).all() and (sent == 3 + loop).all())
    return same, right


@pytest.mark.parametrize("method", METHODS)
def test_d53_collectives_in_flight_on_other_groups_change_nothing(method):
    assert ranks.run(_beside_other_traffic, 4, method, 100) == [(True, True)] * 4
