"""What the Megatron host is refused: one clear error on every rank, before anything is computed, and a quick end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.testing import ranks
from tests.conformance.loop import EXAMPLE

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

ROOT = Path(__file__).resolve().parents[2]


# -- from the command line ------------------------------------------------------------------------------------------------


def launched(world: int, *flags: str) -> subprocess.CompletedProcess[str]:
    """Start the example under torchrun with flags that are to be refused; the data need not exist."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    script = [
        "-m",
        "megacp",
        str(EXAMPLE / "pretrain.py"),
        "--data-path",
        "none",
        "--tokenizer-model",
        "none",
    ]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [*command, *script, *flags],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    ("world", "flags", "words"),
    [
        (2, ("--context-parallel-size", "0"), ("--context-parallel-size", "'0'", "1 or more")),
        (4, ("--context-parallel-size", "3"), ("--context-parallel-size", "3", "4 ranks", "1, 2, 4")),
        (
            2,
            ("--context-parallel-size", "2", "--megacp-layout", "zigzga"),
            ("--megacp-layout", "zigzag, contiguous"),
        ),
        (2, ("--context-parallel-size", "2", "--megacp-document", "eod"), ("--megacp-documents",)),
    ],
    ids=["size 0", "3 in a world of 4", "unknown layout", "unknown flag"],
)
def test_a_wrong_command_line_is_one_message_on_every_rank(
    world: int, flags: tuple[str, ...], words: tuple[str, ...]
) -> None:
    begin = time.monotonic()
    done = launched(world, *flags)
    assert done.returncode != 0 and time.monotonic() - begin < 60
    for rank in range(world):
        lines = [line for line in done.stderr.splitlines() if line.startswith(f"megacp [rank {rank}]: ")]
        assert len(lines) == 1, done.stderr[-3000:]
        assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr.partition("torch/distributed")[0]


# -- in a loop of one's own -----------------------------------------------------------------------------------------------


def refusal(what: str) -> tuple[str, str]:
    """Do one thing in this rank that is to be refused; give the error's type and text, and check nothing else happened."""
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    documents, eod = {
        "documents without tokenizer": ("eod", None),
        "documents as one sequence": ("eod", 7),
    }.get(what, ("off", None))
    megacp.install(Config(report="off", documents=documents, eod_token=eod))
    from megatron.core import parallel_state

    try:
        ACTIONS[what]()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        parallel_state.destroy_model_parallel()
        megacp.uninstall()
    return "nothing was refused", ""


def groups(size: int = 2, **more: Any) -> None:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=size, **more)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def config(**settings: Any) -> Any:
    from megatron.core.transformer import TransformerConfig

    plain = {
        "num_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return TransformerConfig(
        **{**plain, "context_parallel_size": 2, "use_cpu_initialization": True, **settings}
    )


