"""Exact, load-balanced context parallelism for any Megatron.

Three doors to one room::

    torchrun ... -m megacp pretrain_gpt.py <your arguments> --context-parallel-size 8
    import megacp; megacp.install()                       # first line of a fork's script
    megacp.shard(...), megacp.attention(...)              # a library, no Megatron needed

Names are imported on first use, so ``import megacp`` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megacp._version import __version__

if TYPE_CHECKING:
    from megacp.attend import attention as attention
    from megacp.attend import plan as plan
    from megacp.errors import CommTimeout as CommTimeout
    from megacp.errors import ConfigError as ConfigError
    from megacp.errors import SeamError as SeamError
    from megacp.errors import UnsupportedError as UnsupportedError
    from megacp.hosts import install as install
    from megacp.hosts import report as report
    from megacp.hosts import uninstall as uninstall
    from megacp.layout import Layout as Layout
    from megacp.loss import masked_mean as masked_mean
    from megacp.mask import Mask as Mask
    from megacp.sharding import gather as gather
    from megacp.sharding import shard as shard

_HOME = {
    "Layout": "megacp.layout",
    "Mask": "megacp.mask",
    "attention": "megacp.attend",
    "plan": "megacp.attend",
    "shard": "megacp.sharding",
    "gather": "megacp.sharding",
    "masked_mean": "megacp.loss",
    "install": "megacp.hosts",
    "uninstall": "megacp.hosts",
    "report": "megacp.hosts",
    "ConfigError": "megacp.errors",
    "UnsupportedError": "megacp.errors",
    "SeamError": "megacp.errors",
    "CommTimeout": "megacp.errors",
}

__all__ = ["__version__", *_HOME]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name == "pytorch":  # the door for plain scaled_dot_product_attention
        return import_module("megacp.pytorch")
    if name not in _HOME:
        raise AttributeError(f"module 'megacp' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
