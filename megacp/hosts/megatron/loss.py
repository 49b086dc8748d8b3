"""The loss on whole sequences: to the host's loss function there is no context parallelism.

Every rank of a group holds the whole per-token loss, so the loss function computes what it would on one rank, if nothing in it
sums over the group or multiplies by the group's size once more. What a Megatron does there has changed several times:

==============  ======================  ========================================  ================  ===============
Megatron-core   the loss function       the schedule                              tokens counted    gradients
==============  ======================  ========================================  ================  ===============
0.7 to 0.11     sums over cp, times cp  divides by the count                      over dp           0.8: summed
0.12            sums over cp            divides by the count, times cp            over dp           averaged
0.13 and later  nothing                 divides by the count; two values: by cp   over dp and cp    averaged
==============  ======================  ========================================  ================  ===============

None of this is looked up by version. While the loss function runs, the host's own functions say that the group has one member;
what the schedule multiplies by is measured; over which group the tokens are counted is watched; by what gradients are divided is
read from the host's buffers. With that, the gradient at the model's exit is the same in all of them, and the model's boundary
multiplies it by the group's size where the host averages over the group (see ``model.py``).
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megacp.errors import SeamError, UnsupportedError
from megacp.hosts.hooks import Function
from megacp.hosts.megatron.attached import measure_scales
from megacp.hosts.megatron.settings import parallel_state
from megacp.hosts.session import Session


@contextmanager
def one_rank(run: Session) -> Iterator[None]:
    """Let the host's functions and its arguments say that nobody shares this rank's sequence."""
    names = sys.modules.get("megatron.training.global_vars")
    settings = getattr(names, "_GLOBAL_ARGS", None)
    cp = getattr(settings, "context_parallel_size", None)
    before, run.is_one_rank = run.is_one_rank, True
    if settings is not None:
        settings.context_parallel_size = 1
    try:
        yield
    finally:
        run.is_one_rank = before
        if settings is not None:
            settings.context_parallel_size = cp


def group_of_one(original: Function, session: Callable[[], Session]) -> Function:
    """Answer for a group of one member while :func:`one_rank` is on: its size, this rank in it, and the group itself."""
    name = original.__name__

    def answer(*args: Any, **kwargs: Any) -> Any:
        run = session()
        if not run.is_one_rank:
            return original(*args, **kwargs)
        if name == "get_context_parallel_world_size":
            return 1
        if name == "get_context_parallel_rank":
            return 0
        return run.alone if run.alone is not None else original(*args, **kwargs)

    return answer


def loss_scale(original: Function, session: Callable[[], Session]) -> Function:
    """Take back what the schedule multiplies the loss by for the group's sake; wraps the function that calls the loss function."""
    if "loss_func" in inspect.signature(original).parameters:
        return _calc_loss(original, session)
    return _forward_step(original, session)


