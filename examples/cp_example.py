"""Attention over a sequence that is split over two ranks, with PyTorch's own scaled_dot_product_attention, made exact by one import.

    python examples/cp_example.py                                   # starts its two processes itself
    torchrun --standalone --nproc-per-node 2 examples/cp_example.py

Runs on GPUs where there are as many as ranks, else on the CPU with gloo. It is PyTorch's context-parallel tutorial with megacp's
context_parallel in place of torch.distributed.tensor.experimental's, and with gradients: every rank computes the loss of its own
tokens, and the gradients that come back belong to the loss of all of them. The result is held against attention over the whole
sequence on one rank, and the run fails if it is further away than rounding.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone need not be installed

from megacp.pytorch import context_parallel, context_parallel_unshard  # the one import changed

SHAPE = (1, 4, 4096, 64)  # batch, heads, tokens, head size
ALLOWED = 1e-6  # of the largest value, in float32


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """Give the largest difference, relative to the largest value."""
    return float((got - right).detach().abs().max() / right.detach().abs().max())


def main() -> int:
    """Attend both ways, print how far apart they are, and return the exit status."""
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("cp",))

    torch.manual_seed(0)  # every rank makes the same whole tensors
    q, k, v = (torch.randn(SHAPE).to(device).requires_grad_() for _ in range(3))
    target = torch.randn(SHAPE).to(device)

    full = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    full_loss = (full - target).square().mean()
    full_grads = torch.autograd.grad(full_loss, (q, k, v))
    elements = target.numel()  # of all ranks, so that the ranks' losses add up to the mean

    with context_parallel(mesh, buffers=[q, k, v, target], buffer_seq_dims=[2, 2, 2, 2]):
        # q, k, v and target hold this rank's tokens here
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        loss = (out - target).square().sum() / elements
        loss.backward()
        local = tuple(q.shape)
    # and the whole sequence again here, with the gradient of all of it
    (out,) = context_parallel_unshard(mesh, [out], [2])
    dist.all_reduce(loss := loss.detach())

    errors = {"output": relative_error(out, full), "loss": relative_error(loss, full_loss)}
    errors |= {
        f"gradient of {name}": relative_error(x.grad, g)
        for name, x, g in zip("qkv", (q, k, v), full_grads, strict=True)
    }
    if dist.get_rank() == 0:
        print(
            f"causal attention {SHAPE} over {dist.get_world_size()} ranks ({device.type}), {local} a rank, against one rank:"
        )
        for name, error in errors.items():
            print(f"  {name:13s}  relative error {error:.1e}")
    dist.destroy_process_group()
    worst = max(errors.values())
    if not worst <= ALLOWED:
        print(f"The error {worst:.1e} is larger than {ALLOWED:g}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    if "WORLD_SIZE" not in os.environ:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.execv(sys.executable, [*torchrun, __file__, *sys.argv[1:]])
    sys.exit(main())
