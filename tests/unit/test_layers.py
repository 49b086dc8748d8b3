"""What a hooked attention layer reads from the host's module."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from megacp.errors import UnsupportedError
from megacp.groups import Group
from megacp.hosts.megatron.layer import _regrouped

GROUP = Group(None, 0, 4, (2, 3, 6, 7))


@pytest.fixture(autouse=True)
def groups_are_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_process_group_ranks", list)


def layer(group: Any, method: str = "a2a") -> Any:
    """A layer of Transformer Engine after set_context_parallel_group(group, ..., method)."""
    return SimpleNamespace(set_context_parallel_group=None, cp_group=group, cp_comm_type=method)


def test_a_layer_that_was_given_no_group_keeps_its_method() -> None:
    assert _regrouped(layer(None), GROUP) is None
    assert _regrouped(SimpleNamespace(cp_group=(0, 1)), GROUP) is None  # not one of Transformer Engine's


def test_the_method_set_with_the_group_is_taken() -> None:
    assert _regrouped(layer((2, 3, 6, 7)), GROUP) == "a2a"
    assert _regrouped(layer([(2, 3), (2, 6)], "a2a+p2p"), GROUP) == "a2a+p2p"


@pytest.mark.parametrize("group", [(2, 3), (0, 1, 2, 3), [(2, 3), (2, 3, 6, 7)]])
def test_a_group_of_other_ranks_is_refused(group: Any) -> None:
    with pytest.raises(UnsupportedError, match=r"ranks .*split over ranks \[2, 3, 6, 7\]"):
        _regrouped(layer(group), GROUP)
