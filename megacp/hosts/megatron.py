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

import copy
import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megacp import attend, kernels, methods, sharding
from megacp.config import FLAGS
from megacp.errors import SeamError, ShapeError, UnsupportedError
from megacp.groups import Group, as_group
from megacp.hosts import limits
from megacp.hosts.documents import document_mask, starts_of
from megacp.hosts.hooks import Function
from megacp.hosts.seams import Seam
from megacp.hosts.session import Session
from megacp.hosts.splits import Split, redeem, ticket
from megacp.layout import Layout
from megacp.mask import Mask

__all__ = ["rows"]

_CORE = "megatron.core"


def rows(session: Callable[[], Session], table: Callable[[], str]) -> list[Seam]:
    """List the seams of Megatron-core and Megatron-LM's training code.

    Args:
        session: gives the run's state. table: gives the report's table of seams.
    """

    def seam(name: str, targets: str | tuple[str, ...], wrap: Any, needs: tuple[str, ...], **more: Any) -> Seam:
        listed = (targets,) if isinstance(targets, str) else targets
        bound = functools.partial(wrap, session=session, table=table) if wrap is _model_forward else functools.partial(wrap, session=session)
        return Seam(name, listed, bound, needs, **more)

    rotary = f"{_CORE}.models.common.embeddings"
    local = f"{_CORE}.transformer.dot_product_attention:DotProductAttention"
    te = f"{_CORE}.extensions.transformer_engine:TEDotProductAttention"
    return [
        seam("arguments", "megatron.training.arguments:parse_args", _parse_args, ("extra_args_provider",)),
        seam("argument checks", "megatron.training.arguments:validate_args", _validate_args, ("args",)),
        seam("groups", f"{_CORE}.parallel_state:initialize_model_parallel", _initialize, ("context_parallel_size",), required=True),
        seam("warm-up", "megatron.training.initialize:_warmup_jit_function", _warm_up, ()),
        seam("tokenizer", f"{_CORE}.datasets.gpt_dataset:GPTDatasetConfig.__post_init__", _dataset_config, ()),
        seam(
            "batch",
            (f"{_CORE}.utils:get_batch_on_this_cp_rank", "megatron.training.utils:get_batch_on_this_cp_rank"),
            _whole_batch,
            ("batch",),
        ),
        seam("model setup", f"{_CORE}.models.gpt.gpt_model:GPTModel.__init__", _model_init, ("config",), required=True),
        seam(
            "model",
            f"{_CORE}.models.gpt.gpt_model:GPTModel.forward",
            _model_forward,
            ("input_ids", "position_ids", "attention_mask", "labels"),
            required=True,
        ),
        seam(
            "rotary positions",
            (
                f"{rotary}.rotary_pos_embedding:RotaryEmbedding.forward",
                f"{rotary}.yarn_rotary_pos_embedding:YarnRotaryEmbedding.forward",
            ),
            _rotary,
            ("max_seq_len", "packed_seq"),
            every=True,
        ),
        seam("core attention setup", f"{local}.__init__", _attention_init, ("config", "layer_number"), required=True),
        seam("core attention", f"{local}.forward", _attention_forward, _QKV, required=True),
        seam("Transformer Engine setup", f"{te}.__init__", _attention_init, ("config", "layer_number")),
        seam("Transformer Engine attention", f"{te}.forward", _attention_forward, _QKV),
        seam("loss scale", f"{_CORE}.pipeline_parallel.schedules:forward_step_calc_loss", _loss_scale, ("loss_func",), required=True),
        seam("other models", _OTHER_MODELS, _refused_model, ("config",), every=True),
    ]


_QKV = ("query", "key", "value", "attention_mask")
_OTHER_MODELS = (
    f"{_CORE}.models.mamba.mamba_model:MambaModel.__init__",
    f"{_CORE}.models.T5.t5_model:T5Model.__init__",
    f"{_CORE}.models.bert.bert_model:BertModel.__init__",
)


# -- settings -------------------------------------------------------------------------------------------------------------


