"""The loss of one rank under every contract that a Megatron has had between its loss function and its schedule.

Stand-ins for the host: a schedule and a loss function in the manner of each generation, a group of two whose sum doubles.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megacp import groups as members
from megacp.config import Config
from megacp.errors import SeamError, UnsupportedError
from megacp.hosts.entry import mask_last_labels
from megacp.hosts.megatron.layer import rotary
from megacp.hosts.megatron.loss import gradient_average, group_of_one, loss_scale, one_rank, token_count
from megacp.hosts.megatron.model import whole_batch
from megacp.hosts.session import Session
from megacp.mask import Mask

CP = 2
LOSSES = torch.tensor([1.0, 2.0, 3.0, 5.0])
MASK = torch.tensor([0.0, 1.0, 1.0, 1.0])  # a mean of 10 / 3 on one rank
MICRO_BATCHES = 4


class Group:
    def __init__(self, size: int) -> None:
        self.size = size


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """A parallel_state of two ranks, hooked, and the arguments of a run."""
    run = Session(Config(), lambda: "", lambda: None, alone=Group(1))
    state: Any = types.ModuleType("megatron.core.parallel_state")

    def get_context_parallel_world_size() -> int:
        return CP

    def get_context_parallel_rank() -> int:
        return 1

    def get_context_parallel_group() -> Group:
        return Group(CP)

    for function in (get_context_parallel_world_size, get_context_parallel_rank, get_context_parallel_group):
        setattr(state, function.__name__, group_of_one(function, lambda: run))
    names: Any = types.ModuleType("megatron.training.global_vars")
    names._GLOBAL_ARGS = types.SimpleNamespace(context_parallel_size=CP)
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", names)
    return types.SimpleNamespace(run=run, state=state, args=names._GLOBAL_ARGS)


def summed(x: torch.Tensor, group: Group) -> torch.Tensor:
    """All ranks hold the same, so a sum over the group is a multiple; its gradient is that of the summand."""
    return x + (group.size - 1) * x.detach()


# -- loss functions of scripts ------------------------------------------------------------------------------------------------


def sums_and_multiplies(host: Any, per_token: torch.Tensor) -> tuple[Any, ...]:
    """As in 0.7 to 0.11."""
    loss = torch.stack([(per_token * MASK).sum(), MASK.sum()])
    if host.args.context_parallel_size > 1:
        loss = summed(loss, host.state.get_context_parallel_group())
    return loss[0] * host.args.context_parallel_size, loss[1].detach().int(), {}


def sums(host: Any, per_token: torch.Tensor) -> tuple[Any, ...]:
    """As in 0.12, without asking for the size first."""
    loss = torch.stack([(per_token * MASK).sum(), MASK.sum()])
    loss = summed(loss, host.state.get_context_parallel_group())
    return loss[0].clone(), loss[1].detach().int(), {}


def local(host: Any, per_token: torch.Tensor) -> tuple[Any, ...]:
    """As in 0.13 and later."""
    return (per_token * MASK).sum(), MASK.sum().int(), {}


def two_values(host: Any, per_token: torch.Tensor) -> tuple[Any, ...]:
    return (per_token * MASK).sum() / MASK.sum(), {}


def two_values_summed(host: Any, per_token: torch.Tensor) -> tuple[Any, ...]:
    loss = torch.stack([(per_token * MASK).sum(), MASK.sum()])
    loss = summed(loss, host.state.get_context_parallel_group())
    return loss[0] / loss[1], {}


# -- schedules ----------------------------------------------------------------------------------------------------------------


def step(multiplied: Callable[[Any, int], int]) -> Callable[..., Any]:
    """Make a schedule's step that runs the model; ``multiplied`` gives its factor for so many values."""

    def make(host: Any) -> Any:
        def forward_step(
            forward_step_func: Any,
            model: Any,
            num_microbatches: int,
            forward_data_store: list[Any],
            config: Any,
        ) -> Any:
            output, loss_func = forward_step_func(None, model)
            outputs = loss_func(output)
            loss = outputs[0]
            if len(outputs) == 2 or not config.calculate_per_token_loss:
                if len(outputs) == 3:
                    loss = loss / outputs[1]
                loss = loss * multiplied(host, len(outputs)) / num_microbatches
            return [loss], torch.tensor(0)

        return loss_scale(forward_step, lambda: host.run)

    return make


