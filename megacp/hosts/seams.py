"""Where a host framework is hooked: a table of seams, each probed, applied and reversible.

A `Seam` says which function or method of a host is wrapped, which of its parameters the wrapper relies on,
and what is lost where it is missing. `Seams` puts the wrappers in place, right after the host's module has
been imported or at once if it is there already, and takes them out again. Nothing asks for version numbers.

Every wrapper has a switch. When the table is uninstalled, a copy of the wrapper that somebody kept, or that
another framework has wrapped in turn, calls the original as if megacp were not there.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import ModuleType

from megacp.after_import import AfterImport, is_findable
from megacp.errors import SeamError
from megacp.hosts.hooks import (
    Finding,
    Function,
    Hook,
    Place,
    covered,
    find,
    foreign,
    hook_of,
    layers,
    reaches,
    rebind,
)

__all__ = ["Finding", "Seam", "SeamState", "Seams"]


@dataclass(frozen=True)
class Seam:
    """One place in a host that we wrap.

    name: unique in its table.
    targets: ``"package.module:function"`` or ``"package.module:Class.method"``; the first one found is
        hooked, or all of them with ``every``. Ties are decided by what the host imports first.
    wrap: original -> replacement, called once for each place that is hooked.
    needs: parameter names that the replacement relies on, looked up in the target's signature.
    required: the host cannot be run exactly without it.
    absent_means: what is not supported where it is missing, as a sentence's end.
    role: what the seam is for; rows of one role stand in for each other. The name, if empty.
    renames: the wrapper's parameter name -> the target's, for forks that call it differently; the wrapper
        sees only its own names.
    Raises: SeamError if a target is not written as above.
    """

    name: str
    targets: tuple[str, ...]
    wrap: Callable[[Function], Function]
    needs: tuple[str, ...] = ()
    required: bool = False
    every: bool = False
    absent_means: str = ""
    role: str = ""
    renames: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        targets = (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)
        object.__setattr__(self, "targets", targets)
        object.__setattr__(self, "needs", tuple(self.needs))
        object.__setattr__(self, "role", self.role or self.name)
        for target in targets:
            module, _, path = target.partition(":")
            if not all(part.isidentifier() for part in [*module.split("."), *path.split(".")]):
                raise SeamError(
                    f"seam {self.name!r} has the target {target!r}; a target is written "
                    "'package.module:function' or 'package.module:Class.method'."
                )
        if not targets:
            raise SeamError(f"seam {self.name!r} has no target.")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Give the names that must stand in the target's signature, in the target's words."""
        return tuple(dict.fromkeys(self.renames.get(name, name) for name in [*self.needs, *self.renames]))


@dataclass(frozen=True)
class SeamState:
    """How one seam stands.

    status: ``hooked``; ``waiting`` for a module that has not been imported; ``absent``, looked for and not
        found; ``replaced`` by somebody else after we hooked it; ``off``, not installed.
    targets: where it is hooked. rebound: ``module.name`` of by-value copies that were changed too.
    findings: what did not fit. notes: other frameworks on the same target, and copies left alone.
    """

    seam: Seam
    status: str
    targets: tuple[str, ...] = ()
    rebound: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Give the seam's name."""
        return self.seam.name


