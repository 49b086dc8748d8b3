"""The model's boundary: the batch is sliced where it goes in, the per-token loss comes back whole where it goes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megacp import kernels, sharding
from megacp.errors import ShapeError, UnsupportedError
from megacp.groups import Group
from megacp.hosts import limits, shares
from megacp.hosts.documents import document_mask, starts_of
from megacp.hosts.entry import OFFSETS, PER_TOKEN, causal, check_same_sample, mask_last_labels
from megacp.hosts.hooks import Function
from megacp.hosts.megatron import dropout
from megacp.hosts.megatron.settings import cp_group
from megacp.hosts.placement import Placement, place
from megacp.hosts.session import Session
from megacp.hosts.splits import Split, ticket
from megacp.mask import Mask


def whole_batch(original: Function, session: Callable[[], Session]) -> Function:
    """Leave the batch whole; the model's entry slices it."""

    def get_batch_on_this_cp_rank(batch: Any, *args: Any, **kwargs: Any) -> Any:
        session().loss_mask = batch.get("loss_mask") if isinstance(batch, Mapping) else None
        return batch

    return get_batch_on_this_cp_rank


def model_init(original: Function, session: Callable[[], Session]) -> Function:
    """Refuse what cannot be exact, before a weight is made."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        values = signature.bind(self, *args, **kwargs).arguments
        config, cp = values["config"], values["config"].context_parallel_size
        asked = session().comm_types
        if asked and not hasattr(config, "cp_comm_type"):
            config.cp_comm_type = list(asked) if len(asked) > 1 else asked[0]
        if session().is_in_force(cp):
            run = session()
            limits.check_model_config(config, cp, run.has_documents, run.has_keyed_dropout, run.config.layout)
            run.methods = limits.comm_types(config)
            run.asks_late = bool(getattr(config, "multi_latent_attention", False))
        given = getattr(config, "cp_comm_type", None)
        if isinstance(
            given, list
        ):  # hosts that count layers from 1 here look one past the end for the last layer
            config.cp_comm_type = [*given, given[-1]]
        try:
            original(self, *args, **kwargs)
        finally:
            config.cp_comm_type = given
        if session().is_in_force(cp):
            _check_attention(self, cp)
            session().model_config, session().device = config, next(self.parameters()).device.type
        dropout.number_layers(self)

    return init


def _check_attention(model: Any, cp: int) -> None:
    """Refuse layers whose core attention is of a class of somebody's own: it would attend to the rank's own tokens only.

    A class derived from a hooked one may stand in between, if its forward calls the one above it.
    """
    for name, module in model.named_modules():
        core = getattr(module, "core_attention", None)
        if core is None:
            continue
        forward = type(core).forward
        calls_ours = hasattr(forward, "__megacp_seam__") or "__class__" in forward.__code__.co_freevars
        if not (calls_ours and hasattr(core, "megacp_scale")):
            raise UnsupportedError(
                f"megacp: the core attention of {name} is {type(core).__module__}.{type(core).__qualname__}, in which megacp is not "
                f"hooked; at --context-parallel-size {cp} it would see its own tokens only. Use the host's own core attention in the "
                "layer spec, or add rows for this class of the roles 'core attention setup' and 'core attention' (megacp.hosts.rows)."
            )


def model_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Slice at the model's entry; bring the per-token loss (or the logits) back whole at its exit."""
    signature = inspect.signature(original)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        share = session().share
        group = cp_group(self) if share is None else share.group
        if share is None and not session().is_in_force(group.size):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        batch = given.arguments
        known = {**batch, **_offsets(batch, session())}
        for name in (
            "inference_context",
            "inference_params",
            "packed_seq_params",
            "decoder_input",
            "extra_block_kwargs",
        ):
            if batch.get(name) is not None:
                raise UnsupportedError(
                    f"megacp: the model was called with {name}, which context parallelism over {group.size} ranks does not offer "
                    f"yet ({_WHY_NOT[name]}). Use --context-parallel-size 1 for it."
                )
        if share is not None:
            shares.check(self, share, session())
            _check_attention(self, share.step.waves.ranks)
        check_same_sample(known, group, session())
        placement, mask = _split(self, known, session(), group)
        split = dropout.keyed(
            Split(placement.layout, mask, group, method=share.method if share else None), self, session()
        )
        _check_dense_mask(batch.get("attention_mask"), split.mask)
        ends = None
        if session().has_documents and batch.get("labels") is not None:
            ends = mask_last_labels(batch, split.mask, session())
        if getattr(self.config, "mtp_num_layers", None):
            _check_prediction(self, batch)
        whole_mask = _whole_loss_mask(self, batch, split.mask)
        limits.check_padding(self.config, batch.get("padding_mask"), split.layout)
        fields = {name: batch.get(name) for name in PER_TOKEN}
        local = sharding.shard(fields, split.layout, rank=group.rank, fields=_DIMS)
        batch.update({k: v for k, v in local.items() if k in batch})
        if whole_mask is not None:
            batch["loss_mask"] = whole_mask
        batch["attention_mask"] = ticket(split)
        session().announce(split, _kernel_name(self, session()), placement.reason)
        drops = split.dropout_key and self.config.hidden_dropout and getattr(self, "pre_process", True)
        with session().holding(split=split), dropout.at(session(), split, 0, drops=bool(drops)):
            out = original(*given.args, **given.kwargs)
        if not getattr(self, "post_process", True):
            return out
        # [B, S] per-token loss, or [B, S, V] logits where no labels are given
        factor = group.size if session().is_averaged and share is None else 1
        whole = sharding.gather(out, split.layout, group, dim=1, grad_factor=factor)
        return whole if ends is None else whole.masked_fill(ends.to(whole.device), 0)

    return forward


