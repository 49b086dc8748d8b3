"""The oracle is judged by hand-made numbers and by PyTorch's own attention, not by the package."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests import oracle


def _inputs(heads=4, kv_heads=2, length=7, d=5, e=3):
    torch.manual_seed(1)
    q = torch.randn(2, length, heads, d, dtype=torch.float64)
    k = torch.randn(2, length, kv_heads, d, dtype=torch.float64)
    v = torch.randn(2, length, kv_heads, e, dtype=torch.float64)
    return q, k, v, torch.randn(2, length, heads, e, dtype=torch.float64)


def test_masks_by_hand():
    assert oracle.causal(3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert oracle.causal(4, window=2).int().tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    assert oracle.full(2).int().tolist() == [[1, 1], [1, 1]]
    assert oracle.documents([0, 1, 3]).int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 1, 1]]
    assert oracle.documents([0, 1, 3], is_causal=False).int().tolist() == [[1, 0, 0], [0, 1, 1], [0, 1, 1]]
    assert oracle.prefix(3, 2).int().tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert oracle.offsets([5, 3, 8]) == [0, 5, 8, 16]


def test_it_agrees_with_pytorch_forward_and_backward():
    q, k, v, d_out = _inputs()
    mask = oracle.documents([0, 3, 7])
    truth = oracle.attention(q, k, v, mask, d_out, scale=0.3)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    heads_first = [x.transpose(1, 2) for x in leaves]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(
        1, 2
    )
    grads = torch.autograd.grad(out, leaves, d_out)
    for ours, theirs in zip((truth.out, truth.dq, truth.dk, truth.dv), (out, *grads), strict=True):
        assert oracle.rel(ours, theirs) < 1e-13


def test_equal_logits_give_the_mean_and_a_sink_takes_its_share():
    q, k, v, d_out = _inputs(heads=2, kv_heads=2)
    q = torch.zeros_like(q)
    truth = oracle.attention(q, k, v, oracle.causal(7), d_out)
    assert torch.allclose(truth.out[:, 3], v[:, :4].mean(1))
    assert torch.allclose(truth.lse[:, :, 3], torch.tensor(math.log(4.0), dtype=torch.float64))
    sunk = oracle.attention(q, k, v, oracle.causal(7), d_out, sinks=torch.zeros(2))
    assert torch.allclose(sunk.out[:, 3], v[:, :4].sum(1) / 5)
    assert torch.allclose(sunk.lse[:, :, 3], torch.tensor(math.log(5.0), dtype=torch.float64))
    assert sunk.dsinks is not None and sunk.dsinks.shape == (2,)


def test_the_softcap_bounds_the_logits():
    q, k, v, d_out = _inputs()
    truth = oracle.attention(q * 1e6, k, v, oracle.full(7), d_out, softcap=1.0)
    assert float(truth.lse.max()) <= 1.0 + math.log(7.0) + 1e-12


def test_gradients_agree_with_finite_differences_also_those_through_the_lse():
    q, k, v, d_out = _inputs()
    sinks, d_lse = torch.randn(4, dtype=torch.float64), torch.randn(2, 4, 7, dtype=torch.float64)
    mask = oracle.causal(7, window=3)
    truth = oracle.attention(q, k, v, mask, d_out, sinks=sinks, softcap=2.0, d_lse=d_lse)

    def total(*x):
        out, lse = oracle.forward(*x[:3], mask, sinks=x[3], softcap=2.0)
        return float((out * d_out).sum() + (lse * d_lse).sum())

    inputs = [q, k, v, sinks]
    for i, grad in enumerate((truth.dq, truth.dk, truth.dv, truth.dsinks)):
        along = torch.randn_like(inputs[i])
        there = [x + 1e-6 * along if j == i else x for j, x in enumerate(inputs)]
        back = [x - 1e-6 * along if j == i else x for j, x in enumerate(inputs)]
        slope = (total(*there) - total(*back)) / 2e-6
        assert abs(slope - float((grad * along).sum())) < 1e-6 * max(1.0, abs(slope))


def test_rows_that_see_nothing_are_zero_and_have_no_gradient():
    q, k, v, d_out = _inputs()
    mask = oracle.causal(7)
    mask[2] = False
    truth = oracle.attention(q, k, v, mask, d_out)
    assert not truth.out[:, 2].any() and not truth.dq[:, 2].any()
    assert bool((truth.lse[:, :, 2] == float("-inf")).all())
    assert all(bool(x.isfinite().all()) for x in (truth.dq, truth.dk, truth.dv))


def test_the_distance_does_not_forgive_what_is_not_a_number():
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    empty = torch.tensor([1.0, float("-inf"), 1.0])
    assert oracle.rel(one, one) == 0 and oracle.rel(one * 1.5, one) == 0.5
    assert oracle.rel(nan, one) == oracle.rel(one, nan) == oracle.rel(nan, nan) == float("inf")
    assert oracle.rel(empty, empty) == 0 and oracle.rel(empty, one) == oracle.rel(one, empty) == float("inf")
