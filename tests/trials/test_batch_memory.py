"""No step of a batch's way to the layers is quadratic in the length of the sequence, and dense masks of long ones are refused."""

from __future__ import annotations

import tracemalloc
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import megacp
from megacp import Layout, sharding
from megacp.attend import plan
from megacp.config import Config
from megacp.groups import Group
from megacp.hosts import entry
from megacp.hosts.documents import Mailbox
from megacp.hosts.megatron import model
from megacp.hosts.session import Session
from megacp.hosts.splits import Split, ticket

LENGTH, CP = 131_072, 8


class Largest(TorchDispatchMode):
    """Note the bytes of the largest tensor that any operation gives."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, torch.Tensor):
                self.bytes = max(self.bytes, x.numel() * x.element_size())
        return out


def _prepare(length, documents):
    """Do what the model's entry does with a batch of one row, up to the plan of an attention layer."""
    run = Session(Config(documents=documents, eod_token=7), str, lambda: None)
    run.mailbox = Mailbox(None, 1)
    group = Group(None, 1, CP, tuple(range(CP)))
    tokens = torch.arange(length)[None] % 1009
    batch = {name: tokens.clone() for name in entry.PER_TOKEN}
    sizes = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 64, "hidden_size": 512}
    config = SimpleNamespace(tensor_model_parallel_size=1, sequence_parallel=False, **sizes)
    host = SimpleNamespace(config=config, decoder=None, vp_stage=None, parameters=lambda: iter([tokens]))
    placement, mask = model._split(host, batch, run, group)
    split = Split(placement.layout, mask, group)
    if documents != "off":
        entry.mask_last_labels(batch, split.mask, run)
    sharding.shard(batch, split.layout, rank=1)
    ticket(split)
    plan(split.layout, split.mask, "ring").steps(1)


@pytest.mark.parametrize("documents", ["off", "eod"])
def test_preparing_131072_tokens_allocates_a_few_numbers_for_each(documents):
    _prepare(1024, documents)
    tracemalloc.start()
    with Largest() as largest:
        _prepare(LENGTH, documents)
    python = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 0 < largest.bytes <= 8 * LENGTH  # an int64 a token
    assert python < 2000 * LENGTH  # bytes; a quadratic mask would be 131,072 for each token


def test_the_watch_sees_a_quadratic_mask():
    with Largest() as largest:
        torch.ones(512, 512, dtype=torch.bool).triu(1)
    assert largest.bytes == 512 * 512


def test_a_dense_mask_of_a_long_sequence_is_refused_naming_the_option():
    long = torch.ones(1, dtype=torch.bool).expand(1, 1, LENGTH, LENGTH)
    with pytest.raises(megacp.UnsupportedError, match="--no-create-attention-mask-in-dataloader"):
        model._check_dense_mask(long, megacp.Mask.causal(LENGTH))


def test_a_dense_mask_is_compared_by_rows_without_another_of_its_size():
    length = 4096
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    with Largest() as largest:
        assert model._is_causal(hidden)
    assert largest.bytes <= 1 << 22
    hidden[..., 4000, 17] = True
    assert not model._is_causal(hidden)


def test_the_layout_of_a_long_sequence_is_made_of_ranges():
    assert len(Layout.zigzag(LENGTH, CP).ranges(0)) == 2
