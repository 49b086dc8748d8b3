"""Trials about losses: what is averaged over what. Each is named after the public report it retells.

The kit: 16 tokens, the loss of token i is i + 1. With zigzag over two ranks, rank 0 holds 0-3 and 12-15, rank 1 4-11.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import megacp
from megacp import Layout, Mask
from megacp.testing import ranks
from tests import oracle


def _weights(valid):
    weights = torch.zeros(1, 16, dtype=torch.float64)
    weights[0, list(valid)] = 1
    return weights


def _kit(valid, reduction="mean", poison=None):
    """Loss, and the gradient of the per-token loss, reduced as the caller says and put together."""
    layout, rank = Layout.zigzag(16, dist.get_world_size()), dist.get_rank()
    per_token = torch.arange(1.0, 17.0, dtype=torch.float64)[None]
    for position, value in (poison or {}).items():
        per_token[0, position] = value
    local = layout.shard(per_token, rank).requires_grad_()
    loss = megacp.masked_mean(local, layout.shard(_weights(valid), rank), reduction=reduction)
    loss.backward()
    grad = megacp.gather(local.grad, layout)  # of each token on its owner; the others' gradient of it is 0
    return float(loss.detach()), grad / dist.get_world_size() if reduction == "mean" else grad


# -- D03: a mean of per-rank means (Megatron-LM#7452, #7513) -------------------------------------------------------------


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_d03_each_valid_token_weighs_the_same_on_whichever_rank_it_is(cp_size, reduction):
    for loss, grad in ranks.run(_kit, cp_size, [0, 1, 2, 5], reduction):
        assert loss == 3.0
        assert torch.equal(grad, _weights([0, 1, 2, 5]) / 4)


@pytest.mark.parametrize("cp_size", [2, 4])
def test_d03_one_valid_token_and_none_are_right_on_every_rank(cp_size):
    for loss, grad in ranks.run(_kit, cp_size, [13]):
        assert loss == 14.0 and torch.equal(grad, _weights([13]))
    for loss, grad in ranks.run(_kit, cp_size, []):
        assert loss == 0.0 and not grad.any()


def _data_parallel(per_token, micro_batches):
    """dp=2 x cp=2, rows {0,1,2,5} and {13}: the gradient of a factor on the loss, averaged over all four ranks.

    With per_token the mean is over the tokens of both rows, otherwise the mean of the rows' means. Two micro-batches
    repeat the same rows, so nothing may change.
    """
    cp_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replica, rank = divmod(dist.get_rank(), 2)
    layout = Layout.zigzag(16, 2)
    local = layout.shard(torch.arange(1.0, 17.0, dtype=torch.float64)[None], rank)
    weights = layout.shard(_weights([[0, 1, 2, 5], [13]][replica]), rank)
    factor = torch.ones((), dtype=torch.float64, requires_grad=True)
    losses = []
    for _ in range(micro_batches):
        loss = megacp.masked_mean(factor * local, weights, group=None if per_token else cp_groups[replica])
        (loss / micro_batches).backward()
        losses.append(float(loss.detach()))
    dist.all_reduce(factor.grad)
    return losses, float(factor.grad) / 4


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_d03_with_data_parallelism_per_token_and_per_micro_batch(micro_batches):
    for losses, grad in ranks.run(_data_parallel, 4, True, micro_batches):
        assert losses == [(12 + 14) / 5] * micro_batches
        assert grad == pytest.approx(26 / 5, rel=1e-12)
    for i, (losses, grad) in enumerate(ranks.run(_data_parallel, 4, False, micro_batches)):
        assert losses == [[3.0, 14.0][i // 2]] * micro_batches
        assert grad == pytest.approx((3 + 14) / 2, rel=1e-12)


# -- D06: labels shifted after the split (verl#4250, bionemo-recipes#1449, transformers#36607) ---------------------------


def _tokens_and_labels():
    tokens = torch.arange(8)[None]
    batch = {"tokens": tokens, "labels": Mask.causal(8).labels(tokens)}
    local = megacp.shard(batch, Layout.zigzag(8, dist.get_world_size()))
    return local["tokens"][0].tolist(), local["labels"][0].tolist()


def test_d06_labels_are_shifted_before_the_split():
    first, second = ranks.run(_tokens_and_labels, 2)
    assert first == ([0, 1, 6, 7], [1, 2, 7, -100])
    assert second == ([2, 3, 4, 5], [3, 4, 5, 6])


def test_d06_labels_of_padding_are_ignored():
    tokens = torch.arange(6)[None]
    batch = {"tokens": tokens, "labels": Mask.causal(6).labels(tokens)}
    parts = [megacp.shard(batch, Layout.zigzag(6, 2), rank=rank) for rank in (0, 1)]
    assert [part["tokens"][0].tolist() for part in parts] == [[0, 1, 0, 0], [2, 3, 4, 5]]
    assert [part["labels"][0].tolist() for part in parts] == [[1, 2, -100, -100], [3, 4, 5, -100]]


# -- D08: the loss multiplied or divided by cp once too often (Megatron-LM#673, SkyRL#1420, DeepSpeed#5248) --------------


def _head_data():
    make = torch.Generator().manual_seed(3)
    x = torch.randn(2, 16, 4, generator=make, dtype=torch.float64)
    return (
        x,
        torch.randn(2, 16, generator=make, dtype=torch.float64),
        torch.randn(4, generator=make, dtype=torch.float64),
    )


def _linear_head(dp_size, cp_size, per_token, reduction):
    """The reduced gradient of a linear head, the loss, and the head after one SGD step."""
    groups = [dist.new_group(list(range(d * cp_size, (d + 1) * cp_size))) for d in range(dp_size)]
    replica, rank = divmod(dist.get_rank(), cp_size)
    layout = Layout.zigzag(16, cp_size)
    x, y, w = _head_data()
    rows = slice(replica * 2 // dp_size, (replica + 1) * 2 // dp_size)
    x, y = layout.shard(x[rows], rank), layout.shard(y[rows], rank)
    w.requires_grad_()
    per_token_loss = (x @ w - y) ** 2
    group = None if per_token else groups[replica]
    loss = megacp.masked_mean(per_token_loss, torch.ones_like(y), group=group, reduction=reduction)
    loss.backward()
    dist.all_reduce(w.grad)  # over data and context parallel ranks
    if reduction == "mean":
        w.grad /= dp_size * cp_size
    elif not per_token:
        w.grad /= dp_size  # each replica's loss is a mean of its own; the replicas are averaged
    return w.grad, (w - 0.1 * w.grad).detach()


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("per_token", [True, False])
@pytest.mark.parametrize(("dp_size", "cp_size"), [(1, 1), (1, 2), (2, 1), (2, 2), (1, 4)])
def test_d08_gradient_and_step_are_those_of_one_rank(dp_size, cp_size, per_token, reduction):
    x, y, w = _head_data()
    w.requires_grad_()
    ((x @ w - y) ** 2).mean().backward()
    for grad, stepped in ranks.run(_linear_head, dp_size * cp_size, dp_size, cp_size, per_token, reduction):
        assert oracle.rel(grad, w.grad) <= 1e-10
        assert abs(float(grad.norm() / w.grad.norm()) - 1) <= 1e-10
        assert oracle.rel(stepped, w - 0.1 * w.grad) <= 1e-10


# -- D09: the token count over the wrong group (verl#5983) ---------------------------------------------------------------


def _divisor():
    """Rows of 3 and 9 valid tokens over dp=2 x cp=2; a loss of 1 at one valid token of row 0 shows the divisor."""
    for ranks_of_group in ([0, 1], [2, 3]):
        dist.new_group(ranks_of_group)
    replica, rank = divmod(dist.get_rank(), 2)
    layout = Layout.zigzag(16, 2)
    loss = torch.zeros(1, 16, dtype=torch.float64)
    loss[0, 0] = 1.0 if replica == 0 else 0.0
    weights = _weights(range([3, 9][replica]))
    return 1 / float(megacp.masked_mean(layout.shard(loss, rank), layout.shard(weights, rank)))


def test_d09_each_token_is_counted_once_over_data_and_context_parallel_ranks():
    assert ranks.run(_divisor, 4) == pytest.approx([12.0] * 4, rel=1e-12)


# -- D34: NaN at a masked position (Megatron-Bridge#3117) ----------------------------------------------------------------


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_d34_what_stands_at_masked_positions_cannot_poison_the_loss(cp_size):
    poison = {12: math.nan, 13: math.nan, 14: math.nan, 15: math.nan, 4: math.inf}
    for loss, grad in ranks.run(_kit, cp_size, [0, 1, 2, 5], "mean", poison):
        assert loss == 3.0
        assert torch.equal(grad, _weights([0, 1, 2, 5]) / 4)


def test_d34_a_nan_at_a_valid_token_shows_on_every_rank():
    for loss, _ in ranks.run(_kit, 2, [0, 1, 2, 5], "mean", {5: math.nan}):
        assert math.isnan(loss)


# -- D43: the evaluation loss (transformers#48167, axolotl#3371) ---------------------------------------------------------


def _evaluate(batches):
    layout, rank = Layout.zigzag(16, dist.get_world_size()), dist.get_rank()
    local = layout.shard(torch.arange(1.0, 17.0, dtype=torch.float64)[None], rank)
    with torch.no_grad():
        evaluated = [
            float(megacp.masked_mean(local, layout.shard(_weights(valid), rank))) for valid in batches
        ]
        stacked = torch.cat([local] * len(batches))
        weights = torch.cat([layout.shard(_weights(valid), rank) for valid in batches])
        together = float(megacp.masked_mean(stacked, weights))
    trained = float(
        megacp.masked_mean(local.requires_grad_(), layout.shard(_weights(batches[0]), rank)).detach()
    )
    return evaluated, together, trained


@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_d43_evaluation_gives_the_loss_of_training_at_every_size(cp_size):
    for evaluated, together, trained in ranks.run(_evaluate, cp_size, [[0, 1, 2, 5], [13]]):
        assert evaluated == [3.0, 14.0] and together == 26 / 5
        assert abs(trained - evaluated[0]) <= 1e-12


# -- D44: the displayed loss beside tensor parallelism (torchtitan#3329, #3280) ------------------------------------------


def _beside_tensor_parallel(tp, cp):
    """Ranks are numbered tensor-parallel first, as in Megatron: those that share a sequence are tp apart."""
    groups = [dist.new_group(list(range(first, tp * cp, tp))) for first in range(tp)]
    group, rank = groups[dist.get_rank() % tp], dist.get_rank() // tp
    layout = Layout.zigzag(16, cp)
    local = layout.shard(torch.arange(1.0, 17.0, dtype=torch.float64)[None], rank)
    return float(megacp.masked_mean(local, layout.shard(_weights([0, 1, 2, 5]), rank), group=group))


@pytest.mark.parametrize(("tp", "cp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_d44_the_displayed_loss_is_the_same_beside_tensor_parallelism(tp, cp):
    assert ranks.run(_beside_tensor_parallel, tp * cp, tp, cp) == [3.0] * (tp * cp)


# -- D70: logits of the full sequence (SkyRL#1751, NeMo RL#4222) ---------------------------------------------------------


class _Watched(TorchDispatchMode):
    """Note the bytes of the largest new tensor that any operation gives."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.numel() * x.element_size())
        return out


