"""Context-parallel size per document: run the rows of a step, each over its own block of ranks, with exact gradients.

    blocks = dynamic.Blocks()                                     # once, on all ranks: a process group for each block
    for samples in loader:
        waves = spread([len(s["tokens"]) for s in samples], blocks.whole.size, capacity, cost)
        step = dynamic.Step(waves, blocks)
        for share in step:                                        # this rank's rows, one after another
            batch = share.pack(samples)                           # this rank's tokens of the row, [1, S]
            loss = model(batch, share)                            # attention(q, k, v, **share.attention)
            share.sum(loss, batch["loss_mask"]).backward()
        mean = step.finish(model.parameters())                    # gradients of the mean over the global batch, on all ranks

Every rank computes the schedule itself, from the lengths of all documents. Losses are summed, not averaged, in each row; what they
are divided by is the count of all ranks' tokens, known at the end. So no block weighs more for having few tokens, and the gradients
are those of one rank that has all documents.

Shapes: ``G`` tokens of a row, ``S`` slots of one rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from megacp import comm, sharding
from megacp.data.waves import Row, Waves, block_sizes, check_sizes
from megacp.errors import ConfigError, ShapeError
from megacp.groups import Group, as_group
from megacp.layout import Layout
from megacp.mask import Mask

__all__ = ["Blocks", "Share", "Step", "row_layout"]

_PADDING = 0.01
"""Share of a row's tokens that may be padded so that each document can be zigzagged alone."""

_BUCKET = 1 << 24
"""Elements of gradients that are summed in one exchange."""


class Blocks:
    """The blocks of a group's ranks that this rank is in, one of each size, each a process group.

    Make it once, on all ranks of the group. Groups are made from the largest to the smallest, and each is used once right away: the
    first exchange in a new group may need all its members at once, which later they would not be sure to be.

    Args:
        group: data-parallel times context-parallel ranks, in an order where neighbours are near: a process group, one-dimensional
            DeviceMesh, or None for all ranks. sizes: of the blocks, as for :func:`megacp.data.spread`.
    Attributes:
        whole: the group. sizes: of its blocks.
    Raises: ConfigError for sizes that do not lie inside one another.
    """

    def __init__(self, group: Any = None, sizes: Sequence[int] | None = None) -> None:
        self.whole = as_group(group)
        size = self.whole.size
        self.sizes = check_sizes(block_sizes(size) if sizes is None else list(sizes), size)
        self._of = {size: self._made(size) for size in reversed(self.sizes)}

    def of(self, size: int) -> Group:
        """Give this rank's block of ``size`` ranks."""
        return self._of[size]

    def _made(self, size: int) -> Group:
        whole = self.whole
        if size == whole.size:
            return whole
        if size == 1:
            return Group(None, 0, 1, (whole.global_ranks[whole.rank],))
        first = whole.rank // size * size
        ranks = list(whole.global_ranks[first : first + size])
        handle = dist.new_group(ranks, backend=whole.backend, use_local_synchronization=True)
        block = Group(handle, whole.rank - first, size, tuple(ranks))
        comm.total(block, torch.zeros(1, device=_device(whole)), f"the first exchange of ranks {ranks}")
        return block


