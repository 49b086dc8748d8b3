"""Train on documents of very different lengths: short ones on one rank, long ones on several, within one step.

    torchrun --nproc-per-node 4 examples/dynamic_cp.py              # a plain PyTorch model
    torchrun --nproc-per-node 4 examples/dynamic_cp.py --megatron   # megatron-core's GPTModel

The documents are sources of the Python standard library, a token for each eight bytes (the first of them). Every step's gradients are
compared with those of one rank that has all documents, in float64; the script ends with status 1 if a parameter's differ by more
than 1e-9 of their norm.
"""

from __future__ import annotations

import argparse
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone need not be installed

import megacp
from megacp.config import Config
from megacp.data import Cost, spread
from megacp.dynamic import Blocks, Share, Step
from megacp.groups import Group

CAPACITY = 1024  # tokens that a rank has memory for in one row
FOLDERS = ("asyncio", "email", "json", "urllib", "xml")
WIDTH, HEADS, LAYERS, VOCAB = 64, 4, 2, 256
COST = Cost.of(
    layers=LAYERS,
    hidden=WIDTH,
    ffn=4 * WIDTH,
    heads=HEADS,
    kv_heads=HEADS,
    head_dim=WIDTH // HEADS,
    vocab=VOCAB,
    matmul_rate=2e10,
    attention_rate=1e10,
    near_rate=1e9,
    far_rate=1e9,
    tile=16,
)

Sample = dict[str, torch.Tensor]
Run = Callable[[Share, list[Sample]], None]


class Decoder(torch.nn.Module):
    """A small decoder with learned positions, which restart in each document."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(VOCAB, WIDTH)
        self.positions = torch.nn.Embedding(16 * CAPACITY, WIDTH)
        self.into = torch.nn.ModuleList(torch.nn.Linear(WIDTH, 3 * WIDTH) for _ in range(LAYERS))
        self.back = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(WIDTH) for _ in range(LAYERS))
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, batch: Sample, share: Share) -> torch.Tensor:
        """Give the loss of each of this rank's tokens, [1, S]."""
        x = self.tokens(batch["tokens"]) + self.positions(batch["position_ids"])
        for into, back, norm in zip(self.into, self.back, self.norms, strict=True):
            q, k, v = into(norm(x)).unflatten(-1, (3, HEADS, -1)).unbind(2)
            x = x + back(megacp.attention(q, k, v, **share.attention).flatten(2))
        logits = self.head(x).transpose(1, 2)
        return torch.nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def plain() -> tuple[torch.nn.Module, Run]:
    """Make the plain model, and what a loop does with one share."""
    model = Decoder().double()

    def run(share: Share, samples: list[Sample]) -> None:
        batch = share.pack(samples)
        share.sum(model(batch, share), batch["loss_mask"]).backward()

    return model, run


def megatron() -> tuple[torch.nn.Module, Run]:
    """Make Megatron's model, at its own context-parallel size 1, and what a loop does with one share."""
    if not torch.cuda.is_available():
        from megacp.testing import cpu

        cpu.install()
    megacp.install(Config(report="off"))
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel, gpt_layer_specs
    from megatron.core.transformer import TransformerConfig

    from megacp.hosts import sharing

    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=torch.float64,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec()
    torch.manual_seed(1)
    model: Any = GPTModel(config, spec, VOCAB, 16 * CAPACITY, position_embedding_type="rope").double()

    def run(share: Share, samples: list[Sample]) -> None:
        batch = share.pack(samples, whole=True)
        with sharing(share):
            loss = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
        share.sum(loss, batch["loss_mask"], whole=True).backward()

    return model, run


def documents(ranks: int, count: int, step: int) -> list[Sample]:
    """Read some sources for a step; what all ranks do not hold is left out."""
    folder = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for name in FOLDERS for path in (folder / name).rglob("*.py"))
    chosen = [paths[(step * count + i) % len(paths)] for i in range(count)]
    texts = [torch.tensor(list(path.read_bytes()[::8][: ranks * CAPACITY])) for path in chosen]
    return [{"tokens": text} for text in texts if len(text)]


def taken(model: torch.nn.Module, run: Run, samples: list[Sample], blocks: Blocks) -> tuple[Step, float]:
    """Take one step over the given blocks; gradients stay on the parameters."""
    lengths = [len(sample["tokens"]) for sample in samples]
    ranks = blocks.whole.size
    step = Step(spread(lengths, ranks, CAPACITY if ranks > 1 else max(lengths), COST, blocks.sizes), blocks)
    model.zero_grad(set_to_none=True)
    for share in step:
        run(share, samples)
    return step, float(step.finish(model.parameters()))


def main(words: list[str] | None = None) -> int:
    """Train some steps, each held against one rank; give the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megatron", action="store_true", help="train megatron-core's GPTModel")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--documents", type=int, default=12, help="of a step")
    options = parser.parse_args(words)
    is_ours = not dist.is_initialized()
    if is_ours:
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model, run = megatron() if options.megatron else plain()
    blocks, alone = Blocks(), Blocks(Group(None, 0, 1, (rank,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    worst = 0.0
    for number in range(options.steps):
        samples = documents(ranks, options.documents, number)
        step, loss = taken(model, run, samples, blocks)
        found = [p.grad for p in model.parameters()]
        lengths = step.waves.lengths
        _, expected = taken(model, run, samples, alone)
        truth = [p.grad for p in model.parameters()]
        gaps = [float((a - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]
        worst = max(worst, *gaps)
        optimizer.step()
        if rank == 0:
            sizes = f"{min(lengths)} to {max(lengths)} tokens"
            rows = [f"{sum(row.size == s for row in step.waves)} of {s}" for s in step.waves.sizes]
            print(
                f"step {number}: {len(samples)} documents of {sizes} | rows over ranks: {', '.join(rows)} "
                f"| loss {loss:.6f}, on one rank {expected:.6f} | gradients differ by {max(gaps):.1e}",
                flush=True,
            )
    if is_ours:
        dist.destroy_process_group()
    return int(worst > 1e-9)


if __name__ == "__main__":
    sys.exit(main())
