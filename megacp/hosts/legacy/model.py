"""The boundary of an old model, and what lies inside it: masks, rotary positions, and three generations of attention."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import torch

from megacp import attend, kernels, sharding
from megacp.errors import ShapeError, UnsupportedError
from megacp.groups import Group
from megacp.hosts import limits
from megacp.hosts.documents import document_mask, starts_of
from megacp.hosts.entry import causal, check_same_sample, mask_last_labels
from megacp.hosts.hooks import Function
from megacp.hosts.session import Session
from megacp.hosts.splits import Split, redeem, ticket
from megacp.mask import Mask

_PER_TOKEN = ("input_ids", "position_ids", "labels")
_REFUSED = (
    "tokentype_ids",
    "inference_params",
    "layer_past",
    "get_key_value",
    "retriever_input_ids",
    "retriever_position_ids",
    "retriever_attn_mask",
)


def _group(run: Session) -> Group | None:
    return None if run.groups is None else run.groups.context


def model_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Slice at the model's entry; bring the per-token loss (or the logits) back whole at its exit."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = session()
        group = _group(run)
        if group is None or not run.is_in_force(group.size):
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs)
        batch = given.arguments
        for name in _REFUSED:
            if batch.get(name) is not None and batch[name] is not False:
                raise UnsupportedError(
                    f"megacp: the model was called with {name}, which context parallelism over {group.size} ranks does not offer. "
                    "Use --context-parallel-size 1 for it."
                )
        check_same_sample(batch, group, run)
        split = _split(self, batch, run, group)
        ends = mask_last_labels(batch, split.mask, run) if run.has_documents and "labels" in batch else None
        fields = {name: batch[name] for name in _PER_TOKEN if isinstance(batch.get(name), torch.Tensor)}
        batch.update(sharding.shard(fields, split.layout, rank=group.rank))
        batch["attention_mask"] = ticket(split)
        why = "auto: equal causal work on every rank" if run.config.layout == "auto" else "asked for"
        run.announce(split, _kernel_name(self, run), why)
        with run.holding(split=split):
            out = original(*given.args, **given.kwargs)
        if not getattr(self, "post_process", True):
            return out
        # [B, S] per-token loss or [B, S, V] logits; these hosts average gradients over all ranks with the same weights
        whole = sharding.gather(out, split.layout, group, dim=1, grad_factor=group.size)
        return whole if ends is None else whole.masked_fill(ends.to(whole.device), 0)

    return forward


def _split(model: Any, batch: dict[str, Any], run: Session, group: Group) -> Split:
    """Work out layout and mask of the micro-batch at hand."""
    shapes = {k: tuple(batch[k].shape) for k in _PER_TOKEN if isinstance(batch.get(k), torch.Tensor)}
    if len(set(shapes.values())) != 1 or len(next(iter(shapes.values()))) != 2:
        raise ShapeError(
            f"megacp: the model's inputs have the shapes {shapes}. Pass whole sequences, all [batch, sequence], on every stage."
        )
    seq_len = next(iter(shapes.values()))[1]
    _check_length(model, seq_len, run, group)
    settings = run.arguments
    tp = getattr(settings, "tensor_model_parallel_size", 1)
    limits.check_sequence_length(
        seq_len, group.size, run.layout_name, tp, getattr(settings, "sequence_parallel", False)
    )
    limits.check_one_layout(run.config.layout)
    run.asks_late = True
    layout = run.layout(seq_len, group.size)
    if not run.has_documents:
        return Split(layout, causal(seq_len), group)
    starts = starts_of(run.config.documents, batch.get("input_ids"), batch.get("position_ids"), run.eod)
    return Split(layout, document_mask(starts), group)


def _check_length(model: Any, seq_len: int, run: Session, group: Group) -> None:
    """Compare the batch with the sequence length of the command line: a script that splits it too would give less."""
    whole = getattr(run.arguments, "seq_length", None)
    if whole is not None and model.training and seq_len != whole:
        raise ShapeError(
            f"megacp: the model was called with {seq_len} tokens, and --seq-length is {whole}. Each of the {group.size} ranks must be "
            "given whole sequences. If something else splits the batch too, let megacp do it alone."
        )


def _kernel_name(model: Any, run: Session) -> str:
    settings, parameter = run.arguments, next(model.parameters())
    heads = getattr(settings, "num_attention_heads", 1)
    size = getattr(settings, "kv_channels", None) or getattr(settings, "hidden_size", heads) // heads
    request = kernels.Request(
        parameter.device.type, parameter.dtype, heads, heads, size, size, kernels.Options(1.0)
    )
    return kernels.choose(run.config.kernel, request).name


def masks_and_positions(original: Function, session: Callable[[], Session]) -> Function:
    """Make loss mask and positions as the host does, and no S x S mask; documents are kept apart by megacp."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def get_ltor_masks_and_position_ids(*args: Any, **kwargs: Any) -> Any:
        run = session()
        group = _group(run)
        if group is None or not run.is_in_force(group.size):
            return original(*args, **kwargs)
        values = signature.bind(*args, **kwargs).arguments
        data, eod = values["data"], values["eod_token"]
        if run.eod is None and isinstance(eod, int):
            run.eod = eod
        loss_mask = torch.ones(data.shape, dtype=torch.float32, device=data.device)
        if values["eod_mask_loss"]:
            loss_mask.masked_fill_(data == eod, 0.0)
        run.loss_mask = loss_mask
        return (
            torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=data.device),
            loss_mask,
            _positions(data, eod if values["reset_position_ids"] else None),
        )

    return get_ltor_masks_and_position_ids


