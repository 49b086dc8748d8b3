"""megacp.pytorch.context_parallel around plain scaled_dot_product_attention: results, gradients, and that everything is put back."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.functional import scaled_dot_product_attention as imported_by_name
from torch.utils.checkpoint import checkpoint

import megacp
from megacp import ConfigError, Layout, UnsupportedError
from megacp.pytorch import context_parallel, context_parallel_unshard
from megacp.testing import ranks
from tests import oracle

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 24
CALLS = {
    "F.": lambda *x, **k: F.scaled_dot_product_attention(*x, **k),
    "imported by name": imported_by_name,
    "torch._C._nn": lambda *x, **k: torch._C._nn.scaled_dot_product_attention(*x, **k),
    "torch.ops": lambda *x, **k: torch.ops.aten.scaled_dot_product_attention(*x, **k),
    "compiled": lambda *x, **k: torch.compile(F.scaled_dot_product_attention, backend="eager")(*x, **k),
}


def _inputs(heads=4, kv_heads=4, dtype=torch.float64, length=LENGTH, needs_grad=True):
    """q, k, v, [B, heads, G, size], the same on every rank, and the weights of the loss."""
    make = torch.Generator().manual_seed(0)
    shapes = [(2, n, length, 8) for n in (heads, kv_heads, kv_heads, heads)]
    q, k, v, w = (torch.randn(s, generator=make, dtype=torch.float64).to(dtype) for s in shapes)
    return [x.requires_grad_(needs_grad) for x in (q, k, v)], w


def _truth(is_causal=True, scale=None, **kind):
    (q, k, v), w = _inputs(**kind, needs_grad=False)
    mask = oracle.causal(q.shape[2]) if is_causal else oracle.full(q.shape[2])
    t = oracle.attention(
        *(x.double().transpose(1, 2) for x in (q, k, v)), mask, w.double().transpose(1, 2), scale=scale
    )
    return [x.transpose(1, 2) for x in (t.out, t.dq, t.dk, t.dv)]


def _check(results, tolerance=1e-10, **kind):
    """Each rank's (out, dq, dk, dv), whole, against the oracle."""
    for got in results:
        for name, x, right in zip(("out", "dq", "dk", "dv"), got, _truth(**kind), strict=True):
            assert x.shape == right.shape and oracle.rel(x, right) <= tolerance, name


def _mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


# -- results and gradients --------------------------------------------------------------------------------------------


def _attend(call, is_causal, kind, options, group, context):
    qkv, w = _inputs(**kind)
    mesh = {"mesh": _mesh, "group": lambda: dist.group.WORLD, "none": lambda: None}[group]()
    with context_parallel(mesh, buffers=[*qkv, w], buffer_seq_dims=[2, 2, -2, 2], **context):
        assert qkv[0].shape[2] == w.shape[2] == LENGTH // dist.get_world_size()
        out = CALLS[call](*qkv, is_causal=is_causal, **options)
        assert out.shape == qkv[0].shape
        (out * w).sum().backward()
    (out,) = context_parallel_unshard(mesh, [out], [2], context.get("layout", "zigzag"))
    return out, *(x.grad for x in qkv)


def _run(cp_size, call="F.", is_causal=True, kind=None, options=None, group="mesh", context=None):
    return ranks.run(
        _attend, cp_size, call, is_causal, kind or {}, options or {}, group, context or {}, timeout=180
    )


@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [True, False])
def test_causal_and_full_attention_are_exact_with_their_gradients(cp_size, is_causal):
    _check(_run(cp_size, is_causal=is_causal), is_causal=is_causal)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_seen_however_it_is_called(call):
    _check(_run(2, call))


@pytest.mark.parametrize("group", ["mesh", "group", "none"])
def test_a_device_mesh_a_group_or_nothing_is_taken(group):
    _check(_run(2, group=group))


def test_query_heads_may_share_key_heads_and_the_scale_is_honoured():
    kind = {"heads": 4, "kv_heads": 2}
    _check(_run(2, kind=kind, options={"enable_gqa": True, "scale": 0.3}), scale=0.3, **kind)


@pytest.mark.parametrize("method", ["all_gather", "all_to_all", "auto"])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_other_methods_and_layouts_can_be_asked_for(method, layout):
    _check(_run(2, context={"method": method, "layout": layout}))


def test_a_layout_of_ones_own_can_be_given():
    _check(_run(2, context={"layout": Layout.contiguous(LENGTH, 2)}))


