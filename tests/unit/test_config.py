"""Settings and their flags: what is taken from a command line, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from megacp.config import FLAGS, Config
from megacp.errors import ConfigError


def test_without_flags_nothing_is_taken_and_the_defaults_hold() -> None:
    config, rest = Config.from_argv(["train.py", "--lr", "1e-4"])
    assert config == Config(layout="auto", documents="off", kernel="auto", report="auto", eod_token=None)
    assert rest == ["train.py", "--lr", "1e-4"]


def test_flags_are_taken_out_wherever_they_stand_in_both_spellings() -> None:
    words = ["--megacp-layout", "zigzag", "train.py", "--lr", "1", "--megacp-documents=eod"]
    words += ["--megacp-eod-token", "0", "--bf16"]
    config, rest = Config.from_argv(words)
    assert (config.layout, config.documents, config.eod_token) == ("zigzag", "eod", 0)
    assert rest == ["train.py", "--lr", "1", "--bf16"]


def test_of_a_flag_given_twice_the_last_value_counts() -> None:
    config, _ = Config.from_argv(["--megacp-kernel=sdpa", "--megacp-kernel", "reference"])
    assert config.kernel == "reference"


def test_what_follows_a_bare_double_dash_is_left_alone() -> None:
    words = ["train.py", "--", "--megacp-layout", "zigzag"]
    assert Config.from_argv(words) == (Config(), words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--megacp-layout", "zigzg"], "--megacp-layout is 'zigzg'.* auto, zigzag, contiguous.*'zigzag'"),
        (["--megacp-documents=all"], "--megacp-documents is 'all'.* one of off, eod, positions"),
        (["--megacp-report", "on"], "--megacp-report is 'on'.* one of auto, off"),
        (["--megacp-kernel="], "--megacp-kernel is ''"),
        (["--megacp-eod-token", "x"], "--megacp-eod-token is 'x'; it must be an integer"),
        (["--megacp-eod-token=-1"], "--megacp-eod-token is -1; it must be a token id, 0 or more"),
        (
            ["--megacp-layout"],
            "--megacp-layout needs a value: --megacp-layout {auto,zigzag,contiguous,balanced,per_document}",
        ),
        (["--megacp-layout", "--lr"], "--megacp-layout needs a value"),
        (["--megacp-document", "eod"], "no flag --megacp-document. Did you mean --megacp-documents"),
        (["--megacp-method=ring"], "no flag --megacp-method. .* --cp-comm-type"),
    ],
)
def test_a_faulty_flag_is_refused_by_its_name(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Config.from_argv(words)


def test_an_unknown_flag_is_refused_with_all_legal_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_argv(["--megacp-x"])
    assert all(flag.name in str(caught.value) for flag in FLAGS)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("layout", None),
        ("documents", True),
        ("kernel", 3),
        ("kernel", "a b"),
        ("eod_token", True),
        ("timeout_s", 0),
        ("timeout_s", float("inf")),
        ("timeout_s", "9"),
    ],
)
def test_a_value_that_is_not_legal_is_refused_when_the_object_is_made(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field} is "):
        Config(**{field: value})
