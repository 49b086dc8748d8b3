"""The command line: ``megacp run SCRIPT ARGS...``, or shorter, ``python -m megacp SCRIPT ARGS...``.

Runs somebody's training script as if python had been given it, with the hooks in place before its first line.
A refusal is one clean message on every rank and a quick end: no rank is left waiting in a collective.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from math import prod
from pathlib import Path

from megacp._version import __version__
from megacp.config import FLAGS, Config, value_of
from megacp.errors import ConfigError, MegacpError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and give its exit status: 0, or 1 after a refusal.

    argv: the words after the program's name; ``sys.argv[1:]`` if None.
    A refusal ends the process at once where threads or a process group could keep it alive.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except MegacpError as error:
        _print_refusal(error)
        _let_the_others_speak()
        if _could_hang():
            sys.stdout.flush()
            os._exit(1)
        return 1


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_help())
        return 0
    if words[0] == "--version":
        print(f"megacp {__version__}")
        return 0
    first = words[0]
    if first in COMMANDS and not Path(first).is_file():
        return COMMANDS[first][0](words[1:])
    if first.startswith("-") or first.endswith(".py") or Path(first).exists():
        return run(words)
    raise ConfigError(
        f"{first!r} is neither a command nor a script that exists in {Path.cwd()}.\n"
        f"Commands: {', '.join(COMMANDS)}. To train: megacp run SCRIPT ARGS..."
    )


def run(words: list[str]) -> int:
    """Put the hooks in place, then run a script (or ``-m`` module) as ``__main__`` with what is left for it.

    Raises: ConfigError for a bad flag, a script that does not exist, or sizes that cannot fit.
    """
    if words and words[0] in ("-h", "--help"):
        print(_run_help())
        return 0
    config, rest = Config.from_argv(words)
    start, arguments = _script(rest)
    check_sizes(arguments, os.environ.get("WORLD_SIZE"))
    _use_the_cpu_where_there_is_no_gpu()
    folder = str(Path(rest[0]).resolve().parent)  # where the host is, beside the script
    sys.path.insert(0, folder)
    try:
        import_module("megacp.hosts").install(config)
    finally:
        sys.path.remove(folder)
    try:
        start()
    except SystemExit as ended:
        if not ended.code:
            _end_the_groups()
        raise
    _end_the_groups()
    return 0


def _end_the_groups() -> None:
    """Take down gloo's process groups if the script left them, as Megatron's do.

    At the interpreter's end their threads are torn down in no order, and on a busy machine a process that has trained to its end then
    aborts now and then.
    """
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized() and dist.get_backend() == "gloo":
        dist.destroy_process_group()


def _doctor(words: list[str]) -> int:
    result: int = import_module("megacp.doctor").doctor(words)  # here, because it needs torch
    return result


def _verify(words: list[str]) -> int:
    result: int = import_module("megacp.verify").verify(words)
    return result


COMMANDS: dict[str, tuple[Callable[[list[str]], int], str]] = {
    "run": (run, "run a training script with context parallelism"),
    "verify": (_verify, "train at context-parallel size 1 and N, and compare"),
    "doctor": (_doctor, "tell which places of a Megatron can be hooked, without training"),
}


def _script(words: list[str]) -> tuple[Callable[[], None], list[str]]:
    """Find the program to run; give the call that runs it, and its arguments."""
    if not words:
        raise ConfigError("no script is given: megacp run [--megacp-...] SCRIPT ARGS...")
    first, *arguments = words
    if first == "-m":
        if not arguments:
            raise ConfigError("-m needs the name of a module: megacp run -m package.module ARGS...")
        module, *arguments = arguments

        def start_module() -> None:
            sys.argv = [module, *arguments]
            _set_first_path(os.getcwd())
            runpy.run_module(module, run_name="__main__", alter_sys=True)

        return start_module, arguments
    if first.startswith("-"):
        raise ConfigError(
            f"{first} stands before the script. Only --megacp-* flags and -m may: "
            "megacp run [--megacp-...] SCRIPT ARGS..."
        )
    script = Path(first)
    if not script.exists():
        raise ConfigError(f"the script {first!r} does not exist; the current folder is {Path.cwd()}.")

    def start_script() -> None:
        sys.argv = [first, *arguments]
        _set_first_path(str(script.resolve().parent))
        runpy.run_path(first, run_name="__main__")

    return start_script, arguments


def _set_first_path(folder: str) -> None:
    """Make a folder the first place for imports, where python itself puts a script's own folder."""
    if getattr(sys.flags, "safe_path", False):  # python -P put nothing there, so nothing is to be replaced
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder


