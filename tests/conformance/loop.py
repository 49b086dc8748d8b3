"""Run the example's training loop inside a pool of ranks, hooked or never hooked, and hold two runs against each other."""

from __future__ import annotations

import multiprocessing
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "pretrain_documents"


@dataclass(frozen=True)
class Run:
    """What one training left behind: a record a step, and its parameters by shard and name."""

    records: list[dict[str, Any]]
    parameters: dict[str, dict[str, torch.Tensor]]


def train_here(argv: list[str], settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Train in this rank. settings: of megacp.Config, or None to run without megacp."""
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    # Megatron writes checkpoints with processes of its own, which python denies to the daemons that a pool's workers are.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    megacp.uninstall()
    if settings is not None:
        megacp.install(Config(report="off", **settings))
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    import pretrain
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    shapes: set[tuple[int, ...]] = set()
    hand_over = GPTModel.set_input_tensor

    def noting(self: Any, arriving: Any) -> None:
        for x in arriving if isinstance(arriving, list) else [arriving]:
            shapes.update([tuple(x.shape)] if x is not None else [])
        hand_over(self, arriving)

    GPTModel.set_input_tensor = noting
    try:
        records = pretrain.main(argv)
    finally:
        GPTModel.set_input_tensor = hand_over
        parallel_state.destroy_model_parallel()
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, sorted(shapes))
    return [{**record, "stage_inputs": sorted({s for part in gathered for s in part})} for record in records]


def read_run(records: list[dict[str, Any]], folder: Path) -> Run:
    files = sorted(folder.glob("*.pt"))
    return Run(records, {f.name: torch.load(f, weights_only=True) for f in files})


def differences(a: Run, b: Run) -> dict[str, float]:
    """Largest relative differences of losses, gradient norms and parameters."""
    assert len(a.records) == len(b.records) > 0
    assert a.parameters.keys() == b.parameters.keys() and a.parameters

    def apart(x: float, y: float) -> float:
        return abs(x - y) / max(abs(x), abs(y))

    out = {
        "loss": max(apart(x["loss"], y["loss"]) for x, y in zip(a.records, b.records, strict=True)),
        "grad_norm": max(
            apart(x["grad_norm"], y["grad_norm"]) for x, y in zip(a.records, b.records, strict=True)
        ),
        "parameter": 0.0,
    }
    for shard, tensors in a.parameters.items():
        assert tensors.keys() == b.parameters[shard].keys()
        for name, value in tensors.items():
            other = b.parameters[shard][name]
            gap = float((value.double() - other.double()).norm() / value.double().norm().clamp(min=1e-30))
            out["parameter"] = max(out["parameter"], gap)
    return out


def train_on_a_copied_config(argv: list[str], settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Train in this rank with a model whose config is a deep copy of the one that the loop goes on with."""
    import copy

    from megacp.testing import cpu

    cpu.install()
    sys.path.insert(0, str(EXAMPLE))
    import pretrain
    from megatron.core.distributed import finalize_model_grads

    build = pretrain.build_model

    def build_on_a_copy(args: Any, config: Any, vocab_size: int) -> list[Any]:
        live = copy.deepcopy(config)
        live.finalize_model_grads_func = finalize_model_grads
        return build(args, live, vocab_size)  # type: ignore[no-any-return]

    pretrain.build_model = build_on_a_copy
    try:
        return train_here(argv, settings)
    finally:
        pretrain.build_model = build


def train_by_offsets(argv: list[str], settings: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Train in this rank with a script that finds documents itself and passes their offsets to the model."""
    from megacp.testing import cpu

    cpu.install()
    sys.path.insert(0, str(EXAMPLE))
    from functools import partial

    import pretrain
    from megatron.core.packed_seq_params import PackedSeqParams

    plain = pretrain.forward_step
    eod = pretrain.Tokenizer(argv[argv.index("--tokenizer-model") + 1]).eod

    def forward_step(args: Any, iterator: Any, chunk: Any) -> tuple[torch.Tensor, Any]:
        whole = next(iterator)
        (ends,) = torch.nonzero(whole["tokens"][0, :-1] == eod, as_tuple=True)
        row = torch.tensor([0, *(ends + 1).tolist(), args.seq_length], dtype=torch.int32)
        params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=row, cu_seqlens_kv=row)
        return plain(args, iter([whole]), partial_with_module(chunk, packed_seq_params=params))

    def partial_with_module(chunk: Any, **more: Any) -> Any:
        call = partial(chunk, **more)
        call.module = chunk  # type: ignore[attr-defined]
        return call

    pretrain.forward_step = forward_step
    try:
        return train_here(argv, settings)
    finally:
        pretrain.forward_step = plain
