"""Stand-ins for attention libraries that need a GPU: their functions' parameters and documented semantics, computed on the CPU.

They are strict where the libraries are: cumulative lengths are int32 and end at the number of tokens, head sizes are multiples of 8,
a window that reaches past the longest sequence is dropped, and a side of a window without a limit reaches as far as that.
"""

from __future__ import annotations

import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

CALLS: list[dict[str, Any]] = []


def visible(s: int, t: int, left: int, right: int, longest: int) -> torch.Tensor:
    """Bool [s, t], aligned at the bottom right; FlashAttention's way with windows that reach past the longest sequence."""
    left, right = (-1 if side >= longest else side for side in (left, right))
    if (left < 0) != (right < 0):
        left, right = (longest if side < 0 else side for side in (left, right))
        if right == 0 and left == longest:
            left = -1  # plain causal
    delta = torch.arange(t)[None, :] - torch.arange(s)[:, None] - (t - s)
    seen = torch.ones(s, t, dtype=torch.bool)
    if right >= 0:
        seen &= delta <= right
    if left >= 0:
        seen &= delta >= -left
    return seen


def logits_of(q, k, seen, scale, softcap):
    """q [s, H, D], k [t, K, D] -> masked logits [H, s, t], float64, and the slope of the cap."""
    k = k.double().repeat_interleave(q.shape[1] // k.shape[1], 1)
    logits = torch.einsum("shd,thd->hst", q.double(), k) * scale
    slope = torch.ones_like(logits)
    if softcap:
        capped = torch.tanh(logits / softcap)
        logits, slope = capped * softcap, 1 - capped * capped
    return logits.masked_fill(~seen, -torch.inf), slope


def attend(q, k, v, seen, scale, softcap=0.0):
    """One sequence: out [s, H, E], lse [H, s]."""
    logits, _ = logits_of(q, k, seen, scale, softcap)
    lse = torch.logsumexp(logits, -1)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.einsum("hst,the->she", torch.exp(logits - lse[..., None]), v), lse


def attend_backward(d_out, q, k, v, out, lse, seen, scale, softcap=0.0):
    """One sequence: dq, dk, dv, given out and lse that may come from more keys than these."""
    logits, slope = logits_of(q, k, seen, scale, softcap)
    heads, kv_heads = q.shape[1], k.shape[1]
    k_all, v_all = (x.double().repeat_interleave(heads // kv_heads, 1) for x in (k, v))
    probs = torch.exp(logits - lse.double()[..., None])
    delta = (d_out.double() * out.double()).sum(-1).transpose(0, 1)[..., None]
    d_probs = torch.einsum("she,the->hst", d_out.double(), v_all)
    d_logits = probs * (d_probs - delta) * slope * scale
    dq = torch.einsum("hst,thd->shd", d_logits, k_all)
    dk = torch.einsum("hst,shd->thd", d_logits, q.double())
    dv = torch.einsum("hst,she->the", probs, d_out.double())
    return dq, *(x.unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))


def sequences(cu_q, cu_k, max_q, max_k, q, k):
    """Check cumulative lengths as the libraries do, and give each sequence's slices."""
    assert cu_q.dtype == cu_k.dtype == torch.int32 and len(cu_q) == len(cu_k)
    assert int(cu_q[-1]) == q.shape[0] and int(cu_k[-1]) == k.shape[0] and int(cu_q[0]) == int(cu_k[0]) == 0
    assert int(cu_q.diff().max()) == max_q and int(cu_k.diff().max()) == max_k
    assert int(cu_q.diff().min()) > 0 and int(cu_k.diff().min()) > 0
    pairs = zip(itertools.pairwise(cu_q.tolist()), itertools.pairwise(cu_k.tolist()), strict=True)
    return [(slice(*a), slice(*b)) for a, b in pairs]


def packed_forward(q, k, v, cu_q, cu_k, max_q, max_k, left, right, scale, softcap=0.0):
    out, lse = [], []
    for a, b in sequences(cu_q, cu_k, max_q, max_k, q, k):
        seen = visible(a.stop - a.start, b.stop - b.start, left, right, max_k)
        one = attend(q[a], k[b], v[b], seen, scale, softcap)
        out.append(one[0])
        lse.append(one[1])
    CALLS.append({"sequences": len(out), "window": (left, right)})
    return torch.cat(out).to(q.dtype), torch.cat(lse, 1).float()


def packed_backward(d_out, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, left, right, scale, softcap=0.0):
    assert lse.dtype == torch.float32 and lse.is_contiguous() and lse.shape == (q.shape[1], q.shape[0])
    assert d_out.dtype == out.dtype == q.dtype and d_out.shape == out.shape
    grads = []
    for a, b in sequences(cu_q, cu_k, max_q, max_k, q, k):
        seen = visible(a.stop - a.start, b.stop - b.start, left, right, max_k)
        grads.append(attend_backward(d_out[a], q[a], k[b], v[b], out[a], lse[:, a], seen, scale, softcap))
    return [torch.cat(parts).to(q.dtype) for parts in zip(*grads, strict=True)]


# -- FlashAttention ----------------------------------------------------------------------------------------------------


def _same_size(*tensors: torch.Tensor) -> None:
    assert len({x.shape[-1] for x in tensors}) == 1 and tensors[0].shape[-1] % 8 == 0


def fa2_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
):  # fmt: skip
    _same_size(q, k, v)
    assert dropout_p == 0.0
    right = 0 if causal else window_size_right
    out, lse = packed_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, window_size_left, right, softmax_scale, softcap
    )  # fmt: skip
    return out, lse, None, None


