"""Trials about who gets which token. Each is named after the public report it retells."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import Layout
from megacp.testing import ranks
from tests import oracle
from tests.distributed.cells import METHODS, Cell, check, vary

# -- D13: gathers of replicated work (slime#1748, VeOmni#1120) -----------------------------------------------------------


def _replicated_layers():
    """Three layers y = tanh(w * (x + its mean over the row)) on gathered tokens, the same on all ranks."""
    layout = Layout.zigzag(12, dist.get_world_size())
    x, weights, d_out = _layer_data()
    x, leaves = x.requires_grad_(), [w.requires_grad_() for w in weights]
    full = megacp.gather(layout.shard(x, dist.get_rank()), layout)
    for w in leaves:
        full = torch.tanh(w * (full + full.mean(1, keepdim=True)))
    (
        full * d_out
    ).sum().backward()  # every rank holds the whole loss, so its weights' gradients are whole already
    dist.all_reduce(x.grad)  # each rank has the gradient of its own tokens, and 0 for the others'
    return x.grad, [w.grad for w in leaves]


def _layer_data():
    make = torch.Generator().manual_seed(5)
    x = torch.randn(2, 12, 3, generator=make, dtype=torch.float64)
    weights = [torch.randn(3, generator=make, dtype=torch.float64) for _ in range(3)]
    return x, weights, torch.randn(2, 12, 3, generator=make, dtype=torch.float64)


def test_d13_a_gather_before_the_same_work_on_all_ranks_does_not_inflate_gradients():
    x, weights, d_out = _layer_data()
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights)]
    full = x
    for w in weights:
        full = torch.tanh(w * (full + full.mean(1, keepdim=True)))
    dx, *dw = torch.autograd.grad((full * d_out).sum(), leaves)
    for got_x, got_w in ranks.run(_replicated_layers, 2):
        assert oracle.rel(got_x, dx) <= 1e-10
        assert max(oracle.rel(a, b) for a, b in zip(got_w, dw, strict=True)) <= 1e-10


def _sliced_layers(whole_loss, sums=True):
    """The three layers again, with a gather before each and the rank's own slice kept after each."""
    rank, layout = dist.get_rank(), Layout.zigzag(12, dist.get_world_size())
    x, weights, d_out = _layer_data()
    x, leaves = x.requires_grad_(), [w.requires_grad_() for w in weights]
    local = layout.shard(x, rank)
    for w in leaves:
        full = megacp.gather(local, layout, sum_gradients=sums)
        local = layout.shard(torch.tanh(w * (full + full.mean(1, keepdim=True))), rank)
    if whole_loss:  # the same loss on all ranks: the last gather has their gradients whole already
        (megacp.gather(local, layout) * d_out).sum().backward()
    else:
        (local * layout.shard(d_out, rank)).sum().backward()
    for grad in (x.grad, *(w.grad for w in leaves)):  # a part of each weight's gradient on each rank
        dist.all_reduce(grad)
    return x.grad, [w.grad for w in leaves]


@pytest.mark.parametrize("whole_loss", [False, True], ids=["loss of the own slice", "loss of all on all"])
def test_d13_a_gather_before_each_of_three_layers_sums_the_gradients_of_ranks_that_go_on_differently(
    whole_loss,
):
    x, weights, d_out = _layer_data()
    leaves = [x.requires_grad_(), *(w.requires_grad_() for w in weights)]
    full = x
    for w in weights:
        full = torch.tanh(w * (full + full.mean(1, keepdim=True)))
    dx, *dw = torch.autograd.grad((full * d_out).sum(), leaves)
    for got_x, got_w in ranks.run(_sliced_layers, 2, whole_loss):
        assert oracle.rel(got_x, dx) <= 1e-10
        assert max(oracle.rel(a, b) for a, b in zip(got_w, dw, strict=True)) <= 1e-10
    wrong_x, _ = ranks.run(_sliced_layers, 2, whole_loss, sums=False)[0]
    assert oracle.rel(wrong_x, dx) > 1e-2  # the other variant is another gradient


# -- D37: the balanced split without causal masking (pytorch#141429, #152261) --------------------------------------------


@pytest.mark.parametrize("cp_size", [2, 4])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
def test_d37_full_attention_is_exact_on_either_split(method, layout, cp_size):
    check(vary(Cell(mask=("full", 32), method=method, layout=layout), heads=[(4, 4), (8, 2)]), cp_size)


# -- D56: a sequence shorter than 2 * cp (pytorch#159706, #183968) -------------------------------------------------------


@pytest.mark.parametrize("length", [8, 4, 1, 3, 9])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("method", METHODS)
def test_d56_short_sequences_are_right_by_padding(method, layout, length):
    check(vary(Cell(method=method, layout=layout), mask=[("causal", length), ("full", length)]), 4)


def test_d56_without_padding_they_are_refused_naming_the_rule():
    with pytest.raises(megacp.ConfigError, match=r"4 .*zigzag.*4.*2 \* cp_size = 8.*Pad to 8"):
        Layout.zigzag(4, 4, pad=False)
    assert Layout.zigzag(8, 4, pad=False).positions(1).tolist() == [1, 6]


# -- D58: metadata split as if it were tokens (Megatron-Bridge#1964, #1292, #4519) ---------------------------------------


