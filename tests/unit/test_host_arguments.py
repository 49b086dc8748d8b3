"""The host's arguments: what is refused while they are validated, on every rank and before any group is made."""

from __future__ import annotations

import argparse
import types
from typing import Any

import pytest

from megacp.config import Config
from megacp.errors import UnsupportedError
from megacp.hosts import limits
from megacp.hosts.megatron.settings import model_config, parse_args, validate_args
from megacp.hosts.session import Session


def session(documents: str = "off") -> Session:
    return Session(Config(documents=documents), lambda: "", lambda: None)


def arguments(cp: int, **more: Any) -> types.SimpleNamespace:
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "world_size": cp}
    return types.SimpleNamespace(
        context_parallel_size=cp, seq_length=64, sequence_parallel=False, **sizes, **more
    )


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("use_legacy_models", "--use-legacy-models.*Megatron-core"),
        ("sft", "--sft .*--megacp-documents"),
        ("dataloader_inter_document_masking", "--dataloader-inter-document-masking.*--megacp-documents"),
        ("dynamic_context_parallel", "--dynamic-context-parallel"),
        ("sequence_packing_scheduler", "--sequence-packing-scheduler"),
        ("reset_attention_mask", "--reset-attention-mask.*--megacp-documents eod"),
    ],
)
def test_what_the_host_would_split_itself_is_refused_by_its_flag(flag: str, words: str) -> None:
    seen: list[Any] = []
    check = validate_args(seen.append, session)
    with pytest.raises(UnsupportedError, match=words):
        check(arguments(2, **{flag: True}))
    assert not seen
    check(arguments(1, **{flag: True}))  # without context parallelism and documents it is the host's business
    assert len(seen) == 1


def test_the_dense_mask_is_switched_off_where_ours_is_in_force() -> None:
    for cp, documents, expected in [(2, "off", False), (1, "eod", False), (1, "off", True)]:
        args = arguments(cp, create_attention_mask_in_dataloader=True)
        validate_args(lambda _: None, lambda documents=documents: session(documents))(args)
        assert args.create_attention_mask_in_dataloader is expected


# -- the flag that old hosts lack -----------------------------------------------------------------------------------------------


def parsed(host_has_the_flag: bool, words: list[str]) -> tuple[Session, argparse.Namespace]:
    def host_parse_args(extra_args_provider: Any = None) -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        if host_has_the_flag:
            parser.add_argument("--cp-comm-type", nargs="+", default=["p2p"])
        return argparse.ArgumentParser.parse_args(extra_args_provider(parser), words)

    run = session()
    return run, parse_args(host_parse_args, lambda: run)()


def test_a_host_without_cp_comm_type_is_given_the_flag() -> None:
    run, args = parsed(False, ["--cp-comm-type", "all_gather", "p2p"])
    assert run.comm_types == ("all_gather", "p2p") == tuple(args.cp_comm_type)
    run, _ = parsed(False, [])
    assert run.comm_types == ("p2p",)


def test_a_host_that_has_cp_comm_type_keeps_its_own() -> None:
    run, args = parsed(True, ["--cp-comm-type", "a2a"])
    assert run.comm_types == () and args.cp_comm_type == ["a2a"]


class Configuration:
    def __init__(self, cp: int, comm: Any) -> None:
        self.context_parallel_size, self.cp_comm_type, self.num_layers = cp, comm, 2


def test_a_host_that_knows_one_method_only_does_not_refuse_the_others() -> None:
    def post_init(self: Any) -> None:
        if self.context_parallel_size > 1 and self.cp_comm_type is not None:
            raise ValueError("only all_gather")

    hooked = model_config(post_init, session)
    config = Configuration(2, "p2p")
    hooked(config)
    assert config.cp_comm_type == "p2p"


def test_a_list_of_methods_must_name_one_for_each_layer() -> None:
    with pytest.raises(ValueError, match=r"names 3 methods.*the model has 2 layers"):
        limits.check_model_config(Configuration(2, ["p2p", "a2a", "p2p"]), 2, False)