def fa2_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
    softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    zero_tensors=False,
):  # fmt: skip
    _same_size(dout, q, k, v, out)
    right = 0 if causal else window_size_right
    grads = packed_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        window_size_left, right, softmax_scale, softcap,
    )  # fmt: skip
    for given, grad in zip((dq, dk, dv), grads, strict=True):
        given.copy_(grad)
    return None


def fa3_forward(
    q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q, seqused_k, max_seqlen_q,
    max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary, q_descale, k_descale,
    v_descale, softmax_scale, causal, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
):  # fmt: skip
    assert k_new is None and page_table is None and out is None
    return fa2_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, *window_size, softcap
    )[:2]  # fmt: skip


def fa3_backward(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k, max_seqlen_q, max_seqlen_k, dq, dk,
    dv, softmax_scale, causal, window_size=(-1, -1), softcap=0.0, deterministic=False, sm_margin=0,
):  # fmt: skip
    assert sequed_q is None and sequed_k is None
    fa2_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0,
        softmax_scale, causal, *window_size, softcap, None, deterministic,
    )  # fmt: skip
    return dq, dk, dv, None


def fa4_forward(
    q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None,
    causal=False, softcap=None, window_size_left=None, window_size_right=None, return_lse=False, out=None, lse=None,
):  # fmt: skip
    assert return_lse and out is None and lse is None
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    return *fa2_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale, causal, left, right, softcap
    )[:2], None, None, None  # fmt: skip


def fa4_backward(
    q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None,
    cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None,
    dv=None, dlse=None,
):  # fmt: skip
    assert dlse is None
    left, right = (-1 if side is None else side for side in (window_size_left, window_size_right))
    fa2_backward(
        dout, q, k, v, out, lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
        causal, left, right, softcap, None, deterministic,
    )  # fmt: skip
    return dq, dk, dv


FLASH = {
    2: {"flash_attn": {}, "flash_attn.flash_attn_interface": {
        "_flash_attn_varlen_forward": fa2_forward, "_flash_attn_varlen_backward": fa2_backward}},
    3: {"flash_attn_interface": {"_flash_attn_forward": fa3_forward, "_flash_attn_backward": fa3_backward}},
    4: {"flash_attn": {}, "flash_attn.cute": {}, "flash_attn.cute.interface": {
        "_flash_attn_fwd": fa4_forward, "_flash_attn_bwd": fa4_backward}},
}  # fmt: skip


# -- PyTorch's operators -----------------------------------------------------------------------------------------------


def aten_flash(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale,
    window_size_left, window_size_right,
):  # fmt: skip
    out, lse, *_ = fa2_forward(
        query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale, is_causal, window_size_left, window_size_right
    )  # fmt: skip
    return out, lse, None, None, None


