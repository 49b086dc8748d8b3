"""A row of text with two images in it, over two ranks: tokens of an image see each other in both directions, text is causal.

    python examples/multimodal_row.py                                   # starts its two processes itself
    torchrun --standalone --nproc-per-node 2 examples/multimodal_row.py

A second document follows, whose text must not see the first. Masks are slices, so a row of any length takes no more memory than its
tokens. Output and gradients are held against attention over the whole row on one rank, by the same mask spelled out.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone need not be installed

import megacp
from megacp import Layout, Mask

TOKENS, HEADS, KV_HEADS, SIZE = 1024, 8, 2, 64
DOCUMENTS = [0, 768, TOKENS]
IMAGES = [(100, 356), (500, 756)]  # 256 patches each, within the first document
ALLOWED = 1e-5  # of the largest value, in float32


def whole(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> torch.Tensor:
    """Attend on one rank, with PyTorch and the mask as a table of booleans."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.dense().to(q.device), enable_gqa=True)
    return out.transpose(1, 2)


def main() -> int:
    """Attend both ways, print how far apart they are, and return the exit status."""
    cuda = torch.cuda.device_count() >= int(os.environ["WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")

    mask = Mask.documents(DOCUMENTS).with_spans(IMAGES)
    layout = Layout.balanced(mask, dist.get_world_size())
    torch.manual_seed(0)  # every rank makes the same whole tensors
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    q, k, v, d_out = (torch.randn(1, TOKENS, n, SIZE).to(device) for n in heads)

    local = megacp.shard({"q": q, "k": k, "v": v}, layout, fields={"q": 1, "k": 1, "v": 1})
    leaves = [local[name].requires_grad_() for name in "qkv"]
    out = megacp.attention(*leaves, mask=mask, layout=layout, method="exchange")
    out.backward(layout.shard(d_out, dist.get_rank()))
    got = [out.detach(), *(x.grad for x in leaves)]

    inputs = [x.requires_grad_() for x in (q, k, v)]
    right = whole(*inputs, mask)
    right.backward(d_out)
    worst = 0.0
    for name, mine, other in zip(
        ("output", "dq", "dk", "dv"), got, [right, *(x.grad for x in inputs)], strict=True
    ):
        joined = megacp.gather(mine, layout)
        error = float((joined - other).detach().abs().max() / other.detach().abs().max())
        worst = max(worst, error)
        if dist.get_rank() == 0:
            print(f"  {name:6s}  relative error {error:.1e}")
    if dist.get_rank() == 0:
        plan = megacp.plan(layout, mask, method="exchange")
        work = [plan.pairs(rank) for rank in range(dist.get_world_size())]
        print(f"(query, key) pairs of each rank: {work}")
    dist.destroy_process_group()
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