def _offsets(batch: dict[str, Any], run: Session) -> dict[str, Any]:
    """Take the documents' offsets from the call, if they are to be read there; the host's attention is then given none."""
    if run.config.documents != "cu_seqlens":
        return {}
    given = batch.get("packed_seq_params")
    if given is not None:
        batch["packed_seq_params"] = None
    return {"packed_seq_params": None, **{name: getattr(given, name, None) for name in OFFSETS}}


def _check_prediction(model: Any, batch: dict[str, Any]) -> None:
    """Refuse multi-token prediction in training without labels: the host would make them of the local tokens."""
    if model.training and getattr(model, "post_process", True) and batch.get("labels") is None:
        raise UnsupportedError(
            "megacp: multi-token prediction was called in training without labels, which is not offered over ranks. Pass labels."
        )


def _whole_loss_mask(model: Any, batch: dict[str, Any], mask: Mask) -> torch.Tensor | None:
    """Return the loss mask that multi-token prediction gets: whole, as its sum is that of all tokens; None if there is none to pass.

    It is rolled before it is used, and rolling gives the rank's own part (see hosts.megatron.attached).
    """
    if not getattr(model.config, "mtp_num_layers", None) or not isinstance(batch.get("labels"), torch.Tensor):
        return None
    given = batch.get("loss_mask")
    if given is not None:
        return given  # type: ignore[no-any-return]
    ones = torch.ones_like(batch["labels"])
    return ones.masked_fill_(mask.document_ends().to(ones.device), 0) if mask.offsets else ones


_DIMS = {"padding_mask": 1}
_WHY_NOT = {
    "inference_context": "decoding against a cache is not attention over a split sequence",
    "inference_params": "decoding against a cache is not attention over a split sequence",
    "packed_seq_params": "with --megacp-documents cu_seqlens documents are read from it",
    "decoder_input": "embeddings made outside the model are not split",
    "extra_block_kwargs": "their tokens are not known",
}


def _split(model: Any, batch: dict[str, Any], run: Session, group: Group) -> tuple[Placement, Mask]:
    """Work out layout and mask of the micro-batch at hand."""
    if run.share is not None:
        return Placement(run.share.layout, "by document"), run.share.mask
    rows, seq_len = _shape(model, batch, group)
    config = model.config
    limits.check_sequence_length(
        seq_len, group.size, run.layout_name, config.tensor_model_parallel_size, config.sequence_parallel
    )
    mask = _mask(model, batch, run, (rows, seq_len))
    device = next(model.parameters()).device.type
    return place(run.config.layout, mask, group.size, config, run.methods, device), mask


