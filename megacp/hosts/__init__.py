"""Megatron and its kin: where megacp is hooked in, and taken out again.

:func:`install` puts one table of seams in place; what stands at each seam is in one file a family of hosts.
"""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

from megacp.comm import set_deadline
from megacp.config import Config
from megacp.dynamic import Share
from megacp.errors import ConfigError
from megacp.hosts import legacy, megatron
from megacp.hosts.legacy.groups import withdraw
from megacp.hosts.megatron import record
from megacp.hosts.rows import entry_point_rows, load_rows
from megacp.hosts.seams import Seam, Seams
from megacp.hosts.session import Session

__all__ = ["fork_rows", "install", "report", "sharing", "uninstall"]

_session: Session | None = None
_seams: Seams | None = None


def install(config: Config | None = None) -> None:
    """Place the hooks into the Megatron of this process, now or as it is imported; a second time changes nothing.

    Args:
        config: the settings; defaults if None. No command line is read here, the host's parser learns our flags.
    Raises: SeamError if a place that is needed is sure to be missing, naming what was tried.
    """
    global _session, _seams
    if _seams is not None:
        if config is not None and _session is not None:
            _session.configure(vars(config))
        return
    _session = Session(config or Config(), _table, _check)
    set_deadline(_session.config.timeout_s)
    _forget_rotary_tables()
    folder = os.environ.get("MEGACP_RECORD")  # set by megacp verify
    records = record.rows(folder) if folder else []
    others = entry_point_rows()
    host = legacy if legacy.is_needed(others) else megatron
    _seams = Seams([*host.rows(_current), *others, *records])
    _seams.install()


def uninstall() -> None:
    """Put everything back as it was before :func:`install`."""
    global _session, _seams
    if _seams is None:
        return
    _seams.uninstall()
    if _session is not None and _session.groups is not None:
        withdraw(_session.groups)
    _session = _seams = None
    _forget_rotary_tables()


def report() -> str:
    """Return what is hooked where, and what is in force; one line if megacp is not installed."""
    if _seams is None or _session is None:
        return "megacp is not installed in this process."
    return _session.text()


def sharing(share: Share) -> AbstractContextManager[None]:
    """Let the host's model run a row of documents on its own block of ranks: ``with sharing(share): loss = model(...)``.

    The model is called with the whole row (``share.pack(samples, whole=True)``) and gives the whole row's losses, [1, G], for
    ``share.sum(..., whole=True)``.
    Raises: ConfigError if megacp is not installed in the host.
    """
    if _session is None:
        raise ConfigError(
            "megacp: a host's model is to run a share, but megacp is not installed. Call megacp.install() first."
        )
    return _session.holding(share=share)


def fork_rows(path: str | Path, has_context_parallel: bool = False) -> list[Seam]:
    """Read a fork's own names from a file (see :mod:`megacp.hosts.rows`), for its entry point of the group ``megacp.seams``.

    has_context_parallel: the fork has context-parallel groups of its own, as Megatron-core has since 0.4.
    Raises: SeamError naming the file and the row.
    """
    return load_rows(path, (megatron if has_context_parallel else legacy).rows(_current))


def _current() -> Session:
    assert _session is not None, "a seam ran without a session"
    return _session


def _check() -> None:
    assert _seams is not None
    _seams.check()


def _table() -> str:
    assert _seams is not None
    return _seams.table()


def _forget_rotary_tables() -> None:
    """Empty the host's caches of rotary tables, which hold slices made by whoever was in charge."""
    name = "megatron.core.models.common.embeddings.rotary_pos_embedding"
    for value in list(vars(sys.modules.get(name, object)).values()) if name in sys.modules else []:
        clear = (
            getattr(getattr(value, "forward", None), "cache_clear", None) if isinstance(value, type) else None
        )
        if clear is not None:
            clear()
