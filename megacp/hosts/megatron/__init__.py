"""Megatron-core: the seams, and what stands at each of them.

Data flow under context parallelism, with the host's own lines untouched:

    get_batch        leaves the batch whole           (seam: batch)
    model.forward    slices it, passes a ticket on    (seam: model)
      rotary         gives the slice's positions      (seam: rotary positions)
      core attention reads the ticket, attends        (seam: core attention)
    model.forward    brings the per-token loss back whole
    loss function    sees the whole loss, so every mask is exact (seam: loss scale)

The gradient that comes back into the slice is multiplied by the group's size, because the host averages gradients over
data-parallel times context-parallel ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megacp.hosts.megatron import layer, loss, model, settings
from megacp.hosts.seams import Seam
from megacp.hosts.session import Session

__all__ = ["rows"]

_CORE = "megatron.core"


def rows(session: Callable[[], Session]) -> list[Seam]:
    """List the seams of Megatron-core and Megatron-LM's training code. ``session`` gives the state of the run."""

    def seam(
        name: str, targets: str | tuple[str, ...], wrap: Any, needs: tuple[str, ...], **more: Any
    ) -> Seam:
        listed = (targets,) if isinstance(targets, str) else targets
        return Seam(name, listed, functools.partial(wrap, session=session), needs, **more)

    rotary = f"{_CORE}.models.common.embeddings"
    schedules = f"{_CORE}.pipeline_parallel.schedules"
    local = f"{_CORE}.transformer.dot_product_attention:DotProductAttention"
    te = tuple(
        f"{_CORE}.{place}.transformer_engine:TEDotProductAttention"
        for place in ("extensions", "transformer.custom_layers")
    )
    return [
        seam(
            "arguments",
            "megatron.training.arguments:parse_args",
            settings.parse_args,
            ("extra_args_provider",),
        ),
        seam(
            "argument checks", "megatron.training.arguments:validate_args", settings.validate_args, ("args",)
        ),
        seam(
            "groups",
            f"{_CORE}.parallel_state:initialize_model_parallel",
            settings.initialize,
            ("context_parallel_size",),
            required=True,
        ),
        seam("warm-up", "megatron.training.initialize:_warmup_jit_function", settings.warm_up, ()),
        seam(
            "tokenizer",
            f"{_CORE}.datasets.gpt_dataset:GPTDatasetConfig.__post_init__",
            settings.dataset_config,
            (),
        ),
        seam(
            "batch",
            (f"{_CORE}.utils:get_batch_on_this_cp_rank", "megatron.training.utils:get_batch_on_this_cp_rank"),
            model.whole_batch,
            ("batch",),
        ),
        seam(
            "model configuration",
            f"{_CORE}.transformer.transformer_config:TransformerConfig.__post_init__",
            settings.model_config,
            (),
        ),
        seam(
            "model setup",
            f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__",
            model.model_init,
            ("config",),
            required=True,
        ),
        seam(
            "model",
            f"{_CORE}.models.gpt.gpt_model:GPTModel.forward",
            model.model_forward,
            ("input_ids", "position_ids", "attention_mask", "labels"),
            required=True,
        ),
        seam(
            "rotary positions",
            (
                f"{rotary}.rotary_pos_embedding:RotaryEmbedding.forward",
                f"{rotary}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
            ),
            layer.rotary,
            ("max_seq_len",),
            every=True,
        ),
        seam(
            "core attention setup",
            f"{local}.__init__",
            layer.attention_init,
            ("config", "layer_number"),
            required=True,
        ),
        seam("core attention", f"{local}.forward", layer.attention_forward, _QKV, required=True),
        seam(
            "Transformer Engine setup",
            tuple(f"{name}.__init__" for name in te),
            layer.attention_init,
            ("config", "layer_number"),
        ),
        seam(
            "Transformer Engine attention",
            tuple(f"{name}.forward" for name in te),
            layer.attention_forward,
            _QKV,
        ),
        seam(
            "loss scale",
            (f"{schedules}:forward_step_calc_loss", f"{schedules}:forward_step"),
            loss.loss_scale,
            ("num_microbatches", "forward_data_store", "config"),
            required=True,
        ),
        seam(
            "loss on one rank",
            tuple(
                f"{_CORE}.parallel_state:get_context_parallel_{what}"
                for what in ("world_size", "rank", "group")
            ),
            loss.group_of_one,
            (),
            required=True,
            every=True,
        ),
        seam(
            "count of tokens",
            f"{_CORE}.distributed.finalize_model_grads:finalize_model_grads",
            loss.token_count,
            ("model", "num_tokens"),
            absent_means="--calculate-per-token-loss",
        ),
        seam("other models", _OTHER_MODELS, model.refused_model, ("config",), every=True),
    ]


_QKV = ("query", "key", "value", "attention_mask")
_OTHER_MODELS = (
    f"{_CORE}.models.mamba.mamba_model:MambaModel.__init__",
    f"{_CORE}.models.T5.t5_model:T5Model.__init__",
    f"{_CORE}.models.bert.bert_model:BertModel.__init__",
)
