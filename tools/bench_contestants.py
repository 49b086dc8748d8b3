"""Who takes part in tools/bench.py, and how one of them is run and timed inside a rank.

A contestant is a function that makes an ``attend`` for a process group: attend(q, k, v) takes this rank's part, [B, S, heads, size] by
the contestant's layout, and gives [B, S, heads, size], differentiably. What is not installed, or cannot do the case, says so in one
sentence when it is made, by raising Absent.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

import megacp
from megacp import Layout, Mask

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
NAMES = ("out", "dq", "dk", "dv")


class Absent(Exception):
    """A contestant cannot take part; the message says why."""


@dataclass(frozen=True)
class Case:
    """Causal self-attention of one row, over the whole of it or over packed documents (their lengths in tokens)."""

    name: str
    tokens: int
    heads: int
    head_dim: int
    dtype: str
    ranks: int
    documents: tuple[int, ...] = ()

    @property
    def mask(self) -> Mask:
        if self.documents:
            return Mask.documents([0, *accumulate(self.documents)])
        return Mask.causal(self.tokens)


@dataclass(frozen=True)
class Contestant:
    """Attributes: whose: 'one process', 'megacp' or 'peer'. layout: who holds which tokens. make: gives its attend for a case."""

    name: str
    whose: str
    layout: str
    make: Callable[[Case, str], Attend]


def layout_of(name: str, case: Case) -> Layout:
    """Make a contestant's layout for a case."""
    ranks = case.ranks if name != "whole" else 1
    if name == "balanced":
        return Layout.balanced(case.mask, ranks)
    if name == "per document":
        return Layout.per_document([0, *accumulate(case.documents)], ranks)
    return Layout.zigzag(case.tokens, ranks) if name == "zigzag" else Layout.contiguous(case.tokens, ranks)


# -- one process -------------------------------------------------------------------------------------------------