def never(host: Any, values: int) -> int:
    return 1


def by_the_size(host: Any, values: int) -> int:
    return int(host.state.get_context_parallel_world_size())


def two_by_the_size(host: Any, values: int) -> int:
    return by_the_size(host, values) if values == 2 else 1


def loss_alone(host: Any) -> Any:
    """A schedule's function of the loss alone, as in 0.14 and later; two values are multiplied by the size it is handed."""

    def forward_step_calc_loss(
        model: Any,
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        collect_non_loss_data: bool,
        num_microbatches: int,
        forward_data_store: list[Any],
        cp_group_size: int,
    ) -> Any:
        outputs = loss_func(output_tensor)
        loss = outputs[0]
        if len(outputs) == 3:
            if not config.calculate_per_token_loss:
                loss = loss / outputs[1].clamp(min=1) / num_microbatches
        else:
            loss = loss * cp_group_size / num_microbatches
        return loss, torch.tensor(0)

    return loss_scale(forward_step_calc_loss, lambda: host.run)


def gradient(host: Any, hooked: Any, script: Any, per_token: bool) -> torch.Tensor:
    x = LOSSES.clone().requires_grad_()
    config = types.SimpleNamespace(calculate_per_token_loss=per_token, num_moe_experts=None)
    if hooked.__name__ == "forward_step":
        out = hooked(lambda *_: (x * 1, lambda y: script(host, y)), None, MICRO_BATCHES, [], config)
    else:
        out = hooked(None, x * 1, lambda y: script(host, y), config, False, MICRO_BATCHES, [], CP)
    loss = out[0][0] if isinstance(out[0], list) else out[0]
    loss.backward()
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize(
    ("script", "schedule"),
    [
        (sums_and_multiplies, step(never)),
        (sums, step(by_the_size)),
        (local, step(two_by_the_size)),
        (local, loss_alone),
        (two_values, step(two_by_the_size)),
        (two_values, loss_alone),
        (two_values_summed, step(by_the_size)),
        (two_values_summed, loss_alone),
    ],
    ids=["0.7", "0.12", "0.13", "0.14", "two, 0.13", "two, 0.14", "two summed, 0.12", "two summed, 0.14"],
)
def test_the_gradient_at_the_exit_is_that_of_one_rank(
    host: Any, script: Any, schedule: Any, per_token: bool
) -> None:
    whole = script in (two_values, two_values_summed) or not per_token
    expected = MASK / MASK.sum() / MICRO_BATCHES if whole else MASK
    found = gradient(host, schedule(host), script, per_token)
    assert torch.allclose(found, expected)
    assert host.args.context_parallel_size == CP and not host.run.is_one_rank


def test_a_schedule_that_multiplies_by_a_size_of_its_own_is_refused(host: Any) -> None:
    with pytest.raises(SeamError, match=r"1\.66667 of a loss that is 0\.833333 on one rank"):
        gradient(host, step(lambda *_: CP)(host), local, False)


def test_other_data_than_the_loss_is_left_alone(host: Any) -> None:
    def forward_step_calc_loss(loss_func: Any, output_tensor: Any, config: Any) -> Any:
        return loss_func(output_tensor, non_loss_data=True)

    hooked = loss_scale(forward_step_calc_loss, lambda: host.run)
    pair = (torch.tensor(3.0), {})
    assert hooked(lambda *_, **__: pair, LOSSES, None) is pair


