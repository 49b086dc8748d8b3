"""What the CPU runtime bridges in hosts of other ages, on stand-ins for their modules, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

MODULES = {
    "megatron.core.fp8_utils": """
        def _quantize_param_shard_impl(*args, **kwargs):
            raise RuntimeError("no Transformer Engine")

        def quantize_param_shard(model_params):
            _quantize_param_shard_impl(model_params)
    """,
    "megatron.core.transformer.torch_layer_norm": """
        import torch

        class WrappedTorchLayerNorm(torch.nn.LayerNorm):
            def __init__(self, config, hidden_size):
                assert not config.sequence_parallel
                super().__init__(hidden_size)
    """,
    "megatron.core.transformer.moe.paged_stash": """
        import triton
        import triton.language as tl
        from packaging import version
        from megatron.core.ssm.ops.common import causal_conv1d_varlen  # one that needs triton imports another

        OLD = version.parse(triton.__version__) < version.parse("2.0.0")
        HAVE = bool(tl.constexpr(False))
    """,
    "megatron.core.ssm.ops.common.causal_conv1d_varlen": """
        import triton
        import triton.language as tl

        @triton.autotune(configs=[triton.Config({"BLOCK": 64}, num_warps=4)], key=["n"])
        @triton.jit
        def kernel(n: tl.constexpr):
            pass
    """,
}


def run(folder: Path, body: str) -> str:
    for name, text in MODULES.items():
        file = folder.joinpath(*name.split(".")).with_suffix(".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in file.relative_to(folder).parents:
            (folder / package / "__init__.py").touch()
        file.write_text(textwrap.dedent(text))
    start = "from megacp.testing import cpu\ncpu.install()\nimport types\n"
    done = subprocess.run(
        [sys.executable, "-c", start + textwrap.dedent(body)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(REPOSITORY)])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def test_the_distributed_optimizer_quantizes_nothing_without_transformer_engine(tmp_path: Path) -> None:
    body = """
        from megatron.core.fp8_utils import quantize_param_shard
        quantize_param_shard([])
        try:
            quantize_param_shard([1])
        except RuntimeError as error:
            print(error)
    """
    assert run(tmp_path, body) == "no Transformer Engine"


@pytest.mark.parametrize("is_parallel", [True, False])
def test_the_layer_norm_of_old_hosts_works_with_sequence_parallelism(
    tmp_path: Path, is_parallel: bool
) -> None:
    body = f"""
        from megatron.core.transformer.torch_layer_norm import WrappedTorchLayerNorm
        config = types.SimpleNamespace(sequence_parallel={is_parallel})
        norm = WrappedTorchLayerNorm(config, 8)
        print([p.sequence_parallel for p in norm.parameters()], config.sequence_parallel)
    """
    assert run(tmp_path, body) == f"[{is_parallel}, {is_parallel}] {is_parallel}"


def test_kernels_are_defined_without_triton_which_is_not_left_behind(tmp_path: Path) -> None:
    pytest.importorskip("packaging")
    body = """
        import sys
        from megatron.core.transformer.moe import paged_stash
        print(paged_stash.OLD, paged_stash.HAVE, "triton" in sys.modules)
    """
    try:
        import triton  # noqa: F401
    except ImportError:
        assert run(tmp_path, body) == "True False False"
    else:
        pytest.skip("triton is installed, and not stood in for")
