"""From what a GPT's dropout is drawn: another seed in every place, the same on all ranks of a group, restored with the random state.

Trials D36 (ranks that share a mask, or a backward pass with another one) and D42 (another rank's stream after resuming).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacp.testing import ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Any:
    ranks.shutdown()
    yield
    ranks.shutdown()


def seeds(tp: int, cp: int) -> dict[str, Any]:
    """Run two micro-batches, one in evaluation, then both again after the random state was put back; note every seed."""
    import megacp
    from megacp.config import Config
    from megacp.hosts.megatron import dropout, layer
    from megacp.testing import cpu

    cpu.install()
    megacp.install(Config(report="off", dropout="positions"))
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    noted: list[int] = []
    drop, attention = dropout.drop, layer.attend.attention

    def noting_drop(x: torch.Tensor, p: float, seed: int, positions: torch.Tensor) -> torch.Tensor:
        noted.append(seed)
        return drop(x, p, seed, positions)

    def noting_attention(*args: Any, **kwargs: Any) -> Any:
        noted.extend([-kwargs["dropout_seed"]] if kwargs.get("dropout_p") else [])  # below 0: of attention
        return attention(*args, **kwargs)

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tp, context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    dropout.drop, layer.attend.attention = noting_drop, noting_attention
    try:
        config = TransformerConfig(
            num_layers=2,
            hidden_size=16,
            num_attention_heads=2,
            attention_dropout=0.1,
            hidden_dropout=0.1,
            tensor_model_parallel_size=tp,
            context_parallel_size=cp,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=16)
        tokens = torch.arange(16)[None]

        def step() -> tuple[list[int], list[int]]:
            noted.clear()
            loss = model(tokens, tokens, None, labels=tokens).mean()
            forward = list(noted)
            noted.clear()
            if loss.requires_grad:
                loss.backward()
            return forward, list(noted)

        tracker = tensor_parallel.get_cuda_rng_tracker()
        first = step()
        kept = {name: state.clone() for name, state in tracker.get_states().items()}
        second = step()
        model.eval()
        with torch.no_grad():
            evaluated = step()
        model.train()
        third = step()
        tracker.set_states(kept)
        again = [step(), step()]
        replica = parallel_state.get_data_parallel_rank()
        return {
            "steps": [first, second, third],
            "again": again,
            "evaluated": evaluated,
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "dp": replica,
        }
    finally:
        dropout.drop, layer.attend.attention = drop, attention
        parallel_state.destroy_model_parallel()
        megacp.uninstall()


@pytest.mark.parametrize(("tp", "cp"), [(1, 2), (2, 2), (1, 1)])
def test_d36_d42_every_place_has_a_seed_of_its_own_shared_by_the_ranks_of_a_sequence(
    tp: int, cp: int
) -> None:
    found = ranks.run(seeds, 4 if cp > 1 else 2, tp, cp, timeout=120)
    for rank in found:
        forward = [seed for step, _ in rank["steps"] for seed in step]
        assert (
            len(forward) == len(set(forward)) == 3 * (1 + 2 * 3)
        )  # embedding; attention and two sums of each layer
        for step, recomputed in rank["steps"]:
            assert sorted(recomputed) == sorted(step[1:])  # layers are recomputed, the embedding is not
        assert rank["evaluated"] == ([], [])
        assert rank["again"] == rank["steps"][1:]  # evaluation draws nothing
        for other in found:
            for (a, _), (b, _) in zip(rank["steps"], other["steps"], strict=True):
                hidden = [[seed for seed in step if seed > 0] for step in (a, b)]
                attention = [{seed for seed in step if seed < 0} for step in (a, b)]
                if rank["dp"] != other["dp"]:
                    assert not {*a} & {*b}
                    continue
                assert hidden[0] == hidden[1]
                assert (attention[0] == attention[1]) == (rank["tp"] == other["tp"])
                assert attention[0] == attention[1] or not attention[0] & attention[1]


def without(place: str) -> str:
    """Train a GPT with one of the places where dropout is hooked taken out; give what is said."""
    import importlib

    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    megacp.install(Config(report="off", dropout="positions"))
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    module, _, path = place.partition(":")
    owner: Any = importlib.import_module(module)
    for name in path.split("."):
        hooked = owner = getattr(owner, name)
    hooked.__megacp_hook__.on = False
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=16,
            num_attention_heads=2,
            attention_dropout=0.0,
            hidden_dropout=0.1,
            context_parallel_size=2,
            use_cpu_initialization=True,
            bias_dropout_fusion=False,
            masked_softmax_fusion=False,
        )
        model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=16)
        tokens = torch.arange(16)[None]
        model(tokens, tokens, None, labels=tokens).mean().backward()
    except megacp.UnsupportedError as error:
        return str(error)
    finally:
        hooked.__megacp_hook__.on = True
        parallel_state.destroy_model_parallel()
        megacp.uninstall()
    return "nothing was refused"


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("megatron.core.fusions.fused_bias_dropout:get_bias_dropout_add", "layer 1 has hidden dropout"),
        (
            "megatron.core.models.common.embeddings.language_model_embedding:LanguageModelEmbedding.forward",
            "the embedding has hidden dropout",
        ),
    ],
)
def test_dropout_that_megacp_does_not_see_is_refused(place: str, words: str) -> None:
    for said in ranks.run(without, 2, place, timeout=120):
        assert words in said and "--hidden-dropout 0" in said