def test_the_group_has_two_members_again_after_an_error(host: Any) -> None:
    with pytest.raises(ZeroDivisionError), one_rank(host.run):
        assert host.state.get_context_parallel_world_size() == 1
        assert host.state.get_context_parallel_rank() == 0
        assert host.state.get_context_parallel_group().size == 1
        raise ZeroDivisionError
    assert host.state.get_context_parallel_world_size() == CP == host.args.context_parallel_size
    assert host.state.get_context_parallel_rank() == 1


# -- averaging gradients ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dp", "factor", "settings", "is_averaged"),
    [
        (3, 1 / 6, {}, True),
        (3, 1 / 3, {}, False),
        (1, 1 / 2, {}, True),
        (1, 1.0, {}, False),
        (1, 1.0, {"calculate_per_token_loss": True}, True),
        (1, 1.0, {"average_in_collective": True}, True),
    ],
)
def test_gradients_that_the_host_sums_over_the_group_are_not_multiplied(
    host: Any, dp: int, factor: float, settings: dict[str, bool], is_averaged: bool
) -> None:
    class DistributedDataParallel:
        def __init__(self, config: Any, ddp_config: Any) -> None:
            self.buffers = [types.SimpleNamespace(gradient_scaling_factor=factor)]

    host.state.get_data_parallel_world_size = lambda with_context_parallel=False: dp * CP
    init = gradient_average(DistributedDataParallel.__init__, lambda: host.run)
    init(
        object.__new__(DistributedDataParallel),
        types.SimpleNamespace(**settings),
        types.SimpleNamespace(**settings),
    )
    assert host.run.is_averaged == is_averaged


# -- rotary positions of hosts that cannot be asked for the whole table -----------------------------------------------------------


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_a_host_without_packed_seq_gives_the_table_of_the_whole_sequence(host: Any, layout: str) -> None:
    class RotaryEmbedding:
        cp_group: Any = members.Group(None, 1, CP, (0, 1))

        def forward(self, max_seq_len: int, offset: int = 0) -> torch.Tensor:
            assert self.cp_group is None and host.state.get_context_parallel_world_size() == 1
            return torch.arange(max_seq_len)[:, None, None, None]

    host.run.configure({"layout": layout})
    module = RotaryEmbedding()
    table = rotary(RotaryEmbedding.forward, lambda: host.run)(module, 8)
    expected = {"zigzag": [2, 3, 4, 5], "contiguous": [4, 5, 6, 7]}
    assert table.flatten().tolist() == expected[layout]
    assert module.cp_group.size == CP


# -- counting tokens ----------------------------------------------------------------------------------------------------------


class Chunk:
    scale = 1.0

    def scale_gradients(self, factor: float) -> None:
        self.scale *= factor


@pytest.mark.parametrize(("size", "divided_by"), [(3, CP), (6, 1)], ids=["data parallel", "data x context"])
def test_tokens_are_counted_over_all_ranks(
    host: Any, monkeypatch: pytest.MonkeyPatch, size: int, divided_by: int
) -> None:
    finalize = counting(host, monkeypatch, size)
    chunk = Chunk()
    for _ in range(2):  # watched in the first step, remembered in the second
        chunk.scale = 1.0
        finalize([chunk], torch.tensor(10, dtype=torch.int))
        assert chunk.scale == 1 / (10 * size) / divided_by
    finalize([chunk])
    assert chunk.scale == 1 / (10 * size) / divided_by


def test_a_count_over_another_group_is_refused(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match=r"groups of \[5\] ranks.*data parallel \(3\).*\(6\)"):
        counting(host, monkeypatch, 5)([Chunk()], torch.tensor(10, dtype=torch.int))


