"""What the Megatron host is refused, and why: everything that would not train the same as without context parallelism.

All values come from the configuration, which every rank has, and are checked before the model is built.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megacp import methods
from megacp.errors import ConfigError, UnsupportedError

__all__ = ["check_model_config", "check_sequence_length", "check_sizes", "comm_types"]


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
    chunks = 1 if layout == "contiguous" else 2
    unit = chunks * cp * (tp if sequence_parallel else 1)
    if cp > 1 and seq_len % unit:
        also = f" * tensor-parallel size {tp} (sequence parallelism)" if sequence_parallel and tp > 1 else ""
        raise ConfigError(
            f"megacp: sequence length {seq_len} cannot be split by layout '{layout}' over context-parallel size {cp}. "
            f"It needs a multiple of {chunks} * {cp}{also} = {unit}. Use --seq-length {-(-seq_len // unit) * unit}"
            + (
                "."
                if layout == "contiguous"
                else f", or --megacp-layout contiguous (a multiple of {unit // 2})."
            )
        )


def check_model_config(config: Any, cp: int, has_documents: bool, has_keyed_dropout: bool = False) -> None:
    """Refuse parts of a model that megacp cannot yet run exactly.

    Args:
        config: the host's TransformerConfig. has_keyed_dropout: dropout is drawn from positions.
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
    if getattr(config, "multi_latent_attention", False) and getattr(config, "apply_rope_fusion", False):
        raise UnsupportedError(
            f"megacp: apply_rope_fusion with multi_latent_attention is not offered with --context-parallel-size {cp}: the host's "
            "fused kernel takes positions from the rank's number, whatever the layout is. Set --no-rope-fusion."
        )
    names = comm_types(config)
    layers = getattr(config, "num_layers", len(names))
    if len(names) not in (1, layers):
        raise ConfigError(
            f"megacp: --cp-comm-type names {len(names)} methods, {', '.join(names)}, and the model has {layers} layers. Give one for "
            "all layers, or one for each."
        )
    for name in names:
        if name != methods.AUTO:
            methods.resolve(name)
    hierarchy = getattr(config, "hierarchical_context_parallel_sizes", None)
    if hierarchy:
        for name in names:
            if name != methods.AUTO:
                methods.levels(methods.resolve(name), cp, tuple(hierarchy))


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
        "num_moe_experts",
        _given,
        "the balance losses of the router would count each rank alone",
        "Train a dense model, or use size 1.",
    ),
    (
        "mtp_num_layers",
        _given,
        "multi-token prediction rolls labels across the ranks' borders",
        "Leave --mtp-num-layers away.",
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
    "mtp_num_layers",
    "experimental_attention_variant",
    "is_hybrid_model",
    "cuda_graph_impl",
    "enable_cuda_graph",
    "fp8_dot_product_attention",
    "qk_clip",
    "log_max_attention_logit",
}
