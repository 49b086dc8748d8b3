"""``megacp doctor [PATH]``: which of the places that megacp hooks a Megatron offers, without training.

The table of seams is the one that a run uses, and each place is looked for with the same eyes: its module is imported, and the
function and the parameters that a wrapper relies on are probed. Nothing is hooked and no group is made.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from megacp.config import Config
from megacp.errors import ConfigError
from megacp.hosts import legacy, megatron
from megacp.hosts.hooks import Finding, find
from megacp.hosts.rows import entry_point_rows
from megacp.hosts.seams import Seam
from megacp.hosts.session import Session

__all__ = ["Answer", "Place", "doctor", "examine"]


@dataclass(frozen=True)
class Place:
    """One place that was tried. is_there: it can be hooked; ``found`` says what is there instead."""

    target: str
    is_there: bool
    found: str


@dataclass(frozen=True)
class Answer:
    """How one seam stands.

    state: ``there``; ``missing``, and nothing else fills its role; ``not needed``, because another seam of its role is there.
    without_it: what is not supported while it is missing.
    """

    name: str
    role: str
    required: bool
    state: str
    places: tuple[Place, ...]
    without_it: str


def doctor(words: list[str]) -> int:
    """Look at a Megatron and print what was found; 0 if it can be run, 1 if a seam that is needed is missing.

    words: an optional path of a checkout, ``--json``, ``--help``.
    Raises: ConfigError for an unknown flag, or a path that holds no Megatron.
    """
    if "-h" in words or "--help" in words:
        print(_HELP)
        return 0
    flags = [word for word in words if word.startswith("-")]
    paths = [word for word in words if not word.startswith("-")]
    if set(flags) - {"--json"} or len(paths) > 1:
        raise ConfigError(f"megacp doctor takes one path and --json, not {' '.join(words)}.\n{_HELP}")
    with _quietly():
        host = _host(Path(paths[0]) if paths else None)
        others = entry_point_rows()
        table = legacy if legacy.is_needed(others) else megatron
        answers = examine([*table.rows(_no_session), *others])
    print(_as_json(host, answers) if flags else _as_text(host, answers))
    return 0 if _can_run(answers) else 1


def examine(rows: Sequence[Seam]) -> list[Answer]:
    """Look for every target of every seam, in the order of the table."""
    tried = {row.name: tuple(_try(row, target) for target in row.targets) for row in rows}
    filled = {row.role for row in rows if any(place.is_there for place in tried[row.name])}
    answers = []
    for row in rows:
        places = tried[row.name]
        instead = "not needed" if row.role in filled else "missing"
        state = "there" if any(place.is_there for place in places) else instead
        if state == "there" and not row.every:  # of candidates the first one is hooked
            places = places[: [place.is_there for place in places].index(True) + 1]
        answers.append(Answer(row.name, row.role, row.required, state, places, row.absent_means))
    return answers


def _try(row: Seam, target: str) -> Place:
    name = target.partition(":")[0]
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if name == missing or name.startswith(missing + "."):
            return Place(target, False, f"there is no module {missing}")
        return Place(target, False, f"{name} cannot be imported: it needs {missing}, which is not installed")
    except (Exception, SystemExit) as error:  # whatever a host's module does when it is imported
        return Place(target, False, f"{name} cannot be imported: {type(error).__name__}: {error}")
    place = find(target, module, row.parameters)
    if isinstance(place, Finding):
        return Place(target, False, place.text)
    return Place(target, True, "")


def _no_session() -> Session:
    return Session(Config(), lambda: "", lambda: None)


def _can_run(answers: Sequence[Answer]) -> bool:
    return not any(answer.required and answer.state == "missing" for answer in answers)


# -- the host -----------------------------------------------------------------------------------------------------------------


def _host(path: Path | None) -> dict[str, str]:
    """Make a checkout the one that is imported; tell where the host is, and what it calls its version.

    Raises: ConfigError if there is none.
    """
    if path is not None:
        if not (path / "megatron").is_dir():
            raise ConfigError(
                f"{path} holds no Megatron: there is no folder {path / 'megatron'}. Give the folder that pretrain_gpt.py stands in."
            )
        sys.path.insert(0, str(path.resolve()))
    import_module("torch")
    if not import_module("torch").cuda.is_available():
        import_module("megacp.testing.cpu").install()  # some hosts ask for CUDA when they are imported
    try:
        core = import_module("megatron.core")
    except ModuleNotFoundError as error:
        if error.name not in ("megatron", "megatron.core"):
            raise ConfigError(
                f"this Megatron cannot be imported: it needs {error.name}, which is not installed."
            ) from None
        if path is None:
            raise ConfigError(
                "no Megatron can be imported here. Give the path of a checkout: megacp doctor PATH."
            ) from None
        return {"path": str(path), "megatron-core": "none"}
    where = Path(getattr(core, "__file__", None) or next(iter(core.__path__))).resolve()
    if path is not None and path.resolve() not in where.parents:
        raise ConfigError(f"megatron.core is imported from {where}, not from {path}. Is it imported already?")
    return {
        "path": str(where.parents[2]),
        "megatron-core": str(getattr(core, "__version__", "of no version")),
    }


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep what a host prints and warns of while it is imported out of the answer."""
    with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield


# -- the answer ---------------------------------------------------------------------------------------------------------------


def _as_text(host: dict[str, str], answers: Sequence[Answer]) -> str:
    wide = max(len(answer.name) for answer in answers)
    lines = [f"Megatron at {host['path']}, megatron-core {host['megatron-core']}", ""]
    lines.append(f"{'seam':{wide}s}  {'needed':6s}  {'state':10s}  where")
    for answer in answers:
        first, *more = _where(answer)
        needed = "yes" if answer.required else ""
        lines.append(f"{answer.name:{wide}s}  {needed:6s}  {answer.state:10s}  {first}")
        lines += [f"{'':{wide}s}  {'':6s}  {'':10s}  {line}" for line in more]
    lost = [answer for answer in answers if answer.state == "missing"]
    lines.append("")
    if lost:
        lines.append("Not supported on this host:")
        lines += [f"  {what}" for what in _lost(answers)]
    fatal = [repr(answer.name) for answer in lost if answer.required]
    if fatal:
        lines.append(
            f"It cannot be run without {', '.join(fatal)}. If the host has such a place under another name, map it with an "
            "entry point of group 'megacp.seams'."
        )
    else:
        lines.append("Every seam that is needed is there.")
    return "\n".join(line.rstrip() for line in lines)


def _where(answer: Answer) -> list[str]:
    """Give the lines of one seam; at least one."""
    there = [place.target for place in answer.places if place.is_there]
    if there:
        return there
    return [f"{place.target}: {place.found}" for place in answer.places]


def _lost(answers: Sequence[Answer]) -> list[str]:
    return list(dict.fromkeys(a.without_it or a.name for a in answers if a.state == "missing"))


def _as_json(host: dict[str, str], answers: Sequence[Answer]) -> str:
    found: dict[str, Any] = {
        "host": host,
        "can_run": _can_run(answers),
        "unsupported": _lost(answers),
        "seams": [asdict(answer) for answer in answers],
    }
    return json.dumps(found, indent=2)


_HELP = """usage: megacp doctor [PATH] [--json]

Look at a Megatron, without training: which places that megacp hooks it offers, which were tried, what is missing,
and what is therefore not supported. PATH is a checkout (the folder of pretrain_gpt.py); without it, the Megatron
that is installed. Ends with 0 if every seam that is needed is there, with 1 if not."""
