"""FlashAttention 2, 3 and 4, by the functions that give and take the log-sum-exp of packed sequences. Not yet run on a GPU.

All full blocks of a step go in one call, all causal ones in a second, each window in one more; GQA, windows and softcap are the
library's own. Of the three interfaces the first that is installed, fits the device and has the parameters relied on is taken: on
Hopper 3, 4, 2; on newer devices 4, 2; on older ones 2. Head sizes that differ, or are no multiple of 8, are filled up with zeros.

The library rounds out, dq, dk and dv of each call to the inputs' 16 bits; they are then summed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple

import torch

from megacp.kernels import Gradients, Options, Request, not_offered, packed, signatures
from megacp.merge import Partial
from megacp.plans import Block

__all__ = ["backward", "forward", "name", "refuses"]

name = "flash_attn"

_DEVICE = "cuda"  # a test sets this to run the calls against a stand-in


class _Interface(NamedTuple):
    """One generation of the library: its two functions, and the largest head size."""

    label: str
    forward: Callable[..., Any]
    backward: Callable[..., Any]
    largest: int


_GENERATIONS: dict[int, Any] = {  # modules, the functions forward and backward, largest head size
    2: (
        ("flash_attn.flash_attn_interface",),
        "_flash_attn_varlen_forward",
        "_flash_attn_varlen_backward",
        256,
    ),
    3: (
        ("flash_attn_interface", "flash_attn_3.flash_attn_interface"),
        "_flash_attn_forward",
        "_flash_attn_backward",
        256,
    ),
    4: (("flash_attn.cute.interface",), "_flash_attn_fwd", "_flash_attn_bwd", 128),
}
_RELIED_ON = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "max_seqlen_q",
    "max_seqlen_k",
    "softmax_scale",
    "causal|is_causal",
    "window_size|window_size_left",
    "window_size|window_size_right",
    "softcap",
)


def refuses(request: Request) -> str | None:
    """Refuse without the package, on other devices, other dtypes than 16-bit, and head sizes above the library's."""
    packages = ("flash_attn", "flash_attn_interface", "flash_attn_3")
    if not any(signatures.is_installed(package) for package in packages):
        return "the package flash-attn is not installed"
    reason = packed.refusal(request, "flash-attn", _DEVICE) or not_offered(request.options, "softcap")
    if reason is not None:
        return reason
    found = _interface(max(request.head_dim, request.value_dim), packed.capability())
    return found if isinstance(found, str) else None


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
) -> Iterator[Partial]:
    """Give one partial result for each mask among the blocks."""
    return packed.forward(q, k, v, blocks, options, _attend, windows=True)


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
    packed.backward(d_out, q, k, v, out, lse, blocks, options, into, _attend_backward, windows=True)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: packed.Call, options: Options
) -> tuple[torch.Tensor, torch.Tensor]:
    value_dim = v.shape[-1]
    q, k, v = packed.widened(q, k, v)
    library = _interface_for(q)
    out, lse, *_ = signatures.call(
        library.forward, q=q, k=k, v=v, return_lse=True, **_asked(call, options, library)
    )
    return out[..., :value_dim], lse


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
    d_out, q, k, v, out = packed.widened(d_out, q, k, v, out)
    library = _interface_for(q)
    # The second and third generation write the gradients into tensors that they are given; the fourth makes its own if given none.
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    signatures.call(
        library.backward,
        dout=d_out,
        q=q,
        k=k,
        v=v,
        out=out,
        softmax_lse=lse,
        lse=lse,
        dq=dq,
        dk=dk,
        dv=dv,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        **_asked(call, options, library),
    )
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _asked(call: packed.Call, options: Options, library: _Interface) -> dict[str, Any]:
    """Give what both directions are told, under all names that it has had."""
    none = None if library.label.endswith("4") else -1  # how "no limit" is said
    left = none if call.window < 0 else call.window
    right = 0 if call.is_causal else none
    return {
        "cu_seqlens_q": call.cu_q,
        "cu_seqlens_k": call.cu_k,
        "max_seqlen_q": call.max_q,
        "max_seqlen_k": call.max_k,
        "dropout_p": 0.0,
        "softmax_scale": options.scale,
        "causal": call.is_causal,
        "is_causal": call.is_causal,
        "window_size": (left, right),
        "window_size_left": left,
        "window_size_right": right,
        "softcap": options.softcap or 0.0,
    }


def _interface_for(q: torch.Tensor) -> _Interface:
    found = _interface(q.shape[-1], packed.capability())
    if isinstance(found, str):
        raise RuntimeError(found)  # refuses() said so before
    return found


@lru_cache(maxsize=64)
def _interface(size: int, capability: int) -> _Interface | str:
    """Return the interface to use for a head size on a device, or why there is none."""
    order = (3, 4, 2) if capability == 9 else (4, 2) if capability > 9 else (2,)
    reasons = []
    for generation in order:
        found = _loaded(generation)
        if isinstance(found, str):
            reasons.append(found)
        elif size > found.largest:
            reasons.append(f"{found.label} has head sizes up to {found.largest}, not {size}")
        else:
            return found
    return "; ".join(reasons)


def _loaded(generation: int) -> _Interface | str:
    """Import one generation, and check the parameters relied on; a string says what is missing."""
    modules, *names, largest = _GENERATIONS[generation]
    label, reason = f"FlashAttention {generation}", ""
    for module in modules:
        try:
            library = import_module(module)
        except (ImportError, OSError) as error:  # OSError: a shared library that does not fit this machine
            reason = f"{label} cannot be imported ({str(error).splitlines()[0]})"
            continue
        functions: list[Any] = [getattr(library, name, None) for name in names]
        missing = [_missing(name, function) for name, function in zip(names, functions, strict=True)]
        reason = next((f"{label} has no {what}" for what in missing if what), "")
        if not reason:
            return _Interface(label, functions[0], functions[1], largest)
    return reason


def _missing(name: str, function: Callable[..., Any] | None) -> str | None:
    if function is None:
        return name
    parameter = signatures.lacks(function, *_RELIED_ON)
    return f"parameter {parameter} of {name}" if parameter else None
