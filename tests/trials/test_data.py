"""Trials about data that one rank reads for others. Each is named after the public report it retells."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp.groups import as_group
from megacp.hosts.batches import Shared
from megacp.testing import ranks

# -- D54: a broadcast with unlike shapes, dtypes and numbers of documents (Megatron-LM#4103, #6820) ----------------------


def _batches(replica):
    """2, then 7 documents; offsets collated to [1, n]; a size as a number, 0-dim and with one element; int32 and int64."""
    for documents, size in ((2, 9), (7, torch.tensor(9)), (1, torch.tensor([9])), (0, None)):
        offsets = torch.arange(documents + 1, dtype=[torch.int32, torch.int64][documents % 2])[None] + replica
        whole = torch.arange(1000.0).view(10, 100)
        yield {
            "tokens": torch.arange(16).view(2, 8) * (replica + 1),
            "offsets": offsets,
            "size": size,
            "view": whole[:, 3],
            "half": torch.full((3,), 1.5, dtype=torch.bfloat16),
            "mask": torch.tensor([True, False]),
            "nothing": torch.empty(0, 4),
            "inside": [("name", {"seen": torch.tensor(replica, dtype=torch.uint8)})],
        }


def _shared(group_size):
    """Two groups, strided over the world, each with data of its own; only their first ranks read."""
    world = dist.get_world_size()
    starts = range(world // group_size)
    groups = [dist.new_group(list(range(start, world, len(starts)))) for start in starts]
    replica = dist.get_rank() % len(starts)
    group = as_group(groups[replica])
    return replica, list(Shared(_batches(replica) if group.rank == 0 else None, group))


def _same(a, b):
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in b)
    if isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


@pytest.mark.parametrize(("world", "size"), [(2, 2), (4, 2)])
def test_d54_every_rank_gets_its_groups_batches_whatever_their_shapes(world, size):
    for replica, found in ranks.run(_shared, world, size, timeout=60):
        assert _same(found, list(_batches(replica)))


def _fails():
    def two():
        yield torch.ones(1)
        raise OSError("the file is gone")

    batches = Shared(two() if dist.get_rank() == 0 else None, as_group())
    next(batches)
    try:
        next(batches)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def test_d54_a_reader_that_fails_fails_on_every_rank_with_the_reason():
    first, second = ranks.run(_fails, 2, timeout=60)
    assert first == ("OSError", "the file is gone")
    assert second[0] == "ShapeError" and "rank 0" in second[1] and "the file is gone" in second[1]


def test_d54_a_view_is_sent_without_what_it_is_a_view_of():
    from megacp.hosts import batches

    form, data = batches._pack({"row": torch.zeros(1000, 1000)[3]})
    assert data.numel() == 4000 and len(form) < 1000


# -- batches that differ between the ranks of a group ---------------------------------------------------------------------

FIELDS = ("input_ids", "labels", "position_ids", "loss_mask")


def _compared(field):
    """Compare a batch whose one field differs on rank 2, by one number and a swap that leaves the sum."""
    from megacp.config import Config
    from megacp.hosts.entry import check_same_sample
    from megacp.hosts.session import Session

    run = Session(Config(), str, lambda: None)
    batch = {name: torch.arange(32).view(2, 16) for name in FIELDS}
    batch["loss_mask"] = (batch["loss_mask"] % 3 > 0).float()
    if field and dist.get_rank() == 2:
        row = batch[field] = batch[field].clone()
        row[0, 3], row[0, 4] = row[0, 5].clone(), row[0, 3].clone()
    said = []
    for step in range(101):
        run.forwards = step
        try:
            check_same_sample(batch, as_group(), run)
        except megacp.ConfigError as error:
            said.append((step, str(error)))
    return said


@pytest.mark.parametrize("field", FIELDS)
def test_a_batch_that_differs_in_any_field_is_refused_naming_the_ranks_and_the_field(field):
    found = ranks.run(_compared, 4, field, timeout=60)
    assert all(said == found[0] for said in found)
    assert [step for step, _ in found[0]] == [0, 100]
    assert "ranks [2] differ from rank 0" in found[0][0][1] and field in found[0][0][1]


def test_equal_batches_are_not_refused():
    assert list(itertools.chain(*ranks.run(_compared, 4, None, timeout=60))) == []
