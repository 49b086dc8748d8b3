"""Megatron-core: the seams, and what stands at each of them.

Data flow under context parallelism, with the host's own lines untouched:

    get_batch        leaves the batch whole           (seam: batch)
    model.forward    slices it, passes a ticket on    (seam: model)
      rotary         gives the slice's positions      (seam: rotary positions)
      core attention reads the ticket, attends        (seam: core attention)
    model.forward    brings the per-token loss back whole
    loss function    sees the whole loss, so every mask is exact (seam: loss scale)

The gradient that comes back into the slice is multiplied by the group's size where the host averages gradients over
data-parallel times context-parallel ranks (seam: average of gradients).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megacp.hosts.megatron import attached, dropout, layer, loss, model, settings
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
    gpt = f"{_CORE}.models.gpt.gpt_model:GPTModel"
    schedules = f"{_CORE}.pipeline_parallel.schedules"
    moe, mtp = f"{_CORE}.transformer.moe", f"{_CORE}.transformer.multi_token_prediction"
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
            absent_means="flags in the host's own parser; give settings to megacp.install(Config(...))",
        ),
        seam(
            "argument checks",
            "megatron.training.arguments:validate_args",
            settings.validate_args,
            ("args",),
            absent_means="refusals before the first group is made; the host's S x S mask stays on unless it is switched off by hand",
        ),
        seam(
            "groups",
            f"{_CORE}.parallel_state:initialize_model_parallel",
            settings.initialize,
            ("context_parallel_size",),
            required=True,
            absent_means="context parallelism",
        ),
        seam(
            "warm-up",
            "megatron.training.initialize:_warmup_jit_function",
            settings.warm_up,
            (),
            absent_means="the same first weights of learned positions and routers at every size",
        ),
        seam(
            "tokenizer",
            f"{_CORE}.datasets.gpt_dataset:GPTDatasetConfig.__post_init__",
            settings.dataset_config,
            (),
            absent_means="--megacp-documents eod without --megacp-eod-token",
        ),
        seam(
            "data sets",
            f"{_CORE}.datasets.blended_megatron_dataset_builder:BlendedMegatronDatasetBuilder.__init__",
            settings.dataset_builder,
            ("is_built_on_rank",),
            absent_means="--megacp-broadcast-data in Megatron's scripts",
        ),
        seam(
            "data iterators",
            "megatron.training.training:build_train_valid_test_data_iterators",
            settings.data_iterators,
            (),
            absent_means="--megacp-broadcast-data in Megatron's scripts",
        ),
        seam(
            "batch",
            (f"{_CORE}.utils:get_batch_on_this_cp_rank", "megatron.training.utils:get_batch_on_this_cp_rank"),
            model.whole_batch,
            ("batch",),
            absent_means="scripts that split the batch themselves",
        ),
        seam(
            "model configuration",
            f"{_CORE}.transformer.transformer_config:TransformerConfig.__post_init__",
            settings.model_config,
            (),
            absent_means="methods that the host's own attention refuses",
        ),
        seam(
            "model setup",
            f"{gpt}.__init__",
            model.model_init,
            ("config",),
            required=True,
            absent_means="GPT models",
        ),
        seam(
            "model",
            f"{gpt}.forward",
            model.model_forward,
            ("input_ids", "position_ids", "attention_mask", "labels"),
            required=True,
            absent_means="GPT models",
        ),
        seam(
            "rotary positions",
            (
                f"{rotary}.rotary_pos_embedding:RotaryEmbedding.forward",
                f"{rotary}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
            ),
            layer.rotary,
            ("max_seq_len",),
            required=True,
            every=True,
            absent_means="rotary positions",
        ),
        seam(
            "multimodal positions",
            f"{rotary}.rotary_pos_embedding:MultimodalRotaryEmbedding.forward",
            layer.multimodal_rotary,
            ("position_ids",),
            absent_means="mrope",
        ),
        seam(
            "core attention setup",
            f"{local}.__init__",
            layer.attention_init,
            ("config", "layer_number"),
            required=True,
            absent_means="attention",
        ),
        seam(
            "core attention",
            f"{local}.forward",
            layer.attention_forward,
            _QKV,
            required=True,
            absent_means="attention",
        ),
        seam(
            "Transformer Engine setup",
            tuple(f"{name}.__init__" for name in te),
            layer.attention_init,
            ("config", "layer_number"),
            absent_means="layers of Transformer Engine",
        ),
        seam(
            "Transformer Engine attention",
            tuple(f"{name}.forward" for name in te),
            layer.attention_forward,
            _QKV,
            absent_means="layers of Transformer Engine",
        ),
        seam(
            "embedding dropout",
            f"{_CORE}.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward",
            dropout.embedding,
            ("input_ids",),
            absent_means="--megacp-dropout positions",
        ),
        seam(
            "layers",
            f"{_CORE}.transformer.transformer_layer:TransformerLayer.forward",
            dropout.transformer_layer,
            (),
            absent_means="--megacp-dropout positions",
        ),
        seam(
            "hidden dropout",
            f"{_CORE}.fusions.fused_bias_dropout:get_bias_dropout_add",
            dropout.bias_dropout_add,
            ("training",),
            absent_means="--megacp-dropout positions",
        ),
        seam(
            "loss scale",
            (f"{schedules}:forward_step_calc_loss", f"{schedules}:forward_step"),
            loss.loss_scale,
            ("num_microbatches", "forward_data_store", "config"),
            required=True,
            absent_means="training",
        ),
        seam(
            "loss on one rank",
            tuple(f"{_CORE}.parallel_state:get_context_parallel_{what}" for what in _OF_THE_GROUP),
            loss.group_of_one,
            (),
            required=True,
            every=True,
            absent_means="loss functions that sum over the group",
        ),
        seam(
            "attached losses",
            (f"{moe}.moe_utils:MoEAuxLossAutoScaler.backward", f"{mtp}:MTPLossAutoScaler.backward"),
            attached.scaled_backward,
            (),
            every=True,
            absent_means="mixtures of experts, multi-token prediction",
        ),
        seam(
            "router",
            f"{moe}.router:TopKRouter.apply_z_loss",
            attached.router_z_loss,
            (),
            absent_means="mixtures of experts with --calculate-per-token-loss",
        ),
        seam(
            "next tokens",
            f"{mtp}:roll_tensor",
            attached.roll_tensor,
            ("tensor", "shifts", "dims"),
            absent_means="multi-token prediction",
        ),
        seam(
            "logged prediction losses",
            tuple(f"{mtp}:MTPLossLoggingHelper.save_{what}_to_tracker" for what in ("loss", "metrics")),
            attached.logged,
            ("loss",),
            every=True,
            absent_means="the logged losses of multi-token prediction (gradients do not need it)",
        ),
        seam(
            "average of gradients",
            f"{_CORE}.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            loss.gradient_average,
            ("config", "ddp_config"),
            absent_means="hosts that sum gradients over the group (0.8 does)",
        ),
        seam(
            "count of tokens",
            f"{_CORE}.distributed.finalize_model_grads:finalize_model_grads",
            loss.token_count,
            ("model", "num_tokens"),
            required=True,
            absent_means="--calculate-per-token-loss",
        ),
        seam(
            "other models",
            _OTHER_MODELS,
            model.refused_model,
            ("config",),
            every=True,
            absent_means="the refusal of Mamba, hybrid, T5 and BERT models by their name",
        ),
        seam(
            "recurrent layers",
            _RECURRENT,
            attached.refused_layer,
            ("config",),
            every=True,
            absent_means="the refusal of recurrent layers by their name",
        ),
    ]


_OF_THE_GROUP = ("world_size", "rank", "group")
_QKV = ("query", "key", "value", "attention_mask")
_OTHER_MODELS = (
    f"{_CORE}.models.hybrid.hybrid_model:HybridModel.__init__",
    f"{_CORE}.models.mamba.mamba_model:MambaModel.__init__",
    f"{_CORE}.models.T5.t5_model:T5Model.__init__",
    f"{_CORE}.models.bert.bert_model:BertModel.__init__",
)
_RECURRENT = tuple(
    f"{_CORE}.ssm.{name}.__init__"
    for name in (
        "mamba_mixer:MambaMixer",
        "gated_delta_net:GatedDeltaNet",
        "gated_delta_net.gdn2:GatedDeltaNet2",
        "gated_delta_product:GatedDeltaProductMixer",
    )
)
