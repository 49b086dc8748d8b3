"""What the Megatron host is refused, and why: everything that would not train the same as without context parallelism.

All values come from the configuration, which every rank has, and are checked before the model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from megacp import methods
from megacp.errors import ConfigError, UnsupportedError
from megacp.layout import Layout

__all__ = [
    "check_methods",
    "check_model_config",
    "check_one_layout",
    "check_padding",
    "check_sequence_length",
    "check_sizes",
    "comm_types",
]


def check_sizes(world: int, cp: Any, tp: int, pp: int) -> None:
    """Refuse a context-parallel size that is no size, or does not divide the world.

    Raises: ConfigError.
    """
    if isinstance(cp, bool) or not isinstance(cp, int) or cp < 1:
        raise ConfigError(
            f"megacp: --context-parallel-size is {cp!r}. It must be a whole number of at least 1; 1 means no context parallelism."
        )
    if world % (tp * pp * cp):
        raise ConfigError(
            f"megacp: --context-parallel-size {cp} does not fit a world of {world} ranks with tensor-parallel size {tp} and "
            f"pipeline-parallel size {pp}: {world} is no multiple of {tp} * {pp} * {cp} = {tp * pp * cp}. Start a multiple of "
            f"{tp * pp * cp} ranks, or choose a context-parallel size that divides {world // (tp * pp) or 1}."
        )


def check_sequence_length(
    seq_len: int, cp: int, layout: str, tp: int = 1, sequence_parallel: bool = False
) -> None:
    """Refuse a sequence that the ranks cannot hold in equal parts without padding, as the host's pipeline expects.

    Raises: ConfigError with the next legal length.
    """
    if layout == "per_document":  # pads each document inside
        return
    chunks = 2 if layout == "zigzag" else 1
    unit = chunks * cp * (tp if sequence_parallel else 1)
    if cp > 1 and seq_len % unit:
        also = f" * tensor-parallel size {tp} (sequence parallelism)" if sequence_parallel and tp > 1 else ""
        raise ConfigError(
            f"megacp: sequence length {seq_len} cannot be split by layout '{layout}' over context-parallel size {cp}. "
            f"It needs a multiple of {chunks} * {cp}{also} = {unit}. Use --seq-length {-(-seq_len // unit) * unit}"
            + ("." if chunks == 1 else f", or --megacp-layout contiguous (a multiple of {unit // 2}).")
        )


def check_methods(names: Sequence[str], layers: int) -> None:
    """Refuse methods that are unknown, or as many as fit neither the model nor each of its layers. Raises: ConfigError."""
    if len(names) not in (1, layers):
        raise ConfigError(
            f"megacp: --cp-comm-type names {len(names)} methods, {', '.join(names)}, and the model has {layers} layers. Give one for "
            "all layers, or one for each."
        )
    for name in names:
        if name != methods.AUTO:
            methods.resolve(name)


def check_one_layout(layout: str) -> None:
    """Refuse layouts that differ by micro-batch, for hosts whose layers ask for positions in recompute too.

    Raises: UnsupportedError.
    """
    if layout in ("balanced", "per_document"):
        raise UnsupportedError(
            f"megacp: --megacp-layout {layout} is not offered on a host without context parallelism of its own: its layers ask for "
            "positions anew in recompute, when the micro-batch is no longer known. Use --megacp-layout zigzag."
        )


def check_model_config(
    config: Any, cp: int, has_documents: bool, has_keyed_dropout: bool = False, layout: str = "auto"
) -> None:
    """Refuse parts of a model that megacp cannot yet run exactly.

    Args:
        config: the host's TransformerConfig. has_keyed_dropout: dropout is drawn from positions. layout: as the user named it.
    Raises: ConfigError for a wrong setting, UnsupportedError for a part that is not offered; both name setting and value.
    """
    for setting, refused, why, instead in _RULES:
        value = getattr(config, setting, None)
        if has_keyed_dropout and setting in _DROPOUT:
            continue
        if refused(value) and (cp > 1 or setting in _WITH_DOCUMENTS):
            what = f"--context-parallel-size {cp}" if cp > 1 else "--megacp-documents or --megacp-dropout"
            raise UnsupportedError(
                f"megacp: {setting} is {value!r}, which {what} does not offer: {why}. {instead}"
            )
    _check_pairs(config, cp, has_documents)
    if cp > 1:
        _check_layout(config, layout)
    names = comm_types(config)
    check_methods(names, getattr(config, "num_layers", len(names)))
    hierarchy = getattr(config, "hierarchical_context_parallel_sizes", None)
    if hierarchy:
        for name in names:
            if name != methods.AUTO:
                methods.levels(methods.resolve(name), cp, tuple(hierarchy))


def _check_layout(config: Any, layout: str) -> None:
    """Refuse layouts that differ by micro-batch where the host needs to know one before."""
    if layout in ("balanced", "per_document") and getattr(config, "multi_latent_attention", False):
        raise UnsupportedError(
            f"megacp: --megacp-layout {layout} is not offered with multi_latent_attention: its layers ask for positions anew in "
            "recompute, when the micro-batch is no longer known. Use --megacp-layout zigzag."
        )
    if layout != "per_document":
        return
    for setting, what in _EQUAL_PARTS.items():
        value = getattr(config, setting, None)
        if value and not (value == 1 and setting == "pipeline_model_parallel_size"):
            raise UnsupportedError(
                f"megacp: --megacp-layout per_document is not offered with {setting} {value!r}: it pads each document to a multiple "
                f"of twice the group, and {what}. Use --megacp-layout balanced, which does not pad."
            )


_EQUAL_PARTS = {
    "pipeline_model_parallel_size": "the pipeline expects the same number of tokens in every message",
    "sequence_parallel": "sequence parallelism divides the rank's tokens by the tensor-parallel size",
    "num_moe_experts": "a router counts padding among its tokens",
    "mtp_num_layers": "multi-token prediction counts padding among its tokens",
}


def _check_pairs(config: Any, cp: int, has_documents: bool) -> None:
    """Refuse two settings that are exact alone, but not together."""
    if (
        cp > 1
        and getattr(config, "multi_latent_attention", False)
        and getattr(config, "apply_rope_fusion", False)
    ):
        raise UnsupportedError(
            f"megacp: apply_rope_fusion is True with multi_latent_attention, which --context-parallel-size {cp} does not offer: the "
            "fused kernel works out positions by the host's own formula. Set --no-rope-fusion."
        )
    balance = getattr(config, "moe_router_load_balancing_type", None)
    if (
        getattr(config, "num_moe_experts", None)
        and has_documents
        and "seq_aux_loss" in (balance if isinstance(balance, list) else [balance])
    ):
        raise UnsupportedError(
            f"megacp: moe_router_load_balancing_type is {balance!r}, which --megacp-documents does not offer: the host counts a "
            "packed row as one sequence, not each document in it. Use aux_loss or global_aux_loss, or --megacp-documents off."
        )


def check_padding(config: Any, padding: torch.Tensor | None, layout: Layout) -> None:
    """Refuse a padding mask [B, G], True in padding, under which the router's means over a rank's tokens are not that over all tokens.

    Raises: UnsupportedError, on every rank; each has the whole mask.
    """
    is_mean = bool(getattr(config, "moe_z_loss_coeff", None)) or config.calculate_per_token_loss
    if padding is None or layout.cp_size == 1 or not getattr(config, "num_moe_experts", None) or not is_mean:
        return
    counts = [int(layout.shard(padding, rank).logical_not().sum()) for rank in range(layout.cp_size)]
    is_cut_again = config.sequence_parallel and bool(padding.any())
    if is_cut_again or len(set(counts)) > 1:
        raise UnsupportedError(
            f"megacp: padding_mask leaves {counts} tokens on the context-parallel ranks. With moe_z_loss_coeff or "
            "--calculate-per-token-loss the host's router takes the mean over each rank's tokens, which is not the mean over all. "
            "Pass no padding_mask, or leave both away."
        )


def comm_types(config: Any) -> tuple[str, ...]:
    """List the methods that --cp-comm-type names: one for all layers, or one for each."""
    given = getattr(config, "cp_comm_type", None)
    return tuple(given) if isinstance(given, (list, tuple)) else (given or "ring",)


def _given(value: Any) -> bool:
    return value not in (None, False, 0, [], "none")


_EXACT = "training would not be the same as without it"
_RULES: tuple[tuple[str, Callable[[Any], bool], str, str], ...] = (
    (
        "attention_dropout",
        _given,
        f"which pairs are dropped would depend on the number of ranks, so {_EXACT}",
        "Set --attention-dropout 0, or draw it from positions, the same at every size: --megacp-dropout positions.",
    ),
    (
        "hidden_dropout",
        _given,
        f"the host draws one pattern for the local tokens of every rank, so {_EXACT}",
        "Set --hidden-dropout 0, or draw it from positions, the same at every size: --megacp-dropout positions.",
    ),
    (
        "moe_expert_capacity_factor",
        _given,
        "each rank would drop the tokens that are too many among its own",
        "Leave --moe-expert-capacity-factor away.",
    ),
    (
        "moe_router_load_balancing_type",
        lambda value: "sinkhorn" in (value if isinstance(value, list) else [value]),
        "each rank would balance its own tokens alone",
        "Use aux_loss, seq_aux_loss, global_aux_loss or none.",
    ),
    (
        "moe_input_jitter_eps",
        _given,
        f"the noise would depend on the number of ranks, so {_EXACT}",
        "Leave --moe-input-jitter-eps away.",
    ),
    (
        "moe_router_force_load_balancing",
        _given,
        f"its random logits would depend on the number of ranks, so {_EXACT}",
        "It is for benchmarks; leave it away.",
    ),
    (
        "overlap_moe_expert_parallel_comm",
        _given,
        "the host then runs a model's parts without its forward function, where the sequence is split",
        "Leave --overlap-moe-expert-parallel-comm away.",
    ),
    (
        "mtp_hsm",
        _given,
        "it mixes the hidden states of a rank's neighbouring tokens",
        "Leave it away.",
    ),
    (
        "experimental_attention_variant",
        _given,
        "only softmax attention is split over ranks",
        "Leave it away.",
    ),
    (
        "is_hybrid_model",
        _given,
        "recurrent layers need their tokens in order",
        "Use size 1 for hybrid models.",
    ),
    (
        "hybrid_context_parallel",
        _given,
        "its batches are split by the host itself",
        "Leave --hybrid-context-parallel away.",
    ),
    (
        "cuda_graph_impl",
        _given,
        "documents and splits change between steps, a graph does not",
        "Turn CUDA graphs off.",
    ),
    (
        "enable_cuda_graph",
        _given,
        "documents and splits change between steps, a graph does not",
        "Turn CUDA graphs off.",
    ),
    (
        "fp8_dot_product_attention",
        _given,
        "attention in 8 bits is not exact over ranks",
        "Turn --fp8-dot-product-attention off.",
    ),
    ("qk_clip", _given, "the largest logit is not reported across ranks yet", "Turn QK-clip off."),
    ("log_max_attention_logit", _given, "the largest logit is not reported across ranks yet", "Turn it off."),
)
_DROPOUT = {"attention_dropout", "hidden_dropout"}
_WITH_DOCUMENTS = {
    "attention_dropout",
    "overlap_moe_expert_parallel_comm",
    "mtp_hsm",
    "experimental_attention_variant",
    "is_hybrid_model",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "fp8_dot_product_attention",
    "qk_clip",
    "log_max_attention_logit",
}
