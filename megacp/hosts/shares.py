"""A host's model on a row of documents that has ranks of its own: see :mod:`megacp.dynamic`.

The host knows no context parallelism then: its size is 1, and blocks of ranks are taken out of its data-parallel group. The model's
entry splits each row by its share in place of the host's group, and the loop sums losses and gradients by the step.
"""

from __future__ import annotations

from typing import Any

import torch

from megacp.dynamic import Share
from megacp.errors import UnsupportedError
from megacp.hosts import limits
from megacp.hosts.session import Session

__all__ = ["check", "rotary_length"]


def check(model: Any, share: Share, run: Session) -> None:
    """Refuse parts of a model, or of a run, that are not exact when each row has ranks of its own.

    Raises: UnsupportedError naming the setting and its value; SeamError if a seam that is needed is missing.
    """
    run.check()
    config = model.config
    for setting, why, instead in _ONE:
        value = getattr(config, setting, None)
        if value is not None and value is not False and value not in (0, 1):
            raise UnsupportedError(
                f"megacp: {setting} is {value!r}, which a context-parallel size per document does not offer: {why}. {instead}"
            )
    for setting, why, instead in _OFF:
        value = getattr(config, setting, None) or getattr(model, setting, None)
        if value in (None, False, 0, 0.0) or (setting == "position_embedding_type" and value != "mrope"):
            continue
        raise UnsupportedError(
            f"megacp: {setting} is {value!r}, which a context-parallel size per document does not offer: {why}. {instead}"
        )
    if run.has_documents or run.has_keyed_dropout:
        flag = "--megacp-documents" if run.has_documents else "--megacp-dropout"
        raise UnsupportedError(
            f"megacp: {flag} is on, which a context-parallel size per document does not offer: documents are those of the schedule, "
            f"and dropout is not drawn from their positions yet. Turn {flag} off."
        )
    if getattr(model, "megacp_overlaps_sums", False):
        raise UnsupportedError(
            "megacp: overlap_grad_reduce is True, which a context-parallel size per document does not offer: the host would sum "
            "gradients in the backward pass, of which ranks have different numbers. Turn it off; Step.finish() sums them."
        )
    limits.check_model_config(config, max(share.step.waves.sizes), True)


def rotary_length(share: Share) -> int:
    """Give a length that holds every position of the row; few different ones, as hosts keep a table for each."""
    return max(2, 1 << (max(share.row.lengths) - 1).bit_length())


def own_rows(table: torch.Tensor, share: Share) -> torch.Tensor:
    """Take the rows of a table by position that this rank's tokens have, [S, ...]."""
    return table[share.positions().to(table.device)]


_SPLIT = "only data-parallel ranks are put into blocks yet"
_ONE = (
    ("context_parallel_size", "blocks are made of data-parallel ranks", "Set --context-parallel-size 1."),
    ("tensor_model_parallel_size", _SPLIT, "Set --tensor-model-parallel-size 1."),
    (
        "pipeline_model_parallel_size",
        "ranks have different numbers of rows",
        "Set --pipeline-model-parallel-size 1.",
    ),
    (
        "expert_model_parallel_size",
        "experts wait for ranks of other blocks",
        "Set --expert-model-parallel-size 1.",
    ),
)
_OFF = (
    (
        "num_moe_experts",
        "the router's losses are means over rows, of which ranks have different numbers",
        "Use a dense model.",
    ),
    (
        "mtp_num_layers",
        "the loss of its layers is attached, not summed by the step",
        "Leave --mtp-num-layers away.",
    ),
    (
        "multi_latent_attention",
        "its own rotary positions would be those of the row, not of documents",
        "Use a model without it.",
    ),
    (
        "position_embedding_type",
        "its positions come from the model's input, not from documents",
        "Use rope or learned_absolute.",
    ),
)
