"""Inside the model: rotary positions of the rank's own tokens, and attention over all ranks' keys."""

from __future__ import annotations

import copy
import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megacp import attend, methods
from megacp.errors import SeamError, UnsupportedError
from megacp.groups import Group
from megacp.hosts import limits, shares
from megacp.hosts.hooks import Function
from megacp.hosts.megatron import dropout
from megacp.hosts.megatron.loss import one_rank
from megacp.hosts.megatron.settings import cp_group
from megacp.hosts.session import Session
from megacp.hosts.splits import redeem
from megacp.mask import Mask


def rotary(original: Function, session: Callable[[], Session]) -> Function:
    """Give the positions of the rank's own tokens, by our layout rather than the host's formula."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values, share = given.arguments, session().share
        group = cp_group(self, values.get("cp_group")) if share is None else share.group
        if share is not None:
            values["max_seq_len"] = shares.rotary_length(share)
        elif group.size == 1 or values.get("packed_seq"):
            return original(*given.args, **given.kwargs)
        if "packed_seq" in values:
            values["packed_seq"] = True  # the host's way of asking for the table of the whole sequence
            table = original(*given.args, **given.kwargs)
        else:
            table = _whole_table(self, session(), original, given)
        if share is not None:
            is_pair = isinstance(table, tuple)
            own = shares.own_rows(table[0] if is_pair else table, share)
            return (own, *table[1:]) if is_pair else own
        layout = session().layout(values["max_seq_len"], group.size)
        if isinstance(table, tuple):  # YaRN: (table, scale)
            return (layout.shard(table[0], group.rank, dim=0), *table[1:])
        return layout.shard(table, group.rank, dim=0)

    return forward


def multimodal_rotary(original: Function, session: Callable[[], Session]) -> Function:
    """Make the table of the position ids given, which are the rank's own already."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = session()
        group, handle = cp_group(self), getattr(self, "cp_group", None)
        if group.size == 1 or run.split is None:
            return original(self, *args, **kwargs)
        kwargs.pop("cp_group", None)
        try:
            self.cp_group = None
            with one_rank(run):
                return original(self, *args[:2], **kwargs)
        finally:
            self.cp_group = handle

    return forward


def _whole_table(module: Any, run: Session, original: Function, given: inspect.BoundArguments) -> Any:
    """Ask a host that cannot be asked for the table of the whole sequence, as if one rank held it."""
    group = getattr(module, "cp_group", None)
    try:
        if group is not None:
            module.cp_group = None
        with one_rank(run):
            return original(*given.args, **given.kwargs)
    finally:
        if group is not None:
            module.cp_group = group


def attention_init(original: Function, session: Callable[[], Session]) -> Function:
    """Build the host's attention as for one rank; the group is our business."""
    signature = inspect.signature(original)
    unknown = {"k_channels", "v_channels"} - signature.parameters.keys()

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if unknown & kwargs.keys():
            if not session().is_in_force(_cp_of(args, kwargs)):
                original(self, *args, **kwargs)
                return
            kwargs = {name: value for name, value in kwargs.items() if name not in unknown}  # ours needs none
        given = signature.bind(self, *args, **kwargs)
        config = given.arguments["config"]
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        given.arguments["config"] = alone
        original(*given.args, **given.kwargs)
        self.config = config  # the live one: the host changes it later
        self.megacp_scale = given.arguments.get("softmax_scale")
        self.megacp_dropout = given.arguments.get("attention_dropout")
        self.megacp_number = number = given.arguments["layer_number"]
        self.megacp_window = _window(config, number)
        names = limits.comm_types(config)
        self.megacp_method = names[
            min(number, len(names)) - 1
        ]  # layers of multi-token prediction come after the last
        sizes = getattr(config, "hierarchical_context_parallel_sizes", None)
        self.megacp_hierarchy = tuple(sizes) if sizes and _has_levels(self.megacp_method) else None

    return init


def _cp_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    return int((args[0] if args else kwargs["config"]).context_parallel_size)


