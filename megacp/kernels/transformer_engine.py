"""Transformer Engine's fused attention (cuDNN) on packed sequences. Not yet run on a GPU.

Only two of its masks are used, ``padding`` and ``padding_causal_bottom_right``, because its windows depend on the versions of cuDNN
and the device: a window becomes pairs of triangles, which costs no further operations. GQA, and head sizes of q and v that differ, are
its own. What its query of backends does not offer is refused; so its environment variables (NVTE_FUSED_ATTN and others) keep their
meaning.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch

from megacp.kernels import Gradients, Options, Request, not_offered, packed, signatures
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "transformer_engine"

_DEVICE = "cuda"  # a test sets this to run the calls against a stand-in
_MASKS = ("padding", "padding_causal_bottom_right")
_RELIED_ON = (
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "cu_seqlens_q_padded",
    "cu_seqlens_kv_padded",
    "fake_dtype",
    "fused_attention_backend",
    "attn_scale",
    "qkv_layout",
    "attn_mask_type",
)
_QUERIES = (
    "transformer_engine.pytorch.attention.dot_product_attention.utils",
    "transformer_engine.pytorch.dot_product_attention.utils",
)

_ASKED = 4096  # tokens: the one packed sequence that the query of backends is asked about

# Whether the log-sum-exp comes packed, [t, H, 1], or padded, [n, H, max_q, 1]: cuDNN decides, and shows it in the forward pass,
# which runs before any backward pass.
_comes_padded: dict[torch.device, bool] = {}


def refuses(request: Request) -> str | None:
    """Refuse without the package, on other devices, softcap, and whatever the package's query of backends does not offer."""
    if not signatures.is_installed("transformer_engine"):
        return "the package transformer-engine is not installed"
    reason = packed.refusal(request, "Transformer Engine's fused attention", _DEVICE)
    if reason is None and request.options.softcap is not None:
        reason = "Transformer Engine's fused attention has no softcap"
    reason = reason or not_offered(request.options)
    if reason is not None:
        return reason
    sizes = (request.heads, request.kv_heads, _multiple(request.head_dim), _multiple(request.value_dim))
    for mask in _MASKS:
        found = _backend(request.dtype, *sizes, mask, _is_deterministic())
        if isinstance(found, str):
            return found
    return None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each mask among the blocks; two for windows."""
    return packed.forward(q, k, v, blocks, options, _attend, windows=False)


def backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    blocks: Sequence[Block],
    options: Options,
    into: Gradients,
) -> None:
    """Add the gradients of each call, by the library's own backward."""
    packed.backward(d_out, q, k, v, out, lse, blocks, options, into, _attend_backward, windows=False)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: packed.Call, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    value_dim = v.shape[-1]
    q, k, v = packed.widened(q, k, v, alike=False)
    out, saved, *_ = signatures.call(
        _library().fused_attn_fwd, is_training=True, **_asked(q, k, v, call, options)
    )
    lse: torch.Tensor = saved[0]
    _comes_padded[lse.device] = lse.dim() == 4
    lse = _from_padded(lse[..., 0], call) if lse.dim() == 4 else lse[..., 0].transpose(0, 1)
    return out.view(q.shape[0], q.shape[1], -1)[..., :value_dim], lse


