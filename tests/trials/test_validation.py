"""Trials about settings that cannot be right, and about state that must not leak. Named after the public reports."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import METHODS, Cell, check, inputs, run_cell, vary


def _attempt(**settings):
    """Ask every rank for attention with some wrong setting; return what each says."""
    size = dist.get_world_size()
    layout = settings.pop("layout", None) or Layout.zigzag(16, size)
    mask = settings.pop("mask", None) or Mask.causal(16)
    heads, kv_heads, d = settings.pop("heads", (4, 2, 8))
    dtype = settings.pop("dtype", torch.float32)
    q = torch.zeros(1, layout.local_len, heads, d, dtype=dtype)
    k = torch.zeros(1, layout.local_len, kv_heads, d, dtype=dtype)
    if "cache" in settings:
        k = torch.zeros(1, settings.pop("cache"), kv_heads, d)
    if "k_dtype" in settings:
        k = k.to(settings.pop("k_dtype"))
    try:
        megacp.attention(q, k, k, mask=mask, layout=layout, **settings)
    except ValueError as error:
        return type(error).__name__, str(error)
    return "accepted", ""


def _refused(size, match, **settings):
    answers = ranks.run(_attempt, size, **settings)
    assert all(answer == answers[0] for answer in answers)
    name, text = answers[0]
    assert name in ("ConfigError", "UnsupportedError", "ShapeError") and text.startswith("megacp: ")
    for part in match:
        assert part in text, (part, text)


# -- D07: a setting silently switches CP off (Megatron-Bridge#2667, #2665) -----------------------------------------------


def _probe_across_ranks(method):
    """Which rows change when token 0 changes."""
    layout, rank = Layout.zigzag(16, dist.get_world_size()), dist.get_rank()
    outs = []
    for changed in (False, True):
        x = inputs(Cell())
        x["v"][:, 0] += float(changed)
        q, k, v = (layout.shard(x[name], rank) for name in "qkv")
        outs.append(megacp.attention(q, k, v, mask=Mask.causal(16), layout=layout, method=method))
    return bool((outs[0] != outs[1]).flatten(2).any(-1).all())


@pytest.mark.parametrize("method", ["ring", "p2p", "all_gather", "allgather"])
def test_d07_token_0_reaches_the_rows_of_every_rank(method):
    assert ranks.run(_probe_across_ranks, 4, method) == [True] * 4


def test_d07_a_group_of_another_size_than_the_layout_is_refused():
    _refused(2, ["cp_size 4", "2 ranks"], layout=Layout.zigzag(16, 4))
    _refused(2, ["cp_size 1", "2 ranks"], layout=Layout.zigzag(16, 1))


def test_d07_without_a_layout_more_than_one_rank_is_refused():
    def ask():
        q = torch.zeros(1, 16, 2, 8)
        return megacp.attention(q, q, q, mask=Mask.causal(16), layout=Layout.zigzag(16, 2))

    with pytest.raises(megacp.ConfigError, match=r"cp_size 2.*1 rank"):
        ask()


# -- D19: state that leaks from one model to the next (DeepSpeed#8291, #8316) --------------------------------------------


def _two_models(method_a, method_b):
    """A, B, A in one process, on two groups; the two results of A must be the same bits."""
    own = dist.new_group([0, 1, 2, 3])
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][dist.get_rank() // 2]
    a = Cell(mask=("causal", 32), heads=(8, 2), method=method_a)
    b = Cell(mask=("documents", (20, 28)), heads=(12, 4), method=method_b, dims=(16, 8), batch=1)
    first = run_cell(a, own)
    other, on_pair = run_cell(b, own), run_cell(b, pair)
    again = run_cell(a, own)
    return first, other, on_pair, all(torch.equal(first[name], again[name]) for name in first)


@pytest.mark.parametrize(
    ("method_a", "method_b"), [("ring", "all_gather"), ("all_gather", "ring"), ("ring", "ring")]
)
def test_d19_one_model_leaves_nothing_for_the_next(method_a, method_b):
    results = ranks.run(_two_models, 4, method_a, method_b)
    a = Cell(mask=("causal", 32), heads=(8, 2), method=method_a)
    b = Cell(mask=("documents", (20, 28)), heads=(12, 4), method=method_b, dims=(16, 8), batch=1)
    check([a], 4, results=[[result[0]] for result in results])
    check([b], 4, results=[[result[1]] for result in results])
    for pair in (results[:2], results[2:]):
        check([b], 2, results=[[result[2]] for result in pair])
    assert all(result[3] for result in results)


# -- D61: lengths that do not divide (DeepSpeed#5177, xDiT#471, torchtitan#1306) -----------------------------------------


def test_d61_without_padding_the_refusal_names_the_next_legal_length():
    with pytest.raises(megacp.ConfigError, match=r"57826.*cp_size 8.*= 16.*57840"):
        Layout.zigzag(57826, 8, pad=False)
    with pytest.raises(megacp.ConfigError, match=r"57826.*cp_size 8.*= 8.*57832"):
        Layout.contiguous(57826, 8, pad=False)
    assert Layout.zigzag(57840, 8, pad=False).local_len == 7230


@pytest.mark.parametrize("make", [Layout.zigzag, Layout.contiguous])
def test_d61_with_padding_the_length_comes_back_exactly(make):
    layout = make(57826, 8)
    x = torch.arange(57826)[None]
    parts = [layout.shard(x, rank) for rank in range(8)]
    assert {part.shape[1] for part in parts} == {layout.local_len}
    assert torch.equal(layout.unshard(parts), x)
    assert sum(stop - start for rank in range(8) for start, stop in layout.ranges(rank)) == 57826


@pytest.mark.parametrize("cp_size", [2, 3, 4])
@pytest.mark.parametrize("method", METHODS)
def test_d61_attention_over_odd_lengths_is_exact(method, cp_size):
    masks = [("causal", length) for length in (7, 17, 50, 61)]
    check(vary(Cell(method=method), mask=masks, layout=["contiguous", "zigzag"]), cp_size)


# -- D63: offsets in other clothes (ms-swift#7299) -----------------------------------------------------------------------


def test_d63_offsets_of_any_integer_kind_mean_the_same():
    lists = [0, 5, 8, 16]
    kinds = [
        lists,
        tuple(lists),
        torch.tensor(lists),
        torch.tensor(lists, dtype=torch.int32),
        torch.tensor(lists).numpy(),
    ]
    masks = [Mask.documents(offsets) for offsets in kinds]
    assert all(mask == masks[0] and hash(mask) == hash(masks[0]) for mask in masks)
    layouts = [Layout.per_document(offsets, 2) for offsets in kinds]
    assert all(layout == layouts[0] for layout in layouts)


@pytest.mark.parametrize("offsets", [[0.0, 5.0], [1, 5], [0, 5, 3], [[[0, 5]]], torch.tensor([0.0, 4.0]), 7])
def test_d63_offsets_that_cannot_be_right_are_refused_by_name(offsets):
    with pytest.raises(megacp.ConfigError, match="cu_seqlens"):
        Layout.per_document(offsets, 2)
    with pytest.raises(megacp.ConfigError):
        Mask.documents(offsets)


# -- D67: uneven domains (Megatron-LM#5679) ------------------------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [0, -1, 2.0, True, None])
@pytest.mark.parametrize(
    "make", [Layout.zigzag, Layout.contiguous, lambda n, cp: Layout.per_document([0, n], cp)]
)
def test_d67_a_size_that_is_none_is_refused(make, cp_size):
    with pytest.raises(megacp.ConfigError, match="cp_size"):
        make(16, cp_size)


def test_d67_a_layout_for_four_on_six_ranks_and_on_three_is_refused_on_every_rank():
    for world_size in (3, 6):
        _refused(
            world_size,
            ["cp_size 4", f"{world_size} ranks"],
            layout=Layout.zigzag(24, 4),
            mask=Mask.causal(24),
        )


# -- D75: messages that mislead (Megatron-LM#1459, cosmos-predict2#92, TransformerEngine#1051) ---------------------------


def test_d75_wrong_settings_are_refused_with_the_value_and_what_is_legal():
    _refused(2, ["'rign'", "ring", "all_gather", "p2p"], method="rign")
    _refused(2, ["'sdap'", "sdpa", "reference", "auto"], kernel="sdap")
    _refused(2, ["'bhsd'", "bshd", "sbhd", "thd"], format="bhsd")
    _refused(2, ["20 tokens", "16"], mask=Mask.causal(16), layout=Layout.zigzag(20, 2))
    _refused(2, ["4 query heads", "3 key/value heads"], heads=(4, 3, 8))
    _refused(2, ["sinks", "(3,)", "4 query heads"], sinks=torch.zeros(3))
    _refused(2, ["int32"], dtype=torch.int32)
    _refused(2, ["float32", "float64"], k_dtype=torch.float64)
    _refused(2, ["sdpa", "softcap"], kernel="sdpa", softcap=3.0)


def test_d75_without_process_groups_the_refusal_says_so():
    q = torch.zeros(1, 8, 2, 8)
    with pytest.raises(megacp.ConfigError, match=r"megacp: .*cp_size 2.*1 rank"):
        megacp.attention(q, q, q, mask=Mask.causal(16), layout=Layout.zigzag(16, 2))
    with pytest.raises(megacp.ConfigError, match=r"megacp: .*cp_size 2.*1 rank"):
        megacp.shard({"tokens": torch.zeros(1, 16)}, Layout.zigzag(16, 2))


@pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="transformer_engine is installed")
def test_d75_a_missing_library_is_named_and_the_cpu_works_without_it():
    _refused(
        2,
        ["transformer_engine", "the package transformer-engine is not installed"],
        kernel="transformer_engine",
    )
    q = torch.randn(1, 16, 4, 8, generator=torch.Generator().manual_seed(0))
    assert megacp.attention(q, q, q, mask=Mask.causal(16)).shape == q.shape


def test_d75_the_public_errors_are_value_errors():
    assert issubclass(megacp.ConfigError, ValueError) and issubclass(megacp.UnsupportedError, ValueError)


# -- D76: decoding (VeOmni#949, LlamaFactory#10474) ----------------------------------------------------------------------


def test_d76_keys_of_another_length_than_the_queries_are_refused():
    _refused(2, ["cache"], cache=24)


def test_d76_one_query_against_a_sequence_of_keys_is_refused():
    _refused(2, ["cache"], layout=Layout.contiguous(2, 2), mask=Mask.causal(2), cache=24)


# -- the oracle that all of this stands on -------------------------------------------------------------------------------


def test_masks_agree_with_the_oracle_s_own():
    pairs = [
        (Mask.causal(9), oracle.causal(9)),
        (Mask.causal(9, window=3), oracle.causal(9, 3)),
        (Mask.full(5), oracle.full(5)),
        (Mask.documents([0, 4, 9]), oracle.documents([0, 4, 9])),
        (Mask.documents([0, 4, 9], causal=False), oracle.documents([0, 4, 9], False)),
        (Mask.documents([0, 4, 9], window=2), oracle.documents([0, 4, 9], True, 2)),
        (Mask.prefix(9, 4), oracle.prefix(9, 4)),
        (Mask.from_tokens(torch.tensor([5, 0, 5, 5, 0, 0, 5]), eod=0), oracle.documents([0, 2, 5, 6, 7])),
        (Mask.from_positions(torch.tensor([0, 1, 0, 1, 2, 0])), oracle.documents([0, 2, 5, 6])),
    ]
    for ours, theirs in pairs:
        assert torch.equal(ours.dense(), theirs), ours
        for i in range(len(theirs)):
            for j in range(len(theirs)):
                assert ours.visible(i, j) == bool(theirs[i, j])
