"""Losses that layers attach on their way: the balance of experts, the router's z-loss, and multi-token prediction.

Such a loss is no part of what the loss function sees. A layer computes it from the tokens of its own rank and hands it to an
autograd function, which adds its gradient, times a scale, in the backward pass. To be those of one rank, the gradients of all
ranks must add up, after the host's average, to the gradient of the loss of the whole sequence. What that takes, and how it is found
out here (never by version):

- Statistics over the group. Megatron counts each expert's tokens over tensor and context parallel ranks, in all versions.
- The scale. The gradient at the model's exit is times the group's size where the host averages over the group (``model.py``); so is
  that of these losses. Some schedules multiply by that size themselves (0.16 does for experts): measured with a step of one token.
- The number of tokens. With --calculate-per-token-loss a router multiplies by the number of its tokens, because the host divides by
  the number of all. Some count the tokens of one rank (0.12 to 0.16), others of all: measured with one and two rows of logits.
- The next token. :func:`roll_tensor` moves labels, ids and masks by one token in global order, by our layout, and never from one
  document into another; its sum is that of the whole sequence.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megacp import sharding
from megacp.errors import SeamError, UnsupportedError
from megacp.hosts.hooks import Function
from megacp.hosts.megatron.settings import parallel_state
from megacp.hosts.session import Session

_SCALERS = {
    "MoEAuxLossAutoScaler": "megatron.core.transformer.moe.moe_utils",
    "MTPLossAutoScaler": "megatron.core.transformer.multi_token_prediction",
}


def scaled_backward(original: Function, session: Callable[[], Session]) -> Function:
    """Scale the gradient of an attached loss as that of the main loss is."""
    scaler = original.__qualname__.partition(".")[0]

    def backward(ctx: Any, *grads: Any) -> Any:
        result = original(ctx, *grads)
        run = session()
        cp = parallel_state().get_context_parallel_world_size()
        if cp == 1:
            return result
        factor = (cp if run.is_averaged else 1) / run.attached_scales.get(scaler, 1.0)
        if scaler == "MoEAuxLossAutoScaler" and run.router_tokens is not None:
            factor *= run.router_tokens
        return (result[0], result[1] * factor, *result[2:])

    return backward


def measure_scales(step: Callable[[Any], Any], config: Any) -> dict[str, float]:
    """Measure what a schedule scales attached losses by for the group's sake.

    Args:
        step: runs the schedule's step on a loss of one token, with the configuration it is given.
        config: the host's, of which a changed copy is given.
    Returns: the scale that the schedule sets where it would set 1 on one rank, by the name of the scaler.
    """
    changed = copy.copy(config)
    changed.num_moe_experts = changed.mtp_num_layers = 1
    for name in ("grad_scale_func", "moe_grad_scale_func", "mtp_grad_scale_func"):
        setattr(changed, name, None)
    with _no_scale_set() as scalers:
        step(changed)
        found = {name: scaler.main_loss_backward_scale for name, scaler in scalers.items()}
    return {name: float(scale) for name, scale in found.items() if scale is not None}


@contextmanager
def _no_scale_set() -> Iterator[dict[str, Any]]:
    """Give the host's scalers by name, without a scale; put their scales back at the end."""
    scalers = {
        name: getattr(sys.modules[module], name)
        for name, module in _SCALERS.items()
        if hasattr(sys.modules.get(module), name)
    }
    before = {name: scaler.main_loss_backward_scale for name, scaler in scalers.items()}
    try:
        for scaler in scalers.values():
            scaler.main_loss_backward_scale = None
        yield scalers
    finally:
        for name, scaler in scalers.items():
            scaler.main_loss_backward_scale = before[name]


def router_z_loss(original: Function, session: Callable[[], Session]) -> Function:
    """Learn, at the router's first tokens, by whose number of tokens it multiplies its losses."""

    def apply_z_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = session()
        cp = parallel_state().get_context_parallel_world_size()
        if cp > 1 and getattr(self.config, "calculate_per_token_loss", False) and run.router_tokens is None:
            run.router_tokens = 1.0
            run.router_tokens = float(cp) if _counts_one_rank(self, original) else 1.0
        return original(self, *args, **kwargs)

    return apply_z_loss