def _parse_args(original: Function, session: Callable[[], Session]) -> Function:
    """Add our flags to the host's parser, so that they are known, shown in --help and kept with the run's arguments."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        def with_our_flags(parser: Any) -> Any:
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            group = parser.add_argument_group("megacp")
            for flag in FLAGS:
                if flag.name not in parser._option_string_actions:
                    default = getattr(session().config, flag.field)
                    group.add_argument(flag.name, metavar=flag.metavar, type=flag.read, default=default, help=flag.help)
            return parser

        parsed = original(with_our_flags, *args, **kwargs)
        session().configure({flag.field: getattr(parsed, f"megacp_{flag.field}") for flag in FLAGS})
        return parsed

    return parse_args


def _validate_args(original: Function, session: Callable[[], Session]) -> Function:
    """Check what the host would let pass or refuse without a reason, and switch off its S x S mask where ours is in force."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        cp = args.context_parallel_size
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        limits.check_sizes(args.world_size, cp, tp, pp)
        if session().is_in_force(cp):
            if getattr(args, "seq_length", None) is not None:
                limits.check_sequence_length(args.seq_length, cp, session().layout_name, tp, args.sequence_parallel)
            if getattr(args, "reset_attention_mask", False) and not session().has_documents:
                raise UnsupportedError(
                    f"megacp: --reset-attention-mask with --context-parallel-size {cp}: the host ignores it there, and documents "
                    "would see each other. Add --megacp-documents eod, which keeps them apart."
                )
            args.create_attention_mask_in_dataloader = False
        return original(args, *rest, **kwargs)

    return validate_args


def _dataset_config(original: Function, session: Callable[[], Session]) -> Function:
    """Learn which token ends a document from the host's own data configuration."""

    def post_init(self: Any) -> None:
        original(self)
        eod = getattr(getattr(self, "tokenizer", None), "eod", None)
        if isinstance(eod, int) and session().eod is None:
            session().eod = eod

    return post_init


# -- groups ---------------------------------------------------------------------------------------------------------------


def _initialize(original: Function, session: Callable[[], Session]) -> Function:
    """Check the sizes before the first group is made; afterwards connect the pipeline's stages."""
    signature = inspect.signature(original)

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        limits.check_sizes(
            dist.get_world_size(),
            values["context_parallel_size"],
            values["tensor_model_parallel_size"],
            values["pipeline_model_parallel_size"],
        )
        result = original(*args, **kwargs)
        state = sys.modules[f"{_CORE}.parallel_state"]
        session().connect_pipeline(
            state.get_pipeline_model_parallel_group(), values.get("virtual_pipeline_model_parallel_size") or 1
        )
        return result

    return initialize_model_parallel


def _warm_up(original: Function, session: Callable[[], Session]) -> Function:
    """Let the host's warm-up draw as many random numbers as at size 1; weights made after it must not depend on the size."""

    def warm_up(*args: Any, **kwargs: Any) -> Any:
        settings = sys.modules["megatron.training.global_vars"].get_args()
        if settings.position_embedding_type != "learned_absolute":
            return original(*args, **kwargs)
        cp, settings.context_parallel_size = settings.context_parallel_size, 1
        try:
            return original(*args, **kwargs)
        finally:
            settings.context_parallel_size = cp

    return warm_up


# -- batch and model ------------------------------------------------------------------------------------------------------


def _whole_batch(original: Function, session: Callable[[], Session]) -> Function:
    """Leave the batch whole; the model's entry slices it."""

    def get_batch_on_this_cp_rank(batch: Any, *args: Any, **kwargs: Any) -> Any:
        return batch

    return get_batch_on_this_cp_rank


