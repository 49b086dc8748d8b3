"""One wrapper in its place: find a host's function, stand around it, see who else does, and leave again."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from megacp.errors import MegacpError, SeamError

__all__ = [
    "Finding",
    "Function",
    "Hook",
    "Place",
    "covered",
    "find",
    "foreign",
    "hook_of",
    "layers",
    "origin",
    "reaches",
    "rebind",
]

Function = Callable[..., Any]


@dataclass(frozen=True)
class Finding:
    """What was found where a target was looked for, and does not fit. exists: the name is there."""

    target: str
    text: str
    exists: bool = False


@dataclass(eq=False)
class Place:
    """An attribute of a module or a class.

    raw: what is stored there. function: the same without the static or class method around it.
    is_own: stored in the owner itself, not inherited.
    """

    owner: Any
    leaf: str
    raw: Any
    function: Function
    is_own: bool

    def now(self) -> Any:
        """Read what is stored there now, unbound."""
        return vars(self.owner).get(self.leaf)

    def put(self, function: Function) -> Any:
        """Store a function the way the first one was stored; give what is then in the place."""
        kind = type(self.raw) if isinstance(self.raw, staticmethod | classmethod) else None
        setattr(self.owner, self.leaf, kind(function) if kind else function)
        return self.now()

    def restore(self) -> None:
        """Put back what was there first, the same object."""
        if self.is_own:
            setattr(self.owner, self.leaf, self.raw)
        else:
            delattr(self.owner, self.leaf)


def find(target: str, module: ModuleType, needs: Sequence[str] = ()) -> Place | Finding:
    """Look for ``module:path`` in its module; tell what is there instead if it does not fit.

    needs: parameter names that must stand in the function's signature.
    """
    where, _, path = target.partition(":")
    *classes, leaf = path.split(".")
    owner: Any = module
    for part in classes:
        inner = getattr(owner, part, None)
        if inner is None:
            return Finding(target, _no_such_name(where, owner, part))
        if not inspect.isclass(inner):  # None or a mock, where an optional library is not installed
            return Finding(target, f"{part!r} is no class here but {type(inner).__name__}")
        owner = inner
        where = f"{where}.{part}"
    raw = vars(owner)[leaf] if leaf in vars(owner) else inspect.getattr_static(owner, leaf, None)
    if raw is None:  # not there, or a stand-in for an optional library
        return Finding(target, _no_such_name(where, owner, leaf))
    function = _function(raw)
    if type(function).__module__ == "unittest.mock":
        return Finding(target, f"{leaf!r} is no function here but {type(function).__name__}")
    if inspect.isclass(function):
        return Finding(target, "it is a class; name one of its methods", exists=True)
    if not callable(function):
        return Finding(target, f"it is no function but {type(raw).__name__}", exists=True)
    lacks = _lacking(function, needs)
    if lacks:
        return Finding(target, lacks, exists=True)
    return Place(owner, leaf, raw, function, leaf in vars(owner))


def _function(raw: Any) -> Any:
    return raw.__func__ if isinstance(raw, staticmethod | classmethod) else raw


def _no_such_name(where: str, owner: Any, name: str) -> str:
    near = difflib.get_close_matches(name, [key for key in dir(owner) if key[:2] != "__"], n=3, cutoff=0.5)
    return f"there is no {name!r} in {where}" + (f"; close to it: {', '.join(near)}" if near else "")


def _lacking(function: Function, needs: Sequence[str]) -> str:
    if not needs:
        return ""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError) as error:
        return f"its parameters cannot be read ({error}); needed: {', '.join(needs)}"
    missing = [name for name in needs if name not in parameters]
    if not missing:
        return ""
    return f"its parameters are ({', '.join(map(str, parameters.values()))}); it lacks {', '.join(missing)}"


@dataclass(eq=False)
class Hook:
    """One wrapper in its place, with its switch: while it is off, the wrapper only calls the original.

    name: of the seam. placed: what `apply` stored. rebound: ``module.name`` of copies changed too.
    """

    name: str
    target: str
    place: Place
    on: bool = True
    wrapper: Function = lambda: None
    placed: Any = None
    rebound: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def make(self, wrap: Callable[[Function], Function], renames: Mapping[str, str]) -> None:
        """Build the wrapper: the switch around what ``wrap`` gives for the original.

        What it stands around stays visible to `inspect`, and other attributes, such as the cache_clear of
        functools.lru_cache, can be reached through it.
        renames: the wrapper's parameter name -> the original's.
        Raises: SeamError if ``wrap`` fails.
        """
        original = self.place.function
        try:
            replacement = wrap(_renamed(original, renames) if renames else original)
        except MegacpError:
            raise
        except Exception as error:
            raise SeamError(f"seam {self.name!r}: its wrapper for {self.target} failed: {error!r}") from error
        ours = {theirs: own for own, theirs in renames.items()}

        @functools.wraps(original)
        def hooked(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return original(*args, **kwargs)
            if ours:
                kwargs = {ours.get(name, name): value for name, value in kwargs.items()}
            return replacement(*args, **kwargs)

        for name in dir(original):
            if not name.startswith("__") and not hasattr(hooked, name):
                setattr(hooked, name, getattr(original, name))
        marks: Any = hooked
        marks.__megacp_seam__ = self.name
        marks.__megacp_hook__ = self
        self.wrapper = hooked

    def apply(self) -> None:
        """Put the wrapper in its place. Raises: TypeError or AttributeError if the owner allows no change."""
        self.placed = self.place.put(self.wrapper)

    def withdraw(self) -> bool:
        """Switch off and put the original back; False, with nothing changed, if somebody else is there."""
        self.on = False
        value = self.place.now()
        if value is self.placed:
            self.place.restore()
        return value is self.placed or value is self.place.raw


def _renamed(function: Function, renames: Mapping[str, str]) -> Function:
    """Give a function the parameter names that a wrapper knows."""
    ours = {theirs: own for own, theirs in renames.items()}

    @functools.wraps(function)
    def renamed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{renames.get(name, name): value for name, value in kwargs.items()})

    signature = inspect.signature(function)
    parameters = [p.replace(name=ours.get(p.name, p.name)) for p in signature.parameters.values()]
    renamed.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return renamed


def hook_of(value: Any) -> Hook | None:
    """Give the hook whose wrapper this is; functools.wraps copies our marks, so ask for identity.

    Any object of any module is asked, so nothing is looked up in it: that could warn, or wake it up.
    """
    hook = value.__dict__.get("__megacp_hook__") if type(value) is FunctionType else None
    return hook if isinstance(hook, Hook) and hook.wrapper is value else None


def rebind(old: Function, new: Function) -> list[str]:
    """Put a function in place of every module-level copy of another one; give ``module.name`` of each.

    In every module, as a script of anybody's may have imported the function by value before megacp was installed; one that is
    missed would train on, not hooked. A wrapper that a former table has left behind, switched off, counts as a copy of what
    it wraps.
    """
    found = []
    seen: set[int] = set()
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or id(module) in seen:
            continue
        seen.add(id(module))
        names = object.__getattribute__(module, "__dict__")  # a lazy module must not be woken up
        for key, value in list(names.items()):
            hook = hook_of(value)
            if value is old or (hook is not None and not hook.on and hook.place.function is old):
                found.append(f"{name}.{key}")
                names[key] = new
    return found


# -- other frameworks on our places


def layers(value: Any) -> Iterator[Any]:
    """Walk from the outermost wrapper inwards, along ``__wrapped__``."""
    for _ in range(100):
        value = _function(value)
        yield value
        value = getattr(value, "__wrapped__", None)
        if value is None:
            return


def reaches(value: Any, hook: Hook) -> bool:
    """Tell whether a call of a function arrives at our wrapper, as far as can be seen.

    Besides ``__wrapped__``, a wrapper may hold what it wraps in its closure, in a global or in a partial.
    """
    for layer in layers(value):
        if layer is hook.wrapper:
            return True
        held = [cell.cell_contents for cell in getattr(layer, "__closure__", None) or () if _is_filled(cell)]
        held.append(getattr(layer, "func", None))
        code = getattr(layer, "__code__", None)
        if code is not None:
            held += [layer.__globals__.get(name) for name in code.co_names]
        if any(inner is hook.wrapper for item in held for inner in layers(item)):
            return True
    return False


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def covered(hook: Hook) -> str:
    """Tell who sits on a hook's place now, if it is not megacp; nothing if nobody does."""
    value = hook.place.now()
    if value is hook.placed or value is hook.place.raw:
        return ""
    if not reaches(value, hook):
        return f"{hook.target} was replaced after megacp hooked it, by {origin(value)}"
    above = []
    for layer in layers(value):
        if layer is hook.wrapper:
            break
        if hook_of(layer) is None:
            above.append(origin(layer))
    if not above:
        return ""
    return f"{hook.target} was hooked after megacp by {', '.join(above)}, which wraps us"


_ORDINARY = frozenset({*sys.stdlib_module_names, "torch", "typing_extensions", "megacp"})


def foreign(target: str, place: Place) -> str:
    """Name the frameworks that sit on a place before us; nothing if there are none.

    Foreign is code that is neither the host's own nor a decorator of python's, torch's or ours.
    """
    own = {
        target.partition(":")[0].partition(".")[0],
        getattr(place.owner, "__module__", "").partition(".")[0],
    }
    roots = own | _ORDINARY
    found = [layer for layer in layers(place.function) if _home(layer).partition(".")[0] not in roots]
    return ", ".join(origin(layer) for layer in found)


def _home(function: Any) -> str:
    """Give the module whose code this is; functools.wraps changes ``__module__``, but not the globals."""
    names = getattr(function, "__globals__", None)
    return str(names.get("__name__", "?")) if names is not None else type(function).__module__


def origin(value: Any) -> str:
    """Name the code of a function as ``module.name``, whatever functools.wraps made of its names."""
    function = _function(value)
    code = getattr(function, "__code__", None)
    return f"{_home(function)}.{code.co_name if code is not None else type(function).__name__}"
