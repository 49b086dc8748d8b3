"""Which layout a micro-batch gets, and which are refused before a model is made."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from megacp import ConfigError, Mask, UnsupportedError
from megacp.hosts import limits
from megacp.hosts.placement import changes_by_batch, place

DOCUMENTS = Mask.documents([0, 4096, 4608, 5120, 5632, 6144, 7168, 8192])


def config(**more: object) -> SimpleNamespace:
    sizes = {"num_attention_heads": 8, "num_query_groups": 2, "kv_channels": 64, "hidden_size": 512}
    return SimpleNamespace(
        **{**sizes, "tensor_model_parallel_size": 1, "cp_comm_type": "p2p", "num_layers": 2, **more}
    )


def test_auto_takes_balanced_for_packed_documents_that_need_little_of_each_other() -> None:
    long = Mask.documents([0, *range(8192, 65536 + 1, 2048)])
    large = config(num_attention_heads=64, num_query_groups=8, kv_channels=128)
    placement = place("auto", long, 8, large, ["exchange"], "cuda")
    assert placement.layout.name == "balanced"
    assert "times as fast as with zigzag" in placement.reason


def test_auto_takes_zigzag_for_one_document_whatever_its_length() -> None:
    for mask in (Mask.causal(8192), Mask.documents([0, 8192])):
        assert place("auto", mask, 4, config(), ["p2p"], "cuda").layout.name == "zigzag"


def test_auto_counts_every_layer_by_its_own_method() -> None:
    slow = place("auto", DOCUMENTS, 4, config(), ["p2p", "exchange", "a2a+p2p", "auto"], "cuda")
    assert slow.layout.name in ("zigzag", "balanced") and slow.reason.startswith("auto: ")


def test_auto_stays_with_zigzag_where_layers_ask_for_positions_late() -> None:
    latent = config(multi_latent_attention=True)
    assert place("auto", DOCUMENTS, 4, latent, ["exchange"], "cuda").layout.name == "zigzag"


def test_rows_of_a_micro_batch_share_a_balanced_layout_with_equal_parts() -> None:
    rows = Mask.documents([[0, 100, 256], [0, 30, 60, 256]])
    layout = place("balanced", rows, 4, config(), ["p2p"], "cpu").layout
    assert layout.local_len == 64 and layout.padding == 0


def test_a_layout_by_document_for_rows_with_other_documents_is_refused() -> None:
    rows = Mask.documents([[0, 100, 256], [0, 30, 60, 256]])
    with pytest.raises(ConfigError, match="--micro-batch-size 1"):
        place("per_document", rows, 4, config(), ["p2p"], "cpu")


@pytest.mark.parametrize(
    ("layout", "setting", "value"),
    [
        ("per_document", "pipeline_model_parallel_size", 2),
        ("per_document", "sequence_parallel", True),
        ("per_document", "num_moe_experts", 4),
        ("per_document", "mtp_num_layers", 1),
        ("per_document", "multi_latent_attention", True),
        ("balanced", "multi_latent_attention", True),
    ],
)
def test_what_cannot_have_such_a_layout_is_refused_by_name(layout: str, setting: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"--megacp-layout {layout} is not offered with {setting}"):
        limits.check_model_config(config(**{setting: value}), 2, True, layout=layout)
    limits.check_model_config(config(**{setting: value}), 2, True, layout="auto")


def test_a_balanced_layout_wants_a_multiple_of_the_ranks_only() -> None:
    limits.check_sequence_length(1020, 4, "balanced")
    with pytest.raises(ConfigError, match="multiple of 1 \\* 4 = 4"):
        limits.check_sequence_length(1022, 4, "balanced")
    limits.check_sequence_length(1022, 4, "per_document")


@pytest.mark.parametrize("layout", ["balanced", "per_document"])
def test_a_host_that_is_given_context_parallelism_has_one_layout(layout: str) -> None:
    limits.check_one_layout("auto")
    with pytest.raises(UnsupportedError, match=f"--megacp-layout {layout} is not offered on a host without"):
        limits.check_one_layout(layout)


def test_layouts_differ_by_micro_batch_only_where_documents_do() -> None:
    assert changes_by_batch("balanced", True) and changes_by_batch("auto", True)
    assert not changes_by_batch("auto", False) and not changes_by_batch("contiguous", True)