def _model_init(original: Function, session: Callable[[], Session]) -> Function:
    """Refuse what cannot be exact, before a weight is made."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        values = signature.bind(self, *args, **kwargs).arguments
        config, cp = values["config"], values["config"].context_parallel_size
        if session().is_in_force(cp):
            limits.check_model_config(config, cp, session().has_documents)
            if values.get("position_embedding_type") == "mrope":
                raise UnsupportedError(
                    f"megacp: position_embedding_type 'mrope' is not offered with --context-parallel-size {cp}. Use rope."
                )
            comm_type = getattr(config, "cp_comm_type", None)
            name = comm_type[0] if isinstance(comm_type, (list, tuple)) else comm_type
            session().method = methods.resolve(name or "ring").name
        original(self, *args, **kwargs)

    return init


def _model_forward(original: Function, session: Callable[[], Session], table: Callable[[], str]) -> Function:
    """Slice at the model's entry; bring the per-token loss (or the logits) back whole at its exit."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        group = _group_of(self)
        if not session().is_in_force(group.size):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        batch = given.arguments
        for name in ("inference_context", "inference_params", "packed_seq_params", "decoder_input", "extra_block_kwargs"):
            if batch.get(name) is not None:
                raise UnsupportedError(
                    f"megacp: the model was called with {name}, which context parallelism over {group.size} ranks does not offer "
                    f"yet ({_WHY_NOT[name]}). Use --context-parallel-size 1 for it."
                )
        split = _split(self, batch, session(), group)
        _check_dense_mask(batch.get("attention_mask"), split.mask)
        if session().has_documents and isinstance(batch.get("loss_mask"), torch.Tensor):
            ends = split.mask.document_ends().to(batch["loss_mask"].device)
            batch["loss_mask"].masked_fill_(ends, 0)  # in place: the host's loss function holds the same tensor
        fields = {name: batch.get(name) for name in _PER_TOKEN}
        batch.update({k: v for k, v in sharding.shard(fields, split.layout, rank=group.rank).items() if k in batch})
        batch["attention_mask"] = ticket(split)
        session().announce(split, table(), _kernel_name(self, session()))
        out = original(*given.args, **given.kwargs)
        if not getattr(self, "post_process", True):
            return out
        # [B, S] per-token loss, or [B, S, V] logits where no labels are given
        return sharding.gather(out, split.layout, group, dim=1, grad_factor=group.size)

    return forward


_PER_TOKEN = ("input_ids", "position_ids", "labels", "loss_mask")
_WHY_NOT = {
    "inference_context": "decoding against a cache is not attention over a split sequence",
    "inference_params": "decoding against a cache is not attention over a split sequence",
    "packed_seq_params": "give documents by --megacp-documents instead",
    "decoder_input": "embeddings made outside the model are not split",
    "extra_block_kwargs": "their tokens are not known",
}


def _split(model: Any, batch: dict[str, Any], run: Session, group: Group) -> Split:
    """Work out layout and mask of the micro-batch at hand."""
    rows, seq_len = _shape(model, batch, group)
    config = model.config
    limits.check_sequence_length(
        seq_len, group.size, run.layout_name, config.tensor_model_parallel_size, config.sequence_parallel
    )
    layout = run.layout(seq_len, group.size)
    if not run.has_documents:
        return Split(layout, _causal(seq_len), group)
    mailbox = run.mailbox
    if mailbox is None:
        raise UnsupportedError(
            "megacp: documents are kept apart, but megatron's initialize_model_parallel was never called. Call it before the model."
        )
    chunk = getattr(model, "vp_stage", None) or 0
    if mailbox.is_first and chunk == 0:
        starts = starts_of(run.config.documents, batch.get("input_ids"), batch.get("position_ids"), run.eod)
        mailbox.put(starts)
    else:
        starts = mailbox.get(chunk, rows, seq_len)
    return Split(layout, document_mask(starts), group)


_causal = functools.lru_cache(maxsize=16)(Mask.causal)


