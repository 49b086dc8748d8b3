"""What one hooked run knows: its settings, its groups, and what is in force. One object, made by :func:`megacp.install`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist

from megacp import kernels, methods
from megacp.config import Config
from megacp.dynamic import Share
from megacp.errors import SeamError
from megacp.groups import Group, as_group
from megacp.hosts.documents import Mailbox
from megacp.hosts.placement import changes_by_batch, fixed
from megacp.hosts.splits import Split
from megacp.layout import Layout

__all__ = ["Session"]


@dataclass
class Session:
    """The state of a hooked run.

    Attributes:
        config: the user's settings. table: gives the report's table of seams.
        check: refuses to go on without a seam that is needed.
        eod: the token that ends a document, once known. methods: of the model's layers.
        comm_types: what --cp-comm-type says where the host has no such flag of its own.
        mailboxes: for each model-chunk family (by pipeline group) the document starts on their way.
        facts: lines for the report, in the order in which they became known. forwards: micro-batches seen.
        site: where in the model dropout is drawn now (see hosts.megatron.dropout).
        loss_mask: of the batch that the script has taken last.
        is_one_rank: the host is told that a group has one member, and ``alone`` is that group (see hosts.megatron.loss).
        is_averaged: the host averages gradients over the group; else it sums them.
        attached_scales, router_tokens: what the host scales attached losses by (see hosts.megatron.attached).
        split: of the micro-batch that is in the model's forward.
        asks_late: the model's layers ask for positions themselves, in recompute too, so all micro-batches have one layout.
        arguments, own_group, groups: of a host without context parallelism (see hosts.legacy): its command line, its getter of the
            data-parallel group, and the groups made for it.
        model_config, device: of the model, and the type of device its parameters are on, for what is planned ahead.
        token_divisor: what the host's count of tokens is multiplied by to be that of all ranks; None until it was seen.
        share: the row that the model runs on its own block of ranks now (see hosts.shares); None without dynamic sizes.
    """

    config: Config
    table: Callable[[], str]
    check: Callable[[], None]
    eod: int | None = None
    methods: tuple[str, ...] = ("ring",)
    comm_types: tuple[str, ...] = ()
    pipeline: Group | None = None
    mailbox: Mailbox | None = None
    facts: dict[str, str] = field(default_factory=dict)
    is_announced: bool = False
    forwards: int = 0
    site: Any = None
    loss_mask: Any = None
    is_one_rank: bool = False
    alone: Any = None
    is_averaged: bool = True
    token_divisor: int | None = None
    attached_scales: dict[str, float] = field(default_factory=dict)
    router_tokens: float | None = None
    split: Split | None = None
    share: Share | None = None
    asks_late: bool = False
    model_config: Any = None
    device: str = "cpu"
    arguments: Any = None
    own_group: Any = None
    groups: Any = None

    def __post_init__(self) -> None:
        if self.eod is None:
            self.eod = self.config.eod_token

    def configure(self, values: dict[str, Any]) -> None:
        """Take other settings, by field name. Raises: ConfigError for a value that is not legal."""
        self.config = replace(self.config, **values)
        if self.config.eod_token is not None:
            self.eod = self.config.eod_token

    @property
    def has_documents(self) -> bool:
        """Say whether documents are kept apart."""
        return self.config.documents != "off"

    @property
    def has_keyed_dropout(self) -> bool:
        """Say whether dropout is drawn from positions."""
        return self.config.dropout == "positions"

    @property
    def layout_name(self) -> str:
        """Name the layout that a sequence must suit."""
        return "zigzag" if self.config.layout == "auto" else self.config.layout

    @property
    def changes_layout(self) -> bool:
        """Say whether micro-batches may get different layouts."""
        return changes_by_batch(self.config.layout, self.has_documents) and not self.asks_late

    def layout(self, seq_len: int, cp_size: int) -> Layout:
        """Give the layout of the micro-batch that is in the model's forward, or of any where all have the same.

        Raises: ConfigError if a sequence of ``seq_len`` tokens cannot be split without padding; SeamError if none is in the model.
        """
        if self.split is not None and self.split.layout.seq_len == seq_len:
            return self.split.layout
        if self.changes_layout:
            raise SeamError(
                f"megacp: positions of {seq_len} tokens were asked for outside the model's forward pass, and with --megacp-layout "
                f"{self.config.layout} each micro-batch has tokens elsewhere. Use --megacp-layout zigzag."
            )
        return fixed(self.layout_name, seq_len, cp_size)

    @contextmanager
    def holding(self, **values: Any) -> Iterator[None]:
        """Let fields have other values in a block, and those of before after it."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def is_in_force(self, cp_size: int) -> bool:
        """Say whether attention is ours: with more than one rank, documents to keep apart, or dropout from positions."""
        return cp_size > 1 or self.has_documents or self.has_keyed_dropout

    def connect_alone(self, cp_size: int) -> None:
        """Make the group that holds this rank only."""
        self.alone = self.token_divisor = self.router_tokens = None
        self.attached_scales = {}
        self.is_averaged = True
        if cp_size > 1:
            self.alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)

    def connect_pipeline(self, handle: Any, chunks: int) -> None:
        """Give each pipeline a gloo group of its own for document starts. Collective over the world."""
        self.pipeline = self.mailbox = None
        if not self.has_documents or dist.get_world_size(handle) == 1:
            self.mailbox = Mailbox(None, chunks)
            return
        mine = tuple(dist.get_process_group_ranks(handle))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine)
        for ranks in sorted(set(everyone)):
            group = dist.new_group(list(ranks), backend="gloo")
            if ranks == mine:
                self.pipeline = as_group(group)
        self.mailbox = Mailbox(self.pipeline, chunks)

    def announce(self, split: Split, kernel: str, why: str) -> None:
        """Print once, on rank 0, what was hooked and what is in force, and why."""
        if self.is_announced:
            return
        self.is_announced = True
        self.facts.update(
            {
                **(
                    self._share_facts(self.share) if self.share is not None else self._split_facts(split, why)
                ),
                "kernel": f"{kernel} ({'auto: first that is exact here' if self.config.kernel == 'auto' else 'asked for'}; "
                f"known: {', '.join(kernels.names())})",
                **(
                    {"dropout": "drawn from positions, the same at every size"}
                    if self.has_keyed_dropout
                    else {}
                ),
                "loss": "whole at the model's exit, so every mask gives the gradients of one rank",
            }
        )
        if self.config.report != "off" and (not dist.is_initialized() or dist.get_rank() == 0):
            print(self.text(), file=sys.stderr, flush=True)

    def _split_facts(self, split: Split, why: str) -> dict[str, str]:
        layout = split.layout
        return {
            "context parallel": f"{split.group.size} ranks share each sequence of {layout.seq_len} tokens"
            if split.group.size > 1
            else f"off, each rank holds whole sequences of {layout.seq_len} tokens",
            "layout": f"{layout.name} ({why}), {layout.local_len} tokens a rank"
            + ("; by micro-batch, this is the first" if self.changes_layout else ""),
            "mask": split.mask.kind + (f", from {self.config.documents}" if self.has_documents else ""),
            "method": f"{self._method_words()} (the host's --cp-comm-type)",
        }

    @staticmethod
    def _share_facts(share: Share) -> dict[str, str]:
        waves = share.step.waves
        return {
            "context parallel": f"by document, over blocks of {', '.join(map(str, waves.sizes))} of {waves.ranks} ranks",
            "layout": f"each document zigzagged alone, or balanced, at most {waves.capacity} tokens a rank",
            "mask": "documents (causal), those of the schedule",
            "method": share.step.method or "ring for zigzagged documents, exchange for balanced rows",
        }

    def _method_words(self) -> str:
        names = [name if name == methods.AUTO else methods.resolve(name).name for name in self.methods]
        return names[0] if len(set(names)) == 1 else "by layer: " + ", ".join(names)

    def text(self) -> str:
        """Write the report: the table of seams, then what is in force."""
        wide = max((len(name) for name in self.facts), default=0)
        facts = [f"  {name:{wide}s}  {value}" for name, value in self.facts.items()]
        return "\n".join(
            [
                "megacp is hooked in:",
                *("  " + line for line in self.table().splitlines()),
                *(["in force:"] if facts else []),
                *facts,
            ]
        )