def counting(host: Any, monkeypatch: pytest.MonkeyPatch, size: int) -> Any:
    """Make a host that sums its tokens over a group of ``size`` ranks; data parallel are 3, with context parallel 6."""

    def all_reduce(tensor: torch.Tensor, op: Any = None, group: Any = None) -> None:
        tensor *= group.size

    def finalize_model_grads(model: Any, num_tokens: Any = None) -> None:
        dist.all_reduce(torch.zeros(3), group=Group(7))  # type: ignore[arg-type]
        if num_tokens is not None:
            dist.all_reduce(num_tokens, group=Group(size))  # type: ignore[arg-type]
            for chunk in model:
                chunk.scale_gradients(1 / int(num_tokens))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "get_world_size", lambda group: group.size)
    host.state.get_data_parallel_world_size = lambda with_context_parallel=False: 6
    return token_count(finalize_model_grads, lambda: host.run)


# -- the last label of each document ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["the model's argument", "the batch that the script took", "nowhere"])
def test_the_last_label_of_each_document_is_masked_wherever_the_mask_is(host: Any, where: str) -> None:
    mask = Mask.documents([0, 3, 4, 8])
    seen = torch.ones(1, 8)
    batch: dict[str, Any] = {"labels": torch.zeros(1, 8, dtype=torch.long)}
    if where == "the model's argument":
        batch["loss_mask"] = seen
    elif where == "the batch that the script took":
        whole_batch(lambda batch: batch, lambda: host.run)({"loss_mask": seen})
    zeros = mask_last_labels(batch, mask, host.run)
    ends = [0, 0, 1, 1, 0, 0, 0, 1]
    if where == "nowhere":  # then the loss itself is made zero there
        assert zeros is not None and zeros.int().tolist() == [ends]
    else:
        assert zeros is None and (1 - seen).tolist() == [ends]
    assert host.run.loss_mask is None


# -- D45: a metric that shares memory with a loss which the schedule rescales in place (AMD-AGI/Primus#1079) -------------------


@pytest.mark.parametrize("micro_batches", [1, 4])
@pytest.mark.parametrize("runs_the_model", [True, False])
def test_d45_a_metric_that_is_a_view_of_the_loss_is_not_rescaled(
    host: Any, micro_batches: int, runs_the_model: bool
) -> None:
    """A sum of 12 over 4 tokens; the schedule multiplies the first value in place by cp and divides it by the micro-batches."""
    metrics: list[dict[str, Any]] = []

    def loss_func(output: torch.Tensor) -> tuple[Any, ...]:
        loss = output.sum()
        metrics.append({"lm loss": (loss.detach(), torch.tensor(4))})
        return loss, torch.tensor(4, dtype=torch.int), metrics[-1]

    def rescaled(outputs: Any, size: int, parts: int) -> torch.Tensor:
        loss: torch.Tensor = outputs[0]
        loss.div_(outputs[1]).mul_(size).div_(parts)
        return loss

    def forward_step(
        forward_step_func: Any, num_microbatches: int, forward_data_store: Any, config: Any
    ) -> Any:
        output, calc = forward_step_func()
        loss = rescaled(calc(output), host.state.get_context_parallel_world_size(), num_microbatches)
        return [loss], None

    def forward_step_calc_loss(
        output_tensor: Any,
        loss_func: Any,
        config: Any,
        num_microbatches: int,
        forward_data_store: Any,
        cp_group_size: int,
    ) -> Any:
        return rescaled(loss_func(output_tensor), cp_group_size, num_microbatches), None

    config = types.SimpleNamespace(calculate_per_token_loss=False)
    x = torch.tensor([5.0, 7.0], requires_grad=True)
    for _ in range(micro_batches):
        if runs_the_model:
            hooked = loss_scale(forward_step, lambda: host.run)
            loss = hooked(lambda: (x * 1, loss_func), micro_batches, [], config)[0][0]
        else:
            hooked = loss_scale(forward_step_calc_loss, lambda: host.run)
            loss = hooked(x * 1, loss_func, config, micro_batches, [], CP)[0]
        loss.backward()
    assert all(float(m["lm loss"][0] / m["lm loss"][1]) == 3.0 for m in metrics)
    assert x.grad is not None and torch.allclose(x.grad, torch.full((2,), 1 / 4))