def aten_flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, rng_state,
    unused, *, scale, window_size_left, window_size_right,
):  # fmt: skip
    assert rng_state.shape == (2,)
    grads = [torch.empty_like(x) for x in (query, key, value)]
    fa2_backward(
        grad_out, query, key, value, out, logsumexp, *grads, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, scale,
        is_causal, window_size_left, window_size_right, 0.0, None, False,
    )  # fmt: skip
    return grads


def _square(q, k, is_causal):
    assert not is_causal or q.shape[2] == k.shape[2]
    return visible(q.shape[2], k.shape[2], -1, 0 if is_causal else -1, k.shape[2])


def aten_cudnn(
    query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale
):  # fmt: skip
    assert (
        attn_bias is None
        and compute_log_sumexp
        and query.shape[1] == key.shape[1]
        and query.shape[-1] % 8 == 0
    )
    seen = _square(query, key, is_causal)
    rows = [
        attend(*(x[b].transpose(0, 1) for x in (query, key, value)), seen, scale) for b in range(len(query))
    ]
    out, lse = (torch.stack(x) for x in zip(*rows, strict=True))
    return out.transpose(1, 2).to(query.dtype), lse.float()[..., None], None, None, 0, 0, None, None, None


def aten_cudnn_backward(
    grad_out, query, key, value, out, logsumexp, philox_seed, philox_offset, attn_bias, cum_seq_q, cum_seq_k, max_q, max_k,
    dropout_p, is_causal, *, scale,
):  # fmt: skip
    assert (
        logsumexp.shape == (*query.shape[:3], 1) and logsumexp.is_contiguous() and out.shape == grad_out.shape
    )
    assert (max_q, max_k) == (query.shape[2], key.shape[2])
    seen, rows = _square(query, key, is_causal), []
    for b in range(len(query)):
        one = [x[b].transpose(0, 1) for x in (grad_out, query, key, value, out)]
        rows.append(attend_backward(*one, logsumexp[b, ..., 0], seen, scale))
    return [torch.stack(x).transpose(1, 2).to(query.dtype) for x in zip(*rows, strict=True)]


# -- Transformer Engine ------------------------------------------------------------------------------------------------


