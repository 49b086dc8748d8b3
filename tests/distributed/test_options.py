"""Options of attention that depend on where a token is: the same at every size of the group, for every method and layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import megacp
from megacp import Layout, Mask
from megacp.groups import as_group
from megacp.testing import ranks
from tests import oracle

LENGTH, HEADS, KV_HEADS, SIZE = 24, 6, 2, 8
CU = [0, 5, 6, 24]
METHODS = ["ring", "all_gather", "exchange", "all_to_all", "hierarchical"]
CASES = [
    (method, layout) for method in METHODS for layout in ("zigzag", "contiguous", "per_document", "balanced")
]


def make_layout(name: str, mask: Mask, cp: int) -> Layout:
    if name == "per_document":
        return Layout.per_document(CU, cp)
    if name == "balanced":
        return Layout.balanced(mask, cp)
    return getattr(Layout, name)(LENGTH, cp)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [
        (2, LENGTH, HEADS, SIZE),
        (2, LENGTH, KV_HEADS, SIZE),
        (2, LENGTH, KV_HEADS, SIZE),
        (2, LENGTH, HEADS, SIZE),
    ]
    return tuple(torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)


def attend(cases: list[tuple[str, str]], options: dict[str, Any]) -> list[list[torch.Tensor]]:
    """Run each (method, layout) and give out, dq, dk, dv of the whole sequence, and what else was returned."""
    group, results = as_group(), []
    mask = Mask.documents(CU)
    for method, name in cases:
        layout = make_layout(name, mask, group.size)
        q, k, v, d_out = inputs()
        local = [layout.shard(x, group.rank, fill=50.0).requires_grad_() for x in (q, k, v)]
        found = megacp.attention(
            *local, mask=mask, layout=layout, method=method, kernel="reference", **options
        )
        out, *more = found if isinstance(found, tuple) else (found,)
        out.backward(layout.shard(d_out, group.rank))
        whole = [megacp.gather(x.detach(), layout) for x in (out, *(x.grad for x in local))]
        results.append([*whole, *more])
    return results


def assert_all_like_one_rank(options: dict[str, Any], cp: int) -> list[torch.Tensor]:
    alone = ranks.run(attend, 1, [("ring", "contiguous")], options)[0][0]
    for found in ranks.run(attend, cp, CASES, options, timeout=120):
        for case, result in zip(CASES, found, strict=True):
            for name, a, b in zip(("out", "dq", "dk", "dv", "more"), alone, result, strict=False):
                assert oracle.rel(b, a) <= 1e-10, (case, name)
    return alone


@pytest.mark.parametrize("cp", [2, 3, 4])
def test_the_same_pairs_are_dropped_at_every_size(cp: int) -> None:
    assert_all_like_one_rank({"dropout_p": 0.25, "dropout_seed": 11}, cp)


@pytest.mark.parametrize("cp", [2, 4])
def test_alibi_goes_by_global_positions(cp: int) -> None:
    slopes = torch.linspace(0.1, 0.9, HEADS, dtype=torch.float64)
    alone = assert_all_like_one_rank({"alibi_slopes": slopes}, cp)
    q, k, v, d_out = (x.clone().requires_grad_() for x in inputs())
    at = torch.arange(LENGTH)
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k_all) / SIZE**0.5
    logits = logits - slopes[:, None, None] * (at[:, None] - at[None]).abs()
    probs = logits.masked_fill(~oracle.documents(CU), -torch.inf).softmax(-1)
    out = torch.einsum("bhqk,bkhd->bqhd", probs, v_all)
    out.backward(d_out.detach())
    for a, b in zip(alone, (out, q.grad, k.grad, v.grad), strict=True):
        assert oracle.rel(a, b) <= 1e-10


@pytest.mark.parametrize("cp", [2, 4])
def test_softcap_is_exact_over_ranks(cp: int) -> None:
    alone = assert_all_like_one_rank({"softcap": 1.5}, cp)
    q, k, v, d_out = inputs()
    truth = oracle.attention(q, k, v, oracle.documents(CU), d_out=d_out, softcap=1.5)
    for a, b in zip(alone, (truth.out, truth.dq, truth.dk, truth.dv), strict=True):
        assert oracle.rel(a, b) <= 1e-10


@pytest.mark.parametrize("cp", [2, 4])
def test_the_largest_logit_of_each_head_is_that_of_the_whole(cp: int) -> None:
    alone = assert_all_like_one_rank({"return_max_logit": True}, cp)
    q, k, _, _ = inputs()
    logits = torch.einsum("bqhd,bkhd->bhqk", q, k.repeat_interleave(HEADS // KV_HEADS, 2)) / SIZE**0.5
    expected = logits.masked_fill(~oracle.documents(CU), -torch.inf).amax((0, 2, 3))
    assert torch.allclose(alone[4], expected, rtol=1e-12)


# -- D36: dropout ---------------------------------------------------------------------------------------------------------


def shown_probabilities(
    p: float, seed: int | None, method: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """With Q = 0 and V = identity the output is the dropped probability matrix; also dV, and the same from recompute."""
    torch.manual_seed(5)
    group, length = as_group(), 64
    layout, mask = Layout.zigzag(length, group.size), Mask.causal(length)
    q, k = (torch.zeros(1, length, 1, length, dtype=torch.float64) for _ in range(2))
    v = torch.eye(length, dtype=torch.float64).view(1, length, 1, length)
    d_out = torch.randn(1, length, 1, length, dtype=torch.float64, generator=torch.Generator().manual_seed(9))
    ql, kl, vl = (layout.shard(x, group.rank).requires_grad_() for x in (q, k, v))

    def run(*x: torch.Tensor) -> torch.Tensor:
        options = {"mask": mask, "layout": layout, "method": method, "dropout_p": p, "dropout_seed": seed}
        return megacp.attention(*x, **options)  # type: ignore[return-value]

    out = torch.utils.checkpoint.checkpoint(run, ql, kl, vl, use_reentrant=False)
    out.backward(layout.shard(d_out, group.rank))
    assert vl.grad is not None
    shown, dv = megacp.gather(out.detach(), layout)[0, :, 0], megacp.gather(vl.grad, layout)[0, :, 0]
    return shown, dv, shown.T @ d_out[0, :, 0]


@pytest.mark.parametrize("method", ["ring", "all_to_all", "exchange"])
@pytest.mark.parametrize("seed", [1, None])
def test_D36_dropout_keeps_its_share_and_backward_uses_the_same_pairs(method: str, seed: int | None) -> None:
    cp = 1 if method == "all_to_all" else 4  # one head
    found = ranks.run(shown_probabilities, cp, 0.25, seed, method)
    for shown, dv, expected in found:
        visible = oracle.causal(64)
        assert abs(float((shown[visible] > 0).double().mean()) - 0.75) <= 0.04
        assert not shown[~visible].any()
        assert torch.allclose(dv, expected, rtol=0, atol=1e-13)
        assert torch.equal(shown, found[0][0])
    rows = shown > 0
    assert not torch.equal(rows[40, :30], rows[41, :30])  # and no two rows, ranks or not, share their pattern


def test_D36_no_dropout_does_not_depend_on_the_seed() -> None:
    results = [ranks.run(shown_probabilities, 2, 0.0, seed, "ring")[0][0] for seed in (1, 2, None)]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"dropout_p": -0.1}, "dropout_p"),
        ({"softcap": 0.0}, "softcap"),
        ({"alibi_slopes": torch.zeros(3)}, "alibi_slopes"),
        ({"dropout_p": 0.1, "kernel": "sdpa"}, "does not offer dropout_p"),
        ({"alibi_slopes": torch.zeros(2), "kernel": "sdpa"}, "does not offer alibi_slopes"),
        ({"return_max_logit": True, "kernel": "sdpa"}, "does not offer max_logit"),
    ],
)
def test_an_option_that_is_not_honoured_is_refused(options: dict[str, Any], words: str) -> None:
    x = torch.zeros(1, 8, 2, 4)
    with pytest.raises(ValueError, match=words):
        megacp.attention(x, x, x, mask=Mask.causal(8), **options)