def attention_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Attend by the ticket that the model's entry passed on."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        values = given.arguments
        split = redeem(values["attention_mask"])
        if split is None:
            cp = self.config.context_parallel_size
            if cp > 1:
                raise UnsupportedError(
                    f"megacp: attention runs at context-parallel size {cp}, but its input did not come through a model that megacp "
                    "splits (GPTModel). It would see its own tokens only. Add a seam for this model, or use size 1."
                )
            return original(*given.args, **given.kwargs)
        if not hasattr(self, "megacp_scale"):
            raise SeamError(
                "megacp: an attention layer was built before megacp was installed. Install first, then build the model."
            )
        _check_layer(self, values)
        query, key, value = values["query"], values["key"], values["value"]
        out = attend.attention(
            query,
            key,
            value,
            mask=_layer_mask(split.mask, self.megacp_window),
            layout=split.layout,
            group=split.group,
            method=split.method or _regrouped(self, split.group) or self.megacp_method,
            hierarchy=None if split.method else self.megacp_hierarchy,
            kernel=session().config.kernel,
            format="sbhd",
            scale=self.megacp_scale,
            sinks=_sinks(self),
            **dropout.of_attention(self, split, session()),
        )
        assert isinstance(out, torch.Tensor)
        return out.flatten(
            2
        ).contiguous()  # [S, B, H, E] -> [S, B, H·E], in rows as the host makes it (0.10 views it)

    return forward


def _regrouped(module: Any, group: Group) -> str | None:
    """Return the method that Transformer Engine's set_context_parallel_group asked for after the layer was built, if it was called.

    Raises: UnsupportedError if it named other ranks than those that the model's input is split over.
    """
    asked = getattr(module, "cp_group", None) if hasattr(module, "set_context_parallel_group") else None
    if asked is None:
        return None
    ranks = [dist.get_process_group_ranks(one) for one in (asked if isinstance(asked, list) else [asked])]
    size = math.prod(map(len, ranks))
    if size != group.size or not set().union(*ranks) <= set(group.global_ranks):
        raise UnsupportedError(
            f"megacp: set_context_parallel_group gave a layer the ranks {ranks}, but the model's input is split over ranks "
            f"{list(group.global_ranks)}. Set the group that Megatron's parallel_state has, or set none."
        )
    return str(module.cp_comm_type)


@functools.lru_cache(maxsize=1024)
def _layer_mask(mask: Mask, window: tuple[int, int] | None) -> Mask:
    return mask if window is None else mask.within(*window)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    """Return the layer's sliding window (left, right), if the host gives it one."""
    size = getattr(config, "window_size", None)
    if not size:
        return None
    skip = getattr(config, "window_attn_skip_freq", None)
    if isinstance(skip, int) and layer_number % skip == 0:
        return None
    if isinstance(skip, (list, tuple)) and not skip[layer_number - 1]:
        return None
    return int(size[0]), int(size[1])


def _has_levels(method: str) -> bool:
    return method != methods.AUTO and hasattr(methods.resolve(method), "levels")


def _sinks(module: Any) -> torch.Tensor | None:
    """Return the logits [H] of the layer's sinks: learned, zero ('off-by-one'), or None."""
    kind = getattr(module.config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    offset = module.softmax_offset
    return offset.view(-1) if isinstance(offset, torch.Tensor) else None


def _check_layer(module: Any, values: dict[str, Any]) -> None:
    """Refuse what this layer was asked for and we would not do."""
    kind = values.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    name = getattr(kind, "name", kind)
    if name is not None and name not in ("causal", "padding_causal"):
        raise UnsupportedError(
            f"megacp: a layer asks for attention mask type '{name}' inside a causal model. Only causal attention is split there."
        )
    for what in ("attention_bias", "packed_seq_params"):
        if values.get(what) is not None:
            raise UnsupportedError(
                f"megacp: a layer's attention was called with {what}, which is not offered over ranks yet."
            )