class Seams:
    """The table with its state; nothing happens before `install`.

    rows: the seams, in the order in which they are applied where all modules are there already.
    Raises: SeamError if two rows have one name.
    """

    def __init__(self, rows: Iterable[Seam]) -> None:
        self.rows = tuple(rows)
        names = [row.name for row in self.rows]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise SeamError(f"two seams have the name {', '.join(map(repr, twice))}; names must differ.")
        self._hooks: list[Hook] = []
        self._outlived: list[Hook] = []  # on functions that a reload of their module has replaced
        self._findings: dict[tuple[str, str], Finding] = {}
        self._busy: set[str] = set()
        self._installed = False
        self._lock = threading.RLock()  # held for bookkeeping only, never while a wrapper is made
        modules = {_module(target) for row in self.rows for target in row.targets}
        self._finder = AfterImport(modules, self._after_import)

    # -- putting in and taking out

    def install(self) -> None:
        """Put hooks on what is imported already, and on the rest as it comes; a second call only looks again.

        Raises: SeamError if a required seam is sure to be missing; then nothing stays hooked.
        """
        with self._lock:
            self._installed = True
            if self._finder not in sys.meta_path:
                sys.meta_path.insert(0, self._finder)
            self._hooks = [hook for hook in self._hooks if hook.on or reaches(hook.place.now(), hook)]
            for hook in self._hooks:  # one that an uninstall left under somebody else's wrapper works again
                hook.on = True
        try:
            self._look_again()
        except BaseException:
            self.uninstall()
            raise

    def uninstall(self) -> list[SeamState]:
        """Put every original back, by-value copies included; give the seams that could not be restored.

        Where somebody else has taken or wrapped our place meanwhile it stays as it is; our wrapper, if it is
        still called from there, does nothing but call the original.
        """
        with self._lock:
            self._installed = False
            if self._finder in sys.meta_path:
                sys.meta_path.remove(self._finder)
            left = []
            for hook in reversed(
                self._hooks + self._outlived
            ):  # several may share a place: last in, first out
                if not hook.withdraw() and hook not in self._outlived:
                    left.append(hook)
                rebind(hook.wrapper, hook.place.function)
                hook.rebound.clear()
            self._hooks = left[::-1]
            self._outlived.clear()
            self._findings.clear()
            return [state for state in self.report() if state.notes]

    def check(self, *roles: str, now: bool = False) -> None:
        """Refuse to go on without a seam that is needed; to be asked before the first collective.

        roles: those that are needed, whether marked required or not; all required ones if none is named.
        now: count as missing what waits for a module that exists, but has not been imported.
        Raises: SeamError naming what was tried, what was found, and what is not supported without it.
        """
        self._look_again()
        wanted = roles or tuple(dict.fromkeys(row.role for row in self.rows if row.required))
        problems = [problem for role in wanted if (problem := self._problem(role, now, search=True))]
        if problems:
            raise SeamError("\n\n".join(problems))

    # -- telling

    def report(self) -> list[SeamState]:
        """Tell how each seam stands now, in the order of the table."""
        with self._lock:
            return [self._state(row) for row in self.rows]

    def table(self) -> str:
        """Give the report as text: a line for each seam, its particulars below."""
        states = self.report()
        wide = max((len(state.name) for state in states), default=4)
        lines = [f"{'seam':{wide}s}  {'state':8s}  where"]
        for state in states:
            first, *more = _details(state)
            lines.append(f"{state.name:{wide}s}  {state.status:8s}  {first}")
            lines += [f"{'':{wide}s}  {'':8s}  {detail}" for detail in more]
        return "\n".join(line.rstrip() for line in lines)

    def _state(self, row: Seam) -> SeamState:
        hooks = [hook for hook in self._hooks if hook.name == row.name]
        notes = [note for hook in hooks for note in [*hook.notes, covered(hook)] if note]
        findings = tuple(f for t in row.targets if (f := self._findings.get((row.name, t))))
        if not self._installed:
            status = "off"
        elif hooks:
            status = "hooked" if all(reaches(hook.place.now(), hook) for hook in hooks) else "replaced"
        else:
            status = "absent" if len(findings) == len(row.targets) else "waiting"
        return SeamState(
            row,
            status,
            tuple(hook.target for hook in hooks),
            tuple(name for hook in hooks for name in hook.rebound),
            findings,
            tuple(dict.fromkeys(notes)),
        )

    def _problem(self, role: str, now: bool = False, search: bool = False) -> str:
        """Say in full why a role is not filled; nothing if it is, or may still be.

        search: look whether modules that were not imported exist at all.
        """
        with self._lock:
            states = [self._state(row) for row in self.rows if row.role == role]
        lost = [note for state in states if state.status == "replaced" for note in state.notes]
        unfit = [f for state in states if state.seam.every for f in state.findings if f.exists]
        if not lost and not unfit and any(state.status == "hooked" for state in states):
            return ""
        tried = [f"  {note}" for note in lost]
        for state in states:
            for target in state.seam.targets:
                finding = self._findings.get((state.name, target)) or self._not_there(
                    state.seam, target, search
                )
                if finding is not None:
                    tried.append(f"  {target}: {finding.text}")
                elif target not in state.targets and not (now or lost or unfit):
                    return ""  # its module may still come
                elif target not in state.targets:
                    tried.append(f"  {target}: not imported yet")
        means = dict.fromkeys(state.seam.absent_means for state in states if state.seam.absent_means)
        return _problem_text(role, tried, list(means), bool(lost))

    def _not_there(self, row: Seam, target: str, search: bool) -> Finding | None:
        module = _module(target)
        if not search or module in sys.modules or is_findable(module):
            return None
        finding = Finding(target, f"there is no module {module}")
        with self._lock:
            return self._findings.setdefault((row.name, target), finding)

    # -- applying

    def _after_import(self, name: str, module: ModuleType) -> None:
        self._look_again({name: module})

    def _look_again(self, fresh: Mapping[str, ModuleType] | None = None) -> None:
        """Apply whatever can be applied now. fresh: modules whose body has just run.

        Raises: SeamError if a required role is sure to stay unfilled.
        """
        fresh = fresh or {}
        for row in self.rows:
            for target in row.targets:
                name = _module(target)
                module = fresh.get(name) or _imported(name)
                if module is not None:
                    self._apply(row, target, module, late=name not in fresh)
        for role in dict.fromkeys(row.role for row in self.rows if row.required):
            problem = self._problem(role) if self._installed else ""
            if problem:
                raise SeamError(problem)

    def _apply(self, row: Seam, target: str, module: ModuleType, late: bool) -> None:
        with self._lock:
            hooks = [hook for hook in self._hooks if hook.name == row.name]
            there = [hook for hook in hooks if hook.target == target]
            if not self._installed or row.name in self._busy:
                return
            if hooks and not there and not row.every:
                return  # the first one found counts
            if there and late:
                return  # ours, or somebody else's by now: `report` tells which
            self._busy.add(row.name)
        try:
            place = find(target, module, row.parameters)
            if isinstance(place, Finding):
                with self._lock:
                    self._findings[row.name, target] = place
            elif not any(reaches(place.raw, hook) for hook in hooks):
                self._hook(row, target, place)
        finally:
            with self._lock:
                self._busy.discard(row.name)

    def _hook(self, row: Seam, target: str, place: Place) -> None:
        above = [hook_of(layer) for layer in layers(place.function)]
        if any(hook is not None and hook.on and hook.name == row.name for hook in above):
            finding = Finding(target, "another table of megacp has hooked it", exists=True)
            with self._lock:
                self._findings[row.name, target] = finding
            return
        hook = Hook(row.name, target, place)
        hook.make(row.wrap, row.renames)
        others = foreign(target, place)
        if others:
            hook.notes.append(f"{target} was hooked before megacp by {others}; we wrap that")
        with self._lock:
            if not self._installed:
                return
            try:
                hook.apply()
            except (TypeError, AttributeError) as error:
                finding = Finding(target, f"it cannot be replaced: {error}", exists=True)
                self._findings[row.name, target] = finding
                return
            self._findings.pop((row.name, target), None)
            self._outlived += [old for old in self._hooks if (old.name, old.target) == (row.name, target)]
            self._hooks = [old for old in self._hooks if old not in self._outlived]
            self._hooks.append(hook)
            if isinstance(place.owner, ModuleType):  # methods live on the class, where everybody finds them
                hook.rebound += rebind(place.function, hook.wrapper)