def _shape(model: Any, batch: dict[str, Any], group: Group) -> tuple[int, int]:
    """Return (rows, whole sequence length) of the micro-batch."""
    shapes = {name: tuple(batch[name].shape) for name in _PER_TOKEN if isinstance(batch.get(name), torch.Tensor)}
    if len(set(shapes.values())) > 1:
        raise ShapeError(f"megacp: the model's inputs have different shapes: {shapes}. Pass whole sequences, [batch, sequence].")
    arriving = getattr(getattr(model, "decoder", None), "input_tensor", None)  # [S, B, hidden] from the stage before
    if isinstance(arriving, torch.Tensor):
        config = model.config
        whole = arriving.shape[0] * group.size * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        for name, shape in shapes.items():
            if shape[1] != whole:
                raise ShapeError(
                    f"megacp: {name} has {shape[1]} tokens, but the pipeline stage before sent {arriving.shape[0]} for this one of "
                    f"{group.size} ranks, {whole} in all. Something else splits the batch too; let megacp do it alone."
                )
        return arriving.shape[1], whole
    if not shapes:
        raise ShapeError("megacp: the model was called without tokens, labels or an input from the pipeline stage before.")
    return next(iter(shapes.values()))


def _check_dense_mask(given: Any, mask: Mask) -> None:
    """Accept a host's mask that says what ours says; refuse any other."""
    if not isinstance(given, torch.Tensor):
        return
    length = mask.seq_len
    if given.shape[-2:] == (length, length) and given.dtype == torch.bool:
        hidden = torch.ones(length, length, dtype=torch.bool, device=given.device).triu_(1)  # Megatron's True is hidden
        if bool((given == hidden).all()):
            return
    raise UnsupportedError(
        f"megacp: attention_mask of shape {tuple(given.shape)} is not plain causal, and a dense mask cannot be honoured over ranks. "
        "Keep documents apart with --megacp-documents eod or positions, and build no mask (--no-create-attention-mask-in-dataloader)."
    )


def _group_of(module: Any) -> Group:
    """Return the host's own context-parallel group, as the module sees it."""
    handle = getattr(getattr(module, "pg_collection", None), "cp", None)
    return as_group(handle if handle is not None else sys.modules[f"{_CORE}.parallel_state"].get_context_parallel_group())


def _kernel_name(model: Any, run: Session) -> str:
    """Say which kernel the model's attention will use."""
    config = model.config
    parameter = next(model.parameters())
    size = config.kv_channels
    request = kernels.Request(
        parameter.device.type, parameter.dtype, config.num_attention_heads, config.num_query_groups, size, size, kernels.Options(1.0)
    )
    return kernels.choose(run.config.kernel, request).name


# -- layers ---------------------------------------------------------------------------------------------------------------


def _rotary(original: Function, session: Callable[[], Session]) -> Function:
    """Give the positions of the rank's own tokens, by our layout rather than the host's formula."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        handle = values.get("cp_group") or getattr(self, "cp_group", None)
        group = as_group(handle if handle is not None else sys.modules[f"{_CORE}.parallel_state"].get_context_parallel_group())
        if group.size == 1 or values["packed_seq"]:
            return original(*given.args, **given.kwargs)
        values["packed_seq"] = True  # the host's way of asking for the table of the whole sequence
        table = original(*given.args, **given.kwargs)
        layout = session().layout(values["max_seq_len"], group.size)
        if isinstance(table, tuple):  # YaRN: (table, scale)
            return (layout.shard(table[0], group.rank, dim=0), *table[1:])
        return layout.shard(table, group.rank, dim=0)

    return forward


def _attention_init(original: Function, session: Callable[[], Session]) -> Function:
    """Build the host's attention as for one rank; the group is our business."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs)
        config = given.arguments["config"]
        alone = copy.copy(config)
        alone.context_parallel_size = 1
        given.arguments["config"] = alone
        original(*given.args, **given.kwargs)
        self.config = config  # the live one: the host changes it later
        self.megacp_scale = given.arguments.get("softmax_scale")
        self.megacp_dropout = given.arguments.get("attention_dropout")
        self.megacp_window = _window(config, given.arguments["layer_number"])

    return init


