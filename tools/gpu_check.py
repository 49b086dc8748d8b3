"""Check every kernel with every method on this machine, and time the kernels. One command, one process, one GPU is enough.

    python tools/gpu_check.py                      # on a machine with CUDA: everything, and a report in gpu_check.json
    python tools/gpu_check.py --kernel flash_attn  # one kernel only
    python tools/gpu_check.py --device cpu         # the same check of the kernels for the CPU: proves this tool

Several ranks run as threads of this process, each the method's own forward and backward loop; messages between them are copies in
memory (:class:`Exchange` takes the place of ``megacp.comm``). NCCL refuses two ranks on one GPU, and autograd would run the backward
passes of all ranks on one thread a device, where they would wait for each other for ever: so the loops are called directly, and
``megacp.attention`` with autograd is checked on one rank.

Outputs and all gradients are held against plain attention in float64, written here a second time. The exit status is 0 if everything
that was not refused is exact, 1 if something is not, 2 if there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import megacp
from megacp import Layout, Mask, comm, kernels, methods
from megacp.groups import Group
from megacp.kernels import Options, Request
from megacp.methods import Call

NAMES = ("out", "lse", "dq", "dk", "dv")
ALLOWED = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}
"""Largest relative error, by dtype: that of 16-bit results which are rounded once for each step."""

MASKS = ("causal", "full", "window", "documents", "documents+window", "prefix")
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Sizes:
    """One shape: batch, tokens, query heads, key/value heads, head size of q and k, head size of v."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int


@dataclass
class Row:
    """One line of the table."""

    kernel: str
    method: str
    layout: str
    ranks: int
    mask: str
    dtype: str
    sizes: str
    result: str = ""  # "exact", "WRONG", "FAILED" or "refused"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)


# -- ranks in one process ----------------------------------------------------------------------------------------------


