"""How keys and values travel: one file a method, and the registry.

A method is a module with ``name``, ``aliases``, the schedule (``steps``, ``tokens_received``: what happens when, for the plan) and
two loops (``forward``, ``backward``). A method from outside registers itself with :func:`register`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import torch

from megacp.errors import ConfigError
from megacp.groups import Group
from megacp.kernels import Kernel, Options
from megacp.plans import Plan, Schedule

__all__ = ["Call", "Method", "accumulation_dtype", "names", "register", "resolve"]


@dataclass(frozen=True)
class Call:
    """What stays the same through one attention call: the plan, and what carries it out."""

    plan: Plan
    group: Group
    kernel: Kernel
    options: Options


class Method(Schedule, Protocol):
    """A module with these names is a method."""

    aliases: tuple[str, ...]

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: Call, sinks: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (out [B, S, H, E], lse [B, H, S]) of the rank's queries, in the accumulation dtype."""

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: Call,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return (dq, dk, dv) of the rank's own tokens, in the accumulation dtype."""


_registry: dict[str, Method] = {}


def register(method: Any) -> None:
    """Make a method known by its name and aliases.

    Raises: ConfigError if a name is taken by another method.
    """
    for name in (method.name, *method.aliases):
        if _registry.get(name, method) is not method:
            raise ConfigError(f"megacp: a method named '{name}' is registered already. Choose another name.")
        _registry[name] = method


def names() -> list[str]:
    """List the known methods, without aliases."""
    return sorted({method.name for method in _registry.values()})


def resolve(name: str) -> Method:
    """Return the method of a name or alias.

    Raises: ConfigError listing the legal names.
    """
    if name not in _registry:
        aliases = [f"{alias} = {m.name}" for alias, m in sorted(_registry.items()) if alias != m.name]
        raise ConfigError(
            f"megacp: context-parallel method {name!r} is not known. Use one of: {', '.join(names())} (also {', '.join(aliases)})."
        )
    return _registry[name]


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which partial results and travelling gradients are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


for _name in ("ring", "all_gather"):
    register(import_module(f"megacp.methods.{_name}"))