def check_sizes(arguments: Sequence[str], world_size: str | None) -> None:
    """Refuse parallel sizes that no host could run, before anything heavy is imported.

    arguments: the host's own command line. world_size: the environment's WORLD_SIZE, or None.
    Raises: ConfigError if the context-parallel size is no integer of 1 or more, or if the ranks cannot be
    divided into tensor x pipeline x context groups.
    """
    flag = "--context-parallel-size"
    text = value_of(arguments, flag)
    if text is None:
        return
    size = _integer(text)
    if size is None or size < 1:
        raise ConfigError(
            f"{flag} is {text!r}. It must be an integer, 1 or more: the number of ranks that share one "
            f"sequence. Give a divisor of the number of ranks, or leave {flag} away to train without."
        )
    ranks = _integer(world_size)
    others = {name: _integer(value_of(arguments, name) or "1") for name in _MODEL_SIZES}
    known = [value for value in others.values() if value is not None and value >= 1]
    if ranks is None or len(known) < len(others):
        return  # the world is not known yet, or the host will refuse its own sizes
    product = size * prod(known)
    if ranks % product == 0:
        return
    shares = " x ".join(f"{name} {value}" for name, value in {**others, flag: size}.items())
    fitting = [str(c) for c in range(1, ranks + 1) if ranks % (c * prod(known)) == 0]
    advice = (
        f"With {ranks} ranks and these other sizes, {flag} can be {', '.join(fitting)}."
        if fitting
        else f"With these other sizes no {flag} fits {ranks} ranks: lower them, or start more ranks."
    )
    raise ConfigError(
        f"{flag} is {size}, and the world has {ranks} ranks. The number of ranks must be a multiple of "
        f"{shares} = {product}. {advice}"
    )


_MODEL_SIZES = ("--tensor-model-parallel-size", "--pipeline-model-parallel-size")


def _integer(text: str | None) -> int | None:
    try:
        return int(text) if text is not None else None
    except ValueError:
        return None


def _use_the_cpu_where_there_is_no_gpu() -> None:
    import torch  # here, because --help and refusals need not wait for it

    if torch.cuda.is_available():
        return
    import_module("megacp.testing.cpu").install()
    if _rank() == "0":
        print(
            "megacp: no CUDA device is available, so this run uses the CPU (gloo), with megacp.testing.cpu.",
            file=sys.stderr,
            flush=True,
        )


def _rank() -> str:
    return os.environ.get("RANK", "0")


def _print_refusal(error: MegacpError) -> None:
    if os.environ.get("MEGACP_TRACEBACK") == "1":
        traceback.print_exception(error)
    # One write, so that the lines of several ranks do not mix.
    sys.stderr.write(f"megacp [rank {_rank()}]: {str(error).removeprefix('megacp: ')}\n")
    sys.stderr.flush()


def _let_the_others_speak() -> None:
    """Wait a moment before leaving: torchrun ends every other rank as soon as one has failed, said or unsaid."""
    if (_integer(os.environ.get("WORLD_SIZE")) or 1) > 1:
        time.sleep(_MOMENT_S)


_MOMENT_S = 5.0


def _could_hang() -> bool:
    """Tell whether leaving python the usual way could wait for a peer or for a thread."""
    me = threading.current_thread()
    if any(t is not me and not t.daemon for t in threading.enumerate()):
        return True
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _help() -> str:
    lines = [f"  {name:10s}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: megacp COMMAND ...",
            "       torchrun ... -m megacp SCRIPT ARGS...      (short for: megacp run SCRIPT ARGS...)",
            "",
            "Exact, balanced context parallelism for any Megatron.",
            "",
            "commands:",
            *lines,
            "",
            "megacp COMMAND --help tells more; megacp --version prints the version.",
        ]
    )


def _run_help() -> str:
    default = Config()
    lines = []
    for flag in FLAGS:
        value = getattr(default, flag.field)
        lines += [f"  {flag.name} {flag.metavar}", f"      {flag.help} (default: {value})"]
    return "\n".join(
        [
            "usage: megacp run [--megacp-...] SCRIPT ARGS...",
            "       megacp run [--megacp-...] -m package.module ARGS...",
            "       torchrun ... -m megacp SCRIPT ARGS... --context-parallel-size N",
            "",
            "Hook the Megatron that SCRIPT imports, then run SCRIPT with ARGS as python would.",
            "The flags below may stand anywhere in ARGS; SCRIPT never sees them. The size and the method are",
            "the host's own flags: --context-parallel-size and --cp-comm-type.",
            "",
            *lines,
            "",
            "environment:",
            "  MEGACP_TRACEBACK=1    show where a refusal was raised",
            "  MEGACP_RECORD=FOLDER  write down what each step computes, as megacp verify does",
        ]
    )