class Exchange:
    """What ``megacp.comm`` offers, between threads of this process. Every message is a copy, made when it is posted."""

    def __init__(self) -> None:
        self._arrived = threading.Condition()
        self._messages: dict[Any, torch.Tensor] = {}
        self._numbers: dict[Any, int] = defaultdict(int)
        self._broken = False

    def stop(self) -> None:
        """End every wait: a rank has failed."""
        with self._arrived:
            self._broken = True
            self._arrived.notify_all()

    def post(
        self,
        group: Group,
        sends: Sequence[tuple[torch.Tensor, int]],
        receives: Sequence[tuple[torch.Tensor, int]],
        what: str,
    ) -> Any:
        """Send and receive as :func:`megacp.comm.post` does; what is received is there after ``wait``."""
        me, others = group.global_ranks[group.rank], group.global_ranks
        with self._arrived:
            for x, peer in sends:
                self._messages[self._next("send", me, others[peer])] = x.clone()
            self._arrived.notify_all()
            due = [(x, self._next("receive", others[peer], me)) for x, peer in receives]
        return _Waiting(self, due, what)

    def exchange(
        self, group: Group, send: torch.Tensor, sent: Sequence[int], received: Sequence[int], what: str
    ) -> tuple[torch.Tensor, Any]:
        """Trade parts as :func:`megacp.comm.exchange` does."""
        out = send.new_empty(sum(received))
        sends = [(part, peer) for peer, part in enumerate(send.split(list(sent)))]
        receives = [(part, peer) for peer, part in enumerate(out.split(list(received)))]
        return out, self.post(group, sends, receives, what)

    def all_gather(self, group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
        """Bring every rank's tensor together, [size, *shape]."""
        out = x.new_empty(group.size, *x.shape)
        everyone = range(group.size)
        self.post(
            group, [(x, peer) for peer in everyone], [(out[peer], peer) for peer in everyone], what
        ).wait()
        return out

    def reduce_scatter(self, group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
        """Sum over ranks and keep this rank's part."""
        out = torch.empty_like(x)
        everyone = range(group.size)
        sends, receives = [(x[peer], peer) for peer in everyone], [(out[peer], peer) for peer in everyone]
        self.post(group, sends, receives, what).wait()
        return out.sum(0)

    def total(self, group: Group, x: torch.Tensor, what: str) -> torch.Tensor:
        """Sum a tensor over the group."""
        return self.all_gather(group, x.detach(), what).sum(0)

    def take(self, key: Any, what: str) -> torch.Tensor:
        """Wait for one message."""
        with self._arrived:
            here = self._arrived.wait_for(lambda: self._broken or key in self._messages, PATIENCE_S)
            if not here or self._broken:
                raise TimeoutError(f"no message in {what}, or another rank failed")
            return self._messages.pop(key)

    def _next(self, way: str, source: int, target: int) -> tuple[int, int, int]:
        """Give a message its number among those of the pair, in the order of posting on both sides."""
        self._numbers[way, source, target] += 1
        return source, target, self._numbers[way, source, target]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Take the place of ``megacp.comm``'s functions."""
        words = ("post", "exchange", "all_gather", "reduce_scatter", "total")
        before = {word: getattr(comm, word) for word in words}
        try:
            for word in words:
                setattr(comm, word, getattr(self, word))
            yield
        finally:
            for word, function in before.items():
                setattr(comm, word, function)


class _Waiting:
    def __init__(self, exchange: Exchange, due: list[tuple[torch.Tensor, Any]], what: str) -> None:
        self._exchange, self._due, self._what = exchange, due, what

    def wait(self) -> None:
        """Copy in what was sent."""
        for x, key in self._due:
            x.copy_(self._exchange.take(key, self._what))
        self._due = []


def on_ranks(size: int, work: Callable[[Group], Any]) -> list[Any]:
    """Run a function on several ranks at once, one thread each, and return the results in rank order."""
    exchange, results, errors = Exchange(), [None] * size, []

    def one(rank: int) -> None:
        try:
            results[rank] = work(Group(None, rank, size, tuple(range(size))))
        except BaseException as error:
            errors.append(error)
            exchange.stop()

    with exchange.in_place():
        threads = [threading.Thread(target=one, args=(rank,), daemon=True) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
    return results


# -- the truth ---------------------------------------------------------------------------------------------------------


def masks_of(tokens: int) -> dict[str, tuple[Mask, torch.Tensor]]:
    """Give each kind of mask twice: as megacp's, and spelt out by a formula of its own, bool [G, G]."""
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)[None, :]
    window, prefix = tokens // 5, tokens // 3
    cuts = sorted({0, 1, tokens // 7, tokens // 3 + 1, tokens // 2, tokens})
    document = torch.bucketize(torch.arange(tokens), torch.tensor(cuts[1:]), right=True)
    same, past = document[:, None] == document[None, :], j <= i
    return {
        "causal": (Mask.causal(tokens), past),
        "full": (Mask.full(tokens), torch.ones(tokens, tokens, dtype=torch.bool)),
        "window": (Mask.causal(tokens, window=window), past & (j > i - window)),
        "documents": (Mask.documents(cuts), same & past),
        "documents+window": (Mask.documents(cuts, window=window), same & past & (j > i - window)),
        "prefix": (Mask.prefix(tokens, prefix), past | ((i < prefix) & (j < prefix))),
    }


def truth(x: dict[str, torch.Tensor], seen: torch.Tensor, scale: float) -> dict[str, torch.Tensor]:
    """Compute plain attention and its gradients in float64."""
    q, k, v = (x[name].double().requires_grad_() for name in "qkv")
    times = q.shape[2] // k.shape[2]
    logits = torch.einsum("bihd,bjhd->bhij", q, k.repeat_interleave(times, 2)) * scale
    logits = logits.masked_fill(~seen.to(q.device), -torch.inf)
    out = torch.einsum("bhij,bjhe->bihe", logits.softmax(-1), v.repeat_interleave(times, 2))
    grads = torch.autograd.grad(out, (q, k, v), x["d_out"].double())
    values = (out.detach(), torch.logsumexp(logits, -1).detach(), *grads)
    return dict(zip(NAMES, values, strict=True))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return |a - b| / |b|, infinite where a is not finite."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / b.norm()) if bool(a.isfinite().all()) else float("inf")


# -- one check ---------------------------------------------------------------------------------------------------------


def inputs(sizes: Sizes, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Draw q, k, v and the gradient of the output, global."""
    make, s = torch.Generator().manual_seed(0), sizes
    shapes = {
        "q": (s.heads, s.head_dim),
        "k": (s.kv_heads, s.head_dim),
        "v": (s.kv_heads, s.value_dim),
        "d_out": (s.heads, s.value_dim),
    }
    return {
        name: torch.randn(s.batch, s.tokens, *shape, generator=make).to(device, dtype)
        for name, shape in shapes.items()
    }


def loops(
    x: dict[str, torch.Tensor], plan: Any, kernel: Any, options: Options, group: Group
) -> list[torch.Tensor]:
    """Run one rank's forward and backward loop, as ``megacp.attention`` does around autograd."""
    layout, rank = plan.layout, group.rank
    q, k, v, d_out = (layout.shard(x[name], rank) for name in ("q", "k", "v", "d_out"))
    call, method = Call(plan, group, kernel, options), methods.resolve(plan.method)
    with torch.no_grad():
        out, lse = method.forward(q, k, v, call, None)
        out = out.to(q.dtype)
        grads = method.backward(d_out, q, k, v, out, lse, call)
    return [out, lse, *(grad.to(q.dtype) for grad in grads)]


def check(row: Row, sizes: Sizes, dtype: torch.dtype, device: str, mask: Mask, seen: torch.Tensor) -> None:
    """Fill a row of the table in."""
    x, options = inputs(sizes, dtype, device), Options(sizes.head_dim**-0.5)
    right = truth(x, seen, options.scale)
    if row.method == "attention()":
        leaves = [x[name].requires_grad_() for name in "qkv"]
        out, lse = megacp.attention(*leaves, mask=mask, kernel=row.kernel, return_lse=True)  # type: ignore[misc]
        got = dict(zip(NAMES, (out, lse, *torch.autograd.grad(out, leaves, x["d_out"])), strict=True))
    else:
        layout = getattr(Layout, row.layout)(sizes.tokens, row.ranks)
        plan = megacp.plan(layout, mask, row.method)
        reason = methods.refusal(plan, sizes.heads, sizes.kv_heads)
        if reason is not None:
            row.result, row.reason = "refused", reason
            return
        kernel = kernels.choose(row.kernel, request_of(sizes, dtype, device))
        parts = on_ranks(row.ranks, lambda group: loops(x, plan, kernel, options, group))
        joined = (layout.unshard([p[i] for p in parts], dim=2 if i == 1 else 1) for i in range(len(NAMES)))
        got = dict(zip(NAMES, joined, strict=True))
    row.errors = {name: relative(got[name].detach(), right[name]) for name in NAMES}
    row.result = "exact" if max(row.errors.values()) <= ALLOWED[dtype] else "WRONG"


def request_of(sizes: Sizes, dtype: torch.dtype, device: str) -> Request:
    """Say what a kernel must be able to do for a shape."""
    s = sizes
    return Request(device, dtype, s.heads, s.kv_heads, s.head_dim, s.value_dim, Options(s.head_dim**-0.5))


def rows_to_check(wanted: argparse.Namespace) -> Iterator[tuple[Row, Sizes, torch.dtype]]:
    """List what is to be checked, one rank first."""
    tokens = wanted.tokens
    shapes = [Sizes(2, tokens, 8, 2, 64, 64), Sizes(1, tokens - 3, 4, 4, 96, 64)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
    ways = [("attention()", "contiguous", 1)]
    ways += [(m, layout, wanted.ranks) for m in methods.names() for layout in ("zigzag", "contiguous")]
    for kernel in wanted.kernel or kernels.names():
        for dtype in dtypes:
            for index, sizes in enumerate(shapes):
                reason = kernels._registry[kernel].refuses(request_of(sizes, dtype, wanted.device))
                words = str(dtype).removeprefix("torch.")
                shape = f"b{sizes.batch} s{sizes.tokens} h{sizes.heads}/{sizes.kv_heads} d{sizes.head_dim}/{sizes.value_dim}"
                if reason is not None:
                    yield Row(kernel, "", "", 0, "", words, shape, "refused", reason), sizes, dtype
                    continue
                for method, layout, ranks in ways:
                    if wanted.method and method not in wanted.method:
                        continue
                    if index == 1 and layout == "contiguous" and ranks > 1:
                        continue  # the odd shape once a method
                    for mask in wanted.mask or MASKS:
                        yield Row(kernel, method, layout, ranks, mask, words, shape), sizes, dtype


# -- time --------------------------------------------------------------------------------------------------------------


def seconds(work: Callable[[], Any], device: str, times: int) -> float:
    """Return the median time of a call."""
    found = []
    for _ in range(times + 2):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - start)
    return statistics.median(found[2:])


def timed(wanted: argparse.Namespace) -> list[dict[str, Any]]:
    """Time each kernel on one causal block beside a plain call of PyTorch's flash attention on the same tensors."""
    size = wanted.timed_tokens
    sizes = Sizes(1, size, 16, 4, 128, 128)
    dtype = torch.bfloat16 if wanted.device == "cuda" else torch.float32
    x = inputs(sizes, dtype, wanted.device)
    q, k, v = (x[name].transpose(1, 2).contiguous().requires_grad_() for name in "qkv")
    d_out, options = x["d_out"], Options(sizes.head_dim**-0.5)

    def plain() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with torch.no_grad():
        forward = seconds(plain, wanted.device, wanted.times)
    both = seconds(
        lambda: torch.autograd.grad(plain(), (q, k, v), d_out.transpose(1, 2)), wanted.device, wanted.times
    )
    shape = f"causal, b1 s{size} h16/4 d128 {str(dtype).removeprefix('torch.')}"
    out = [{"kernel": "plain call", "shape": shape, "forward_s": forward, "backward_s": both - forward}]
    for name in wanted.kernel or kernels.names():
        line = {"kernel": name, "shape": shape}
        reason = kernels._registry[name].refuses(request_of(sizes, dtype, wanted.device))
        if reason is None:
            try:
                found = times_of(name, x, options, wanted)
                line |= {"forward_s": found[0], "backward_s": found[1], "ratio": sum(found) / both}
            except Exception as error:
                line["failed"] = f"{type(error).__name__}: {error}"
        else:
            line["refused"] = reason
        out.append(line)
    return out


def times_of(
    name: str, x: dict[str, torch.Tensor], options: Options, wanted: argparse.Namespace
) -> tuple[float, float]:
    """Time one kernel's forward and backward pass on one rank."""
    q, k, v, d_out = (x[part].detach() for part in ("q", "k", "v", "d_out"))
    plan = megacp.plan(Layout.contiguous(q.shape[1], 1), Mask.causal(q.shape[1]), "ring")
    call = Call(plan, Group(None, 0, 1, (0,)), kernels._registry[name], options)
    ring = methods.resolve("ring")
    with torch.no_grad():
        out, lse = ring.forward(q, k, v, call, None)
        out = out.to(q.dtype)
        forward = seconds(lambda: ring.forward(q, k, v, call, None), wanted.device, wanted.times)
        backward = seconds(lambda: ring.backward(d_out, q, k, v, out, lse, call), wanted.device, wanted.times)
    return forward, backward


# -- the command -------------------------------------------------------------------------------------------------------


def machine(device: str) -> dict[str, str]:
    """Say what this was run on."""
    facts = {
        "device": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "megacp": megacp.__version__,
    }
    if device == "cuda":
        facts["device"] = torch.cuda.get_device_name()
        facts["cuda"] = str(torch.version.cuda)
        facts["cudnn"] = str(torch.backends.cudnn.version())
    return facts


def words() -> argparse.ArgumentParser:
    """Describe the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--kernel", action="append", help="only this kernel; may be given again")
    parser.add_argument(
        "--method", action="append", help="only this method, or 'attention()'; may be given again"
    )
    parser.add_argument("--mask", action="append", help="only this kind of mask; may be given again")
    parser.add_argument("--ranks", type=int, default=4, help="ranks, as threads of this process")
    parser.add_argument("--tokens", type=int, help="sequence length of the checks (default: 1024; cpu: 96)")
    parser.add_argument(
        "--timed-tokens", type=int, help="that of the timing (default: 16384; cpu: 512); 0 for none"
    )
    parser.add_argument("--times", type=int, default=10, help="calls of which the median counts")
    parser.add_argument(
        "--json", default=None, help="where the report goes (default: gpu_check.json; cpu: none)"
    )
    return parser


def main() -> int:
    """Run the checks, print the table, write the report."""
    parser = words()
    wanted = parser.parse_args()
    if wanted.device == "cuda" and not torch.cuda.is_available():
        print(
            "gpu_check: there is no CUDA device here; run it where there is one, or pass --device cpu to check the CPU kernels."
        )
        return 2
    for given, known in (
        (wanted.kernel, kernels.names()),
        (wanted.method, ["attention()", *methods.names()]),
        (wanted.mask, MASKS),
    ):
        for name in given or ():
            if name not in known:
                parser.error(f"'{name}' is not known; use one of: {', '.join(known)}")
    on_gpu = wanted.device == "cuda"
    wanted.tokens = wanted.tokens or (1024 if on_gpu else 96)
    wanted.timed_tokens = (16384 if on_gpu else 512) if wanted.timed_tokens is None else wanted.timed_tokens
    report = wanted.json or ("gpu_check.json" if on_gpu else None)
    facts, table = machine(wanted.device), []
    print("gpu_check:", ", ".join(f"{name} {value}" for name, value in facts.items()))
    for row, sizes, dtype in rows_to_check(wanted):
        if not row.result:
            try:
                mask, seen = masks_of(sizes.tokens)[row.mask]
                check(row, sizes, dtype, wanted.device, mask, seen)
            except Exception as error:
                row.result, row.reason = "FAILED", f"{type(error).__name__}: {error}"
                traceback.print_exc()
        table.append(row)
        print_row(row)
    times = timed(wanted) if wanted.timed_tokens else []
    for line in times:
        print_time(line)
    counts = {
        result: sum(row.result == result for row in table)
        for result in ("exact", "refused", "WRONG", "FAILED")
    }
    failed = counts["WRONG"] + counts["FAILED"] + sum("failed" in line for line in times)
    print("gpu_check:", ", ".join(f"{count} {result}" for result, count in counts.items()))
    if report:
        content = {"machine": facts, "counts": counts, "rows": [asdict(row) for row in table], "times": times}
        Path(report).write_text(json.dumps(content, indent=1) + "\n")
        print(f"gpu_check: the report is in {report}")
    if not counts["exact"]:
        print("gpu_check: nothing was checked: no kernel takes any of this.")
    return 1 if failed or not counts["exact"] else 0


def print_row(row: Row) -> None:
    """Print one line of the table."""
    where = f"{row.method} {row.layout} x{row.ranks}" if row.ranks else "-"
    worst = max(row.errors.items(), key=lambda item: item[1]) if row.errors else None
    detail = row.reason or (f"worst {worst[0]} {worst[1]:.1e}" if worst else "")
    print(
        f"{row.kernel:19s} {where:27s} {row.mask:17s} {row.dtype:9s} {row.sizes:24s} {row.result:8s} {detail}",
        flush=True,
    )


def print_time(line: dict[str, Any]) -> None:
    """Print one line of the times."""
    if "forward_s" not in line:
        print(f"{line['kernel']:19s} {line['shape']}: {line.get('refused') or line['failed']}")
        return
    ratio = f", {line['ratio']:.2f} times the plain call" if "ratio" in line else ""
    print(
        f"{line['kernel']:19s} {line['shape']}: forward {line['forward_s'] * 1e3:.2f} ms, "
        f"backward {line['backward_s'] * 1e3:.2f} ms{ratio}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