def _batch():
    return {
        "tokens": torch.arange(16)[None],
        "labels": torch.arange(1, 17)[None],
        "loss_mask": torch.ones(1, 16),
        "position_ids": torch.arange(16)[None],
        "cu_seqlens": torch.tensor([0, 3, 7, 12, 16], dtype=torch.int32),
        "trap": torch.arange(16),
        "max_seqlen": torch.tensor(5),
        "attention_mask": torch.ones(1, dtype=torch.bool),
        "nothing": None,
        "source": "a file",
        "sizes": [1, 2],
    }


def _sharded():
    return megacp.shard(_batch(), Layout.zigzag(16, dist.get_world_size()))


def test_d58_only_declared_fields_are_split_and_metadata_is_the_same_everywhere():
    whole, parts = _batch(), ranks.run(_sharded, 2)
    for rank, part in enumerate(parts):
        assert list(part) == list(whole)
        assert part["tokens"][0].tolist() == Layout.zigzag(16, 2).positions(rank).tolist()
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert part[name].shape == (1, 8) and part[name].dtype == whole[name].dtype
        for name in ("cu_seqlens", "trap", "max_seqlen", "attention_mask"):
            assert torch.equal(part[name], whole[name]) and part[name].dtype == whole[name].dtype
        assert part["nothing"] is None and part["source"] == "a file" and part["sizes"] == [1, 2]


def test_d58_offsets_that_happen_to_have_the_sequence_s_length_are_left_alone():
    batch = {
        "tokens": torch.arange(16)[None],
        "cu_seqlens": torch.arange(16, dtype=torch.int32),
        "labels": None,
    }
    part = megacp.shard(batch, Layout.zigzag(16, 2), rank=1)
    assert part["cu_seqlens"] is batch["cu_seqlens"] and part["labels"] is None


def test_d58_a_field_can_be_declared_and_a_declared_field_of_another_length_is_refused_by_name():
    layout = Layout.zigzag(16, 2)
    part = megacp.shard({"trap": torch.arange(16)}, layout, rank=1, fields={"trap": 0})
    assert part["trap"].tolist() == list(range(4, 12))
    for batch in ({"tokens": torch.zeros(1, 8)}, {"tokens": [1, 2, 3]}, {"loss_mask": torch.ones(16)}):
        with pytest.raises(megacp.ConfigError, match=next(iter(batch))):
            megacp.shard(batch, layout, rank=0)


def test_d21_a_batch_that_was_split_already_is_not_split_again():
    layout = Layout.zigzag(16, 2)
    once = megacp.shard({"tokens": torch.arange(16)[None]}, layout, rank=0)
    with pytest.raises(megacp.ConfigError, match=r"tokens.*\(1, 8\).*16"):
        megacp.shard(once, layout, rank=0)


def _attend_to(length):
    q = torch.zeros(1, length, 2, 8)
    try:
        megacp.attention(
            q, q, q, mask=megacp.Mask.causal(16), layout=Layout.zigzag(16, dist.get_world_size())
        )
    except megacp.ConfigError as error:
        return str(error)
    return "accepted"


def test_d21_a_sequence_that_was_never_split_is_refused_by_attention():
    for text in ranks.run(_attend_to, 2, 16):
        assert "whole sequence" in text and "16" in text and "8" in text
    for text in ranks.run(_attend_to, 2, 4):  # split twice
        assert "4 slots" in text and "gives each rank 8" in text


# -- D27: recurrent layers fed zigzag order, or without boundaries (LlamaFactory#10787, flash-linear-attention#1221) --------


def _recurrent(x, documents):
    """y_t = 0.9 y_{t-1} + z_t, z a causal convolution 4 wide over x [B, S, H, D], both inside each document."""
    out = []
    for part in x.split(documents, dim=1):
        taps = [torch.nn.functional.pad(part, (0, 0, 0, 0, back, 0))[:, : part.shape[1]] for back in range(4)]
        z = sum(0.5**back * tap for back, tap in enumerate(taps))
        rows, state = [], torch.zeros_like(z[:, 0])
        for t in range(z.shape[1]):
            state = 0.9 * state + z[:, t]
            rows.append(state)
        out.append(torch.stack(rows, 1))
    return torch.cat(out, 1)


def _sandwich(in_order):
    """Attention over zigzag ranks, a recurrent layer on tokens in order (or, wrongly, as they lie), attention again."""
    make = torch.Generator().manual_seed(27)
    x, d_out = (torch.randn(1, 16, 2, 4, generator=make, dtype=torch.float64) for _ in range(2))
    rank, size = dist.get_rank(), dist.get_world_size()
    layout, mask = Layout.zigzag(16, size), megacp.Mask.documents([0, 6, 16])
    local = layout.shard(x, rank).requires_grad_()

    def attend(y):
        return megacp.attention(y, y, y, mask=mask, layout=layout, kernel="reference")

    y = attend(local)
    if in_order:
        whole = megacp.gather(y, layout, sum_gradients=True)
        y = layout.shard(_recurrent(whole, [6, 10]), rank)
    else:
        y = _recurrent(y, [y.shape[1]])
    y = attend(y)
    (y * layout.shard(d_out, rank)).sum().backward()
    return layout.unshard(ranks_of(y.detach())), layout.unshard(ranks_of(local.grad))


def ranks_of(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


def test_d27_a_recurrent_layer_between_zigzag_attention_is_exact_on_gathered_tokens():
    alone = ranks.run(_sandwich, 1, True)[0]
    for got in ranks.run(_sandwich, 2, True):
        assert max(oracle.rel(a, b) for a, b in zip(got, alone, strict=True)) <= 1e-10
    assert (
        oracle.rel(ranks.run(_sandwich, 2, False)[0][0], alone[0]) > 1e-2
    )  # what it would be in zigzag order