def _mask(model: Any, batch: dict[str, Any], run: Session, shape: tuple[int, int]) -> Mask:
    """Return the mask of the micro-batch at hand; later pipeline stages get its documents from the first."""
    if not run.has_documents:
        return causal(shape[1])
    mailbox = run.mailbox
    if mailbox is None:
        raise UnsupportedError(
            "megacp: documents are kept apart, but megatron's initialize_model_parallel was never called. Call it before the model."
        )
    chunk = getattr(model, "vp_stage", None) or 0
    if mailbox.is_first and chunk == 0:
        offsets = [batch.get(name) for name in OFFSETS]
        starts = starts_of(
            run.config.documents, batch.get("input_ids"), batch.get("position_ids"), run.eod, offsets
        )
        mailbox.put(starts)
    else:
        starts = mailbox.get(chunk, *shape)
    return document_mask(starts)


def _shape(model: Any, batch: dict[str, Any], group: Group) -> tuple[int, int]:
    """Return (rows, whole sequence length) of the micro-batch."""
    shapes = {
        name: tuple(batch[name].shape[-2:])  # position ids may be [3, B, G]
        for name in PER_TOKEN
        if isinstance(batch.get(name), torch.Tensor)
    }
    if len(set(shapes.values())) > 1:
        raise ShapeError(
            f"megacp: the model's inputs have different shapes: {shapes}. Pass whole sequences, [batch, sequence]."
        )
    arriving = getattr(
        getattr(model, "decoder", None), "input_tensor", None
    )  # [S, B, hidden] from the stage before
    if isinstance(arriving, torch.Tensor):
        config = model.config
        whole = (
            arriving.shape[0]
            * group.size
            * (config.tensor_model_parallel_size if config.sequence_parallel else 1)
        )
        for name, shape in shapes.items():
            if shape[1] != whole:
                raise ShapeError(
                    f"megacp: {name} has {shape[1]} tokens, but the pipeline stage before sent {arriving.shape[0]} for this one of "
                    f"{group.size} ranks, {whole} in all. Something else splits the batch too; let megacp do it alone."
                )
        return arriving.shape[1], whole
    if not shapes:
        raise ShapeError(
            "megacp: the model was called without tokens, labels or an input from the pipeline stage before."
        )
    return next(iter(shapes.values()))


def _check_dense_mask(given: Any, mask: Mask) -> None:
    """Accept a host's mask that says what ours says; refuse any other."""
    if not isinstance(given, torch.Tensor):
        return
    length = mask.seq_len
    if length > _LONGEST_DENSE:
        raise UnsupportedError(
            f"megacp: attention_mask of shape {tuple(given.shape)}: the data loader builds {length} x {length} values for each row, "
            f"and above {_LONGEST_DENSE} tokens megacp does not read it through. Build none: "
            "--no-create-attention-mask-in-dataloader (GPTDatasetConfig.create_attention_mask=False)."
        )
    if given.shape[-2:] == (length, length) and given.dtype == torch.bool and _is_causal(given):
        return
    raise UnsupportedError(
        f"megacp: attention_mask of shape {tuple(given.shape)} is not plain causal, and a dense mask cannot be honoured over ranks. "
        "Keep documents apart with --megacp-documents eod or positions, and build no mask (--no-create-attention-mask-in-dataloader)."
    )


_LONGEST_DENSE = 32_768  # tokens; a mask of this takes 1 GiB a row


def _is_causal(hidden: torch.Tensor) -> bool:
    """Say whether a mask, True is hidden, hides exactly what comes later; by some rows at a time."""
    length = hidden.shape[-1]
    at = torch.arange(length, device=hidden.device)
    step = max(1, (1 << 22) // length)
    return all(
        bool((hidden[..., i : i + step, :] == (at > at[i : i + step, None])).all())
        for i in range(0, length, step)
    )


def _kernel_name(model: Any, run: Session) -> str:
    """Say which kernel the model's attention will use."""
    config = model.config
    parameter = next(model.parameters())
    size = out_size = config.kv_channels
    if getattr(config, "multi_latent_attention", False):
        size, out_size = config.qk_head_dim + config.qk_pos_emb_head_dim, config.v_head_dim
    request = kernels.Request(
        parameter.device.type,
        parameter.dtype,
        config.num_attention_heads,
        config.num_query_groups,
        size,
        out_size,
        kernels.Options(1.0),
    )
    return kernels.choose(run.config.kernel, request).name


def refused_model(original: Function, session: Callable[[], Session]) -> Function:
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
