"""Hosts without context parallelism: Megatron-LM to 23.06, megatron-core 0.2 and 0.3, apex.transformer, and forks of them.

The data flow is that of :mod:`megacp.hosts.megatron`. Besides, the groups are made here (``groups.py``), the flags are added to the
host's parser, and its arguments are checked with as many ranks as there are samples being read (``settings.py``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from megacp.after_import import is_findable, source_of
from megacp.hosts.legacy import groups, model, settings
from megacp.hosts.seams import Seam
from megacp.hosts.session import Session

__all__ = ["is_needed", "rows"]

GROUPS = "groups to split"  # the role that only this table has
_STATE = ("megatron.core.parallel_state", "megatron.mpu.initialize", "apex.transformer.parallel_state")


def is_needed(others: Iterable[Seam]) -> bool:
    """Say whether the host that would be imported has no context parallelism of its own; nothing is imported.

    others: rows of a fork, which may name the groups of a host that is called otherwise.
    """
    if any(row.role == GROUPS for row in others):
        return True
    found = next((name for name in _STATE if is_findable(name)), None)
    if found is None:
        return False
    source = source_of(found)
    return source is not None and "context_parallel" not in source


def rows(session: Callable[[], Session]) -> list[Seam]:
    """List the seams. ``session`` gives the state of the run."""

    def seam(
        name: str, targets: str | tuple[str, ...], wrap: Any, needs: tuple[str, ...] = (), **more: Any
    ) -> Seam:
        listed = (targets,) if isinstance(targets, str) else targets
        return Seam(name, listed, functools.partial(wrap, session=session), needs, **more)

    layers, gpt = "megatron.model.transformer", "megatron.model.gpt_model:GPTModel"
    return [
        seam(
            "arguments",
            "megatron.arguments:parse_args",
            settings.parse_args,
            ("extra_args_provider",),
            absent_means="flags in the host's own parser; pass context_parallel_size to initialize_model_parallel",
        ),
        seam(
            "argument checks",
            "megatron.arguments:validate_args",
            settings.validate_args,
            ("args",),
            absent_means="(hosts that check their arguments while they parse them need none)",
        ),
        seam(
            GROUPS,
            tuple(f"{name}:initialize_model_parallel" for name in _STATE),
            settings.initialize,
            required=True,
            absent_means="context parallelism",
        ),
        *(
            seam(
                f"data parallel {what}",
                tuple(f"{name}:get_data_parallel_{what}" for name in _STATE),
                functools.partial(groups.data_parallel, what=what),
                required=what != "src_rank",
                absent_means="samplers that go by samples while gradients go by replicas",
            )
            for what in ("group", "world_size", "rank", "src_rank")
        ),
        seam(
            "end of groups",
            tuple(f"{name}:destroy_model_parallel" for name in _STATE),
            groups.destroy,
            absent_means="groups that are made a second time",
        ),
        seam(
            "callers that mean batches",
            _BATCHES,
            groups.as_batches,
            every=True,
            absent_means="the host's own samplers; a loop of one's own asks get_data_parallel_rank(with_context_parallel=False)",
        ),
        seam(
            "callers that mean replicas",
            _REPLICAS,
            groups.as_replicas,
            every=True,
            absent_means="the host's own training loop",
        ),
        seam(
            "masks and positions",
            "megatron.utils:get_ltor_masks_and_position_ids",
            model.masks_and_positions,
            ("data", "eod_token", "reset_position_ids", "eod_mask_loss"),
            absent_means="batches without an S x S mask",
        ),
        seam(
            "model",
            f"{gpt}.forward",
            model.model_forward,
            ("input_ids", "position_ids", "attention_mask", "labels"),
            absent_means="GPT models; a model of one's own is sharded by hand (megacp.shard)",
        ),
        seam(
            "rotary positions",
            (
                "megatron.core.models.common.rotary_pos_embedding:RotaryEmbedding.forward",
                "megatron.model.rotary_pos_embedding:RotaryEmbedding.forward",
            ),
            model.rotary,
            ("max_seq_len",),
            every=True,
            absent_means="rotary positions",
        ),
        seam(
            "attention layer",
            (f"{layers}:ParallelAttention.forward", f"{layers}:ParallelSelfAttention.forward"),
            model.layer_forward,
            ("hidden_states", "attention_mask"),
            absent_means="attention",
        ),
        seam(
            "core attention",
            f"{layers}:CoreAttention.forward",
            model.core_forward,
            ("query_layer", "key_layer", "value_layer", "attention_mask"),
            absent_means="layers that have their attention in a class of its own",
        ),
        seam(
            "flash attention",
            f"{layers}:FlashSelfAttention.forward",
            model.flash_forward,
            ("q", "k", "v"),
            absent_means="--use-flash-attn",
        ),
        seam(
            "pipeline shapes",
            (
                "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_with_interleaving",
                "megatron.core.pipeline_parallel.schedules:forward_backward_pipelining_without_interleaving",
                "megatron.p2p_communication:_communicate",
            ),
            settings.message_shape,
            ("tensor_shape",),
            every=True,
            absent_means="pipeline parallelism",
        ),
        seam(
            "other models",
            tuple(f"megatron.model.{name}.__init__" for name in ("bert_model:BertModel", "t5_model:T5Model")),
            model.refused_model,
            every=True,
            absent_means="the refusal of BERT and T5 by their name",
        ),
    ]


_BATCHES = (
    "megatron.data.data_samplers:build_pretraining_data_loader",
    "megatron.microbatches:build_num_microbatches_calculator",
    "megatron.training:train",
    "megatron.training:evaluate",
)
_REPLICAS = (
    "megatron.training:train_step",
    "megatron.training:training_log",
    "megatron.training:save_checkpoint_and_time",
    "megatron.training:calc_params_l2_norm",
    "megatron.utils:average_losses_across_data_parallel_group",
    "megatron.utils:report_memory",
    "megatron.utils:check_adlr_autoresume_termination",
)
