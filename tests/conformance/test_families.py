"""Model families, each against the never-hooked model on one rank: loss, norm and every gradient in float64, in the host's own
schedule and data parallelism. Trials D15, D16, D17, D27, D39 and D55."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from megacp.testing import ranks
from tests.conformance.families import Found, Step, gap, take

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

ALONE = Step(hooked=False)
PER_TOKEN = {"calculate_per_token_loss": True}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.05,
    "moe_router_load_balancing_type": "aux_loss",
}
THREE_LOSSES = {
    **EXPERTS,
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.1, 0.2, 0.3],
}
BIASED = {**EXPERTS, "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
PADDED = {**EXPERTS, "moe_z_loss_coeff": None}
TWO_AHEAD = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.3}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 6,
    "rope_type": "rope",
    "apply_rope_fusion": False,
}
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 16,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": True,
}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def alone(*settings: dict[str, Any], **more: Any) -> Step:
    return ALONE.on(settings={name: value for part in settings for name, value in part.items()}, **more)


def split(one: Step, **more: Any) -> Step:
    return one.on(**{"hooked": True, "cp": 2, **more})


# name: (on one rank, split)
CASES: dict[str, tuple[Step, Step]] = {}


def case(name: str, one: Step, *two: dict[str, Any]) -> None:
    for number, more in enumerate(two or ({},)):
        CASES[name if len(two) < 2 else f"{name}, {number + 1}"] = one, split(one, **more)


case("D39: experts over 2 ranks", alone(EXPERTS), {"ep": 2})
case("D39: experts over 2 of 4 ranks", alone(EXPERTS), {"ep": 2, "dp": 2})
case("D39: experts on every rank", alone(EXPERTS))
case("D39: no context parallelism", alone(EXPERTS), {"hooked": False, "cp": 1, "ep": 2, "dp": 2})
case("D16: loss per token", alone(EXPERTS, PER_TOKEN, mask="end"), {"ep": 2})
case("D16: three losses, two rows", alone(THREE_LOSSES, rows=2, samples=4), {"layout": "contiguous"})
case("D16: three losses per token, recomputed", alone(THREE_LOSSES, PER_TOKEN, RECOMPUTED, rows=2, samples=4))
case("D17: padding is not counted", alone(PADDED, pads=5), {"ep": 2})
case("D55: ranks with only padding", alone(PADDED, pads=27, mask="all"), {"cp": 4})
case("D55: an expert without tokens", alone(BIASED, starved=True), {"ep": 2})
case(
    "shared experts in every second layer",
    alone(EXPERTS, {"moe_shared_expert_intermediate_size": 16, "moe_layer_freq": [0, 1]}),
)
case("D15: two tokens ahead", alone(TWO_AHEAD))
case(
    "D15: two tokens ahead, learned positions, 4 ranks",
    alone(TWO_AHEAD, position="learned_absolute"),
    {"cp": 4},
)
case(
    "D15: two tokens ahead, ranks without any",
    alone(TWO_AHEAD, rows=2, samples=4, mask="end"),
    {"layout": "contiguous"},
)
case("D15: two tokens ahead, loss per token, experts", alone(TWO_AHEAD, EXPERTS, PER_TOKEN, mask="end"))
case(
    "D15: two tokens ahead, documents",
    alone(TWO_AHEAD, PER_TOKEN, apart=True, position="learned_absolute"),
    {"documents": "eod", "apart": False},
)
case("latent attention", alone(LATENT))
case(
    "latent attention, YaRN, other methods",
    alone(LATENT, {"rope_type": "yarn", "original_max_position_embeddings": 16}),
    {"layout": "contiguous"},
)
case("latent attention, experts, a token ahead", alone(LATENT, EXPERTS, {"mtp_num_layers": 1}))
case("multimodal positions", alone({"mrope_section": [1, 1, 2]}, position="mrope", rows=2, samples=4))
case("YaRN", alone(YARN, position="yarn"))
case(
    "window in every second layer, sinks",
    alone({"window_size": (5, 0), "window_attn_skip_freq": 2, "softmax_type": "learnable"}),
)
if os.environ.get("MEGACP_TREES"):  # 8 ranks: too long for every run
    CASES["pp4, documents on middle stages, 8 ranks"] = (
        Step(documents="eod", layers=4, samples=4),
        Step(documents="eod", layers=4, samples=4, pp=4, cp=2),
    )
CASES["pp4, documents on middle stages"] = (
    alone(PER_TOKEN, layers=4, samples=4, apart=True, position="learned_absolute"),
    Step(documents="eod", layers=4, samples=4, pp=4, settings=PER_TOKEN, position="learned_absolute"),
)


@pytest.fixture(scope="module")
def found() -> Any:
    """Take all steps, those of as many ranks together in one run."""
    ranks.shutdown()
    steps: list[Step] = []
    for step in (step for pair in CASES.values() for step in pair):
        if step not in steps:
            steps.append(step)
    results: list[Found | str] = [""] * len(steps)
    for world in sorted(
        {step.world for step in steps}, reverse=True
    ):  # the pool then starts its workers once
        group = [number for number, step in enumerate(steps) if step.world == world]
        answers = ranks.run(take, world, [steps[number] for number in group], timeout=240)[0]
        for number, answer in zip(group, answers, strict=True):
            results[number] = answer
    yield {name: (results[steps.index(one)], results[steps.index(two)]) for name, (one, two) in CASES.items()}
    ranks.shutdown()


@pytest.mark.parametrize("name", CASES)
def test_loss_norm_and_every_gradient_are_those_of_one_rank(found: Any, name: str) -> None:
    one, two = found[name]
    assert not isinstance(one, str), one
    assert not isinstance(two, str), two
    apart = gap(one, two)
    assert max(apart.values()) <= 1e-9, {k: v for k, v in apart.items() if v > 1e-9}
    for key, values in one.logged.items():
        if not CASES[name][0].apart:
            torch.testing.assert_close(torch.tensor(two.logged[key]), torch.tensor(values), rtol=1e-6, atol=0)


def balance(pads: int) -> float:
    """Route 8 tokens, {0, 1, 6, 7} to expert 0 and {2, 3, 4, 5} to expert 1, and pads to expert 3; zigzag puts those on one rank each.

    Returns the balance loss over all ranks. Gradients are held by the models above.
    """
    import torch.distributed as dist

    import megacp
    from megacp import Layout
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    megacp.install(Config(report="off"))
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe.moe_utils import get_moe_layer_wise_logging_tracker
    from megatron.core.transformer.moe.router import TopKRouter

    cp, rank = dist.get_world_size(), dist.get_rank()
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    try:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=4,
            num_attention_heads=1,
            num_moe_experts=4,
            moe_router_topk=1,
            moe_router_pre_softmax=True,
            moe_aux_loss_coeff=1.0,
            moe_router_load_balancing_type="aux_loss",
            moe_router_dtype="fp64",
            context_parallel_size=cp,
            params_dtype=torch.float64,
            use_cpu_initialization=True,
            add_bias_linear=False,
        )
        router = TopKRouter(config, ProcessGroupCollection.use_mpu_process_groups())
        router.set_layer_number(1)
        experts = [0, 0, 1, 1, 1, 1, 0, 0]
        experts = [*experts[:4], *[3] * pads, *experts[4:]]
        tokens = torch.nn.functional.one_hot(torch.tensor(experts), 4).double()[:, None] * 100
        layout = Layout.zigzag(len(experts), cp)
        local = layout.shard(tokens, rank, dim=0)
        padding = layout.shard(torch.tensor(experts)[:, None] == 3, rank, dim=0) if pads else None
        with torch.no_grad():
            router.weight.copy_(torch.eye(4))
        get_moe_layer_wise_logging_tracker().clear()
        router(local, padding_mask=padding)
        value = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].double()
        dist.all_reduce(value)
        return float(value)
    finally:
        parallel_state.destroy_model_parallel()
        megacp.uninstall()


@pytest.mark.parametrize("pads", [0, 4])
def test_D16_D17_the_balance_loss_of_two_even_experts_is_2_whoever_holds_their_tokens_and_without_padding(
    pads: int,
) -> None:
    for world in (1, 2):
        assert ranks.run(balance, world, pads) == pytest.approx([2.0] * world, rel=1e-6)