def test_float32_is_exact_to_1e_6():
    kind = {"dtype": torch.float32}
    _check(_run(2, kind=kind), tolerance=1e-6, **kind)


# -- where gradients go -----------------------------------------------------------------------------------------------


def _backward(when):
    """Run the backward pass at some time; gives out and the whole gradients."""
    qkv, w = _inputs(needs_grad=when != "leaves made inside, as PyTorch wants it")
    mesh = _mesh()
    with context_parallel(mesh, buffers=[*qkv, w], buffer_seq_dims=[2] * 4):
        for x in qkv if not qkv[0].requires_grad else []:
            x.requires_grad = True
        if "checkpoint" in when:
            out = checkpoint(lambda *x: imported_by_name(*x, is_causal=True), *qkv, use_reentrant=True)
        else:
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        loss = (out * w).sum()
        if when.startswith("after"):
            pass
        elif when == "twice":
            for _ in range(2):
                (loss / 2).backward(retain_graph=True)
        else:
            loss.backward()
        if when.startswith("leaves"):
            for x in qkv:
                x.requires_grad = False
    if when.startswith("after") and "grad" not in when:
        loss.backward()
    (out,) = context_parallel_unshard(mesh, [out], [2])
    if when == "after, by autograd.grad":
        return out, *torch.autograd.grad(loss, qkv)
    return out, *context_parallel_unshard(mesh, [x.grad for x in qkv], [2] * 3)


@pytest.mark.parametrize(
    "when",
    [
        "inside",
        "twice",
        "after",
        "after, by autograd.grad",
        "checkpoint",
        "after, of a checkpoint",
        "leaves made inside, as PyTorch wants it",
    ],
)
def test_backward_may_run_inside_or_after_the_context(when):
    _check(ranks.run(_backward, 2, when))


def _begun_outside():
    """A checkpoint of plain attention, whose backward pass runs inside a context."""
    x = torch.randn(1, 2, 8, 4, dtype=torch.float64, requires_grad=True)
    with context_parallel(_mesh()):
        pass
    out = checkpoint(lambda y: F.scaled_dot_product_attention(y, y, y), x, use_reentrant=True)
    with context_parallel(_mesh()), pytest.raises(UnsupportedError, match="ran outside context_parallel"):
        out.sum().backward()
    out = checkpoint(lambda y: F.scaled_dot_product_attention(y, y, y), x, use_reentrant=True)
    out.sum().backward()
    (right,) = torch.autograd.grad(F.scaled_dot_product_attention(x, x, x).sum(), x)
    return torch.equal(x.grad, right)


def test_a_checkpoint_from_outside_is_not_computed_again_inside():
    assert ranks.run(_begun_outside, 2) == [True, True]


