"""Checkpoints with megatron.core.dist_checkpointing: written whole or not at all, loaded at other parallel sizes."""

from __future__ import annotations

import argparse
import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing, parallel_state

from megacp.data import PackedRows

PACKED = "packed_documents.json"
TRACKER = "latest_checkpointed_iteration.txt"


def unwrap(chunk: Any) -> Any:
    """Take off the data-parallel and mixed-precision wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def _metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",  # so that dp, tp, pp and cp may change between runs
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def _state(model: list[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    state: dict[str, Any] = {}
    for i, chunk in enumerate(model):
        name = "model" if len(model) == 1 else f"model{i}"
        state[name] = unwrap(chunk).sharded_state_dict(metadata=_metadata())
    state["optimizer"] = optimizer.sharded_state_dict(state, is_loading=loading, metadata=_metadata())
    return state


def save(
    args: argparse.Namespace,
    iteration: int,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    packed: PackedRows | None = None,
) -> None:
    """Write a checkpoint under a temporary name, then rename it, then point the tracker at it."""
    folder = Path(args.save)
    final, temporary = folder / f"iter_{iteration:07d}", folder / f"iter_{iteration:07d}.tmp"
    rank = torch.distributed.get_rank()
    if rank == 0:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    torch.distributed.barrier()
    state = _state(model, optimizer, loading=False)
    state.update(iteration=iteration, scheduler=scheduler.state_dict())
    dist_checkpointing.save(state, str(temporary))
    if packed is not None and rank == 0:  # alike on every rank
        (temporary / PACKED).write_text(json.dumps(packed.state_dict(iteration)))
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        (folder / f"{TRACKER}.tmp").write_text(f"{iteration}\n")
        os.replace(folder / f"{TRACKER}.tmp", folder / TRACKER)
    torch.distributed.barrier()


def load(
    args: argparse.Namespace,
    model: list[Any],
    optimizer: Any,
    scheduler: Any,
    packed: PackedRows | None = None,
) -> int:
    """Restore the newest checkpoint and give its step; 0 where there is none yet.

    No random state is kept: with dropout (0 by default) a resumed run draws other masks.
    """
    tracker = Path(args.load) / TRACKER
    if not tracker.exists():
        if torch.distributed.get_rank() == 0:
            print(f"no checkpoint in {args.load}: starting from random weights", flush=True)
        return 0
    folder = Path(args.load) / f"iter_{int(tracker.read_text()):07d}"
    state = dist_checkpointing.load(_state(model, optimizer, loading=True), str(folder))
    for i, chunk in enumerate(model):
        unwrap(chunk).load_state_dict(state["model" if len(model) == 1 else f"model{i}"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    if packed is not None:
        if not (folder / PACKED).exists():
            raise SystemExit(
                f"{folder} was written without --pack-documents: there is no place to go on from."
            )
        packed.load_state_dict(json.loads((folder / PACKED).read_text()))
    return int(state["iteration"])


def dump_parameters(folder: str, model: list[Any]) -> None:
    """Write this shard's parameters as a plain dict of tensors, once per data- and context-parallel replica."""
    if parallel_state.get_data_parallel_rank(with_context_parallel=True) != 0:
        return
    tensors = {}
    for i, chunk in enumerate(model):
        prefix = "" if len(model) == 1 else f"chunk{i}."
        for name, parameter in unwrap(chunk).named_parameters():
            tensors[prefix + name] = parameter.detach().cpu().clone()
    tp = parallel_state.get_tensor_model_parallel_rank()
    pp = parallel_state.get_pipeline_model_parallel_rank()
    Path(folder).mkdir(parents=True, exist_ok=True)
    torch.save(tensors, Path(folder) / f"tp{tp}-pp{pp}.pt")
