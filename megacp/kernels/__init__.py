"""One library's attention on some blocks: the contract, and the registry that chooses.

A kernel takes local queries, one step's keys and values, and the blocks between them. Forward it gives partial results
(out, lse) to be merged; backward it takes the *final* out and lse, so that each block's gradient is exact on its own.

Shapes: q [B, S, H, D], k [B, T, K, D], v [B, T, K, E], out [B, S, H, E], lse [B, H, S] natural log.
Accumulators are float32, or float64 for float64 inputs. A kernel is one file, and one line at the end of this one;
one from outside registers itself with :func:`register`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, dataclass, fields
from importlib import import_module
from typing import NamedTuple, Protocol

import torch

from megacp.errors import ConfigError, UnsupportedError
from megacp.merge import Partial
from megacp.plans import Block

__all__ = [
    "Gradients",
    "Kernel",
    "Options",
    "Request",
    "Sum",
    "choose",
    "names",
    "not_offered",
    "register",
    "rows_of",
    "unregister",
]


class Where(NamedTuple):
    """What the numbers of a kernel call mean in the whole, int64, on the device.

    Attributes:
        queries, keys: global positions of the query slots [S] and of the key slots [T]; -1 where there is no token.
        heads: the model's numbers of the query heads [H].
    """

    queries: torch.Tensor
    keys: torch.Tensor
    heads: torch.Tensor


@dataclass(frozen=True)
class Options:
    """What one attention call asks of a kernel, beside its blocks.

    Attributes:
        scale: factor on the logits. softcap: c in c·tanh(logit / c), or None.
        alibi_slopes: float [all query heads]; slope · |query position - key position| is taken off the logits. Or None.
        dropout_p, dropout_seed: which pairs are dropped follows from their positions, see :mod:`megacp.dropout`.
        max_logit: [all query heads], where the kernel keeps the largest logit that it has seen of each head. Or None.
        where: filled in by the method for each step, if something above needs it.
    """

    scale: float
    softcap: float | None = None
    alibi_slopes: torch.Tensor | None = None
    dropout_p: float = 0.0
    dropout_seed: int = 0
    max_logit: torch.Tensor | None = None
    where: Where | None = None

    @property
    def needs_positions(self) -> bool:
        """Say whether a kernel must know global positions and heads."""
        return self.alibi_slopes is not None or self.dropout_p > 0 or self.max_logit is not None


@dataclass(frozen=True)
class Request:
    """What a kernel must be able to do for a call, known alike on every rank."""

    device: str
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    options: Options


class Sum:
    """A gradient in the making, [B, S, H, D] in the accumulation dtype: a whole first part is taken over, all others are added.

    Args:
        like: a tensor of its shape and device. so_far: gives what others have summed, or None, when the first part is there.
    """

    def __init__(
        self,
        like: torch.Tensor,
        dtype: torch.dtype,
        so_far: Callable[[], torch.Tensor | None] = lambda: None,
    ) -> None:
        self.shape, self.dtype, self.device = like.shape, dtype, like.device
        self._so_far = so_far
        self._sum: torch.Tensor | None = None

    def add(self, part: torch.Tensor, rows: slice = slice(None), slots: slice = slice(None)) -> None:
        """Add a part [b, s, H, D] to some rows and slots; the caller no longer uses it."""
        if self._sum is None:
            self._sum = self._so_far()
        if self._sum is None and part.shape == self.shape:
            self._sum = part.to(self.dtype).contiguous()
        else:
            self.tensor[rows, slots] += part

    @property
    def tensor(self) -> torch.Tensor:
        """The sum so far, contiguous; kernels may add to it in place."""
        if self._sum is None:
            self._sum = self._so_far()
        if self._sum is None:
            self._sum = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return self._sum


class Gradients(NamedTuple):
    """Where a kernel adds its gradients: dq [B, S, H, D], dk [B, T, K, D], dv [B, T, K, E]."""

    dq: Sum
    dk: Sum
    dv: Sum


class Kernel(Protocol):
    """One library's attention. A module with these names is a kernel."""

    name: str

    def refuses(self, request: Request) -> str | None:
        """Say why the request cannot be carried out exactly, or None if it can."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, blocks: Sequence[Block], options: Options
    ) -> Iterator[Partial]:
        """Give the partial results of the blocks; a query that a partial holds but that has seen no key has out 0 and lse -inf."""

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        blocks: Sequence[Block],
        options: Options,
        into: Gradients,
    ) -> None:
        """Add the blocks' gradients, given the final out and lse over all keys."""


def rows_of(block: Block) -> slice:
    """Return the rows of the micro-batch that a block is for, as a slice of the batch dim."""
    return slice(None) if block.row < 0 else slice(block.row, block.row + 1)


def not_offered(options: Options, *known: str) -> str | None:
    """Name the options that are not at their default and that a kernel does not know; None if there are none.

    A kernel ends its ``refuses`` with this, so an option that is added to :class:`Options` is refused until the kernel learns it.
    """
    asked = []
    for option in fields(options):
        if option.name not in known and option.default is not MISSING:
            value = getattr(options, option.name)
            is_default = value is option.default or (
                isinstance(value, (bool, int, float, str)) and value == option.default
            )
            asked += [] if is_default else [option.name]
    return f"does not offer {', '.join(asked)}" if asked else None


_registry: dict[str, Kernel] = {}


def register(kernel: Kernel) -> None:
    """Make a kernel known by its name; ``auto`` tries kernels in the order in which they were registered.

    Raises: ConfigError if the name is taken by another kernel.
    """
    if _registry.get(kernel.name, kernel) is not kernel:
        raise ConfigError(
            f"megacp: a kernel named '{kernel.name}' is registered already. Choose another name."
        )
    _registry[kernel.name] = kernel


def unregister(name: str) -> None:
    """Forget a kernel that was registered from outside. Nothing happens if there is none of that name."""
    _registry.pop(name, None)


def names() -> list[str]:
    """List the known kernels, in the order in which ``auto`` tries them."""
    return list(_registry)


def choose(name: str, request: Request) -> Kernel:
    """Return the kernel of that name, or the first that can do the request for ``auto``.

    Raises: ConfigError for an unknown name; UnsupportedError with every kernel's reason if none can.
    """
    if name != "auto" and name not in _registry:
        raise ConfigError(f"megacp: kernel '{name}' is not known. Use one of: auto, {', '.join(_registry)}.")
    reasons = {}
    for candidate in _registry if name == "auto" else [name]:
        reason = _registry[candidate].refuses(request)
        if reason is None:
            return _registry[candidate]
        reasons[candidate] = reason
    width = max(map(len, reasons))
    table = "\n".join(f"  {kernel:{width}s}  {reason}" for kernel, reason in reasons.items())
    raise UnsupportedError(
        f"megacp: no kernel can do this attention exactly on {request.device} in {request.dtype} with {request.heads} query heads, "
        f"{request.kv_heads} key/value heads, head sizes {request.head_dim} and {request.value_dim}:\n{table}"
    )


for _name in ("sdpa", "flash_attn", "transformer_engine", "sdpa_cuda", "sdpa_cudnn", "flex", "reference"):
    register(import_module(f"megacp.kernels.{_name}"))