def _positions(data: torch.Tensor, eod: int | None) -> torch.Tensor:
    """Count tokens from 0, int64 [B, G]; again after each ``eod`` if one is given."""
    at = torch.arange(data.shape[1]) if eod is None else Mask.from_tokens(data, eod).document_positions()
    return at.to(data.device).expand(data.shape)


def rotary(original: Function, session: Callable[[], Session]) -> Function:
    """Give the rows of the rank's own tokens, of the table of the whole sequence."""

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        table = original(*args, **kwargs)
        split = session().split
        if split is None or split.group.size == 1:
            return table
        if table.shape[0] != split.layout.seq_len:
            raise ShapeError(
                f"megacp: the host made rotary positions for {table.shape[0]} tokens, and the sequence has {split.layout.seq_len}."
            )
        return split.layout.shard(table, split.group.rank, dim=0)

    return forward


# -- attention


def layer_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Know the split in an attention layer, in recompute too: the ticket is its attention mask.

    Layers that compute attention in line are computed here, between the same two products.
    """
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        split = redeem(given.arguments.get("attention_mask"))
        run = session()
        if split is None:
            _refuse_local(run, self)
            return original(*given.args, **given.kwargs)
        if hasattr(self, "core_attention") or hasattr(self, "core_attention_flash"):
            with run.holding(split=split):
                return original(*given.args, **given.kwargs)
        for name in ("layer_past", "get_key_value", "encoder_output", "rotary_pos_emb"):
            if given.arguments.get(name) not in (None, False):
                raise UnsupportedError(
                    f"megacp: attention was called with {name}, which is not offered over ranks."
                )
        mixed, _ = self.query_key_value(given.arguments["hidden_states"])  # [S, B, H·3·D]
        heads, size = self.num_attention_heads_per_partition, self.hidden_size_per_attention_head
        q, k, v = mixed.view(*mixed.shape[:-1], heads, 3 * size).split(size, dim=-1)
        return self.dense(_attend(self, q, k, v, split, run))

    return forward


def core_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Attend by the ticket that stands for the attention mask; q, k, v [S, B, H, D] to [S, B, H·D]."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        values = given.arguments
        split = redeem(values["attention_mask"])
        if split is None:
            _refuse_local(session(), self)
            return original(*given.args, **given.kwargs)
        return _attend(
            self, values["query_layer"], values["key_layer"], values["value_layer"], split, session()
        )

    return forward


def flash_forward(original: Function, session: Callable[[], Session]) -> Function:
    """Attend by the split of the layer around it; q, k, v [B, S, H, D] to [B, S, H, D]."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = signature.bind(self, *args, **kwargs)
        split, run = session().split, session()
        if split is None:
            _refuse_local(run, self)
            return original(*given.args, **given.kwargs)
        if not self.causal:
            raise UnsupportedError(
                "megacp: FlashSelfAttention is not causal here, which is not offered over ranks."
            )
        if self.dropout_p and self.training:
            raise UnsupportedError(
                f"megacp: FlashSelfAttention has dropout {self.dropout_p}. Set --attention-dropout 0."
            )
        values = given.arguments
        if len(run.methods) > 1:
            raise UnsupportedError(
                "megacp: FlashSelfAttention does not know its layer, so --cp-comm-type can name one method only on this host."
            )
        return _attention([values[name] for name in "qkv"], split, run, 1, "bshd", self.softmax_scale)

    return forward


def _attend(
    module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, split: Split, run: Session
) -> torch.Tensor:
    """Attend to all ranks' keys; [S, B, H, D] to [S, B, H·D]."""
    kind = getattr(getattr(module, "attn_mask_type", None), "name", "causal")
    if kind != "causal":
        raise UnsupportedError(
            f"megacp: a layer asks for attention mask type '{kind}' inside a causal model. Only causal attention is split there."
        )
    p = getattr(getattr(module, "attention_dropout", None), "p", 0.0)
    if p and module.training:
        raise UnsupportedError(f"megacp: a layer has attention dropout {p}. Set --attention-dropout 0.")
    number, scale = getattr(module, "layer_number", 1), 1 / math.sqrt(q.shape[-1])
    return _attention([q, k, v], split, run, number, "sbhd", scale).flatten(2).contiguous()


def _attention(
    qkv: list[torch.Tensor], split: Split, run: Session, layer: int, form: str, scale: float | None
) -> torch.Tensor:
    """Attend by the method of a layer, counted from 1."""
    out = attend.attention(
        *qkv,
        mask=split.mask,
        layout=split.layout,
        group=split.group,
        method=run.methods[min(layer, len(run.methods)) - 1],
        kernel=run.config.kernel,
        format=form,
        scale=scale,
    )
    assert isinstance(out, torch.Tensor)
    return out


def _refuse_local(run: Session, module: Any) -> None:
    """Refuse attention whose input did not come through a model that is split: it would see its own tokens only."""
    group = _group(run)
    if group is not None and group.size > 1 and run.split is None:
        raise UnsupportedError(
            f"megacp: {type(module).__name__} runs at context-parallel size {group.size}, but its input did not come through a model "
            "that megacp splits. It would see its own tokens only. Add a seam of the role 'model' for this model, or use size 1."
        )


def refused_model(original: Function, session: Callable[[], Session]) -> Function:
    """Refuse models whose entry is not hooked, by name."""

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        group = _group(session())
        if group is not None and session().is_in_force(group.size):
            raise UnsupportedError(
                f"megacp: {type(self).__name__} is not offered with --context-parallel-size {group.size} or --megacp-documents; "
                "GPTModel is. Use size 1 without --megacp-documents."
            )
        original(self, *args, **kwargs)

    return init
