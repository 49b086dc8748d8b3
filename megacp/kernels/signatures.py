"""What a library's function takes, found by looking, never by a version number.

Interfaces of attention libraries rename and add parameters from one release to the next. A kernel offers every value under all the
names it has had; the function gets those that it has. What it must have is asked for first, so nothing is dropped in silence.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["call", "is_installed", "lacks", "parameters"]


def is_installed(package: str) -> bool:
    """Say whether a top-level package can be imported, without importing it."""
    return package in sys.modules or importlib.util.find_spec(package) is not None


def parameters(function: Callable[..., Any]) -> dict[str, bool]:
    """Map the names of a function's (or custom operator's) parameters to whether each must be given."""
    operator = getattr(function, "_opoverload", function)
    schema = getattr(operator, "_schema", None)
    if schema is not None:
        return {argument.name: not argument.has_default_value() for argument in schema.arguments}
    found = inspect.signature(function).parameters.values()
    return {p.name: p.default is p.empty for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)}


def lacks(function: Callable[..., Any], *wanted: str) -> str | None:
    """Name the first parameter that a function lacks; alternatives are given as "one|another"."""
    has = parameters(function)
    missing = [names for names in wanted if not any(name in has for name in names.split("|"))]
    return missing[0].replace("|", " or ") if missing else None


def call(function: Callable[..., Any], **offered: Any) -> Any:
    """Call a function with those of the values that it takes; a parameter it must have and that is not offered is None."""
    has = parameters(function)
    given = {name: offered.get(name) for name, needed in has.items() if name in offered or needed}
    return function(**given)