def _local_gradients():
    qkv, w = _inputs()
    whole = [x.grad for x in qkv]
    with context_parallel(_mesh(), buffers=[*qkv, w], buffer_seq_dims=[2] * 4):
        (F.scaled_dot_product_attention(*qkv, is_causal=True) * w).sum().backward()
        local = [x.grad for x in qkv]
        parts = context_parallel_unshard(_mesh(), local, [2] * 3)
    assert whole == [None] * 3 and all(x.shape[2] == LENGTH // 2 for x in local)
    return F.scaled_dot_product_attention(*qkv, is_causal=True).detach(), *parts


def test_inside_a_gradient_is_that_of_this_ranks_part():
    _check(ranks.run(_local_gradients, 2))


def _accumulated():
    qkv, w = _inputs()
    (F.scaled_dot_product_attention(*qkv, is_causal=True) * w).sum().backward()  # without the context
    with context_parallel(_mesh(), buffers=[*qkv, w], buffer_seq_dims=[2] * 4):
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        (out * w).sum().backward()
    (out,) = context_parallel_unshard(_mesh(), [out], [2])
    return out, *(x.grad / 2 for x in qkv)


def test_gradients_add_up_with_those_from_before():
    _check(ranks.run(_accumulated, 2))


class _Model(nn.Module):
    """Projections around attention, and weights whose gradients the ranks sum."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(16, 48, dtype=torch.float64)
        self.out = nn.Linear(16, 16, dtype=torch.float64)

    def forward(self, x):
        q, k, v = (y.unflatten(2, (4, 4)).transpose(1, 2) for y in self.qkv(x).chunk(3, 2))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.transpose(1, 2).flatten(2))


def _train(split, after):
    torch.manual_seed(3)
    model, x, labels = (
        _Model(),
        torch.randn(2, LENGTH, 16, dtype=torch.float64),
        torch.randn(2, LENGTH, 16).double(),
    )
    if not split:
        (model(x) - labels).square().sum().backward()
        return [p.grad for p in model.parameters()]
    with context_parallel(_mesh(), buffers=[x, labels], buffer_seq_dims=[1, 1]):
        loss = (model(x) - labels).square().sum()
        if not after:
            loss.backward()
    if after:  # what the graph saved of x is this rank's part still, though x is whole again
        loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("after", [False, True], ids=["backward inside", "backward after"])
def test_a_models_weights_get_the_gradients_of_one_rank(after):
    alone = ranks.run(_train, 1, False, False)[0]
    for grads in ranks.run(_train, 2, True, after):
        for got, right in zip(grads, alone, strict=True):
            assert oracle.rel(got, right) <= 1e-10


def _multihead(need_weights, mode):
    torch.manual_seed(3)
    module = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64).train(mode == "train")
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    with torch.set_grad_enabled(mode == "train"):
        alone, _ = module(x, x, x, need_weights=False)
        with context_parallel(_mesh(), buffers=[x], buffer_seq_dims=[1]):
            out, _ = module(x, x, x, need_weights=need_weights)
    (out,) = context_parallel_unshard(_mesh(), [out], [1])
    return float((out - alone).abs().max())


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pytorchs_multihead_attention_is_seen_also_where_it_has_a_fused_path(mode):
    assert max(ranks.run(_multihead, 2, False, mode)) <= 1e-12


def test_attention_weights_are_refused():
    with pytest.raises(
        ranks.RanksError, match=r"need_weights=True inside context_parallel.*Pass need_weights=False"
    ):
        ranks.run(_multihead, 2, True, "train")


# -- everything is put back -------------------------------------------------------------------------------------------


def _restored(how):
    qkv, w = _inputs()
    kept = torch.arange(LENGTH)
    view = qkv[0].detach()[:, :, 3:5]
    copies = [x.detach().clone() for x in (*qkv, w, kept)]
    before = [(id(x), x.data_ptr(), x.requires_grad, x.is_leaf) for x in qkv]
    try:
        with context_parallel(
            _mesh(), buffers=[*qkv, w, kept], buffer_seq_dims=[2, 2, 2, 2, 0], no_restore_buffers={kept}
        ):
            loss = (F.scaled_dot_product_attention(*qkv, is_causal=True) * w).sum()
            w.zero_()  # of the part only
            if how == "exception":
                raise RuntimeError("of the user")
            if how == "exception in megacp":
                F.scaled_dot_product_attention(*qkv, dropout_p=0.1)
            del loss
    except (RuntimeError, UnsupportedError) as error:
        assert how.startswith("exception"), error
    assert all(torch.equal(x, y) for x, y in zip((*qkv, w), copies, strict=False))
    assert [(id(x), x.data_ptr(), x.requires_grad, x.is_leaf) for x in qkv] == before
    assert torch.equal(view, copies[0][:, :, 3:5]) and [x.grad for x in qkv] == [None] * 3
    assert torch.equal(kept, Layout.zigzag(LENGTH, dist.get_world_size()).positions(dist.get_rank()))
    plain = F.scaled_dot_product_attention(
        *copies[:3], is_causal=True
    )  # of any length, with dropout and a mask, as ever
    F.scaled_dot_product_attention(
        *copies[:3], attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool), dropout_p=0.5
    )
    return plain


@pytest.mark.parametrize("how", ["end", "exception", "exception in megacp"])
def test_buffers_and_the_function_are_put_back(how):
    right = _truth()[0]
    for out in ranks.run(_restored, 2, how):
        assert oracle.rel(out, right) <= 1e-10


def _nested():
    qkv, w = _inputs()
    other, _ = _inputs(length=36)
    mesh = _mesh()
    with context_parallel(mesh, buffers=[*qkv, w], buffer_seq_dims=[2] * 4):
        with context_parallel(mesh, buffers=other, buffer_seq_dims=[2] * 3, method="all_gather"):
            inner = F.scaled_dot_product_attention(*other, is_causal=True)
        out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        (out * w).sum().backward()
        try:
            with context_parallel(mesh, buffers=[w], buffer_seq_dims=[2]):
                raise AssertionError("w was sharded twice")
        except ConfigError as error:
            assert "sharded already" in str(error)
    out, inner = context_parallel_unshard(mesh, [out, inner], [2, 2])
    assert (
        oracle.rel(inner.detach(), F.scaled_dot_product_attention(*other, is_causal=True).detach()) <= 1e-12
    )
    return out, *(x.grad for x in qkv)


def test_contexts_may_be_nested():
    _check(ranks.run(_nested, 2))


# -- refusals ---------------------------------------------------------------------------------------------------------


def _refused(how):
    qkv, w = _inputs(kv_heads=2 if how == "heads" else 4)
    if how == "flex":  # the compiler takes seconds to import, on a busy machine not the same on both ranks
        from torch.nn.attention.flex_attention import flex_attention

        flex_attention(*(x.detach() for x in qkv))
        dist.barrier()
    with context_parallel(_mesh(), buffers=[*qkv, w], buffer_seq_dims=[2] * 4):
        q, k, v = qkv
        if how == "mask":
            F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(12, 12, dtype=torch.bool))
        elif how == "dropout":
            F.scaled_dot_product_attention(q, k, v, None, 0.1)
        elif how == "heads":
            F.scaled_dot_product_attention(q, k, v)
        elif how == "length":
            F.scaled_dot_product_attention(*(x[:, :, :7] for x in qkv))
        elif how == "dims":
            F.scaled_dot_product_attention(*(x[0] for x in qkv))
        elif how == "flex":
            flex_attention(*(x.detach() for x in qkv))


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("mask", r"UnsupportedError: .*attn_mask \(12, 12\) inside context_parallel.*is_causal=True or full"),
        ("dropout", r"UnsupportedError: .*dropout_p 0.1 inside context_parallel.*Pass dropout_p=0.0"),
        ("heads", r"ShapeError: .*4 query and 2 key heads.*enable_gqa=True"),
        ("length", r"ShapeError: .*whose buffers have 12 tokens a rank of 24.*must be among the buffers"),
        ("dims", r"ShapeError: .*takes \[batch, heads, sequence, size\], not query \(4, 12, 8\)"),
        ("flex", r"FlexAttention was called inside context_parallel"),  # in the words of the compiler
    ],
)
def test_what_would_not_be_exact_is_refused_on_every_rank(how, words):
    with pytest.raises(ranks.RanksError) as error:
        ranks.run(_refused, 2, how)
    assert len(error.value.failed) == 2
    for text in error.value.failed.values():
        assert re.search(words, text, re.S), text


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ({"buffers": [torch.zeros(4)], "buffer_seq_dims": []}, "1 buffers were given, and 0 sequence dims"),
        ({"buffers": [torch.zeros(4)], "buffer_seq_dims": [1]}, r"of shape \(4,\) has no dim 1"),
        ({"buffers": [nn.Parameter(torch.zeros(4))], "buffer_seq_dims": [0]}, "buffer 0 is a Parameter"),
        (
            {"buffers": [torch.zeros(4, requires_grad=True) * 2], "buffer_seq_dims": [0]},
            "the result of an operation",
        ),
        (
            {"buffers": [torch.zeros(4)], "buffer_seq_dims": [0], "no_restore_buffers": {torch.zeros(4)}},
            "not among the buffers",
        ),
        ({"buffers": [torch.zeros(3)], "buffer_seq_dims": [0]}, "sequence length 3 cannot be split"),
        (
            {"buffers": [torch.zeros(4)], "buffer_seq_dims": [0], "layout": "balanced"},
            "layout 'balanced' is not known",
        ),
        (
            {"buffers": [torch.zeros(4)], "buffer_seq_dims": [0], "layout": Layout.zigzag(6, 1)},
            "Make a layout for them",
        ),
        ({"method": "rings"}, "method 'rings' is not known"),
    ],
)
def test_buffers_that_cannot_be_sharded_are_refused_and_left_alone(what, words):
    copies = [x.detach().clone() for x in what.get("buffers", [])]
    with pytest.raises(megacp.ConfigError, match=words), context_parallel(None, **what):
        raise AssertionError("the context was entered")
    assert all(torch.equal(x, y) for x, y in zip(what.get("buffers", []), copies, strict=True))


# -- the example ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "start", [["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"], []]
)
def test_the_example_prints_errors_of_rounding_only(start):
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
        "OMP_NUM_THREADS": "1"
    }
    command = [sys.executable, *start, "examples/cp_example.py"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    errors = re.findall(r"^  (.*?) +relative error (\S+)$", done.stdout, re.M)
    assert [name for name, _ in errors] == [
        "output",
        "loss",
        "gradient of q",
        "gradient of k",
        "gradient of v",
    ]
    assert all(float(error) <= 1e-6 for _, error in errors), errors
