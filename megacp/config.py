"""What a user can set, and nothing else: one frozen object, checked when it is made.

The flags ``--megacp-*`` are taken out of the command line before the host sees it, so that a host of any age
with any parser can be run. Which method carries keys and values is the host's own ``--cp-comm-type``.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from megacp.errors import ConfigError

__all__ = ["FLAGS", "Config", "Flag", "value_of"]


@dataclass(frozen=True)
class Flag:
    """One command-line flag and the field of `Config` that it fills."""

    field: str
    metavar: str
    help: str
    read: Callable[[str], object] = str

    @property
    def name(self) -> str:
        """Give the flag as it is typed, ``--megacp-...``."""
        return "--megacp-" + self.field.replace("_", "-")


LAYOUTS = ("auto", "zigzag", "contiguous", "balanced", "per_document")
DOCUMENTS = ("off", "eod", "positions", "cu_seqlens")
DROPOUT = ("off", "positions")
BROADCAST_DATA = ("off", "on")
REPORTS = ("auto", "off")

FLAGS: tuple[Flag, ...] = (
    Flag(
        "layout",
        "{" + ",".join(LAYOUTS) + "}",
        "who owns which token; auto: zigzag, or for packed documents balanced where that is faster",
    ),
    Flag(
        "documents",
        "{" + ",".join(DOCUMENTS) + "}",
        "keep packed documents apart: found by end-of-document tokens, restarting position ids or the script's offsets",
    ),
    Flag(
        "dropout",
        "{" + ",".join(DROPOUT) + "}",
        "positions: what is dropped follows from positions, the same at every size; off: dropout over ranks is refused",
    ),
    Flag(
        "broadcast_data",
        "{" + ",".join(BROADCAST_DATA) + "}",
        "on: one rank of those that share a sequence reads the data and sends it to the others",
    ),
    Flag("kernel", "NAME", "attention library for one block; auto takes the fastest that is exact here"),
    Flag("report", "{" + ",".join(REPORTS) + "}", "print what was hooked and what is in force, on rank 0"),
    Flag("eod_token", "ID", "end-of-document token id; without it the host's tokenizer is asked", int),
)


@dataclass(frozen=True)
class Config:
    """Hold the settings of one run; equal on every rank.

    layout: ``auto``, ``zigzag``, ``contiguous``, ``balanced`` or ``per_document``. documents: ``off``, ``eod``,
    ``positions`` or ``cu_seqlens``.
    dropout: ``off`` (refused over ranks) or ``positions`` (drawn by megacp, from positions, at every size).
    broadcast_data: ``off`` (each rank reads the data) or ``on`` (one of those that share a sequence does, for all of them).
    kernel: a name of the kernel registry, or ``auto``. report: ``auto`` or ``off``.
    eod_token: token id that ends a document, or None to ask the host's tokenizer.
    timeout_s: seconds to wait for a peer before `CommTimeout`.
    Raises: ConfigError if a value is not a legal one; the message names those that are.
    """

    layout: str = "auto"
    documents: str = "off"
    dropout: str = "off"
    broadcast_data: str = "off"
    kernel: str = "auto"
    report: str = "auto"
    eod_token: int | None = None
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        _one_of("layout", self.layout, LAYOUTS)
        _one_of("documents", self.documents, DOCUMENTS)
        _one_of("dropout", self.dropout, DROPOUT)
        _one_of("broadcast_data", self.broadcast_data, BROADCAST_DATA)
        _one_of("report", self.report, REPORTS)
        if not isinstance(self.kernel, str) or not self.kernel.isidentifier():
            raise ConfigError(f"kernel is {self.kernel!r}; it must be the name of a kernel, or 'auto'.")
        token = self.eod_token
        if token is not None and (not isinstance(token, int) or isinstance(token, bool) or token < 0):
            raise ConfigError(f"eod_token is {token!r}; it must be a token id, 0 or more, or None.")
        seconds = self.timeout_s
        if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds < math.inf:
            raise ConfigError(f"timeout_s is {seconds!r}; it must be a number of seconds above 0.")

    @classmethod
    def from_argv(cls, argv: Iterable[str]) -> tuple[Config, list[str]]:
        """Take the ``--megacp-*`` flags out of a command line; give the settings and what is left, in order.

        ``--flag value`` and ``--flag=value`` mean the same; of a flag given twice the last value counts;
        everything after a bare ``--`` is left alone.
        Raises: ConfigError for an unknown flag, a flag without a value, or a value that is not legal.
        """
        known = {flag.name: flag for flag in FLAGS}
        values: dict[str, object] = {}
        rest: list[str] = []
        words = list(argv)
        while words:
            word = words.pop(0)
            if word == "--":
                rest += [word, *words]
                break
            if not word.startswith("--megacp-"):
                rest.append(word)
                continue
            name, equals, value = word.partition("=")
            flag = known.get(name)
            if flag is None:
                raise ConfigError(_unknown(name, list(known)))
            if not equals:
                if not words or words[0].startswith("--"):
                    raise ConfigError(f"{name} needs a value: {name} {flag.metavar}.")
                value = words.pop(0)
            try:
                values[flag.field] = flag.read(value)
            except ValueError:
                raise ConfigError(f"{name} is {value!r}; it must be an integer.") from None
        try:
            return cls(**values), rest  # type: ignore[arg-type]
        except ConfigError as error:
            raise ConfigError(_as_flag(str(error), values)) from None


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """Give the last value of a flag of the host's, or None if it is not there; a flag at the very end has the value ''."""
    found = None
    for at, word in enumerate(arguments):
        if word == flag:
            found = arguments[at + 1] if at + 1 < len(arguments) else ""
        elif word.startswith(flag + "="):
            found = word[len(flag) + 1 :]
    return found


def _one_of(field: str, value: object, legal: Sequence[str]) -> None:
    if value in legal:
        return
    near = difflib.get_close_matches(str(value), legal, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"{field} is {value!r}; it must be one of {', '.join(legal)}.{hint}")


def _unknown(name: str, known: list[str]) -> str:
    prefix = "--megacp-"
    near = difflib.get_close_matches(
        name.removeprefix(prefix), [flag.removeprefix(prefix) for flag in known], n=1
    )
    hint = f" Did you mean {prefix}{near[0]}?" if near else ""
    if name in ("--megacp-method", "--megacp-cp-comm-type"):
        hint = " The method is chosen by the host's own --cp-comm-type."
    return f"there is no flag {name}.{hint} megacp's flags are: {', '.join(known)}."


def _as_flag(message: str, fields: Iterable[str]) -> str:
    """Name the flag, as it was typed, in place of the field it fills."""
    for flag in FLAGS:
        if flag.field in fields and message.startswith(flag.field + " "):
            return flag.name + message[len(flag.field) :]
    return message
