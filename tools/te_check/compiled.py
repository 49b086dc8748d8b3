"""megacp's kernel through Transformer Engine's own Python, up to the compiled functions, which only a GPU can run.

Its query of backends, its checks and its enums are the real ones. Each call first goes to the real compiled function: arguments that
it does not take are a TypeError, while any other error means that it took them and missed the GPU. Plain attention answers instead.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any
from unittest import mock

import torch

import megacp
from megacp import Mask
from megacp.kernels import transformer_engine

HEADS, KV_HEADS, SIZE, DOCUMENTS = 4, 2, 16, [0, 20, 64]
NAMES = ("fused_attn_fwd", "fused_attn_bwd")


def through_python() -> tuple[dict[str, int], float]:
    """Attend to documents, plainly and with a window, by the kernel.

    Returns: how often each compiled function took its arguments; the largest relative error of out, dq, dk and dv.
    """
    from megacp.testing import cpu

    cpu.install()
    worst, calls = 0.0, dict.fromkeys((*NAMES, "get_fused_attn_backend"), 0)
    with _answered(calls), mock.patch.object(transformer_engine, "_DEVICE", "cpu"):
        for window in (None, 7):
            mask = Mask.documents(DOCUMENTS, window=window)
            make = torch.Generator().manual_seed(1)
            q, k, v, d_out = (
                torch.randn(1, DOCUMENTS[-1], h, SIZE, generator=make).bfloat16()
                for h in (HEADS, KV_HEADS, KV_HEADS, HEADS)
            )
            kernel = functools.partial(megacp.attention, mask=mask, kernel="transformer_engine")
            found = _results(kernel, q, k, v, d_out)
            right = _results(
                functools.partial(_plain, seen=mask.dense()), *(x.double() for x in (q, k, v, d_out))
            )
            worst = max(worst, *(float((a - b).norm() / b.norm()) for a, b in zip(found, right, strict=True)))
    return calls, worst


def _results(attend: Callable[..., Any], q: Any, k: Any, v: Any, d_out: Any) -> list[torch.Tensor]:
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = attend(q, k, v)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), d_out)]


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    logits = torch.einsum("bshd,bthd->bhst", q, k) / SIZE**0.5
    return torch.einsum("bhst,bthd->bshd", logits.masked_fill(~seen, -torch.inf).softmax(-1), v)


@contextlib.contextmanager
def _answered(calls: dict[str, int]) -> Iterator[None]:
    """Let plain attention answer for the compiled functions, and a device of compute capability 9 for the missing one."""
    library = import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")
    query = import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    compiled = library.tex
    told: dict[str, Any] = {}  # to the Python function around the compiled one, by name

    def remembers(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            told.update(inspect.signature(function).bind(*args, **kwargs).arguments)
            return function(*args, **kwargs)

        return call

    def answers(name: str, answer: Callable[..., Any]) -> Callable[..., Any]:
        original = getattr(compiled, name)

        def call(*args: Any) -> Any:
            try:
                original(*args)
            except RuntimeError as error:  # no GPU; what it cannot read is a TypeError, or says so
                if "cast" in str(error):
                    raise
            calls[name] += 1
            return answer(told, *args)

        return call

    def offered(_: Any, asked: Any) -> tuple[Any, str]:
        backends = compiled.NVTE_Fused_Attn_Backend
        if min(asked.num_tokens_q, asked.num_tokens_kv) < 1:  # of which cuDNN makes no graph
            return backends.NVTE_No_Backend, "there are no tokens"
        return backends.NVTE_F16_arbitrary_seqlen, ""

    with contextlib.ExitStack() as stack:
        for name, answer in zip(NAMES, (_forward, _backward), strict=True):
            stack.enter_context(mock.patch.object(library, name, remembers(getattr(library, name))))
            stack.enter_context(mock.patch.object(compiled, name, answers(name, answer)))
        name = "get_fused_attn_backend"
        stack.enter_context(mock.patch.object(compiled, name, answers(name, offered)))
        stack.enter_context(mock.patch.object(query, "get_device_compute_capability", lambda: (9, 0)))
        transformer_engine._backend.cache_clear()
        yield
    transformer_engine._backend.cache_clear()


def _forward(told: dict[str, Any], *_: Any) -> list[torch.Tensor]:
    """Answer [out, log-sum-exp [t, H, 1], state of the generator]."""
    out = torch.empty_like(told["q"])
    stats = torch.empty(*out.shape[:2], 1)
    for queries, keys in _sequences(told):
        logits, v = _logits(told, queries, keys), _repeated(told["v"][keys])
        out[queries] = torch.einsum("hst,thd->shd", logits.softmax(-1), v).to(out.dtype)
        stats[queries, :, 0] = logits.logsumexp(-1).transpose(0, 1).float()
    return [out, stats, torch.zeros(2, dtype=torch.int64)]


def _backward(told: dict[str, Any], *_: Any) -> list[torch.Tensor]:
    """Answer [dq, dk, dv], given the log-sum-exp over all keys, of which these are some."""
    q, k, v, out, d_out = (told[name].double() for name in ("q", "k", "v", "o", "d_o"))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    for queries, keys in _sequences(told):
        lse = told["aux_ctx_tensors"][0][queries, :, 0].double().transpose(0, 1)[..., None]
        p = (_logits(told, queries, keys) - lse).exp()
        dp = torch.einsum("shd,thd->hst", d_out[queries], _repeated(v[keys]))
        ds = p * (dp - (d_out * out)[queries].sum(-1).transpose(0, 1)[..., None]) * told["attn_scale"]
        dq[queries] = torch.einsum("hst,thd->shd", ds, _repeated(k[keys]))
        for total, part in (
            (dk, torch.einsum("hst,shd->thd", ds, q[queries])),
            (dv, torch.einsum("hst,shd->thd", p, d_out[queries])),
        ):
            total[keys] = part.unflatten(1, (KV_HEADS, -1)).sum(2)
    return [x.to(told["q"].dtype) for x in (dq, dk, dv)]


def _sequences(told: dict[str, Any]) -> Iterator[tuple[slice, slice]]:
    bounds = (pairwise(told[f"cu_seqlens_{side}"].tolist()) for side in ("q", "kv"))
    for queries, keys in zip(*bounds, strict=True):
        yield slice(*queries), slice(*keys)


def _logits(told: dict[str, Any], queries: slice, keys: slice) -> torch.Tensor:
    """Give float64 [H, s, t], -inf where the mask, whose diagonal ends in the bottom right corner, hides the key."""
    q, k = told["q"][queries].double(), _repeated(told["k"][keys])
    logits = torch.einsum("shd,thd->hst", q, k) * told["attn_scale"]
    if told["attn_mask_type"] == "padding":
        return logits
    hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(1 + len(k) - len(q))
    return logits.masked_fill(hidden, -torch.inf)


def _repeated(x: torch.Tensor) -> torch.Tensor:
    return x.double().repeat_interleave(HEADS // KV_HEADS, 1)
