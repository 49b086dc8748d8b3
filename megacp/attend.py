"""Exact attention over a sequence that is split over ranks: check, choose, run.

Shapes: ``B`` batch, ``S`` local sequence (the layout's slots), ``G`` global sequence, ``H`` query heads, ``K`` key/value heads,
``D`` head size of q and k, ``E`` head size of v. Formats: bshd [B, S, H, D], sbhd [S, B, H, D], thd [S, H, D].
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch.autograd.function import once_differentiable

from megacp import comm, kernels, methods
from megacp.errors import ConfigError, ShapeError, UnsupportedError
from megacp.groups import Group, as_group
from megacp.kernels import Kernel, Options, Request
from megacp.layout import Layout
from megacp.mask import Mask
from megacp.methods import Call, accumulation_dtype
from megacp.plans import Plan, Sizes

__all__ = ["attention", "plan"]

_FORMATS = {"bshd": 4, "sbhd": 4, "thd": 3}

_P = ParamSpec("_P")
_R = TypeVar("_R")


def _uncompiled(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Make torch.compile break its graph here and go on after; exchanges between ranks are not for it to trace.

    The compiler takes a second to import, so it is asked only where somebody else has imported it.
    """

    outside: list[Callable[_P, _R]] = []

    @wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        if not outside and "torch._dynamo" in sys.modules:
            outside.append(torch.compiler.disable(function))
        return (outside[0] if outside else function)(*args, **kwargs)

    return call


@lru_cache(maxsize=512)
def plan(layout: Layout, mask: Mask, method: str = "ring", hierarchy: tuple[int, int] | None = None) -> Plan:
    """Turn a layout and a mask into steps. Needs no process group; cached by value.

    Args:
        hierarchy: for method 'hierarchical', the (inner, outer) sizes; near the square root of cp_size if None.
    Warns of a layout with more than half as many padding slots as tokens, which are computed and sent like them.
    Raises: ConfigError for an unknown method, a hierarchy that does not fit, or a layout and a mask of different lengths.
    """
    _warn_of_padding(layout)
    schedule = methods.resolve(method)
    return Plan(layout, mask, schedule, methods.levels(schedule, layout.cp_size, hierarchy))


def _warn_of_padding(layout: Layout) -> None:
    if layout.padding > layout.seq_len / 2:
        slots = layout.seq_len + layout.padding
        warnings.warn(
            f"megacp: layout '{layout.name}' over {layout.cp_size} ranks has {slots:,} slots for {layout.seq_len:,} tokens, "
            f"{slots / layout.seq_len:.2f} times as many. Documents are short for so many ranks; layout 'balanced' keeps them whole.",
            stacklevel=3,
        )