def transformer_engine(pads: bool, offers: bool = True) -> dict[str, dict[str, Any]]:
    """Give the modules; ``pads``: of older releases, with the log-sum-exp [n, H, max_q, 1], else of 2.20, with [t, H, 1]."""

    def sides(mask: str, max_q: int, max_k: int) -> tuple[int, int]:
        assert mask in ("padding", "padding_causal_bottom_right") and (max_q <= max_k or mask == "padding")
        return -1, 0 if "causal" in mask else -1

    def fused_attn_fwd(
        is_training, max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, fake_dtype, fused_attention_backend,
        attn_bias=None, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
        qkv_layout="sbh3d", o_format="sbhd", attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1),
    ):  # fmt: skip
        assert (
            is_training and fused_attention_backend == 1 and qkv_layout == "thd_thd_thd" and o_format == "thd"
        )
        assert fake_dtype == q.dtype and q.shape[-1] % 8 == v.shape[-1] % 8 == 0
        out, lse = packed_forward(
            q, k, v, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
            *sides(attn_mask_type, max_seqlen_q, max_seqlen_kv), attn_scale,
        )  # fmt: skip
        stats = lse.transpose(0, 1)[..., None]
        if pads:
            stats = torch.zeros(len(cu_seqlens_q) - 1, q.shape[1], max_seqlen_q, 1)
            for i, (a, b) in enumerate(itertools.pairwise(cu_seqlens_q.tolist())):
                stats[i, :, : b - a, 0] = lse[:, a:b]
        return out, [stats, torch.zeros(2, dtype=torch.int64)]

    def older_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, dqkv_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
        qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", attn_bias_type="no_bias",
        attn_mask_type="padding", softmax_type="vanilla", window_size=(-1, -1), deterministic=False,
    ):  # fmt: skip
        assert (
            dqkv_dtype == f"te.{q.dtype}"
            and {o_format, do_format} == {"thd"}
            and dqkv_layout == "thd_thd_thd"
        )
        stats, state = aux_ctx_tensors
        assert state.shape == (2,) and stats.is_contiguous()
        lse = stats[..., 0].transpose(0, 1).contiguous()
        if pads:
            bounds = itertools.pairwise(cu_seqlens_q.tolist())
            lse = torch.cat([stats[i, :, : b - a, 0] for i, (a, b) in enumerate(bounds)], 1)
        return *packed_backward(
            d_o, q, k, v, o, lse, cu_seqlens_q, cu_seqlens_kv, max_seqlen_q, max_seqlen_kv,
            *sides(attn_mask_type, max_seqlen_q, max_seqlen_kv), attn_scale,
        ), None  # fmt: skip

    def fused_attn_bwd(
        max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, aux_ctx_tensors,
        fused_attention_backend, cu_seqlens_q_padded=None, cu_seqlens_kv_padded=None, attn_scale=None, dropout=0.0,
        qkv_layout="sbh3d", o_format="sbhd", do_format="sbhd", dqkv_layout="sbh3d", qkv_scale_inv_format=None,
        do_scale_inv_format=None, attn_bias_type="no_bias", attn_mask_type="padding", softmax_type="vanilla",
        window_size=(-1, -1), bottom_right_diagonal=None, deterministic=False, cuda_graph=False,
    ):  # fmt: skip
        assert qkv_scale_inv_format is do_scale_inv_format is bottom_right_diagonal is None
        return older_bwd(
            max_seqlen_q, max_seqlen_kv, cu_seqlens_q, cu_seqlens_kv, q, k, v, o, d_o, fake_dtype, f"te.{q.dtype}",
            aux_ctx_tensors, fused_attention_backend, cu_seqlens_q_padded, cu_seqlens_kv_padded, attn_scale, dropout,
            qkv_layout, o_format, do_format, dqkv_layout, attn_bias_type, attn_mask_type, softmax_type, window_size,
            deterministic,
        )  # fmt: skip

    class OlderParams(SimpleNamespace):
        def __init__(
            self, qkv_dtype=None, qkv_layout="", num_heads=0, num_gqa_groups=0, head_dim_qk=0, head_dim_v=0,
            max_seqlen_q=0, max_seqlen_kv=0, attn_mask_type="", window_size=None, deterministic=False,
        ):  # fmt: skip
            super().__init__(
                head_dim_qk=head_dim_qk, layout=qkv_layout, fits=True, deterministic=deterministic
            )

    class AttentionParams(OlderParams):
        def __init__(
            self, qkv_dtype=None, qkv_layout="", num_heads=0, num_gqa_groups=0, head_dim_qk=0, head_dim_v=0,
            max_seqlen_q=0, max_seqlen_kv=0, num_tokens_q=0, num_tokens_kv=0, attn_mask_type="", window_size=None,
            bottom_right_diagonal=True, deterministic=False,
        ):  # fmt: skip
            super().__init__(qkv_layout=qkv_layout, head_dim_qk=head_dim_qk, deterministic=deterministic)
            # It builds cuDNN's graph of what it is asked about: no tokens are no graph.
            has_tokens = num_tokens_q >= max_seqlen_q > 0 and num_tokens_kv >= max_seqlen_kv > 0
            self.fits = has_tokens and bottom_right_diagonal == ("bottom_right" in attn_mask_type)

    def get_attention_backend(params):
        good = offers and params.head_dim_qk <= 128 and params.layout == "thd_thd_thd" and params.fits
        good = good and not params.deterministic
        return False, None, good, 1 if good else None, False, [False, good, False]

    te = "transformer_engine.pytorch"
    dtypes = {d: f"te.{d}" for d in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
    return {
        "transformer_engine": {},
        f"{te}.cpp_extensions.fused_attn": {
            "fused_attn_fwd": fused_attn_fwd,
            "fused_attn_bwd": older_bwd if pads else fused_attn_bwd,
        },
        f"{te}.constants": {"TE_DType": dtypes},
        f"{te}.attention.dot_product_attention.utils": {
            "AttentionParams": OlderParams if pads else AttentionParams,
            "get_attention_backend": get_attention_backend,
        },
    }


def install(monkeypatch: pytest.MonkeyPatch, modules: dict[str, dict[str, Any]]) -> None:
    """Put modules in place for the length of a test."""
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