def _attend_backward(
    d_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    call: packed.Call,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    head_dim, value_dim = q.shape[-1], v.shape[-1]
    d_out, q, k, v, out = packed.widened(d_out, q, k, v, out, alike=False)
    stats = _to_padded(lse, call) if _comes_padded.get(lse.device) else lse.transpose(0, 1).contiguous()
    state = torch.zeros(2, dtype=torch.int64, device=q.device)  # of the generator; read only with dropout
    dq, dk, dv, *_ = signatures.call(
        _library().fused_attn_bwd,
        o=out,
        d_o=d_out,
        dqkv_dtype=_their_dtype(q.dtype),
        aux_ctx_tensors=[stats[..., None], state],
        do_format="thd",
        dqkv_layout="thd_thd_thd",
        deterministic=_is_deterministic(),
        **_asked(q, k, v, call, options),
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _asked(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: packed.Call, options: Options
) -> dict[str, Any]:
    """Give what both directions are told."""
    mask = _MASKS[call.is_causal]
    backend = _backend(q.dtype, q.shape[1], k.shape[1], q.shape[2], v.shape[2], mask, _is_deterministic())
    return {
        "max_seqlen_q": call.max_q,
        "max_seqlen_kv": call.max_k,
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_kv": call.cu_k,
        "cu_seqlens_q_padded": call.cu_q,
        "cu_seqlens_kv_padded": call.cu_k,
        "q": q,
        "k": k,
        "v": v,
        "fake_dtype": q.dtype,
        "fused_attention_backend": backend,
        "attn_scale": options.scale,
        "dropout": 0.0,
        "qkv_layout": "thd_thd_thd",
        "o_format": "thd",
        "attn_bias_type": "no_bias",
        "attn_mask_type": mask,
        "window_size": (-1, 0 if call.is_causal else -1),
    }


def _from_padded(lse: torch.Tensor, call: packed.Call) -> torch.Tensor:
    """Take [n, H, max_q] to [H, t]."""
    sequence, within = _seats(call)
    return lse[sequence, :, within].transpose(0, 1)


def _to_padded(lse: torch.Tensor, call: packed.Call) -> torch.Tensor:
    """Take [H, t] to [n, H, max_q]."""
    sequence, within = _seats(call)
    padded = lse.new_zeros(call.cu_q.numel() - 1, lse.shape[0], call.max_q)
    padded[sequence, :, within] = lse.transpose(0, 1)
    return padded


def _seats(call: packed.Call) -> tuple[torch.Tensor, torch.Tensor]:
    """Give each packed query's sequence, and its place in it."""
    starts = call.cu_q.long()
    sequence = torch.repeat_interleave(torch.arange(len(starts) - 1, device=starts.device), starts.diff())
    return sequence, torch.arange(len(sequence), device=starts.device) - starts[sequence]


def _multiple(size: int) -> int:
    return size + -size % 8


def _is_deterministic() -> bool:
    """Say whether PyTorch or the package's own environment variable asks for it, as its DotProductAttention does."""
    allows = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    return torch.are_deterministic_algorithms_enabled() or not int(allows)


def _library() -> Any:
    return import_module("transformer_engine.pytorch.cpp_extensions.fused_attn")


def _their_dtype(dtype: torch.dtype) -> Any:
    return import_module("transformer_engine.pytorch.constants").TE_DType[dtype]


@lru_cache(maxsize=64)
def _backend(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
    mask: str,
    deterministic: bool,
) -> Any:
    """Ask the package which fused kernel it would take; a string says why there is none."""
    try:
        library, query = _library(), _query()
    except (ImportError, OSError, RuntimeError) as error:
        return f"Transformer Engine cannot be imported ({str(error).splitlines()[0]})"
    for function in (library.fused_attn_fwd, library.fused_attn_bwd):
        missing = signatures.lacks(function, *_RELIED_ON)
        if missing is not None:
            return f"Transformer Engine's {function.__name__} has no parameter {missing}"
    asked = {
        "qkv_dtype": dtype,
        "qkv_layout": "thd_thd_thd",
        "num_heads": heads,
        "num_gqa_groups": kv_heads,
        "max_seqlen_q": _ASKED,  # the answer depends on which is larger, and queries are never more than keys
        "max_seqlen_kv": _ASKED,
        "num_tokens_q": _ASKED,  # 2.20 tries cuDNN's graph for so many packed tokens; its default is none
        "num_tokens_kv": _ASKED,
        "head_dim_qk": head_dim,
        "head_dim_v": value_dim,
        "attn_mask_type": mask,
        "window_size": (-1, 0 if "causal" in mask else -1),
        "bottom_right_diagonal": "bottom_right" in mask,  # as the calls have it, who leave it to the mask
        "core_attention_bias_requires_grad": False,
        "deterministic": deterministic,
    }
    answer = query.get_attention_backend(signatures.call(query.AttentionParams, **asked))
    is_offered, backend = answer[-1][1], answer[-3]  # the last item lists (flash, fused, unfused)
    if not is_offered or backend is None:
        kind = " that is deterministic" if deterministic else ""
        return (
            f"Transformer Engine offers no fused attention{kind} for packed sequences with mask {mask} in {dtype}, {heads} and "
            f"{kv_heads} heads of sizes {head_dim} and {value_dim} on this device"
        )
    return backend


def _query() -> Any:
    for module in _QUERIES:
        try:
            return import_module(module)
        except ModuleNotFoundError:
            continue
    raise ImportError("no get_attention_backend found")