@_uncompiled
def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    layout: Layout | None = None,
    group: Any = None,
    method: str = "ring",
    hierarchy: tuple[int, int] | None = None,
    kernel: str = "auto",
    format: str = "bshd",
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | None = None,
    return_lse: bool = False,
    return_max_logit: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Attend from this rank's queries to the keys of all ranks, as if the sequence lay on one.

    Shapes: q [B, S, H, D], k [B, S, K, D], v [B, S, K, E], this rank's part by ``layout`` -> out [B, S, H, E] in q's dtype and
    format; with ``return_lse`` also lse [B, H, S], float32 (float64 for float64), natural log; with ``return_max_logit`` also the
    largest visible logit of each head over all ranks, [H] in lse's dtype; neither is differentiable.
    Padding slots give 0 and lse -inf and leak nowhere, whatever they hold.

    Args:
        mask: what each global position may see. layout: who holds which position; may be left out on a single rank. Each token is on
            one rank: one that all ranks know (a shared prefix) is placed like any other, and then counts once; as a further key of
            every rank it is refused.
        group: process group, one-dimensional DeviceMesh, or None for the default group (or a single rank).
        method: how keys and values travel: ring (p2p), all_gather (allgather), exchange, all_to_all (a2a), hierarchical (a2a+p2p),
            or auto: what :func:`megacp.methods.choose` takes from the plans' figures.
        hierarchy: for method hierarchical, (inner, outer): an all-to-all of heads inside each ``inner`` consecutive ranks of the
            group, a ring of ``outer`` across them. If None, the largest inner size that divides K and stays on one node.
        kernel: whose attention computes a block, or 'auto'. scale: of the logits, 1/sqrt(D) if None.
        sinks: [H] learned logits that take part in the softmax and have no value. softcap: c in c·tanh(logit/c).
        alibi_slopes: [H]; slope · |distance in tokens| is taken off the logits (Press et al. 2022); no gradient.
        dropout_p: share of pairs dropped. Which ones follows from dropout_seed and the pair's positions, so they are the same at every
            size of the group and in recompute. dropout_seed: drawn from PyTorch's generator by the first rank if None.
    Raises: ConfigError, ShapeError (a ConfigError) or UnsupportedError, the same on every rank and before the first exchange;
        CommTimeout if a peer does not answer.
    """
    members = as_group(group)
    q4, k4, v4 = (_to_bshd(x, format, name) for x, name in ((q, "q"), (k, "k"), (v, "v")))
    layout = _checked_layout(layout, mask, members)
    _check_tensors(q4, k4, v4, mask, layout)
    options = _checked_options(q4, scale, sinks, softcap, alibi_slopes, dropout_p, return_max_logit)
    what = _planned(method, hierarchy, layout, mask, members, q4, k4, v4)
    chosen = _chosen(kernel, q4, v4, k4, options)
    if dropout_p:
        options = replace(options, dropout_seed=_agreed_seed(dropout_seed, members, q.device))
    out, lse = _Attention.apply(q4, k4, v4, sinks, Call(what, members, chosen, options))  # type: ignore[no-untyped-call]
    out = out if format == "bshd" else out.transpose(0, 1) if format == "sbhd" else out[0]
    largest = []
    if options.max_logit is not None:
        largest = [comm.all_gather(members, options.max_logit, "the largest logit of each head").amax(0)]
    results = (out, *([lse] if return_lse else []), *largest)
    return results if len(results) > 1 else out


class _Attention(torch.autograd.Function):
    """One method's forward and backward loop as a differentiable function."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None, call: Call
    ) -> tuple[torch.Tensor, torch.Tensor]:
        method = methods.resolve(call.plan.method)
        out, lse = method.forward(q, k, v, call, sinks)
        out = out.to(q.dtype)
        empty = call.plan.layout.padding_slots(call.group.rank)
        if empty is not None and sinks is not None:  # a sink alone is not a row that was there
            lse = lse.masked_fill(empty.to(lse.device), -torch.inf)
        ctx.call, ctx.has_sinks = call, sinks is not None
        ctx.save_for_backward(q, k, v, out, lse, *([sinks] if sinks is not None else []))
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, out, lse, *rest = ctx.saved_tensors
        method = methods.resolve(ctx.call.plan.method)
        dq, dk, dv = method.backward(d_out.contiguous(), q, k, v, out, lse, ctx.call)
        d_sinks = _sink_gradient(d_out, out, lse, rest[0]) if ctx.has_sinks else None
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None


