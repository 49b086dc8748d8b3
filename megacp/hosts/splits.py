"""How one micro-batch is split, carried from the model's entry to every attention layer.

Between the two lies the host's code: pipeline schedules with several micro-batches in flight, and activation recompute,
which runs a layer's forward again in the backward pass. The only thing that reaches attention through all of it is the
``attention_mask`` argument. So the model's entry puts a *ticket* there, a tensor of three integers, and attention reads it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

import torch

from megacp.errors import SeamError
from megacp.groups import Group
from megacp.layout import Layout
from megacp.mask import Mask

__all__ = ["Split", "redeem", "ticket"]


@dataclass(frozen=True)
class Split:
    """Who holds which token of a micro-batch, and what may attend to what.

    dropout_key: what the micro-batch's dropout is drawn from, the same on all ranks of the group; 0 without dropout.
    method: how keys and values travel, in place of what each layer says; None for that.
    """

    layout: Layout
    mask: Mask
    group: Group
    dropout_key: int = 0
    method: str | None = None


_MAGIC = 0x6D65676163703031  # "megacp01"
_KEPT = 4096  # micro-batches; more than any pipeline has in flight
_splits: OrderedDict[int, Split] = OrderedDict()
_numbers: dict[Split, int] = {}
_issued = 0


def ticket(split: Split) -> torch.Tensor:
    """Return the ticket of a split, int64 [3] on the CPU; splits that differ in their dropout only share a number."""
    global _issued
    key, split = split.dropout_key, replace(split, dropout_key=0)
    number = _numbers.get(split)
    if number is None:
        number = _issued = _issued + 1
        _numbers[split] = number
        _splits[number] = split
        if len(_splits) > _KEPT:
            _numbers.pop(_splits.popitem(last=False)[1])
    _splits.move_to_end(number)
    return torch.tensor([_MAGIC, number, key], dtype=torch.int64)


def redeem(attention_mask: torch.Tensor | None) -> Split | None:
    """Return the split of a ticket; None if the argument is something else (a host's own mask, or nothing).

    Raises: SeamError for a ticket so old that its split is gone.
    """
    if attention_mask is None or attention_mask.dtype != torch.int64 or attention_mask.shape != (3,):
        return None
    magic, number, key = attention_mask.tolist()
    if magic != _MAGIC:
        return None
    if number not in _splits:
        raise SeamError(
            f"megacp: an attention layer runs for a micro-batch of which {_KEPT} later ones have been started. Its documents are "
            "forgotten. Keep fewer micro-batches in flight."
        )
    return replace(_splits[number], dropout_key=key)
