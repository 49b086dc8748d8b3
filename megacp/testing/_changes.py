"""What was replaced in other people's modules, so that it can be put back."""

from __future__ import annotations

import functools
from collections.abc import Callable, MutableMapping
from typing import Any

__all__ = ["Changes"]

_ABSENT = object()


class Changes:
    """A list of replacements in the order in which they were made, and a line of report for each kind."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.in_force = True
        self._undo: list[Callable[[], Any]] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set owner.name; what the owner only inherited is deleted again, not set."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        if before is _ABSENT:
            self.undo(functools.partial(delattr, owner, name))
        else:
            self.undo(functools.partial(setattr, owner, name, before))

    def item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set mapping[key]."""
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        if before is _ABSENT:
            self.undo(functools.partial(mapping.pop, key, None))
        else:
            self.undo(functools.partial(mapping.__setitem__, key, before))

    def undo(self, step: Callable[[], Any]) -> None:
        """Run `step` when everything is put back."""
        self._undo.append(step)

    def restore(self) -> None:
        """Put everything back, last change first."""
        self.in_force = False
        while self._undo:
            self._undo.pop()()