def _sink_gradient(
    d_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return this rank's share of the gradient of the sinks, [H]: minus the sink's probability times dO·O, over its queries.

    As for every parameter, the shares of all ranks are summed with the other gradients of the model.
    """
    dtype = accumulation_dtype(out.dtype)
    delta = (d_out.to(dtype) * out.to(dtype)).sum(-1).transpose(1, 2)  # [B, H, S]
    share = torch.exp(sinks.to(dtype)[None, :, None] - lse).masked_fill(lse == -torch.inf, 0)  # padding
    return -(share * delta).sum((0, 2)).to(sinks.dtype)


def _to_bshd(x: torch.Tensor, format: str, name: str) -> torch.Tensor:
    if format not in _FORMATS:
        raise ConfigError(f"megacp: format {format!r} is not known. Use one of: {', '.join(_FORMATS)}.")
    if x.dim() != _FORMATS[format]:
        raise ShapeError(
            f"megacp: {name} of shape {tuple(x.shape)} is not in format '{format}', which has {_FORMATS[format]} dims."
        )
    return x if format == "bshd" else x.transpose(0, 1) if format == "sbhd" else x[None]


def _checked_options(
    q: torch.Tensor,
    scale: float | None,
    sinks: torch.Tensor | None,
    softcap: float | None,
    alibi_slopes: torch.Tensor | None,
    dropout_p: float,
    return_max_logit: bool,
) -> Options:
    heads = q.shape[2]
    for name, value in (("sinks", sinks), ("alibi_slopes", alibi_slopes)):
        if value is not None and value.shape != (heads,):
            raise ShapeError(
                f"megacp: {name} of shape {tuple(value.shape)} do not fit {heads} query heads. Pass one a head."
            )
    if alibi_slopes is not None and alibi_slopes.requires_grad:
        raise UnsupportedError("megacp: alibi_slopes that need a gradient are not offered. Detach them.")
    if not 0 <= dropout_p < 1:
        raise ConfigError(f"megacp: dropout_p is {dropout_p!r}; it must be at least 0 and below 1.")
    if softcap is not None and not softcap > 0:
        raise ConfigError(f"megacp: softcap is {softcap!r}; it must be above 0, or None for none.")
    largest = None
    if return_max_logit:
        largest = torch.full((heads,), -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    size = 1.0 / math.sqrt(q.shape[-1]) if scale is None else float(scale)
    return Options(size, softcap, alibi_slopes, float(dropout_p), max_logit=largest)


def _agreed_seed(seed: int | None, group: Group, device: torch.device) -> int:
    """Take the caller's seed, or one that the group's first rank draws (every rank draws, so generators stay in step)."""
    if seed is not None:
        return int(seed)
    drawn = torch.randint(1 << 62, (1,)).to(device)
    return int(comm.all_gather(group, drawn, "the seed of attention dropout")[0])


def _checked_layout(layout: Layout | None, mask: Mask, group: Group) -> Layout:
    if not isinstance(mask, Mask):
        raise UnsupportedError(
            f"megacp: attention_mask is a {type(mask).__name__}; attention takes a megacp.Mask. A dense mask cannot be honoured over "
            "ranks: say what it means with Mask.causal, Mask.full, Mask.documents or Mask.prefix."
        )
    if layout is None:
        if group.size > 1:
            raise ConfigError(
                f"megacp: attention over {group.size} ranks needs the layout by which the sequence was sharded."
            )
        layout = Layout.contiguous(mask.seq_len, 1)
    if layout.cp_size != group.size:
        raise ConfigError(
            f"megacp: the layout is over cp_size {layout.cp_size}, the context-parallel group has {group.size} ranks. "
            "Make the layout for this group, or pass the group it was made for."
        )
    return layout


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask, layout: Layout) -> None:
    """Refuse shapes that cannot be right, naming them. All values are the same on every rank."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} as [B, S, heads, size]"
    if not q.dtype == k.dtype == v.dtype or not q.device == k.device == v.device:
        raise ShapeError(
            f"megacp: q, k and v differ: {q.dtype} {k.dtype} {v.dtype} on {q.device} {k.device} {v.device}."
        )
    if q.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ShapeError(
            f"megacp: attention in {q.dtype} is not offered. Use float64, float32, bfloat16 or float16."
        )
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ShapeError(
            f"megacp: {shapes} do not fit together. Queries and keys must be of the same tokens and head size, keys and values of the "
            "same heads. Decoding against a cache of keys is not attention over a split sequence: run it at context-parallel size 1."
        )
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ShapeError(
            f"megacp: {q.shape[2]} query heads are no multiple of {k.shape[2]} key/value heads ({shapes})."
        )
    if q.shape[1] != layout.local_len:
        whole = (
            " It is the whole sequence: shard it first."
            if q.shape[1] == layout.seq_len and layout.cp_size > 1
            else ""
        )
        raise ShapeError(
            f"megacp: {shapes}: the local sequence has {q.shape[1]} slots, layout '{layout.name}' over {layout.cp_size} ranks "
            f"gives each rank {layout.local_len} of {layout.seq_len} tokens.{whole}"
        )
    if mask.rows is not None and mask.rows != q.shape[0]:
        raise ShapeError(
            f"megacp: the mask has {mask.rows} different rows, the batch {q.shape[0]} ({shapes})."
        )


def _planned(
    method: str,
    hierarchy: tuple[int, int] | None,
    layout: Layout,
    mask: Mask,
    group: Group,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
) -> Plan:
    """Make the plan, and refuse numbers of heads that the method cannot divide."""
    heads, kv_heads = q.shape[2], k.shape[2]
    if method == methods.AUTO:
        sizes = Sizes(heads, kv_heads, q.shape[3], v.shape[3])
        method = methods.choose(layout, mask, sizes, q.element_size(), q.device.type).method
    schedule = methods.resolve(method)
    inner_outer = methods.levels(schedule, layout.cp_size, hierarchy, kv_heads, group.nodes)
    what = plan(layout, mask, method, inner_outer)
    reason = methods.refusal(what, heads, kv_heads)
    if reason is not None:
        raise UnsupportedError(f"megacp: {reason}.")
    return what


def _chosen(name: str, q: torch.Tensor, v: torch.Tensor, k: torch.Tensor, options: Options) -> Kernel:
    request = Request(q.device.type, q.dtype, q.shape[2], k.shape[2], q.shape[3], v.shape[3], options)
    return kernels.choose(name, request)
