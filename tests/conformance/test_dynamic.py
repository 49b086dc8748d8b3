"""Megatron's GPTModel on rows that have ranks of their own: gradients in the host's buffers, against single documents unhooked."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

import torch

from megacp.testing import ranks
from tests.conformance import families
from tests.distributed.test_dynamic import example

LENGTHS = [37, 1, 18, 3, 7, 12, 2, 1, 9, 5, 23, 11]
CAPACITY = 12


def samples() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    out = []
    for length in LENGTHS:
        ids = torch.randint(8, 64, (length + 1,), generator=generator)
        weights = (torch.rand(length, generator=generator) < 0.6).double()
        out.append({"tokens": ids[:-1], "labels": ids[1:], "loss_mask": weights})
    return out


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.main_grad.clone() for name, p in model.module.named_parameters()}


def unhooked(model: Any, data: list[dict[str, torch.Tensor]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Take each document alone, on one rank, with nothing of megacp in the host."""
    total, count = 0.0, 0.0
    for sample in data:
        row = {name: x[None] for name, x in sample.items()}
        positions = torch.arange(len(sample["tokens"]))[None]
        loss = model(row["tokens"], positions, None, labels=row["labels"])
        summed = (loss * row["loss_mask"]).sum()
        summed.backward()
        total, count = total + float(summed.detach()), count + float(row["loss_mask"].sum())
    return total / count, {name: g / count for name, g in gradients(model).items()}


def dynamic_step(model: Any, data: list[dict[str, torch.Tensor]], sizes: Any) -> tuple[float, Any, set[int]]:
    from megacp import dynamic
    from megacp.data import Cost, spread
    from megacp.hosts import sharing

    waves = spread(LENGTHS, 4, CAPACITY, Cost(token=1.0, pair=0.05, key=1.0, row=0.5), sizes)
    step = dynamic.Step(waves, dynamic.Blocks())
    for share in step:
        batch = share.pack(data, whole=True)
        with sharing(share):
            loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        share.sum(loss, batch["loss_mask"], whole=True).backward()
    mean = step.finish(model.parameters())
    return float(mean), gradients(model), {share.group.size for share in step}


def built(step: families.Step, hooked: bool) -> Any:
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    megacp.uninstall()
    if hooked:
        megacp.install(Config(report="off"))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=step.settings.get("tensor_model_parallel_size", 1),
        context_parallel_size=step.cp,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    return families._model(step)[0]


def torn_down() -> None:
    from megatron.core import parallel_state

    import megacp

    parallel_state.destroy_model_parallel()
    megacp.uninstall()


def _take(steps: list[families.Step]) -> list[tuple[dict[str, float], set[int]]]:
    out = []
    for step in steps:
        data = samples()
        model = built(step, hooked=False)
        expected = unhooked(model, data)
        torn_down()
        for sizes in (None, (4,)) if step is steps[0] else (None,):
            loss, found, used = dynamic_step(built(step, hooked=True), data, sizes)
            torn_down()
            assert found.keys() == expected[1].keys()
            apart = {"loss": abs(loss - expected[0]) / expected[0]}
            for name, g in expected[1].items():
                apart[name] = float((found[name] - g).norm() / g.norm())
            out.append((apart, used))
    return out


ROPE = families.Step(dp=4)
RECOMPUTED = ROPE.on(
    position="learned_absolute",
    settings={
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "num_query_groups": 2,
    },
)


def test_a_gpt_model_on_blocks_of_its_data_parallel_ranks_has_the_gradients_of_single_documents() -> None:
    ranks.shutdown()
    results = ranks.run(_take, 4, [ROPE, RECOMPUTED], timeout=240)
    used = set()
    for rank in results:
        assert len(rank) == 3
        for apart, sizes in rank:
            assert len(apart) > 8 and max(apart.values()) <= 1e-9, apart
            used |= sizes
    assert used == {1, 2, 4}


def _refusals(changes: list[dict[str, Any]]) -> list[str]:
    model, found = built(ROPE, hooked=True), []
    for change in changes:
        before = {name: getattr(model.module.config, name) for name in change}
        for name, value in change.items():
            setattr(model.module.config, name, value)
        try:
            dynamic_step(model, samples(), None)
            found.append("")
        except ValueError as error:
            found.append(str(error))
        for name, value in before.items():
            setattr(model.module.config, name, value)
    found.append(_overlapping(model))
    torn_down()
    return found


def _overlapping(model: Any) -> str:
    """Wrap the model anew, in data parallelism that sums gradients during the backward pass."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    settings = DistributedDataParallelConfig(overlap_grad_reduce=True)
    try:
        dynamic_step(DistributedDataParallel(model.module.config, settings, model.module), samples(), None)
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_not_exact_with_a_size_per_document_is_refused_by_name() -> None:
    changes = [
        {"context_parallel_size": 2},
        {"num_moe_experts": 4},
        {"tensor_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2},
        {"expert_model_parallel_size": 2},
        {"mtp_num_layers": 1},
        {"multi_latent_attention": True},
        {"hidden_dropout": 0.1},
    ]
    results = ranks.run(_refusals, 4, changes, timeout=240)
    assert all(rank == results[0] for rank in results)
    changes.append({"overlap_grad_reduce": True})
    for change, text in zip(changes, results[0], strict=True):
        (name,) = change
        assert text.startswith(f"megacp: {name} is {change[name]!r}"), text


def _example() -> int:
    import megacp

    megacp.uninstall()
    try:
        return example("--megatron")
    finally:
        torn_down()


def test_the_example_trains_a_gpt_model_with_the_gradients_of_one_rank() -> None:
    assert ranks.run(_example, 4, timeout=200) == [0] * 4
    ranks.shutdown()  # these workers run under the CPU runtime; other tests start afresh


def test_a_share_without_hooks_is_refused() -> None:
    import megacp
    from megacp.hosts import sharing

    megacp.uninstall()
    with pytest.raises(megacp.ConfigError, match=r"megacp is not installed. Call megacp.install\(\) first"):
        sharing(None)  # type: ignore[arg-type]