def _counts_one_rank(router: Any, apply_z_loss: Function) -> bool:
    """Tell whether a router multiplies its losses by the tokens of its own rank.

    Its z-loss of equal rows is a mean; the multiplier M(rows) is what --calculate-per-token-loss makes of it: the rows, the rows of
    all ranks, or 1.
    Raises: SeamError for another one.
    """
    probe = copy.copy(router)
    probe.config = copy.copy(router.config)
    probe.config.moe_z_loss_coeff, probe.config.mtp_num_layers = 1.0, None
    probe.layer_number, probe.is_mtp_layer, probe.training = None, False, True  # None: nothing is logged

    def gradient(rows: int, per_token: bool) -> float:
        probe.calculate_per_token_loss = probe.config.calculate_per_token_loss = per_token
        with torch.enable_grad(), _no_scale_set():
            logits = torch.zeros(
                rows, 3, dtype=torch.float64, device=router.weight.device, requires_grad=True
            )
            (found,) = torch.autograd.grad(apply_z_loss(probe, logits).sum(), logits)
        return float((found - 1).sum())

    multipliers = [gradient(rows, True) / gradient(rows, False) for rows in (1, 2)]
    everyone = parallel_state().get_tensor_and_context_parallel_world_size()
    for name, expected in (("rows", (1, 2)), ("all rows", (everyone, 2 * everyone)), ("nothing", (1, 1))):
        if all(abs(a - b) < 1e-6 * b for a, b in zip(multipliers, expected, strict=True)):
            return name == "rows"
    raise SeamError(
        f"megacp: with --calculate-per-token-loss this host's router multiplies the z-loss of one and two tokens by {multipliers}: "
        "neither by its tokens, nor by those of all ranks. Leave the flag away, or use size 1."
    )


def roll_tensor(original: Function, session: Callable[[], Session]) -> Function:
    """Move the values of each token one token to the left, in global order and within documents; the last of each gets 0."""
    signature = inspect.signature(original)

    def roll_tensor(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        tensor, split = values["tensor"], session().split
        if tensor is None or split is None:
            return original(*args, **kwargs)
        if values["shifts"] != -1 or values["dims"] not in (-1, tensor.dim() - 1):
            raise UnsupportedError(
                f"megacp: multi-token prediction rolls dim {values['dims']} by {values['shifts']}. Only the last dim by -1 is "
                "offered over ranks: use --context-parallel-size 1."
            )
        layout, group = split.layout, split.group
        whole = tensor  # the boundary passes some fields on whole
        if tensor.shape[-1] != layout.seq_len:
            whole = sharding.gather(tensor, layout, group, dim=-1)
        rolled = torch.roll(whole, -1, -1).masked_fill_(split.mask.document_ends().to(whole.device), 0)
        total = rolled.sum() if values.get("return_sum", True) else None
        return layout.shard(rolled, group.rank, dim=-1), total

    return roll_tensor


def logged(original: Function, session: Callable[[], Session]) -> Function:
    """Log the loss of the whole sequence: the host averages over the group what is each rank's share of a sum."""

    def save_to_tracker(loss: Any, *args: Any, **kwargs: Any) -> Any:
        split = session().split
        return original(loss if split is None else loss * split.group.size, *args, **kwargs)

    return save_to_tracker


def refused_layer(original: Function, session: Callable[[], Session]) -> Function:
    """Refuse layers that carry a state from token to token, by name."""
    signature = inspect.signature(original)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        config = signature.bind_partial(self, *args, **kwargs).arguments["config"]
        cp = config.context_parallel_size
        if session().is_in_force(cp):
            raise UnsupportedError(
                f"megacp: a layer of {type(self).__name__} is not offered with --context-parallel-size {cp} or "
                "--megacp-documents: it carries a state from one token to the next, and a rank does not hold consecutive tokens. "
                "Use size 1 without --megacp-documents, or a model of attention layers."
            )
        original(self, *args, **kwargs)

    return init
