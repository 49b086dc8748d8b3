"""Act right after a module's body has run, before anybody else can take names out of it.

Any finder may bring the module: the ordinary path, an editable install's own finder, a zip file. Ours only
asks the others, and puts itself around the loader for the time of the import; the module keeps no trace.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["AfterImport", "is_findable", "source_of"]


class AfterImport(MetaPathFinder):
    """Call back once for each import, or reload, of the named modules.

    names: full module names. call: receives the name and the module when its body has run; what it
    raises ends the import.
    The importing thread holds that module's import lock meanwhile, so no other thread sees it half done.
    """

    def __init__(self, names: Collection[str], call: Callable[[str, ModuleType], None]) -> None:
        self.names = frozenset(names)
        self.call = call
        self._thread = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Let the other finders find a watched module, and stand around its loader."""
        if fullname not in self.names:
            return None
        asking = self._thread.__dict__.setdefault("asking", set())
        if fullname in asking:  # another finder of our kind asks back
            return None
        asking.add(fullname)
        try:
            spec = _ask(fullname, path, target, besides=self)
        finally:
            asking.discard(fullname)
        # A namespace package has no loader and no body; a loader without exec_module predates python 3.4.
        if spec is not None and hasattr(spec.loader, "exec_module"):
            spec.loader = _Around(spec, self.call)
        return spec


class _Around(Loader):
    """Stand in for a loader until the module's body starts; everything it is asked goes to the loader."""

    def __init__(self, spec: ModuleSpec, call: Callable[[str, ModuleType], None]) -> None:
        assert spec.loader is not None
        self._spec = spec
        self._loader = spec.loader
        self._call = call

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # a copy that has no state yet
            raise AttributeError(name)
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        name = self._spec.name
        self._call(name, sys.modules.get(name, module))  # a body may put something else in its place


def _ask(
    name: str, path: Sequence[str] | None, target: ModuleType | None = None, besides: object = None
) -> ModuleSpec | None:
    for finder in list(sys.meta_path):
        find = getattr(finder, "find_spec", None)
        if finder is besides or find is None:
            continue
        spec: ModuleSpec | None = find(name, path, target)
        if spec is not None:
            return spec
    return None


def is_findable(name: str) -> bool:
    """Tell whether a module could be imported, without importing it or any package around it."""
    return _find(name) is not None


def source_of(name: str) -> str | None:
    """Give the text of a module that could be imported, without importing it; None if there is none."""
    spec = _find(name)
    origin = getattr(spec, "origin", None)
    if origin is None or not origin.endswith(".py"):
        return None
    return Path(origin).read_text(encoding="utf-8", errors="replace")


def _find(name: str) -> ModuleSpec | None:
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        prefix = ".".join(parts[:depth])
        module = sys.modules.get(prefix)
        if module is not None:
            path = getattr(module, "__path__", None)
            spec = getattr(module, "__spec__", None) or ModuleSpec(prefix, None)
        else:
            spec = _ask(prefix, path)
            if spec is None:
                return None
            path = spec.submodule_search_locations
        if path is None and depth < len(parts):
            return None  # a plain module holds no others
    return spec
