"""Context parallelism around plain ``F.scaled_dot_product_attention``, in the shape of PyTorch's own ``context_parallel``.

::

    from megacp.pytorch import context_parallel            # in place of torch.distributed.tensor.experimental

    with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)       # q, k and v are this rank's part here
        out.sum().backward()

Inside, the Python object of a buffer refers to another tensor, which holds this rank's part; afterwards it refers to the whole one
again. So only the part is copied, and whatever a graph, a view or another variable holds of either stays valid: the backward pass may
run inside or after the context. (To resize the buffer, as PyTorch does, is impossible for a tensor that needs a gradient, and
overwrites what a graph has saved of it.)

Attention is intercepted at PyTorch's dispatcher, as a kernel of the operator while a context is open, not by replacing the function
in its module. So every call is seen: through a name imported earlier, in ``nn.MultiheadAttention``, in TorchScript, and in any thread.
A reentrant checkpoint recomputes as its forward pass ran, wherever its backward pass runs; one that is not reentrant, and recomputes
after the context, is refused by PyTorch, which sees that other tensors are saved. A ``TorchFunctionMode`` sees what the operator
cannot: it keeps ``torch.compile`` and fused inference layers from computing attention some other way, and refuses
FlexAttention and attention weights, which would know of this rank's keys only.

Gradients: inside, ``buffer.grad`` is that of this rank's part. Afterwards it is, on every rank, the gradient of the whole buffer, of
the sum of all ranks' losses.

Shapes: ``B`` batch, ``H`` query heads, ``K`` key/value heads, ``S`` local sequence, ``D`` head size of q and k, ``E`` of v.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.weak import WeakTensorKeyDictionary

from megacp import methods
from megacp.attend import attention
from megacp.errors import ConfigError, ShapeError, UnsupportedError
from megacp.groups import Group, as_group
from megacp.layout import Layout
from megacp.mask import Mask
from megacp.sharding import gather

__all__ = ["context_parallel", "context_parallel_unshard"]

_LAYOUTS: dict[str, Callable[..., Layout]] = {"zigzag": Layout.zigzag, "contiguous": Layout.contiguous}

_in_use: list[torch.Tensor] = []  # buffers of all contexts that are open
_ended = WeakTensorKeyDictionary()  # buffers that are whole again, as keys


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: Iterable[torch.Tensor] | None = None,
    method: str = "ring",
    kernel: str = "auto",
    layout: str | Layout = "zigzag",
) -> Iterator[None]:
    """Shard the buffers, and make ``F.scaled_dot_product_attention`` attend over all ranks of ``mesh``, inside the context.

    When it ends, by an exception too, the buffers are what they were before. Attention takes query [B, H, S, D], key [B, K, S, D] and
    value [B, K, S, E], sharded like the buffers, causal or full, with scale and enable_gqa. ``kernel`` says what computes a block;
    ``sdpa_kernel`` does not. Contexts may be nested; the innermost attends.

    Args:
        mesh: one-dimensional DeviceMesh, process group, or None for the default group.
        buffers: plain tensors: no Parameters, and of those that need gradients only leaves.
        buffer_seq_dims: for each buffer the dim of its tokens.
        no_restore_buffers: buffers that stay this rank's part for good; the memory of the whole is freed.
        method, kernel: as for :func:`megacp.attention`. layout: 'zigzag' (which is PyTorch's too), 'contiguous', or a Layout.
    Raises: ConfigError for buffers that cannot be sharded, and lengths that do not divide; inside, UnsupportedError for attn_mask,
        dropout and FlexAttention. The same on every rank, before anything is sent.
    """
    members = as_group(mesh)
    if method != methods.AUTO:
        methods.resolve(method)
    _watch_checkpoints()
    found = _checked(buffers, buffer_seq_dims, no_restore_buffers, layout, members)
    entered: list[_Buffer] = []
    try:
        for buffer in found:
            buffer.enter()
            entered.append(buffer)
        door = _Door(members, [buffer.layout for buffer in found], layout, method, kernel)
        with _opened(door), _Watch():
            yield
    except BaseException:  # other ranks may be elsewhere: nothing may be exchanged
        for buffer in entered:
            buffer.leave()
        raise
    for buffer in entered:
        buffer.leave()
    for buffer in entered:
        buffer.take_back_gradient()


def context_parallel_unshard(
    mesh: Any,
    buffers: Sequence[torch.Tensor],
    seq_dims: Sequence[int],
    layout: str | Layout = "zigzag",
) -> list[torch.Tensor]:
    """Bring every rank's part of each tensor (an output, a gradient) together in global order, on every rank; not differentiable.

    The gradient of a buffer whose context has ended is whole already, and given back as it is.

    Args:
        mesh: as for :func:`context_parallel`. seq_dims: for each tensor the dim of its tokens. layout: that of the context.
    Raises: ConfigError if a tensor cannot be such a part.
    """
    members = as_group(mesh)
    _check_counts(buffers, seq_dims)
    whole = []
    for x, dim in zip(buffers, seq_dims, strict=True):
        if any(x is buffer.grad for buffer in _ended):
            whole.append(x)
        else:
            _check_dim(x, dim)
            placed = _layout_of(x.shape[dim] * members.size, layout, members)
            whole.append(gather(x.detach(), placed, members, dim))
    return whole


@dataclass
class _Buffer:
    """A tensor that is this rank's part inside the context.

    Attributes:
        tensor: the user's object. other: an object for what the user's does not refer to: the whole inside, the part afterwards.
    """

    tensor: torch.Tensor
    dim: int
    layout: Layout
    group: Group
    is_restored: bool
    other: torch.Tensor | None = None

    def enter(self) -> None:
        """Make the user's tensor this rank's part."""
        whole = self.tensor
        if whole.requires_grad and self.is_restored:
            with torch.enable_grad():
                part: torch.Tensor = _Part.apply(whole, self)  # type: ignore[no-untyped-call]
        else:
            part = self.layout.shard(whole.detach(), self.group.rank, self.dim)
            part.requires_grad_(whole.requires_grad)
        _swap(whole, part)
        self.other = part if self.is_restored else None
        _in_use.append(self.tensor)
        _ended.pop(self.tensor, None)

    def leave(self) -> None:
        """Make the user's tensor the whole one again. Nothing is exchanged."""
        _in_use[:] = [x for x in _in_use if x is not self.tensor]
        if self.other is not None:
            _swap(self.tensor, self.other)
            _ended[self.tensor] = None

    def take_back_gradient(self) -> None:
        """Make the gradient whole that a part got which was itself a leaf, now and whenever it gets more.

        It is one if the buffer needed no gradient before the context, and was told to inside, as PyTorch's own context wants it.
        """
        part = self.other
        if part is None or not part.is_leaf:
            return
        self._add_whole(part)
        if part.requires_grad:
            part.register_post_accumulate_grad_hook(self._add_whole)

    def _add_whole(self, part: torch.Tensor) -> None:
        if part.grad is None:
            return
        grad = gather(part.grad.detach(), self.layout, self.group, self.dim)
        part.grad = None
        before = self.tensor.grad
        self.tensor.grad = grad if before is None else before + grad


class _Part(torch.autograd.Function):
    """This rank's part of a buffer; backward brings the gradients of all parts together."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, buffer: _Buffer) -> torch.Tensor:
        ctx.buffer = buffer
        return buffer.layout.shard(whole, buffer.group.rank, buffer.dim)

    @staticmethod
    def backward(ctx: Any, d_part: torch.Tensor) -> tuple[torch.Tensor, None]:
        buffer, part = ctx.buffer, ctx.buffer.tensor
        d_part = d_part.detach()
        if any(x is part for x in _in_use):  # the user looks at the part
            with warnings.catch_warnings():  # of reading the gradient of what is no leaf
                warnings.simplefilter("ignore")
                before = part.grad
            part.grad = d_part.clone() if before is None else before + d_part
        return gather(d_part, buffer.layout, buffer.group, buffer.dim), None


class _Door:
    """One open context's way of attending."""

    def __init__(
        self, group: Group, layouts: Sequence[Layout], default: str | Layout, method: str, kernel: str
    ) -> None:
        self.group, self.default, self.method, self.kernel = group, default, method, kernel
        self.layouts = {layout.local_len: layout for layout in layouts}

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Attend in place of F.scaled_dot_product_attention."""
        if attn_mask is not None:
            raise UnsupportedError(
                f"megacp: scaled_dot_product_attention was given attn_mask {tuple(attn_mask.shape)} inside context_parallel. A mask "
                "over positions of this rank's part cannot say what is seen of other ranks' keys. Use is_causal=True or full "
                "attention, or megacp.attention with a megacp.Mask."
            )
        if dropout_p:
            raise UnsupportedError(
                f"megacp: scaled_dot_product_attention was given dropout_p {dropout_p} inside context_parallel. Which pairs are "
                "dropped would depend on the number of ranks. Pass dropout_p=0.0."
            )
        shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
        if not query.dim() == key.dim() == value.dim() == 4:
            raise ShapeError(
                f"megacp: scaled_dot_product_attention inside context_parallel takes [batch, heads, sequence, size], not {shapes}."
            )
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ShapeError(
                f"megacp: scaled_dot_product_attention was given {query.shape[1]} query and {key.shape[1]} key heads ({shapes}). "
                "Pass enable_gqa=True if query heads share key heads."
            )
        layout = self._layout(query.shape[2], shapes)
        mask = Mask.causal(layout.seq_len) if is_causal else Mask.full(layout.seq_len)
        out = attention(
            *(x.transpose(1, 2) for x in (query, key, value)),
            mask=mask,
            layout=layout,
            group=self.group,
            method=self.method,
            kernel=self.kernel,
            scale=scale,
        )
        assert isinstance(out, torch.Tensor)
        return out.transpose(1, 2)

    def _layout(self, local_len: int, shapes: str) -> Layout:
        if not self.layouts:
            return _layout_of(local_len * self.group.size, self.default, self.group)
        if local_len not in self.layouts:
            known = ", ".join(f"{n} tokens a rank of {x.seq_len}" for n, x in sorted(self.layouts.items()))
            raise ShapeError(
                f"megacp: scaled_dot_product_attention was given {shapes} inside context_parallel, whose buffers have {known}. "
                "Whatever holds tokens must be among the buffers, or be computed from them."
            )
        return self.layouts[local_len]


_doors: list[_Door] = []  # of the contexts that are open, the innermost last


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    """Stand in for the operator: attend by the innermost context. A compiled graph breaks here."""
    attend: Callable[..., torch.Tensor] = _doors[-1].attend
    if "torch._dynamo" in sys.modules:  # else nothing is compiled, and the import would take a second
        attend = torch.compiler.disable(attend)
    return attend(*args, **kwargs)


_attend._torchdynamo_disable = True  # type: ignore[attr-defined] # what torch.compiler.disable sets


@contextmanager
def _opened(door: _Door) -> Iterator[None]:
    """Make ``_attend`` the operator's kernel, below autocast and above autograd, while any context is open."""
    _doors.append(door)
    library = torch.library.Library("aten", "IMPL") if len(_doors) == 1 else None
    try:
        if library is not None:
            for key in (
                "Autograd",
                "CPU",
                "CUDA",
            ):  # the last two for inference mode, where Autograd is not asked
                library.impl("scaled_dot_product_attention", _attend, key)
        yield
    finally:
        del _doors[max(i for i, other in enumerate(_doors) if other is door)]
        if library is not None:
            library._destroy()


def _watch_checkpoints() -> None:
    """Let reentrant checkpoints remember the context of their forward pass, and recompute in it.

    Stays for good, as a graph may outlive its context.
    """
    function: Any = CheckpointFunction
    forward, backward = function.forward, function.backward
    if hasattr(forward, "is_megacp"):
        return

    def forward_in(ctx: Any, *args: Any) -> Any:
        ctx._megacp_door = _doors[-1] if _doors else None
        return forward(ctx, *args)

    def backward_in(ctx: Any, *grads: Any) -> Any:
        door = ctx._megacp_door
        if door is (_doors[-1] if _doors else None):
            return backward(ctx, *grads)
        if door is None:
            raise UnsupportedError(
                "megacp: a checkpoint whose forward pass ran outside context_parallel would be computed again inside it, with "
                "attention over all ranks. Run its backward pass outside."
            )
        with _opened(door):
            return backward(ctx, *grads)

    forward_in.is_megacp = True  # type: ignore[attr-defined]
    function.forward, function.backward = staticmethod(forward_in), staticmethod(backward_in)


class _Watch(TorchFunctionMode):
    """Sees to calls that would not reach the operator."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and torch.compiler.is_compiling():
            return _attend(*args, **kwargs)
        if func is F.multi_head_attention_forward and _wants_weights(*args, **kwargs):
            raise UnsupportedError(
                "megacp: nn.MultiheadAttention was called with need_weights=True inside context_parallel. No rank has the weights "
                "of all keys. Pass need_weights=False."
            )
        if getattr(func, "__name__", "") == "flex_attention":
            raise UnsupportedError(
                "megacp: FlexAttention was called inside context_parallel. Its mask is made for the whole sequence and would be "
                "applied to this rank's part. Use F.scaled_dot_product_attention here, or megacp.attention with a megacp.Mask."
            )
        return func(*args, **kwargs)


def _wants_weights(*args: Any, **kwargs: Any) -> bool:
    given = inspect.signature(F.multi_head_attention_forward).bind(*args, **kwargs).arguments
    return bool(given.get("need_weights", True))


def _checked(
    buffers: Sequence[torch.Tensor] | None,
    seq_dims: Sequence[int] | None,
    kept: Iterable[torch.Tensor] | None,
    layout: str | Layout,
    group: Group,
) -> list[_Buffer]:
    """Look at everything before anything is changed."""
    buffers, seq_dims, kept = list(buffers or ()), list(seq_dims or ()), list(kept or ())
    _check_counts(buffers, seq_dims)
    if any(not any(x is y for y in buffers) for x in kept):
        raise ConfigError("megacp: no_restore_buffers holds a tensor that is not among the buffers.")
    found = []
    for index, (x, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        name = f"buffer {index}"
        if type(x) is not torch.Tensor:
            raise ConfigError(
                f"megacp: {name} is a {type(x).__name__}. Only plain tensors can be sharded: what belongs to tokens, not to the model."
            )
        if x.requires_grad and not x.is_leaf:
            raise ConfigError(
                f"megacp: {name} of shape {tuple(x.shape)} is the result of an operation and needs a gradient. Compute it inside "
                "the context from sharded buffers, or pass a detached leaf."
            )
        if any(x is y for y in (*buffers[:index], *_in_use)):
            raise ConfigError(f"megacp: {name} of shape {tuple(x.shape)} is sharded already.")
        _check_dim(x, dim)
        placed = _layout_of(x.shape[dim], layout, group)
        found.append(_Buffer(x, dim % x.dim(), placed, group, not any(x is y for y in kept)))
    return found


def _check_counts(buffers: Sequence[torch.Tensor], seq_dims: Sequence[int]) -> None:
    if len(buffers) != len(seq_dims):
        raise ConfigError(
            f"megacp: {len(buffers)} buffers were given, and {len(seq_dims)} sequence dims. Give one for each buffer."
        )


def _check_dim(x: torch.Tensor, dim: int) -> None:
    if not -x.dim() <= dim < x.dim():
        raise ConfigError(f"megacp: a buffer of shape {tuple(x.shape)} has no dim {dim}.")


def _layout_of(length: int, layout: str | Layout, group: Group) -> Layout:
    """Return the layout for a buffer of so many tokens. Padding would be visible inside, so there must be none."""
    if isinstance(layout, str):
        if layout not in _LAYOUTS:
            raise ConfigError(
                f"megacp: layout {layout!r} is not known here. Use one of: {', '.join(_LAYOUTS)}, or pass a megacp.Layout."
            )
        return _LAYOUTS[layout](length, group.size, pad=False)
    if layout.cp_size != group.size or layout.seq_len != length or layout.padding:
        raise ConfigError(
            f"megacp: layout '{layout.name}' places {layout.seq_len} tokens on {layout.cp_size} ranks with {layout.padding} slots of "
            f"padding; the buffer has {length} tokens, the group {group.size} ranks. Make a layout for them that needs no padding."
        )
    return layout


def _swap(a: torch.Tensor, b: torch.Tensor) -> None:
    """Let two Python objects refer to each other's tensor."""
    try:
        torch._C._swap_tensor_impl(a, b)
    except RuntimeError as error:
        raise UnsupportedError(
            f"megacp: a buffer of shape {tuple(a.shape)} cannot be exchanged for another: {str(error).splitlines()[0]}. Something, "
            "perhaps retain_grad(), holds a weak reference to it. Pass a copy."
        ) from error