def _calc_loss(original: Function, session: Callable[[], Session]) -> Function:
    """Wrap a function of the loss alone: what it multiplies by is measured with a loss of 1."""
    signature = inspect.signature(original)
    measured: dict[tuple[int, int], float] = {}

    def forward_step_calc_loss(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        values = given.arguments
        loss_func = values["loss_func"]
        cp = parallel_state().get_context_parallel_world_size()
        if cp == 1 or loss_func is None:
            return original(*args, **kwargs)

        def whole_loss(*inner: Any, **named: Any) -> Any:
            with one_rank(session()):
                outputs = loss_func(*inner, **named)
            if not _is_loss(outputs, named):
                return outputs
            key = len(outputs), cp
            if key not in measured:
                measured[key] = _multiplier(original, signature, values, len(outputs))
            # A copy, too: schedules divide in place, and a metric may be a view of the loss.
            return outputs[0] / measured[key], *outputs[1:]

        is_attaching = any(
            getattr(values["config"], name, None) for name in ("num_moe_experts", "mtp_num_layers")
        )
        if is_attaching and not session().attached_scales:
            step = functools.partial(_one_token, original, signature, values, 3)
            session().attached_scales = measure_scales(step, _plain(values["config"]))
        values["loss_func"] = whole_loss
        return original(*given.args, **given.kwargs)

    return forward_step_calc_loss


def _is_loss(outputs: Any, named: dict[str, Any]) -> bool:
    """Tell a loss, with or without its count, from other data that schedules ask a loss function for."""
    is_pair = isinstance(outputs, tuple) and len(outputs) in (2, 3) and isinstance(outputs[0], torch.Tensor)
    return is_pair and not named.get("non_loss_data")


def _multiplier(original: Function, signature: inspect.Signature, real: dict[str, Any], length: int) -> float:
    """Measure what a schedule multiplies a loss of one token by, given as so many values."""
    config = _plain(real["config"])
    config.calculate_per_token_loss = False
    return float(_one_token(original, signature, real, length, config)[0])


def _plain(config: Any) -> Any:
    """Copy a configuration, without what would attach losses or measure time."""
    config = copy.copy(config)
    for name in ("num_moe_experts", "mtp_num_layers", "timers", "experimental_attention_variant"):
        if hasattr(config, name):
            setattr(config, name, None)
    return config


def _one_token(
    original: Function, signature: inspect.Signature, real: dict[str, Any], length: int, config: Any
) -> Any:
    """Call a schedule's function of the loss with a loss of one token and one micro-batch."""
    outputs: tuple[Any, ...] = (torch.ones(()), torch.ones((), dtype=torch.int), {})
    stand_ins = {
        "loss_func": lambda _: outputs if length == 3 else (outputs[0], {}),
        "output_tensor": torch.ones(()),
        "config": config,
        "num_microbatches": 1,
        "forward_data_store": [],
        "collect_non_loss_data": False,
    }
    values = {**real, **{k: v for k, v in stand_ins.items() if k in signature.parameters}}
    bound = signature.bind(**values)
    return original(*bound.args, **bound.kwargs)


def _forward_step(original: Function, session: Callable[[], Session]) -> Function:
    """Wrap a step that runs the model too: the group has one member from the loss function on, until the step is done."""
    signature = inspect.signature(original)
    is_checked = False

    def forward_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_checked
        given = signature.bind(*args, **kwargs)
        values = given.arguments
        run, step = session(), values["forward_step_func"]
        if parallel_state().get_context_parallel_world_size() == 1:
            return original(*args, **kwargs)
        losses: list[tuple[Any, ...]] = []
        with _later(lambda: one_rank(run)) as begin:

            def whole_step(*inner: Any, **named: Any) -> Any:
                output, loss_func = step(*inner, **named)

                def whole_loss(*loss_args: Any, **loss_named: Any) -> Any:
                    begin()
                    outputs = loss_func(*loss_args, **loss_named)
                    if not _is_loss(outputs, loss_named):
                        return outputs
                    outputs = (outputs[0] * 1, *outputs[1:])  # a metric may be a view of the loss
                    if not is_checked:
                        losses.append(
                            (outputs[0].detach().clone(), *outputs[1:])
                        )  # the schedule divides in place
                    return outputs

                return output, whole_loss

            values["forward_step_func"] = whole_step
            result = original(*given.args, **given.kwargs)
        if losses:
            is_checked = _is_what_one_rank_gets(losses[0], result[0], values)
        return result

    return forward_step


@contextmanager
def _later(make: Callable[[], Any]) -> Iterator[Callable[[], None]]:
    """Give a function that enters a context; leave it at the end if it was entered."""
    entered: list[Any] = []

    def begin() -> None:
        if not entered:
            entered.append(make())
            entered[0].__enter__()

    try:
        yield begin
    finally:
        if entered:
            entered[0].__exit__(None, None, None)


def _is_what_one_rank_gets(loss: tuple[Any, ...], out: Any, values: dict[str, Any]) -> bool:
    """Compare the schedule's loss with the loss function's, divided as on one rank; False if there is nothing to see in it.

    Raises: SeamError if the schedule made something else of it.
    """
    found = float((out[0] if isinstance(out, (list, tuple)) else out).detach())
    expected = float(loss[0])
    if len(loss) == 2 or not getattr(values["config"], "calculate_per_token_loss", False):
        count = float(loss[1]) if len(loss) == 3 else 1.0
        expected = expected / count / values["num_microbatches"] if count else math.nan
    if expected == 0 or not math.isfinite(expected):
        return False
    if not math.isclose(found, expected, rel_tol=1e-3):
        raise SeamError(
            f"megacp: the host's schedule made {found:.6g} of a loss that is {expected:.6g} on one rank. It reads the "
            "context-parallel size in a way that megacp does not see, and gradients would be off by that factor."
        )
    return True


def gradient_average(original: Function, session: Callable[[], Session]) -> Function:
    """Read by what the host's data parallelism divides gradients: by data times context parallel ranks, or by the former only."""

    signature = inspect.signature(original)

    def init(*args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        if isinstance(given.get("module"), torch.nn.Module):  # read where rows have ranks of their own
            overlaps = getattr(given["ddp_config"], "overlap_grad_reduce", False)
            given["module"].megacp_overlaps_sums = bool(overlaps)
        cp = parallel_state().get_context_parallel_world_size()
        if cp == 1 or getattr(given["config"], "calculate_per_token_loss", False):
            return  # then nothing is divided here
        if getattr(given["ddp_config"], "average_in_collective", False):
            return  # the collective divides by its own ranks, which are all
        ranks = parallel_state().get_data_parallel_world_size(with_context_parallel=True)
        factors = [
            getattr(buffer, "gradient_scaling_factor", 1 / ranks) for buffer in _buffers(given["self"])
        ]
        session().is_averaged = not any(math.isclose(factor * ranks, cp) for factor in factors)

    return init


def _buffers(module: Any) -> list[Any]:
    found = getattr(module, "buffers", None)
    return found if isinstance(found, list) else []  # a module's own method has this name


def token_count(original: Function, session: Callable[[], Session]) -> Function:
    """Divide by the tokens of all ranks where the host counts only those of one in each group (--calculate-per-token-loss)."""

    @functools.wraps(original)
    def finalize_model_grads(model: Any, num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        run = session()
        cp = parallel_state().get_context_parallel_world_size()
        if num_tokens is None or cp == 1:
            return original(model, num_tokens, *args, **kwargs)
        if run.token_divisor is not None:
            result = original(model, num_tokens, *args, **kwargs)
        else:
            with _watched_counts(num_tokens) as groups:
                result = original(model, num_tokens, *args, **kwargs)
            run.token_divisor = _missing(groups, cp)
        if run.token_divisor != 1:
            for chunk in model:
                chunk.scale_gradients(1 / run.token_divisor)
        return result

    return finalize_model_grads


@contextmanager
def _watched_counts(num_tokens: torch.Tensor) -> Iterator[list[Any]]:
    """List the groups over which the host sums its count of tokens in this block."""
    groups: list[Any] = []
    all_reduce = dist.all_reduce

    @functools.wraps(all_reduce)
    def watched(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor is num_tokens or (tensor.numel() == 1 and tensor.dtype == num_tokens.dtype):
            groups.append(inspect.signature(all_reduce).bind(tensor, *args, **kwargs).arguments.get("group"))
        return all_reduce(tensor, *args, **kwargs)

    dist.all_reduce = watched
    try:
        yield groups
    finally:
        dist.all_reduce = all_reduce


def _missing(groups: list[Any], cp: int) -> int:
    """Return by what the host's count of tokens falls short of that of all ranks.

    Raises: UnsupportedError if it was summed over neither data-parallel nor data- and context-parallel ranks.
    """
    sizes = {dist.get_world_size(group) for group in groups}
    with_cp = parallel_state().get_data_parallel_world_size(with_context_parallel=True)
    if sizes == {with_cp}:
        return 1
    if sizes == {with_cp // cp}:
        return cp
    raise UnsupportedError(
        f"megacp: --calculate-per-token-loss: this host sums its count of tokens over groups of {sorted(sizes)} ranks, which is "
        f"neither data parallel ({with_cp // cp}) nor data times context parallel ({with_cp}). Leave the flag away, or use size 1."
    )