class Step:
    """One training step of this rank: its rows in their order, and the sums of their losses.

    Args:
        waves: the schedule, the same on every rank. blocks: whose sizes hold those of the schedule.
        method: how keys and values travel inside a block, see :func:`megacp.attention`; None is by the row's layout: a ring where
            each document lies on all ranks of the block, else an exchange.
    Collective over all ranks: they compare their schedules.
    Raises: ConfigError, on every rank, if the schedule is for other ranks or blocks, or not the same on all ranks.
    """

    def __init__(self, waves: Waves, blocks: Blocks, *, method: str | None = None) -> None:
        whole = blocks.whole
        if waves.ranks != whole.size or not set(waves.sizes) <= set(blocks.sizes):
            raise ConfigError(
                f"megacp: a schedule for {waves.ranks} ranks in blocks of {list(waves.sizes)} does not fit {whole.size} ranks in "
                f"blocks of {list(blocks.sizes)}. Make it with spread(..., ranks={whole.size}, sizes={list(blocks.sizes)})."
            )
        _check_same(waves, whole)
        self.waves, self.blocks, self.method = waves, blocks, method
        rows = [row for row in waves.rows(whole.rank) if row is not None]
        self.shares = [Share(row, blocks.of(row.size), self) for row in rows]
        self._sums: dict[int, torch.Tensor] = {}  # of each share: sum and count, float64

    def __iter__(self) -> Iterator[Share]:
        return iter(self.shares)

    def totals(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Give the mean loss over the global batch, and the count it was divided by, float64. Collective over all ranks.

        For loops that reduce gradients themselves: summed over all ranks, gradients are to be divided by the count.
        Raises: ConfigError, on every rank, if one has not run all its rows, or there is nothing to learn from (count 0 gives mean 0).
        """
        whole, missing = self.blocks.whole, len(self.shares) - len(self._sums)
        device = _device(whole)
        sums = [
            torch.zeros(2, dtype=torch.float64, device=device),
            *(x.to(device) for x in self._sums.values()),
        ]
        local = torch.cat(
            [torch.stack(sums).sum(0), torch.tensor([missing], dtype=torch.float64, device=device)]
        )
        summed, count, left = comm.total(whole, local, "the sum of a step's losses").unbind()
        if left:
            raise ConfigError(
                f"megacp: a step is to end, but {int(left)} of its rows have not gone through share.sum() (rank {whole.rank}: "
                f"{missing} of {len(self.shares)}). Run every share of the step once, on each rank."
            )
        return torch.where(count == 0, 0, summed / count.clamp(min=1e-300)), count

    def finish(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Make each parameter's gradient that of the mean loss over the global batch; give that mean. Collective over all ranks.

        A rank that had no row, or whose row did not reach a parameter, gets the gradient like the others. A parameter that gathers
        its gradients in an attribute ``main_grad``, as Megatron's do, gets it there.
        Raises: as :meth:`totals`.
        """
        mean, count = self.totals()
        divisor = float(count) or 1.0
        for bucket in _buckets(parameters):
            _sum_gradients(bucket, self.blocks.whole, divisor)
        return mean

    def _note(self, share: Share, sums: torch.Tensor) -> None:
        if id(share) in self._sums:
            raise ConfigError(
                f"megacp: the row of documents {share.documents[:4]}... has gone through share.sum() before in this step. "
                "Run each share once."
            )
        self._sums[id(share)] = sums


@dataclass(frozen=True, eq=False)
class Share:
    """This rank's part in one row: which documents, over which block, and how they are split.

    Attributes:
        row: of the schedule. group: the block.
    """

    row: Row
    group: Group
    step: Step = field(repr=False)

    @property
    def documents(self) -> tuple[int, ...]:
        """Which documents of the step are in the row, in the order of their tokens."""
        return self.row.documents

    @property
    def method(self) -> str:
        """How keys and values travel."""
        by_layout = "ring" if self.layout.name == "per_document" else "exchange"
        return by_layout if self.step.method is None else self.step.method

    @cached_property
    def mask(self) -> Mask:
        """What may attend to what: causal within each document."""
        return Mask.documents(list(accumulate(self.row.lengths, initial=0)))

    @cached_property
    def layout(self) -> Layout:
        """Who holds which token: see :func:`row_layout`."""
        return row_layout(self.row, self.step.waves.capacity, self.mask)

    @property
    def attention(self) -> dict[str, Any]:
        """What :func:`megacp.attention` needs to know: ``attention(q, k, v, **share.attention)``."""
        return {"mask": self.mask, "layout": self.layout, "group": self.group, "method": self.method}

    def positions(self, whole: bool = False) -> torch.Tensor:
        """Give each token's place in its document, int64 [S] (0 in padding), or [G] for the whole row.

        They restart with each document, so that its result does not depend on what it was packed with.
        """
        places = self.mask.document_positions()
        return places if whole else self.layout.shard(places, self.group.rank, dim=0)

    def pack(
        self,
        samples: Sequence[Mapping[str, torch.Tensor]] | Mapping[int, Mapping[str, torch.Tensor]],
        *,
        whole: bool = False,
    ) -> dict[str, torch.Tensor]:
        """Join the row's documents and take this rank's tokens of them; only those documents are asked for.

        Args:
            samples: for each document of the step per-token tensors [length]: ``tokens``, and ``labels`` and ``loss_mask`` if they are
                not to be the next token and every token that has a label; what else they have is joined and split alike.
            whole: give the whole row, for a model that splits it itself.
        Returns tensors [1, S] (or [1, G]) and position_ids that restart with each document. Padding has label -100 and weight 0.
        Raises: ShapeError for a tensor of another length than the schedule was made for.
        """
        fields = list(samples[self.documents[0]])
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in fields}
        for document, length in zip(self.documents, self.row.lengths, strict=True):
            sample = samples[document]
            for name in fields:
                if sample[name].shape != (length,):
                    raise ShapeError(
                        f"megacp: '{name}' of document {document} has shape {tuple(sample[name].shape)}; the schedule was made for "
                        f"one of {length} tokens. Give each per-token field as [length]."
                    )
                parts[name].append(sample[name])
        batch = {name: torch.cat(parts[name])[None] for name in fields}
        if "labels" not in batch:
            batch["labels"] = self.mask.labels(batch["tokens"])
        if "loss_mask" not in batch:
            batch["loss_mask"] = (batch["labels"] != -100).float()
        batch["position_ids"] = self.positions(whole=True)[None].to(batch["labels"].device)
        if whole:
            return batch
        return sharding.shard(batch, self.layout, rank=self.group.rank, fields=dict.fromkeys(batch, 1))

    def sum(
        self, loss_per_token: torch.Tensor, weights: torch.Tensor, *, whole: bool = False
    ) -> torch.Tensor:
        """Sum the row's losses on this rank for the backward pass, and note sum and count for the step. Call it once for each share.

        A token of weight 0 takes no part, even if its loss is NaN; padding never does.
        Shapes: loss_per_token and weights [1, S], or [1, G] with ``whole``: then each rank of the block has the whole row's losses,
        and its backward pass keeps the part of its own tokens (as :func:`megacp.gather` does). Gives a scalar.
        Raises: ShapeError for other shapes; ConfigError if this share was summed before.
        """
        length = self.layout.seq_len if whole else self.layout.local_len
        if loss_per_token.shape != weights.shape or weights.shape[-1] != length:
            raise ShapeError(
                f"megacp: a loss of shape {tuple(loss_per_token.shape)} and weights of shape {tuple(weights.shape)} are not both of "
                f"the {length} tokens that this rank has of the row."
            )
        wide = torch.promote_types(loss_per_token.dtype, torch.float32)
        padding = None if whole else self.layout.padding_slots(self.group.rank)
        kept = weights != 0
        if padding is not None:
            kept = kept & ~padding.to(kept.device)
        weighed = torch.where(kept, loss_per_token.to(wide) * weights.to(wide), 0)
        noted = torch.stack([weighed.detach().double().sum(), torch.where(kept, weights.double(), 0).sum()])
        is_counted = not whole or self.group.rank == 0  # else every rank of the block has the same sum
        self.step._note(self, noted * is_counted)
        return weighed.sum()