def _big_logits(seq_len, vocabulary):
    """Loss and per-token log-probabilities of big logits; what megacp sends and makes is noted, forward and backward."""
    layout, rank = Layout.zigzag(seq_len, dist.get_world_size()), dist.get_rank()
    generator = torch.Generator().manual_seed(5)
    logits = layout.shard(torch.randn(1, seq_len, vocabulary, generator=generator), rank).requires_grad_()
    labels = torch.randint(0, vocabulary, (1, seq_len), generator=generator)
    weights = (torch.arange(seq_len) % 3 > 0).float()[None]
    local = layout.shard({"labels": labels}["labels"], rank)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), local, reduction="none")
    cut = losses.detach().requires_grad_()
    with _Watched() as watched:
        loss = megacp.masked_mean(cut, layout.shard(weights, rank))
        log_probs = -megacp.gather(cut, layout)
        (loss + 0 * log_probs.sum()).backward()
    losses.backward(cut.grad)
    norm = logits.grad.double().square().sum()
    dist.all_reduce(norm)
    return float(loss.detach()), log_probs.detach(), float(norm) / dist.get_world_size() ** 2, watched.largest


def test_d70_only_token_sized_tensors_are_made_and_sent_however_big_the_logits_are():
    seq_len, vocabulary = 512, 3000
    ((loss, log_probs, norm, _),) = ranks.run(_big_logits, 1, seq_len, vocabulary)
    for found, probs, squares, largest in ranks.run(_big_logits, 4, seq_len, vocabulary):
        assert found == pytest.approx(loss, rel=1e-6)
        assert torch.allclose(probs, log_probs, rtol=1e-6)
        assert squares == pytest.approx(norm, rel=1e-5)
        assert 0 < largest <= 8 * seq_len  # bytes; local logits are 375 times that