def _module(target: str) -> str:
    return target.partition(":")[0]


def _imported(name: str) -> ModuleType | None:
    """Give a module whose body has run to its end."""
    module = sys.modules.get(name)
    if getattr(getattr(module, "__spec__", None), "_initializing", False):
        return None
    return module


def _problem_text(role: str, tried: list[str], means: list[str], is_lost: bool) -> str:
    if not tried:
        return f"no row of the table has the role {role!r}."
    lines = [
        f"the seam {role!r} was hooked, but is no longer in force:"
        if is_lost
        else f"the seam {role!r} finds no place to hook in this host. Tried, and found:",
        *tried,
    ]
    if means:
        lines.append(f"Not supported without it: {'; '.join(means)}.")
    if is_lost:
        lines.append("Install megacp after the other framework has put its own hooks in place.")
    else:
        lines.append(
            "If the host has such a place under another name, map it with a row in a file or with an entry "
            "point of group 'megacp.seams' (see megacp.hosts.rows)."
        )
    return "\n".join(lines)


def _details(state: SeamState) -> list[str]:
    """Give the lines of one seam for the table; at least one."""
    lines = list(state.targets)
    if not lines and state.status == "absent":
        lines += [f"{finding.target}: {finding.text}" for finding in state.findings]
    elif not lines and state.status == "waiting":
        tried = {finding.target for finding in state.findings}
        lines += [f"{target} (not imported)" for target in state.seam.targets if target not in tried]
    if not state.targets and state.status != "off" and state.seam.absent_means:
        lines.append(f"without it, not supported: {state.seam.absent_means}")
    if state.rebound:
        lines.append("also in " + ", ".join(state.rebound))
    return [*lines, *state.notes] or [""]
