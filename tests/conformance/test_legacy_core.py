"""megacp on megatron-core 0.2.0, which has no context parallelism: a GPT of its tensor-parallel layers, in a small loop.

The wheel has parallel_state, tensor_parallel and pipeline_parallel only, so model and loop are here, as somebody's fork would have
them. Loss and every gradient in float64, against one rank that was never hooked.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from megacp.testing import ranks
from tests.conformance.test_wheels import unpacked

VOCABULARY, WIDTH, HEADS, LENGTH, ROWS = 64, 16, 4, 32, 4
F64 = {"params_dtype": torch.float64, "use_cpu_initialization": True, "init_method": torch.nn.init.normal_}
MORE = {**F64, "gradient_accumulation_fusion": False, "async_tensor_model_parallel_allreduce": False}


def train(tp: int, cp: int, hooked: bool) -> dict[str, object]:
    """Take the gradient of one step over four rows, on the rank that runs this."""
    from megacp.testing import cpu

    cpu.install()
    import torch.distributed as dist

    import megacp

    if hooked:
        megacp.install()
    from megatron.core import parallel_state, tensor_parallel

    try:
        parallel_state.initialize_model_parallel(tp, 1, **({"context_parallel_size": cp} if hooked else {}))
        torch.manual_seed(1)
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        model = Model(tensor_parallel)
        batches = {"with_context_parallel": False} if hooked else {}
        replicas, samples = (
            parallel_state.get_data_parallel_world_size(),
            parallel_state.get_data_parallel_world_size(**batches),
        )
        mine = data().chunk(samples)[parallel_state.get_data_parallel_rank(**batches)]
        loss = model(mine, parallel_state.get_context_parallel_group() if hooked and cp > 1 else None)
        loss.backward()
        for parameter in model.parameters():  # as the host's data parallelism averages
            dist.all_reduce(parameter.grad, group=parallel_state.get_data_parallel_group())
            parameter.grad /= replicas
        total = loss.detach().clone()
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group())
        return {
            "loss": float(total / replicas),
            "groups": (replicas, samples),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "gradients": {name: p.grad for name, p in model.named_parameters()},
        }
    finally:
        parallel_state.destroy_model_parallel()
        megacp.uninstall()


def data() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(5))


class Model(torch.nn.Module):
    """Embedding, one layer of attention, and logits, all tensor-parallel."""

    def __init__(self, tensor_parallel) -> None:
        super().__init__()
        self.layers = tensor_parallel
        self.embedding = tensor_parallel.VocabParallelEmbedding(VOCABULARY, WIDTH, **F64)
        self.positions = torch.nn.Parameter(torch.randn(LENGTH, WIDTH, dtype=torch.float64))
        self.qkv = tensor_parallel.ColumnParallelLinear(WIDTH, 3 * WIDTH, gather_output=False, **MORE)
        self.dense = tensor_parallel.RowParallelLinear(
            WIDTH,
            WIDTH,
            input_is_parallel=True,
            **{k: v for k, v in MORE.items() if k != "async_tensor_model_parallel_allreduce"},
        )
        self.logits = tensor_parallel.ColumnParallelLinear(WIDTH, VOCABULARY, gather_output=False, **MORE)

    def forward(self, rows, group):
        import megacp

        batch = {"tokens": rows[:, :-1], "labels": rows[:, 1:]}
        batch["loss_mask"] = torch.zeros(batch["tokens"].shape, dtype=torch.float64)
        batch["loss_mask"][:, LENGTH - 9 :] = 1  # answers only: uneven over the ranks
        at = torch.arange(LENGTH).expand_as(batch["tokens"])
        size = 1 if group is None else group.size()
        layout = megacp.Layout.zigzag(LENGTH, size)
        if group is not None:
            batch = {
                name: layout.shard(value, torch.distributed.get_rank(group)) for name, value in batch.items()
            }
            at = layout.shard(at, torch.distributed.get_rank(group))
        x = self.embedding(batch["tokens"]) + self.positions[at]
        mixed, _ = self.qkv(x.transpose(0, 1).contiguous())  # [S, B, 3·H·D]
        q, k, v = mixed.view(*mixed.shape[:2], -1, 3 * (WIDTH // HEADS)).chunk(3, dim=-1)
        if group is None:
            out = torch.nn.functional.scaled_dot_product_attention(
                *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True
            ).permute(2, 0, 1, 3)
        else:
            out = megacp.attention(
                q, k, v, mask=megacp.Mask.causal(LENGTH), layout=layout, group=group, format="sbhd"
            )
        x = x + self.dense(out.flatten(2).contiguous())[0].transpose(0, 1)
        scores, _ = self.logits(x.contiguous())
        losses = self.layers.vocab_parallel_cross_entropy(scores, batch["labels"])
        if group is None:
            return (losses * batch["loss_mask"]).sum() / batch["loss_mask"].sum()
        return megacp.masked_mean(losses, batch["loss_mask"], group=group)


@pytest.fixture(scope="module")
def core(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    cache = getattr(request.config, "cache", None)
    folder = cache.mkdir("megatron-core") if cache is not None else tmp_path_factory.mktemp("megatron-core")
    place = unpacked("0.2.0", folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        ranks.shutdown()
        yield place
        ranks.shutdown()


@pytest.mark.parametrize(
    ("tp", "cp", "world"), [(1, 2, 2), (2, 2, 4), (1, 2, 4)], ids=["cp2", "tp2 cp2", "dp2 cp2"]
)
def test_gradients_on_a_core_without_context_parallelism_are_those_of_one_rank(
    core: Path, tp: int, cp: int, world: int
) -> None:
    alone = {found["tp"]: found for found in ranks.run(train, tp, tp, 1, hooked=False)}
    split = ranks.run(train, world, tp, cp, hooked=True)
    for found in split:
        one = alone[found["tp"]]
        assert found["groups"] == (world // tp, world // tp // cp)
        assert found["loss"] == pytest.approx(one["loss"], rel=1e-12)
        for name, gradient in one["gradients"].items():
            assert torch.allclose(gradient, found["gradients"][name], rtol=1e-10, atol=1e-13), name
