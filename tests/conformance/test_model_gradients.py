"""A whole GPT's gradients, each parameter by name, against the never-hooked model on one rank (trial D23), and the batch that
a loop does not split (D21)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacp.testing import ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

SEQ = 32


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Any:
    ranks.shutdown()
    yield
    ranks.shutdown()


def gradients(
    position: str,
    cp: int,
    hooked: bool,
    documents: str = "off",
    window: int | None = None,
    softmax: str = "vanilla",
) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Build a seeded GPT in float64, take one step; give the loss, the local length and the gradients summed over the group."""
    import torch.distributed as dist

    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    if hooked:
        megacp.install(Config(report="off", documents=documents, eod_token=7))
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    seen: list[int] = []
    try:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            context_parallel_size=cp,
            use_cpu_initialization=True,
            params_dtype=torch.float64,
            window_size=(window, 0) if window else None,
            softmax_type=softmax,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
        )
        spec = get_gpt_layer_local_spec()
        model = GPTModel(
            config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type=position
        ).double()
        with torch.no_grad():  # sinks start at what memory held
            for name, parameter in model.named_parameters():
                if "softmax_offset" in name:
                    parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
        model.decoder.register_forward_pre_hook(
            lambda _, args, kw: seen.append(kw["hidden_states"].shape[0]), with_kwargs=True
        )
        generator = torch.Generator().manual_seed(2)
        tokens = torch.randint(0, 64, (2, SEQ), generator=generator)
        tokens[0, 11] = tokens[1, 4] = tokens[1, 20] = 7
        labels = torch.randint(0, 64, (2, SEQ), generator=generator)
        positions = torch.arange(SEQ).expand(2, SEQ)
        hidden = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)[None, None]
        loss = model(tokens, positions, None if hooked else hidden, labels=labels).mean()
        loss.backward()
        found = {}
        for name, parameter in model.named_parameters():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            dist.all_reduce(gradient)
            found[name] = gradient / cp  # as the host's data parallelism averages
        return float(loss), seen[0], found
    finally:
        parallel_state.destroy_model_parallel()
        megacp.uninstall()


def assert_same_gradients(
    cp: int, position: str, alone_hooked: bool = False, **more: Any
) -> dict[str, torch.Tensor]:
    loss, _, alone = ranks.run(gradients, 1, position, 1, alone_hooked, **more)[0]
    for split_loss, local, split in ranks.run(gradients, cp, position, cp, True, **more):
        assert local == SEQ // cp
        assert abs(split_loss - loss) <= 1e-12 * abs(loss)
        assert split.keys() == alone.keys()
        for name, gradient in alone.items():
            gap = (split[name] - gradient).norm()
            assert gap <= 1e-9 * gradient.norm() + 1e-14, (name, float(gap), float(gradient.norm()))
    return split


@pytest.mark.parametrize("cp", [2, 4])
def test_D23_every_gradient_with_learned_positions_is_that_of_one_rank(cp: int) -> None:
    split = assert_same_gradients(cp, "learned_absolute")
    touched = split["embedding.position_embeddings.weight"].abs().sum(-1).nonzero().flatten().tolist()
    assert touched == list(range(SEQ))


@pytest.mark.parametrize("cp", [2, 4])
def test_D23_every_gradient_with_rotary_positions_is_that_of_one_rank(cp: int) -> None:
    assert_same_gradients(cp, "rope")


def test_D21_a_loop_that_splits_nothing_gets_local_sequences_of_one_nth() -> None:
    assert [local for _, local, _ in ranks.run(gradients, 4, "rope", 4, True)] == [SEQ // 4] * 4


def test_every_gradient_with_documents_that_differ_by_row_is_that_of_one_rank() -> None:
    assert_same_gradients(2, "rope", alone_hooked=True, documents="eod")


def test_the_hosts_sliding_window_holds_over_ranks() -> None:
    assert_same_gradients(2, "rope", window=5)


@pytest.mark.parametrize("softmax", ["learnable", "off-by-one"])
def test_the_hosts_attention_sinks_hold_over_ranks(softmax: str) -> None:
    assert_same_gradients(2, "rope", softmax=softmax)