def gpt(core_attention: Any = None, **settings: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    groups()
    spec = get_gpt_layer_local_spec()
    if core_attention is not None:
        spec.submodules.self_attention.submodules.core_attention = core_attention
    return GPTModel(
        config(**settings),
        spec,
        vocab_size=32,
        max_sequence_length=64,
        position_embedding_type="rope",
    )


def experts(**settings: Any) -> Any:
    return gpt(num_moe_experts=2, **settings)


def call(length: int = 16, different: bool = False, no_labels: bool = False, **more: Any) -> None:
    """Call a model with a batch of one row; ``different``: each rank has tokens of its own."""
    import torch.distributed as dist

    settings = {name: more.pop(name) for name in list(more) if name.startswith(("m", "num"))}
    model = gpt(**settings)
    tokens = torch.arange(length)[None] % 32 + (dist.get_rank() if different else 0)
    positions = torch.arange(length)[None]
    model(tokens, positions, more.pop("attention_mask", None), labels=None if no_labels else tokens, **more)


def uneven_padding() -> None:
    """Padding at the end of a row lies on one rank only; the router's z-loss is a mean over each rank's tokens."""
    padding = torch.arange(16)[None] >= 13
    call(num_moe_experts=2, moe_z_loss_coeff=0.1, padding_mask=padding)


def fused_positions() -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import MLATransformerConfig

    groups()
    latent = MLATransformerConfig(
        num_layers=1,
        hidden_size=16,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=2,
        multi_latent_attention=True,
        apply_rope_fusion=True,
    )
    GPTModel(latent, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=64)


def recurrent(module: str, name: str) -> None:
    """Make a layer that carries a state, as a model with such layers does (trial D27)."""
    import importlib

    layer = getattr(importlib.import_module(f"megatron.core.ssm.{module}"), name)
    groups()
    layer(config(), None)


def a_layer_of_its_own() -> None:
    """An attention layer in a model whose entry is not hooked."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    groups()
    attention = DotProductAttention(config(), 1, AttnMaskType.causal, "self")
    x = torch.zeros(8, 1, 2, 8)
    attention(x, x, x, None)


def hidden(length: int, *, future: bool) -> torch.Tensor:
    """A mask in Megatron's sense, True is hidden: plain causal, or one that also hides the first token from the last half."""
    mask = torch.ones(length, length, dtype=torch.bool).triu(1)
    if not future:
        mask[length // 2 :, 0] = True
    return mask[None, None]


def attention_of_its_own(inherits: bool) -> None:
    """A layer spec whose attention looks at no mask, so it would not notice that its tokens are a part only."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Alone(DotProductAttention if inherits else torch.nn.Module):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs) if inherits else super().__init__()

        def forward(self, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
            return value.flatten(2)

    gpt(Alone)


def mamba() -> None:
    from megatron.core.models.mamba.mamba_model import MambaModel

    groups()
    MambaModel(config(), None, vocab_size=32, max_sequence_length=64)


def inference() -> None:
    from megatron.core.inference.contexts import StaticInferenceContext

    call(inference_context=StaticInferenceContext(1, 16))


ACTIONS = {
    "size 0": lambda: groups(0),
    "size 3": lambda: groups(3),
    "unknown method": lambda: gpt(cp_comm_type="telepathy"),
    "levels that do not fit": lambda: gpt(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=[2, 2]),
    "attention dropout": lambda: gpt(attention_dropout=0.1),
    "hidden dropout": lambda: gpt(hidden_dropout=0.1),
    "tokens dropped": lambda: experts(
        moe_expert_capacity_factor=1.0, moe_router_load_balancing_type="aux_loss"
    ),
    "sinkhorn": lambda: experts(moe_router_load_balancing_type="sinkhorn"),
    "jitter": lambda: experts(moe_input_jitter_eps=0.1),
    "random routing": lambda: experts(moe_router_force_load_balancing=True),
    "documents as one sequence": lambda: experts(moe_router_load_balancing_type="seq_aux_loss"),
    "uneven padding": uneven_padding,
    "prediction without labels": lambda: call(no_labels=True, mtp_num_layers=1),
    "fused positions": fused_positions,
    "mamba": mamba,
    "attention of its own": lambda: attention_of_its_own(False),
    "attention derived from the host's": lambda: attention_of_its_own(True),
    "mamba layer": lambda: recurrent("mamba_mixer", "MambaMixer"),
    "gated delta net": lambda: recurrent("gated_delta_net", "GatedDeltaNet"),
    "inference": inference,
    "length": lambda: call(length=14),
    "dense mask": lambda: call(attention_mask=hidden(16, future=False)),
    "different batches": lambda: call(different=True),
    "a layer of its own": a_layer_of_its_own,
    "documents without tokenizer": call,
}

EXPECTED: dict[str, tuple[str, tuple[str, ...]]] = {
    "size 0": ("ConfigError", ("--context-parallel-size is 0", "at least 1")),
    "size 3": ("ConfigError", ("--context-parallel-size 3", "2 ranks", "divides 2")),
    "unknown method": ("ConfigError", ("'telepathy'", "all_gather", "ring", "p2p = ring")),
    "levels that do not fit": ("ConfigError", ("(2, 2)", "2")),
    "attention dropout": ("UnsupportedError", ("attention_dropout is 0.1", "--attention-dropout 0")),
    "hidden dropout": ("UnsupportedError", ("hidden_dropout is 0.1", "--hidden-dropout 0")),
    "tokens dropped": ("UnsupportedError", ("moe_expert_capacity_factor is 1.0", "drop")),
    "sinkhorn": ("UnsupportedError", ("moe_router_load_balancing_type is 'sinkhorn'",)),
    "jitter": ("UnsupportedError", ("moe_input_jitter_eps is 0.1",)),
    "random routing": ("UnsupportedError", ("moe_router_force_load_balancing is True",)),
    "documents as one sequence": ("UnsupportedError", ("seq_aux_loss", "--megacp-documents")),
    "uneven padding": ("UnsupportedError", ("padding_mask", "[5, 8]", "moe_z_loss_coeff")),
    "prediction without labels": ("UnsupportedError", ("multi-token prediction", "labels")),
    "fused positions": ("UnsupportedError", ("apply_rope_fusion", "multi_latent_attention")),
    "mamba": ("UnsupportedError", ("MambaModel", "GPTModel")),
    "attention of its own": ("UnsupportedError", ("decoder.layers.0.self_attention", "Alone", "own tokens")),
    "attention derived from the host's": (
        "UnsupportedError",
        ("Alone", "own tokens", "core attention setup"),
    ),
    "mamba layer": ("UnsupportedError", ("MambaMixer", "from one token to the next")),
    "gated delta net": ("UnsupportedError", ("GatedDeltaNet", "from one token to the next")),
    "inference": ("UnsupportedError", ("inference_context", "--context-parallel-size 1")),
    "length": ("ConfigError", ("sequence length 14", "2 * 2 = 4", "--seq-length 16")),
    "dense mask": ("UnsupportedError", ("attention_mask", "--megacp-documents")),
    "different batches": ("ShapeError", ("ranks [0, 1]", "same batch", "data-parallel")),
    "a layer of its own": ("UnsupportedError", ("GPTModel", "size 2")),
    "documents without tokenizer": ("ConfigError", ("--megacp-eod-token",)),
}


@pytest.fixture(scope="module", autouse=True)
def own_workers() -> Any:
    ranks.shutdown()
    yield
    ranks.shutdown()


@pytest.mark.parametrize("what", ACTIONS)
def test_what_cannot_be_exact_is_refused_alike_on_every_rank(what: str) -> None:
    kind, words = EXPECTED[what]
    found = ranks.run(refusal, 2, what, timeout=60)
    assert found[0] == found[1] and found[0][0] == kind, found
    assert all(word in found[0][1] for word in words), found[0][1]
    assert re.match("megacp: ", found[0][1])


def causal_mask_is_accepted() -> float:
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    megacp.install(Config(report="off"))
    torch.manual_seed(0)
    model = gpt()
    tokens = torch.arange(16)[None]
    with_mask = model(tokens, tokens, hidden(16, future=True), labels=tokens)
    without = model(tokens, tokens, None, labels=tokens)
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    megacp.uninstall()
    return float((with_mask - without).abs().max())


def test_a_plain_causal_mask_of_the_host_equals_none() -> None:
    assert ranks.run(causal_mask_is_accepted, 2) == [0.0, 0.0]
