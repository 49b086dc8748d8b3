"""Arguments, groups and data of a Megatron run: what is read, checked and connected before the first step."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megacp import comm
from megacp.config import FLAGS
from megacp.errors import UnsupportedError
from megacp.groups import Group, as_group
from megacp.hosts import ahead, limits
from megacp.hosts.batches import Shared
from megacp.hosts.hooks import Function
from megacp.hosts.session import Session


def cp_group(module: Any, given: Any = None) -> Group:
    """Return the host's own context-parallel group: the one given, the module's, or that of its parallel_state."""
    handle = given
    for name in ("pg_collection", "model_comm_pgs"):
        handle = handle if handle is not None else getattr(getattr(module, name, None), "cp", None)
    if handle is None:
        handle = getattr(module, "cp_group", None)
    return as_group(handle if handle is not None else parallel_state().get_context_parallel_group())


def parallel_state() -> Any:
    """Return the host's registry of process groups."""
    return sys.modules["megatron.core.parallel_state"]


def parse_args(original: Function, session: Callable[[], Session]) -> Function:
    """Add our flags to the host's parser, so that they are known, shown in --help and kept with the run's arguments."""

    def parse_args(extra_args_provider: Any = None, *args: Any, **kwargs: Any) -> Any:
        is_ours = False

        def with_our_flags(parser: Any) -> Any:
            nonlocal is_ours
            parser = extra_args_provider(parser) if extra_args_provider is not None else parser
            group = parser.add_argument_group("megacp")
            if "--cp-comm-type" not in parser._option_string_actions:  # hosts that knew one way only
                is_ours = True
                group.add_argument(
                    "--cp-comm-type",
                    nargs="+",
                    default=["p2p"],
                    help="how keys and values travel, for all layers or for each one",
                )
            for flag in FLAGS:
                if flag.name not in parser._option_string_actions:
                    default = getattr(session().config, flag.field)
                    group.add_argument(
                        flag.name, metavar=flag.metavar, type=flag.read, default=default, help=flag.help
                    )
            return parser

        parsed = original(with_our_flags, *args, **kwargs)
        session().configure({flag.field: getattr(parsed, f"megacp_{flag.field}") for flag in FLAGS})
        session().comm_types = tuple(parsed.cp_comm_type) if is_ours else ()
        return parsed

    return parse_args


_REFUSED_FLAGS = {
    "use_legacy_models": "only models of Megatron-core are split. Leave it away",
    "sft": "the host packs and splits such batches itself. Keep documents apart with --megacp-documents instead",
    "dataloader_inter_document_masking": "the host splits such batches itself. Use --megacp-documents instead",
    "dynamic_context_parallel": "the host splits such batches itself, each over ranks of its own. Leave it away",
    "sequence_packing_scheduler": "the host packs and splits such batches itself. Leave it away",
}


def validate_args(original: Function, session: Callable[[], Session]) -> Function:
    """Check what the host would let pass or refuse without a reason, and switch off its S x S mask where ours is in force."""

    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        cp = args.context_parallel_size
        tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        limits.check_sizes(args.world_size, cp, tp, pp)
        if session().is_in_force(cp):
            if getattr(args, "seq_length", None) is not None:
                limits.check_sequence_length(
                    args.seq_length, cp, session().layout_name, tp, args.sequence_parallel
                )
            for flag, why in _REFUSED_FLAGS.items():
                if getattr(args, flag, False):
                    raise UnsupportedError(
                        f"megacp: --{flag.replace('_', '-')} is not offered with --context-parallel-size {cp}"
                        f"{' and --megacp-documents' if session().has_documents else ''}: {why}."
                    )
            if getattr(args, "reset_attention_mask", False) and not session().has_documents:
                raise UnsupportedError(
                    f"megacp: --reset-attention-mask with --context-parallel-size {cp}: the host ignores it there, and documents "
                    "would see each other. Add --megacp-documents eod, which keeps them apart."
                )
            args.create_attention_mask_in_dataloader = False
        return original(args, *rest, **kwargs)

    return validate_args


def model_config(original: Function, session: Callable[[], Session]) -> Function:
    """Let no host refuse a method by name because its own attention could not do it; ours is in its place."""

    def post_init(self: Any) -> None:
        given = getattr(self, "cp_comm_type", None)
        if given is None or not session().is_in_force(getattr(self, "context_parallel_size", 1)):
            original(self)
            return
        self.cp_comm_type = None
        try:
            original(self)
        finally:
            self.cp_comm_type = given

    return post_init


def dataset_config(original: Function, session: Callable[[], Session]) -> Function:
    """Learn which token ends a document from the host's own data configuration."""

    def post_init(self: Any) -> None:
        original(self)
        eod = getattr(getattr(self, "tokenizer", None), "eod", None)
        if isinstance(eod, int) and session().eod is None:
            session().eod = eod

    return post_init