def _attention_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Attend by the ticket that the model's entry passed on."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = signature.bind(self, *args, **kwargs)
        values = given.arguments
        split = redeem(values["attention_mask"])
        if split is None:
            cp = self.config.context_parallel_size
            if cp > 1:
                raise UnsupportedError(
                    f"megacp: attention runs at context-parallel size {cp}, but its input did not come through a model that megacp "
                    "splits (GPTModel). It would see its own tokens only. Add a seam for this model, or use size 1."
                )
            return original(*given.args, **given.kwargs)
        if not hasattr(self, "megacp_scale"):
            raise SeamError("megacp: an attention layer was built before megacp was installed. Install first, then build the model.")
        _check_layer(self, values)
        query, key, value = values["query"], values["key"], values["value"]
        out = attend.attention(
            query,
            key,
            value,
            mask=_layer_mask(split.mask, self.megacp_window),
            layout=split.layout,
            group=split.group,
            method=session().method,
            kernel=session().config.kernel,
            format="sbhd",
            scale=self.megacp_scale,
            sinks=_sinks(self),
        )
        assert isinstance(out, torch.Tensor)
        return out.flatten(2)  # [S, B, H, E] -> [S, B, H·E]

    return forward


@functools.lru_cache(maxsize=1024)
def _layer_mask(mask: Mask, window: tuple[int, int] | None) -> Mask:
    return mask if window is None else mask.within(*window)


def _window(config: Any, layer_number: int) -> tuple[int, int] | None:
    """Return the layer's sliding window (left, right), if the host gives it one."""
    size = getattr(config, "window_size", None)
    if not size:
        return None
    skip = getattr(config, "window_attn_skip_freq", None)
    if isinstance(skip, int):
        has_window = layer_number % skip != 0
    else:
        has_window = bool(skip[layer_number - 1]) if skip is not None else True
    return (int(size[0]), int(size[1])) if has_window else None


def _sinks(module: Any) -> torch.Tensor | None:
    """Return the logits [H] of the layer's sinks: learned, zero ('off-by-one'), or None."""
    kind = getattr(module.config, "softmax_type", "vanilla")
    if kind == "vanilla":
        return None
    offset = module.softmax_offset
    return offset.view(-1) if isinstance(offset, torch.Tensor) else None


def _check_layer(module: Any, values: dict[str, Any]) -> None:
    """Refuse what this layer was asked for and we would not do."""
    kind = values.get("attn_mask_type") or getattr(module, "attn_mask_type", None)
    name = getattr(kind, "name", kind)
    if name is not None and name not in ("causal", "padding_causal"):
        raise UnsupportedError(
            f"megacp: a layer asks for attention mask type '{name}' inside a causal model. Only causal attention is split there."
        )
    for what in ("attention_bias", "packed_seq_params"):
        if values.get(what) is not None:
            raise UnsupportedError(f"megacp: a layer's attention was called with {what}, which is not offered over ranks yet.")
    dropout = module.config.attention_dropout if module.megacp_dropout is None else module.megacp_dropout
    if dropout and module.training:
        raise UnsupportedError(f"megacp: a layer has attention dropout {dropout}. Set --attention-dropout 0.")


def _refused_model(original: Function, session: Callable[[], Session]) -> Function:
    """Refuse models whose entry is not hooked, by name."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = signature.bind(self, *args, **kwargs).arguments["config"]
        cp = config.context_parallel_size
        if session().is_in_force(cp):
            raise UnsupportedError(
                f"megacp: {type(self).__name__} is not offered with --context-parallel-size {cp} or --megacp-documents; GPTModel is. "
                "Its recurrent or two-way layers would not be the same. Use size 1 without --megacp-documents."
            )
        original(self, *args, **kwargs)

    return init


# -- loss -----------------------------------------------------------------------------------------------------------------


def _loss_scale(original: Function, session: Callable[[], Session]) -> Function:
    """Take back the group's size where the host multiplies an old-style loss by it; the loss is whole here already."""
    signature = inspect.signature(original)

    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        loss_func = given.arguments["loss_func"]
        cp = sys.modules[f"{_CORE}.parallel_state"].get_context_parallel_world_size()
        if cp > 1 and loss_func is not None:

            def whole_loss(*inner: Any, **named: Any) -> Any:
                outputs = loss_func(*inner, **named)
                if isinstance(outputs, tuple) and len(outputs) == 2:
                    return outputs[0] / cp, outputs[1]
                return outputs

            given.arguments["loss_func"] = whole_loss
        return original(*given.args, **given.kwargs)

    return forward_step_calc_loss