def _alone(case: Case, _: str) -> Attend:
    """PyTorch's scaled_dot_product_attention, document by document."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if not case.documents:
            return _plain(q, k, v)
        parts = zip(*(x.split(case.documents, 1) for x in (q, k, v)), strict=True)
        return torch.cat([_plain(*part) for part in parts], 1)

    return attend


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    out = F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    return out.transpose(1, 2)


# -- megacp ------------------------------------------------------------------------------------------------------


def _ours(method: str) -> Callable[[Case, str], Attend]:
    def make(case: Case, layout: str) -> Attend:
        what: dict[str, Any] = {"mask": case.mask, "layout": layout_of(layout, case), "method": method}
        return lambda q, k, v: megacp.attention(q, k, v, **what)

    return make


# -- peers -------------------------------------------------------------------------------------------------------


def _only_whole_rows(case: Case) -> None:
    if case.documents:
        raise Absent("has no packed documents")


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:  # packages fail in their own ways where there is no GPU
        reason = "is not installed" if isinstance(error, ModuleNotFoundError) else f"does not import: {error}"
        raise Absent(f"{package} {reason}".splitlines()[0]) from error


def _torch_ring(case: Case, _: str) -> Attend:
    """PyTorch's ring, which is private and has no public way to run on a CPU, around its CPU flash operator."""
    _only_whole_rows(case)
    ring = _imported(
        "torch.distributed.tensor.experimental._context_parallel._attention", "PyTorch's context parallelism"
    )
    forward, backward = ring._templated_ring_attention, ring._templated_ring_attention_backward
    ring._cp_options.enable_load_balance = True
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out, lse = forward(dist.group.WORLD, 2, flash, q, k, v, is_causal=True, dropout_p=0.0)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx: Any, d_out: torch.Tensor) -> tuple[torch.Tensor, ...]:
            q, k, v, out, lse = ctx.saved_tensors
            grads = backward(
                dist.group.WORLD,
                2,
                flash_backward,
                d_out,
                "grad_out",
                q,
                k,
                v,
                out,
                lse,
                is_causal=True,
                dropout_p=0.0,
            )
            return grads[0], grads[1], grads[2]

    return lambda q, k, v: Ring.apply(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def _deepspeed(case: Case, _: str) -> Attend:
    _only_whole_rows(case)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    layer = _imported("deepspeed.sequence.layer", "deepspeed")
    if not layer.dist.is_initialized():
        layer.dist.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    module = layer.DistributedAttention(lambda q, k, v, *_: _plain(q, k, v), dist.group.WORLD, 2, 1)
    return lambda q, k, v: module(q, k, v, 0)


def _yunchang(case: Case, _: str) -> Attend:
    _only_whole_rows(case)
    swap = _imported("yunchang.comm.all_to_all", "yunchang").SeqAllToAll4D.apply

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        return swap(group, _plain(*(swap(group, x, 2, 1) for x in (q, k, v))), 1, 2)

    return attend


def _ringmaster_heads(case: Case, _: str) -> Attend:
    _only_whole_rows(case)
    swap = _imported("ringmaster.comm", "axolotl-ringmaster").seq_all_to_all

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        group = dist.group.WORLD
        return swap(_plain(*(swap(x, 2, 1, group) for x in (q, k, v))), 1, 2, group)

    return attend


def _ringmaster_ring(case: Case, _: str) -> Attend:
    _only_whole_rows(case)
    if case.tokens > 8192:
        raise Absent("axolotl-ringmaster's ring spells out all weights on a CPU; left out above 8,192 tokens")
    ring = _imported("ringmaster.ring.p2p_attn", "axolotl-ringmaster").ring_p2p_attention
    group = dist.group.WORLD
    return lambda q, k, v: ring(
        *(x.transpose(1, 2) for x in (q, k, v)), group=group, causal=True, scaling=None
    )


ALONE = "one process"
_ALL = [
    Contestant(ALONE, "one process", "whole", _alone),
    Contestant("ring", "megacp", "zigzag", _ours("ring")),
    Contestant("all_gather", "megacp", "zigzag", _ours("all_gather")),
    Contestant("exchange", "megacp", "zigzag", _ours("exchange")),
    Contestant("all_to_all", "megacp", "zigzag", _ours("all_to_all")),
    Contestant("hierarchical", "megacp", "zigzag", _ours("hierarchical")),
    Contestant("PyTorch's ring", "peer", "zigzag", _torch_ring),
    Contestant("DeepSpeed DistributedAttention", "peer", "contiguous", _deepspeed),
    Contestant("yunchang all-to-all", "peer", "contiguous", _yunchang),
    Contestant("ringmaster all-to-all", "peer", "contiguous", _ringmaster_heads),
    Contestant("ringmaster ring", "peer", "contiguous", _ringmaster_ring),
]
_PACKED = [
    _ALL[0],
    _ALL[1],
    Contestant("ring, per document", "megacp", "per document", _ours("ring")),
    Contestant("exchange, zigzag", "megacp", "zigzag", _ours("exchange")),
    Contestant("exchange, balanced", "megacp", "balanced", _ours("exchange")),
    Contestant("all_to_all", "megacp", "contiguous", _ours("all_to_all")),
]


def contestants(case: Case) -> list[Contestant]:
    """List who takes part in a case."""
    return _PACKED if case.documents else _ALL


# -- inside a rank -----------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def whole(case: Case) -> tuple[torch.Tensor, ...]:
    """Make q, k, v and the gradient of the output, [1, G, H, D] each, the same in every process."""
    make = torch.Generator().manual_seed(0)
    shape = (1, case.tokens, case.heads, case.head_dim)
    return tuple(torch.randn(shape, generator=make).to(getattr(torch, case.dtype)) for _ in range(4))


@lru_cache(maxsize=1)
def _local(case: Case, layout: str, rank: int) -> tuple[torch.Tensor, ...]:
    placed = layout_of(layout, case)
    return tuple(placed.shard(x, rank).contiguous() for x in whole(case))


def turn(case: Case, name: str, threads: int, wants_result: bool) -> dict[str, Any]:
    """Run one contestant once, forward and backward, or say why it is absent.

    Gives seconds on the clock, seconds of processor time, bytes of memory and, if wanted, the result.
    The first turn of a contestant in a process should not count: it allocates, plans and connects.
    """
    torch.set_num_threads(threads)
    one = next(c for c in contestants(case) if c.name == name)
    try:
        attend = one.make(case, one.layout)
        *inputs, d_out = _local(case, one.layout, dist.get_rank())
        q, k, v = (x.detach().requires_grad_() for x in inputs)
        before = _start_of_memory()
        dist.barrier()
        start, start_of_work = time.perf_counter(), time.process_time()
        out = attend(q, k, v)
        out.backward(d_out)
        seconds, worked = time.perf_counter() - start, time.process_time() - start_of_work
    except (Absent, megacp.UnsupportedError) as why:
        return {"absent": str(why)}
    memory = _peak_memory() - before
    result = [x.detach() for x in (out, q.grad, k.grad, v.grad)] if wants_result else None
    return {"seconds": seconds, "worked": worked, "memory": memory, "result": result}


def _start_of_memory() -> int:
    """Give back what is free, forget the peak, and return the bytes in use (0 where the system cannot tell)."""
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    except (OSError, AttributeError):
        return _peak_memory()
    return _status("VmRSS")


def _peak_memory() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    try:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))
    except (OSError, StopIteration):
        return 0
