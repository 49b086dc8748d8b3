"""Arguments and groups of a host that knows no context parallelism."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from megacp.config import FLAGS
from megacp.errors import UnsupportedError
from megacp.hosts import limits
from megacp.hosts.hooks import Function
from megacp.hosts.legacy.groups import register
from megacp.hosts.session import Session

_SIZE = "context_parallel_size"


def parse_args(original: Function, session: Callable[[], Session]) -> Function:
    """Add the host's missing flags and ours to its parser; where it checks its arguments in the same function, count ranks for it."""

    @functools.wraps(original)
    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        world = os.environ.get("WORLD_SIZE")

        def with_our_flags(parser: Any) -> Any:
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            _add_flags(parser, session())
            if checks_too:
                _count_ranks_after_parsing(parser, session())
            return parser

        try:
            parsed = original(with_our_flags, *args, **kwargs)
        finally:
            if world is not None:
                os.environ["WORLD_SIZE"] = world
        session().configure({flag.field: getattr(parsed, f"megacp_{flag.field}") for flag in FLAGS})
        if checks_too:
            parsed.world_size = int(world or 1)
            _take(parsed, session())
        return parsed

    module = sys.modules.get(original.__module__)
    checks_too = not hasattr(module, "validate_args")
    return parse_args


def _add_flags(parser: Any, run: Session) -> None:
    known = parser._option_string_actions
    group = parser.add_argument_group("megacp")
    if "--context-parallel-size" not in known:
        group.add_argument(
            "--context-parallel-size", type=int, default=1, help="ranks that share each sequence"
        )
    if "--cp-comm-type" not in known:
        group.add_argument("--cp-comm-type", nargs="+", default=["p2p"], help="how keys and values travel")
    for flag in FLAGS:
        if flag.name not in known:
            default = getattr(run.config, flag.field)
            group.add_argument(
                flag.name, metavar=flag.metavar, type=flag.read, default=default, help=flag.help
            )


