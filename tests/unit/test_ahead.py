"""Batches are read and planned one ahead, in order, by a thread; the step then finds its plan made."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from megacp import attend
from megacp.config import Config
from megacp.hosts.ahead import Ahead, planned
from megacp.hosts.documents import document_mask, starts_of
from megacp.hosts.placement import place
from megacp.hosts.session import Session
from megacp.plans import _steps


def test_every_batch_comes_once_and_in_order_and_the_end_is_the_end() -> None:
    seen: list[int] = []
    ahead = Ahead(iter(range(5)), seen.append)
    assert list(ahead) == [0, 1, 2, 3, 4] == seen
    assert list(ahead) == []


def test_a_batch_is_prepared_while_the_one_before_is_in_use_and_by_another_thread() -> None:
    prepared = [threading.Event() for _ in range(3)]
    threads = set()

    def prepare(number: int) -> None:
        threads.add(threading.current_thread().name)
        prepared[number].set()

    ahead = Ahead(iter(range(3)), prepare)
    assert next(ahead) == 0
    assert prepared[1].wait(5)
    assert not prepared[2].wait(0.05)  # one ahead, not more
    assert threading.current_thread().name not in threads


def test_what_reading_raises_comes_when_its_batch_is_asked_for() -> None:
    def batches() -> Iterator[int]:
        yield 0
        raise OSError("the file is gone")

    ahead = Ahead(batches(), lambda batch: None)
    assert next(ahead) == 0
    with pytest.raises(OSError, match="the file is gone"):
        next(ahead)


def session(layout: str) -> Session:
    run = Session(Config(documents="eod", eod_token=7, layout=layout), str, lambda: None)
    run.methods = ("ring", "exchange")
    run.model_config = SimpleNamespace(
        tensor_model_parallel_size=1,
        num_attention_heads=8,
        num_query_groups=2,
        kv_channels=64,
        hidden_size=512,
    )
    return run


@pytest.mark.parametrize("layout", ["auto", "balanced", "zigzag"])
def test_the_step_finds_its_plans_made(layout: str) -> None:
    run = session(layout)
    tokens = torch.randint(0, 40, (1, 512), generator=torch.Generator().manual_seed(len(layout)))
    planned({"tokens": tokens}, run, rank=1, cp_size=4)
    before = _steps.cache_info()
    mask = document_mask(starts_of("eod", tokens, None, 7))
    found = place(layout, mask, 4, run.model_config, run.methods, "cpu").layout
    for method in run.methods:
        attend.plan(found, mask, method).steps(1)
    after = _steps.cache_info()
    assert after.misses == before.misses and after.hits == before.hits + 2


def test_a_batch_that_cannot_be_planned_is_left_to_the_step() -> None:
    run = session("zigzag")
    planned({"tokens": torch.zeros(1, 511, dtype=torch.int64)}, run, rank=1, cp_size=4)
    planned({"tokens": None}, run, rank=1, cp_size=4)
    run.model_config = None
    planned({"tokens": torch.zeros(1, 512, dtype=torch.int64)}, run, rank=1, cp_size=4)