# -- the same kind, other faces ------------------------------------------------------------------------------------------


def _one_of_257(kind):
    loss = torch.zeros(1, 257, dtype=torch.bfloat16)
    loss[0, 0] = 1.0
    return megacp.masked_mean(loss, torch.ones(1, 257, dtype=kind))


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_count_that_16_bit_cannot_hold_is_still_right(cp_size):
    for kind in (torch.bfloat16, torch.bool, torch.int64, torch.float32):
        for mean in ranks.run(_one_of_257, cp_size, kind):
            assert torch.equal(mean, torch.tensor(1 / 257, dtype=torch.bfloat16)), kind


def test_weights_that_are_not_0_or_1_are_weights():
    loss = torch.tensor([2.0, 4.0, 100.0], requires_grad=True)
    mean = megacp.masked_mean(loss, torch.tensor([1.0, 3.0, 0.0]))
    mean.backward()
    assert mean.item() == (2 + 12) / 4 and loss.grad.tolist() == [0.25, 0.75, 0.0]


def test_shapes_that_differ_and_unknown_reductions_are_refused():
    with pytest.raises(megacp.ConfigError, match=r"\(1, 4\).*\(1, 3\)"):
        megacp.masked_mean(torch.ones(1, 4), torch.ones(1, 3))
    with pytest.raises(megacp.ConfigError, match="average"):
        megacp.masked_mean(torch.ones(1, 4), torch.ones(1, 4), reduction="average")
