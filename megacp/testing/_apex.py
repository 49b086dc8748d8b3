"""What hosts of before 2024 import from Apex and from torches of their time, in plain torch.

They import it whether it is there or not. The modules stand in ``sys.modules`` only while a host's module that needs them runs (see
``_cuda_hosts``), so a newer host, which asks whether Apex is installed, is still told no.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch

__all__ = ["IMPORT_APEX", "apex_to_import"]

# Modules of hosts that import Apex, or what torch and pillow had, while they run.
IMPORT_APEX = (
    "megatron.data.autoaugment",
    "megatron.data.image_folder",
    "megatron.data.indexed_dataset",
    "megatron.data.vit_dataset",
    "megatron.model.fused_layer_norm",
    "megatron.model.vision.dino",
    "megatron.model.vision.inpainting",
    "megatron.model.vision.vit_backbone",
    "megatron.optimizer",
    "megatron.optimizer.clip_grads",
    "megatron.optimizer.distrib_optimizer",
    "megatron.optimizer.optimizer",
    "megatron.utils",
)


@contextlib.contextmanager
def apex_to_import() -> Iterator[None]:
    """Let imports of Apex and its like succeed in this block, where they are not installed."""
    made = _modules()
    absent = {
        name: module
        for name, module in made.items()
        if name not in sys.modules
        and not _is_installed(name.partition(".")[0] if name[:6] != "torch." else name)
    }
    sys.modules.update(absent)
    try:
        yield
    finally:
        for name in absent:
            sys.modules.pop(name, None)


def _is_installed(name: str) -> bool:
    return name not in _cache and importlib.util.find_spec(name) is not None


_cache: dict[str, ModuleType] = {}


def _modules() -> dict[str, ModuleType]:
    if not _cache:
        for name, contents in _CONTENTS.items():
            _cache[name] = _Named(name)
            vars(_cache[name]).update(contents)
        for name, module in _cache.items():
            package, _, leaf = name.rpartition(".")
            if package in _cache:
                setattr(_cache[package], leaf, module)
    return _cache


class _Any(type):
    """Makes classes in which every name is such a class too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class _Named(ModuleType):
    """A module in which what is not there is a class of that name, to derive from or to never call."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or self.__name__ in ("apex.transformer", "apex.contrib"):
            raise AttributeError(name)
        return _Any(name, (), {})


# -- amp_C: many tensors at once


def _applied(
    operation: Any, overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], *more: Any
) -> Any:
    return operation(overflow, tensors, *more)


def _norm(
    overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], per_parameter: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    norms = torch.stack([x.detach().float().norm() for x in tensors[0]])
    return norms.norm().reshape(1), norms if per_parameter else None


def _scale(overflow: torch.Tensor, tensors: Sequence[Sequence[torch.Tensor]], factor: float) -> None:
    with torch.no_grad():
        for source, target in zip(*tensors, strict=True):
            target.copy_(source * factor)


# -- optimizers


class _Adam(torch.optim.AdamW):
    """Adam with decoupled decay, as Apex has it by default."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: Any = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


# -- norms


class _LayerNorm(torch.autograd.Function):
    """Layer norm, with the arguments that Apex's function has."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, shape: Any, eps: float
    ) -> Any:
        out, mean, inverse = forward_affine(x, shape, weight, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        found = backward_affine(grads[0], mean, inverse, x, ctx.shape, weight, bias, ctx.eps)
        return (*found, None, None)


def forward_affine(x: torch.Tensor, shape: Any, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> Any:
    """Normalize over the last dims; return output, mean and inverse deviation."""
    out, mean, inverse = torch.native_layer_norm(x.to(weight.dtype), list(shape), weight, bias, eps)
    return out, mean, inverse


def backward_affine(
    grad: torch.Tensor,
    mean: torch.Tensor,
    inverse: torch.Tensor,
    x: torch.Tensor,
    shape: Any,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
) -> Any:
    """Return the gradients of input, weight and bias."""
    grads = torch.ops.aten.native_layer_norm_backward(
        grad.contiguous().to(weight.dtype),
        x.to(weight.dtype),
        list(shape),
        mean,
        inverse,
        weight,
        bias,
        [True, True, True],
    )
    return grads[0].to(x.dtype), grads[1], grads[2]


_KERNEL = {"forward_affine": forward_affine, "backward_affine": backward_affine}
_CONTENTS: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.optimizers": {"FusedAdam": _Adam, "FusedSGD": torch.optim.SGD},
    "apex.multi_tensor_apply": {"multi_tensor_applier": _applied},
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _LayerNorm},
    "apex.parallel": {},
    "amp_C": {"multi_tensor_l2norm": _norm, "multi_tensor_scale": _scale},
    "torch._six": {"inf": math.inf},
    "torchvision": {},
    "torchvision.transforms": {},
    "torchvision.datasets": {},
    "PIL": {},
    "fused_layer_norm_cuda": _KERNEL,
    "fused_mix_prec_layer_norm_cuda": _KERNEL,
}