def _is_shared(run: Session) -> bool:
    """Say whether one rank reads the data of several."""
    return run.config.broadcast_data == "on" and parallel_state().get_context_parallel_world_size() > 1


def dataset_builder(original: Function, session: Callable[[], Session]) -> Function:
    """Build data sets on the first rank of each context-parallel group only (--megacp-broadcast-data on)."""
    signature = inspect.signature(original)

    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        is_asked = given.arguments["is_built_on_rank"]
        if _is_shared(session()):
            given.arguments["is_built_on_rank"] = lambda: (
                bool(is_asked()) and parallel_state().get_context_parallel_rank() == 0
            )
        original(*given.args, **given.kwargs)

    return init


def data_iterators(original: Function, session: Callable[[], Session]) -> Function:
    """Hand the batches of the group's first rank to all its ranks (--megacp-broadcast-data on).

    Raises: UnsupportedError where the host makes several validation sets.
    """

    def build_train_valid_test_data_iterators(*args: Any, **kwargs: Any) -> Any:
        if not _is_shared(session()):
            return _planned_ahead(original(*args, **kwargs), session())
        settings = sys.modules["megatron.training.global_vars"].get_args()
        for flag in ("full_validation", "multiple_validation_sets"):
            if getattr(settings, flag, False):
                raise UnsupportedError(
                    f"megacp: --megacp-broadcast-data on is not offered with --{flag.replace('_', '-')}: how many validation batches "
                    "there are is read from data that only one rank has. Leave one of the two away."
                )
        group = as_group(parallel_state().get_context_parallel_group())
        own = original(*args, **kwargs)
        there = torch.tensor([iterator is not None for iterator in own], dtype=torch.int64)
        there = comm.all_gather(group, there.to(torch.cuda.current_device()), "which data there are")[0]
        return tuple(
            _shared(iterator, group) if is_there else None
            for iterator, is_there in zip(own, there.tolist(), strict=True)
        )

    return build_train_valid_test_data_iterators


def _planned_ahead(iterators: Any, run: Session) -> Any:
    """Let the training data be read one batch ahead, where its documents give each batch a plan of its own."""
    size = parallel_state().get_context_parallel_world_size()
    train, *others = iterators
    if size == 1 or run.config.documents not in ("eod", "positions") or train is None:
        return iterators
    prepare = functools.partial(
        ahead.planned, run=run, rank=parallel_state().get_context_parallel_rank(), cp_size=size
    )
    chunks = train if isinstance(train, list) else [train]
    chunks = [
        _below(chunk, lambda batches: ahead.Ahead(batches, prepare)) if chunk is not None else None
        for chunk in chunks
    ]
    return (chunks if isinstance(train, list) else chunks[0], *others)


def _shared(iterator: Any, group: Group) -> Any:
    return _below(iterator, lambda batches: Shared(batches, group))


def _below(iterator: Any, wrap: Callable[[Any], Any]) -> Any:
    """Put something below the host's own wrapper, which can go back over batches."""
    module = sys.modules.get("megatron.core.rerun_state_machine")
    wrapper = getattr(module, "RerunDataIterator", None)
    if wrapper is None:
        return wrap(iterator)
    if isinstance(iterator, wrapper):
        iterator.iterable = wrap(iterator.iterable)
        return iterator
    return wrapper(wrap(iterator))


def initialize(original: Function, session: Callable[[], Session]) -> Function:
    """Check the sizes before the first group is made; afterwards connect the pipeline's stages."""
    signature = inspect.signature(original)

    def initialize_model_parallel(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        values = given.arguments
        limits.check_sizes(
            dist.get_world_size(),
            values["context_parallel_size"],
            values["tensor_model_parallel_size"],
            values["pipeline_model_parallel_size"],
        )
        if session().is_in_force(values["context_parallel_size"]):
            session().check()
        result = original(*args, **kwargs)
        session().connect_alone(values["context_parallel_size"])
        session().connect_pipeline(
            parallel_state().get_pipeline_model_parallel_group(),
            values.get("virtual_pipeline_model_parallel_size") or 1,
        )
        return result

    return initialize_model_parallel


def warm_up(original: Function, session: Callable[[], Session]) -> Function:
    """Let the host's warm-up draw as many random numbers as at size 1; weights made after it must not depend on the size."""

    def warm_up(*args: Any, **kwargs: Any) -> Any:
        settings = sys.modules["megatron.training.global_vars"].get_args()
        draws = settings.position_embedding_type == "learned_absolute" or getattr(
            settings, "num_experts", None
        )
        if not draws:  # only positions and routers are made from the numbers that follow
            return original(*args, **kwargs)
        cp, settings.context_parallel_size = settings.context_parallel_size, 1
        try:
            return original(*args, **kwargs)
        finally:
            settings.context_parallel_size = cp

    return warm_up