def row_layout(row: Row, capacity: int, mask: Mask) -> Layout:
    """Place a row on its block: each document zigzagged alone, where that pads little and the slots are there; else balanced.

    Documents that were given many ranks are long, so it pads next to nothing. Both give all ranks equal tokens and equal work.
    """
    alone = Layout.per_document(mask.offsets[0], row.size) if mask.offsets else None
    if alone is not None and alone.local_len <= capacity and alone.padding <= _PADDING * row.tokens:
        return alone
    return Layout.balanced(mask, row.size)


def _check_same(waves: Waves, whole: Group) -> None:
    """Compare the ranks' schedules: they follow from the documents, which each rank has read itself."""
    if whole.size == 1:
        return
    mine = torch.frombuffer(bytearray(waves.digest()), dtype=torch.int64).to(_device(whole))
    everyone = comm.all_gather(whole, mine, "the comparison of schedules")
    others = (everyone != everyone[0]).any(1).nonzero().flatten().tolist()
    if others:
        raise ConfigError(
            f"megacp: ranks {others} have another schedule than rank 0: they were given other documents, costs or sizes. Give every "
            "rank the lengths of all documents of the step, in one order."
        )


def _buckets(parameters: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group parameters that need a gradient, in their order, by the gradient's dtype and device, up to a size."""
    open_: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for parameter in parameters:
        if not parameter.requires_grad:
            continue
        gradient = _gradient(parameter)
        kind = (parameter if gradient is None else gradient).dtype, parameter.device
        bucket = open_.setdefault(kind, [])
        bucket.append(parameter)
        if sum(p.numel() for p in bucket) >= _BUCKET:
            yield open_.pop(kind)
    yield from open_.values()


def _sum_gradients(bucket: list[torch.Tensor], whole: Group, divisor: float) -> None:
    for parameter in bucket:
        if _gradient(parameter) is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [_gradient(parameter) for parameter in bucket]
    flat = comm.total(whole, torch.cat([g.reshape(-1) for g in gradients]), "the sum of gradients") / divisor
    for gradient, part in zip(gradients, flat.split([g.numel() for g in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def _gradient(parameter: torch.Tensor) -> Any:
    main = getattr(parameter, "main_grad", None)
    return parameter.grad if main is None else main


def _device(group: Group) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else torch.device("cpu")
    )
