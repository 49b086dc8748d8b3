"""What every model's entry does with a batch: compare it over the ranks, and mask the labels that lead out of a document."""

from __future__ import annotations

import functools
from typing import Any

import torch

from megacp import comm
from megacp.errors import ShapeError
from megacp.groups import Group
from megacp.hosts.session import Session
from megacp.mask import Mask

__all__ = ["OFFSETS", "PER_TOKEN", "causal", "check_same_sample", "mask_last_labels"]

PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask", "padding_mask")
"""Arguments of a model with a value a token, [B, G]; positions may be [3, B, G]."""

OFFSETS = ("cu_seqlens_q", "cu_seqlens_q_padded")
"""Documents' offsets, of ``packed_seq_params``."""

causal = functools.lru_cache(maxsize=16)(Mask.causal)


def mask_last_labels(batch: dict[str, Any], mask: Mask, run: Session) -> torch.Tensor | None:
    """Take the last label of each document out of the loss mask, in place: the host's loss function holds the same tensor.

    The mask is the one that the model is called with; scripts of hosts whose models take none have it from the batch.
    Returns the positions [B, G] whose loss is to be zero where neither is to be seen, else None.
    """
    seen = batch["loss_mask"] if batch.get("loss_mask") is not None else run.loss_mask
    run.loss_mask = None
    ends = mask.document_ends()
    if not isinstance(seen, torch.Tensor) or seen.shape != batch["labels"].shape:
        return ends
    seen.masked_fill_(ends.to(seen.device), 0)
    return None


def check_same_sample(batch: dict[str, Any], group: Group, run: Session) -> None:
    """Compare a fingerprint of the batch over the group, at the first micro-batch and every hundredth after it.

    Raises: ShapeError naming the ranks that hold something else, on every rank.
    """
    due, run.forwards = run.forwards % 100 == 0, run.forwards + 1
    due = due or run.share is not None  # ranks of a block have not counted alike
    compared = (*PER_TOKEN, *OFFSETS)
    fields = [batch.get(name) for name in compared]
    given = next((x for x in fields if isinstance(x, torch.Tensor)), None)
    if group.size == 1 or not due or given is None:
        return
    mine = torch.stack([_fingerprint(x, given.device) for x in fields])
    everyone = comm.all_gather(group, mine, "the comparison of the batch")  # [size, fields, 4]
    differ = (everyone != everyone[0]).any(-1)
    others = differ.any(1).nonzero().flatten().tolist()
    if others:
        names = [name for name, there in zip(compared, differ.any(0).tolist(), strict=True) if there]
        shapes = [tuple(row[0, :2].tolist()) for row in everyone]
        raise ShapeError(
            f"megacp: context-parallel ranks {[0, *others]} do not all hold the same batch: ranks {others} differ from rank 0 in "
            f"{', '.join(names)} ({PER_TOKEN[0]} by rank: {shapes}). Each must load the whole sequence of its data-parallel rank. "
            "Either the data loader goes by the rank in the world, or something else splits the batch already."
        )


def _fingerprint(x: Any, device: torch.device) -> torch.Tensor:
    """Return the sizes, the sum, and a sum by place, of one field, int64 [4]; -1 where there is none."""
    if not isinstance(x, torch.Tensor):
        return torch.full((4,), -1, dtype=torch.int64, device=device)
    sizes = [*x.shape[:2], 0, 0][:2]
    values = x.detach().reshape(-1)
    if x.is_floating_point():
        values = values.double() * 65536
    values = values.to(torch.int64)
    weights = torch.arange(1, x.numel() + 1, device=x.device) % 8191
    sums = torch.stack([values.sum(), (values * weights).sum()])
    return torch.cat([torch.tensor(sizes, device=device), sums.to(device)])
