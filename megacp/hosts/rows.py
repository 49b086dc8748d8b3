"""Rows for the table of seams that come from outside megacp.

A package declares an entry point of the group ``megacp.seams``::

    entry_points={"megacp.seams": ["myfork = myfork.cp:ROWS"]}    # an iterable of Seam, or a callable for one

or, with no code at all, a file maps a fork's own names onto the wrappers that megacp has, by their role::

    [[seam]]
    role = "core attention"                         # which of megacp's wrappers
    target = "myfork.attn:FusedAttention.run"       # or a list of candidates
    name = "myfork attention"                       # optional
    parameters = {query = "q", key = "k"}           # optional: megacp's name = the fork's name
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

from megacp.errors import SeamError
from megacp.hosts.seams import Seam

__all__ = ["entry_point_rows", "load_rows"]

GROUP = "megacp.seams"
_FIELDS = ("role", "target", "name", "parameters")


def entry_point_rows() -> list[Seam]:
    """Load the rows that installed packages declare, in the order of their names.

    Raises: SeamError naming the entry point and its package if it cannot be loaded or is no row.
    """
    rows: list[Seam] = []
    for entry in sorted(metadata.entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        package = entry.dist.name if entry.dist is not None else "an unknown package"
        where = f"the entry point '{entry.name} = {entry.value}' of {package} (group {GROUP!r})"
        try:
            loaded = entry.load()
            found = list(loaded() if callable(loaded) else loaded)
        except Exception as error:
            raise SeamError(f"{where} cannot be loaded: {error!r}") from error
        wrong = [item for item in found if not isinstance(item, Seam)]
        if wrong:
            raise SeamError(f"{where} must give rows of megacp.hosts.seams.Seam, and gives {wrong[0]!r}.")
        rows += found
    return rows


def load_rows(path: str | Path, known: Iterable[Seam]) -> list[Seam]:
    """Read rows from a TOML file; each takes the wrapper, and what it needs, of a known row of its role.

    known: the rows whose roles may be named. The new rows are not required themselves: they fill their role.
    Raises: SeamError naming the file and the row if it cannot be read or is not written as above.
    """
    roles: dict[str, Seam] = {}
    for seam in known:
        roles.setdefault(seam.role, seam)
    entries = _read(Path(path)).get("seam", [])
    if not isinstance(entries, list) or not entries:
        raise SeamError(f"{path} has no rows; each starts with a line [[seam]].")
    return [_row(f"row {at} of {path}", entry, roles) for at, entry in enumerate(entries, start=1)]


def _read(path: Path) -> dict[str, Any]:
    try:
        tomllib = import_module("tomllib")
    except ModuleNotFoundError:
        try:
            tomllib = import_module("tomli")
        except ModuleNotFoundError:
            raise SeamError(
                f"{path} is a TOML file, and this python has no reader for it. "
                "Use python 3.11 or later, or install the package tomli."
            ) from None
    try:
        content: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SeamError(f"the file of seams {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise SeamError(f"the file of seams {path} is not valid TOML: {error}") from error
    return content


def _row(where: str, entry: Any, roles: Mapping[str, Seam]) -> Seam:
    if not isinstance(entry, dict):
        raise SeamError(f"{where} is {entry!r}; it must be a table with role and target.")
    unknown = [key for key in entry if key not in _FIELDS]
    missing = [key for key in ("role", "target") if key not in entry]
    if unknown or missing:
        fault = f"has no field {missing[0]!r}" if missing else f"has the unknown field {unknown[0]!r}"
        raise SeamError(f"{where} {fault}; the fields are {', '.join(_FIELDS)}.")
    role, targets, parameters = entry["role"], entry["target"], entry.get("parameters", {})
    targets = [targets] if isinstance(targets, str) else targets
    if not isinstance(targets, list) or not all(isinstance(target, str) for target in targets):
        raise SeamError(f"{where} has the target {targets!r}; it must be a string or a list of strings.")
    if not isinstance(parameters, dict) or not all(isinstance(name, str) for name in parameters.values()):
        raise SeamError(f'{where} has parameters {parameters!r}; write them as {{ours = "theirs"}}.')
    if role not in roles:
        near = difflib.get_close_matches(str(role), roles, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise SeamError(f"{where} has the role {role!r}; the roles are {', '.join(map(repr, roles))}.{hint}")
    name = str(entry.get("name", f"{role} ({targets[0] if targets else ''})"))
    return replace(
        roles[role],
        name=name,
        targets=tuple(targets),
        role=role,
        required=False,
        every=False,
        renames=parameters,
    )
