"""Which layout a micro-batch gets: a fixed one, or one that its documents ask for.

Every rank of a group, and every pipeline stage, has the same documents and so finds the same layout. Layouts and estimates are
kept, so that a micro-batch that comes again (other chunks, evaluation) costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from megacp import methods
from megacp.errors import ConfigError
from megacp.layout import Layout
from megacp.mask import Mask
from megacp.plans import Sizes

__all__ = ["Placement", "changes_by_batch", "fixed", "place"]

_BY_DOCUMENTS = ("balanced", "per_document")


class Placement(NamedTuple):
    """A layout, and why it was taken."""

    layout: Layout
    reason: str


def changes_by_batch(name: str, has_documents: bool) -> bool:
    """Say whether micro-batches may get different layouts."""
    return name in _BY_DOCUMENTS or (name == "auto" and has_documents)


def place(name: str, mask: Mask, cp_size: int, config: Any, layers: Sequence[str], device: str) -> Placement:
    """Make the layout of a micro-batch.

    Args:
        name: auto, zigzag, contiguous, balanced or per_document. mask: of the micro-batch, whose rows share the layout.
        config: the host's TransformerConfig. layers: the method of each layer, or one for all. device: its type.
    Raises: ConfigError if the length cannot be split, or rows of a micro-batch would need layouts of their own.
    """
    if name != "auto":
        return Placement(_made(name, mask, cp_size), "asked for")
    if not mask.offsets or cp_size == 1 or getattr(config, "multi_latent_attention", False):
        return Placement(_made("zigzag", mask, cp_size), "auto: equal causal work on every rank")
    hierarchy = getattr(config, "hierarchical_context_parallel_sizes", None)
    return _quickest(mask, cp_size, tuple(layers), tuple(hierarchy or ()), _sizes(config), device)


@lru_cache(maxsize=256)
def _made(name: str, mask: Mask, cp_size: int) -> Layout:
    if name == "balanced":
        return Layout.balanced(mask, cp_size)
    if name == "per_document":
        if len(mask.offsets or ()) > 1:
            raise ConfigError(
                f"megacp: --megacp-layout per_document with a micro-batch of {len(mask.offsets or ())} rows: each row has documents "
                "of its own, and they share one layout. Use --micro-batch-size 1, or --megacp-layout balanced."
            )
        return Layout.per_document(mask.offsets[0] if mask.offsets else [0, mask.seq_len], cp_size)
    return fixed(name, mask.seq_len, cp_size)


def fixed(name: str, seq_len: int, cp_size: int) -> Layout:
    """Make a layout that is the same for every micro-batch, contiguous or zigzag, in equal parts."""
    make = Layout.contiguous if name == "contiguous" else Layout.zigzag
    return make(seq_len, cp_size, pad=False)


@lru_cache(maxsize=256)
def _quickest(
    mask: Mask, cp_size: int, layers: tuple[str, ...], hierarchy: tuple[int, ...], sizes: Sizes, device: str
) -> Placement:
    """Take zigzag or balanced, whichever makes attention of all layers shorter by the plan's own figures."""
    layouts = {name: _made(name, mask, cp_size) for name in ("zigzag", "balanced")}
    times = dict.fromkeys(layouts, 0.0)
    for method in layers:
        for name, layout in layouts.items():
            times[name] += methods.estimate(
                layout, mask, method, sizes, device=device, hierarchy=hierarchy
            ).time
    best, other = sorted(times, key=lambda name: times[name])
    ratio = times[other] / max(times[best], 1e-9)
    return Placement(
        layouts[best], f"auto: attention of this batch {ratio:.2f} times as fast as with {other}"
    )


def _sizes(config: Any) -> Sizes:
    """Read the sizes of one rank's attention from the host's TransformerConfig."""
    tp = config.tensor_model_parallel_size
    groups = config.num_query_groups or config.num_attention_heads
    size = config.kv_channels or config.hidden_size // config.num_attention_heads
    return Sizes(max(1, config.num_attention_heads // tp), max(1, groups // tp), size, size)