def _count_ranks_after_parsing(parser: Any, run: Session) -> None:
    """Have a host that reads WORLD_SIZE right after parsing count one rank for each group that shares sequences."""
    own = parser.parse_known_args  # which parse_args calls too

    def parse_known_args(*args: Any, **kwargs: Any) -> Any:
        parsed, unknown = own(*args, **kwargs)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        _check(parsed, world, run)
        os.environ["WORLD_SIZE"] = str(world // getattr(parsed, _SIZE))
        return parsed, unknown

    parser.parse_known_args = parse_known_args


def validate_args(original: Function, session: Callable[[], Session]) -> Function:
    """Check what is not offered, then let the host check its arguments as if each group that shares sequences were one rank."""

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        world = args.world_size
        _check(args, world, session())
        args.world_size = world // getattr(args, _SIZE)
        try:
            checked = original(args, *rest, **kwargs)
        finally:
            args.world_size = world
        _take(args, session())
        return checked

    return validate_args


def _take(args: Any, run: Session) -> None:
    """Remember what the command line asked for."""
    run.arguments = args
    run.methods = run.comm_types = tuple(args.cp_comm_type)


_REFUSED: tuple[tuple[str, str], ...] = (
    ("num_experts", "its experts have not been run over ranks"),
    ("retro_add_retriever", "its retrieved neighbours are not split"),
    ("fp8_e4m3", "attention in 8 bits is not exact over ranks"),
    ("fp8_hybrid", "attention in 8 bits is not exact over ranks"),
)
_DROPOUT = ("attention_dropout", "hidden_dropout")


def _check(args: Any, world: int, run: Session) -> None:
    """Refuse what cannot be exact; all values are on the command line, which every rank has."""
    cp, tp = getattr(args, _SIZE), args.tensor_model_parallel_size
    limits.check_sizes(world, cp, min(tp, world), args.pipeline_model_parallel_size)
    run.configure({flag.field: getattr(args, f"megacp_{flag.field}") for flag in FLAGS})
    if not run.is_in_force(cp):
        return
    what = f"--context-parallel-size {cp}" if cp > 1 else "--megacp-documents"
    limits.check_one_layout(run.config.layout)
    if run.config.documents == "cu_seqlens":
        raise UnsupportedError(
            "megacp: --megacp-documents cu_seqlens reads packed_seq_params, which models of this host are not given. Use eod or "
            "positions."
        )
    if args.seq_length is not None:
        parallel = getattr(args, "sequence_parallel", False)
        limits.check_sequence_length(args.seq_length, cp, run.layout_name, tp, parallel)
    if run.has_keyed_dropout:
        raise UnsupportedError(
            "megacp: --megacp-dropout positions is not offered on this host, whose layers draw their own dropout. "
            "Set --attention-dropout 0 --hidden-dropout 0."
        )
    if run.config.broadcast_data == "on":
        raise UnsupportedError(
            "megacp: --megacp-broadcast-data on is not offered on this host, whose data sets every rank builds. Leave it away."
        )
    for name in _DROPOUT:
        if getattr(args, name, 0):
            flag = "--" + name.replace("_", "-")
            raise UnsupportedError(
                f"megacp: {name} is {getattr(args, name)!r}, which {what} does not offer: the host draws one pattern for the local "
                f"tokens of every rank, so training would not be the same as without it. Set {flag} 0."
            )
    for name, why in _REFUSED:
        if getattr(args, name, None):
            raise UnsupportedError(
                f"megacp: --{name.replace('_', '-')} is not offered with {what} on this host: {why}. Leave it away."
            )
    if getattr(args, "transformer_impl", "local") not in ("local", None):
        raise UnsupportedError(
            f"megacp: --transformer-impl {args.transformer_impl} is not offered with {what} on this host: its layers are not hooked. "
            "Use --transformer-impl local."
        )
    if getattr(args, "reset_attention_mask", False) and not run.has_documents:
        raise UnsupportedError(
            f"megacp: --reset-attention-mask with {what}: documents are kept apart by --megacp-documents eod here, not by a dense "
            "mask. Add it."
        )
    limits.check_methods(args.cp_comm_type, args.num_layers)


def initialize(original: Function, session: Callable[[], Session]) -> Function:
    """Split context-parallel groups out of the data-parallel ones that the host has just made.

    The size is the command line's, or what the call itself is given as ``context_parallel_size``, which this host does not know.
    """

    @functools.wraps(original)
    def initialize_model_parallel(*args: Any, context_parallel_size: int | None = None, **kwargs: Any) -> Any:
        run = session()
        cp = context_parallel_size
        if cp is None:
            cp = getattr(run.arguments, _SIZE, 1)
        given = inspect.signature(original).bind(*args, **kwargs)
        given.apply_defaults()
        tp, pp = (_size_of(given.arguments, kind) for kind in ("tensor", "pipeline"))
        limits.check_sizes(dist.get_world_size(), cp, tp, pp)
        if run.is_in_force(cp):
            run.check()
        result = original(*args, **kwargs)
        run.groups = register(sys.modules[original.__module__], run.own_group, cp)
        return result

    return initialize_model_parallel


def _size_of(values: dict[str, Any], kind: str) -> int:
    names = (f"{kind}_model_parallel_size", f"{kind}_model_parallel_size_")
    return next((int(values[name]) for name in names if name in values), 1)


def message_shape(original: Function, session: Callable[[], Session]) -> Function:
    """Let pipeline stages send each other the rank's own tokens: the shape is an argument, or read from the host's arguments."""
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = session()
        cp = run.groups.context.size if run.groups is not None else 1
        if cp == 1:
            return original(*args, **kwargs)
        given = signature.bind(*args, **kwargs)
        shape = given.arguments.get("tensor_shape")
        if is_schedule and shape is not None:
            given.arguments["tensor_shape"] = (shape[0] // cp, *shape[1:])
        if is_schedule:
            return original(*given.args, **given.kwargs)
        with _local_length(run, cp):
            return original(*given.args, **given.kwargs)

    is_schedule = "forward_step_func" in signature.parameters
    return call


@contextmanager
def _local_length(run: Session, cp: int) -> Iterator[None]:
    length = run.arguments.seq_length
    run.arguments.seq_length = length // cp
    try:
        yield
    finally:
        run.arguments.seq_length = length
