"""The example's loop over megatron-core: the same training at every context-parallel size.

float64 wherever the host allows it (rel 1e-9): its gradient clipping and its distributed optimizer take float32 at most, so
those are held to rel 1e-5 in float32. The runs without context parallelism and without documents are never hooked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megacp.testing import ranks
from tests.conformance.loop import (
    Run,
    differences,
    read_run,
    train_by_offsets,
    train_here,
    train_on_a_copied_config,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

STEPS = 6
SEQ = 64
FULL_RECOMPUTE = (
    "--recompute-granularity",
    "full",
    "--recompute-method",
    "uniform",
    "--recompute-num-layers",
    "1",
)


class Trainings:
    """Trains each configuration once and keeps what came out."""

    def __init__(self, corpus: Path, folder: Path) -> None:
        self.corpus, self.folder = corpus, folder
        self.done: dict[tuple[str, ...], Run] = {}

    def run(
        self,
        *flags: str,
        ranks_used: int = 1,
        dtype: str = "float64",
        hooked: bool = True,
        train: Callable[..., Any] = train_here,
        **settings: str,
    ) -> Run:
        named = map(str, sorted(settings.items()))
        key = (*flags, str(ranks_used), dtype, str(hooked), train.__name__, *named)
        if key not in self.done:
            out = self.folder / str(len(self.done))
            argv = [
                *("--data-path", str(self.corpus), "--tokenizer-model", f"{self.corpus}.model"),
                *("--num-layers", "2", "--hidden-size", "32", "--num-attention-heads", "4"),
                *("--group-query-attention", "--num-query-groups", "2", "--seq-length", str(SEQ)),
                *("--micro-batch-size", "2", "--global-batch-size", "8", "--train-iters", str(STEPS)),
                *("--lr", "1e-2", "--split", "100,0,0", "--use-cpu-initialization", "--params-dtype", dtype),
                *("--log-interval", "1000", "--dump-parameters", str(out), *flags),
            ]
            if dtype == "float64":
                argv += ["--clip-grad", "0"]
            records = ranks.run(train, ranks_used, argv, settings if hooked else None, timeout=120.0)
            self.done[key] = read_run(records[0], out)
        return self.done[key]


@pytest.fixture(scope="module")
def trainings(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    ranks.shutdown()
    yield Trainings(corpus, tmp_path_factory.mktemp("runs"))
    ranks.shutdown()  # these workers run under the CPU runtime; other tests start afresh


def cp(size: int) -> tuple[str, str]:
    return ("--context-parallel-size", str(size))


def assert_same(a: Run, b: Run, bound: float) -> None:
    found = differences(a, b)
    assert max(found.values()) <= bound, found
    assert len(a.records) == STEPS


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("comm", ["p2p", "all_gather"])
def test_training_at_any_size_is_the_never_hooked_training_float64(
    trainings: Trainings, size: int, comm: str
) -> None:
    alone = trainings.run(hooked=False)
    assert_same(alone, trainings.run(*cp(size), "--cp-comm-type", comm, ranks_used=size), 1e-9)


@pytest.mark.parametrize(
    "comm", [("a2a",), ("exchange",), ("a2a+p2p",), ("auto",), ("p2p", "all_gather")], ids=" ".join
)
def test_every_method_and_one_for_each_layer_trains_the_same_float64(
    trainings: Trainings, comm: tuple[str, ...]
) -> None:
    alone = trainings.run(documents="eod")
    split = trainings.run(*cp(4), "--cp-comm-type", *comm, ranks_used=4, documents="eod")
    assert_same(alone, split, 1e-9)


@pytest.mark.parametrize("size", [2, 4])
def test_training_with_documents_is_the_same_at_any_size_float64(trainings: Trainings, size: int) -> None:
    alone = trainings.run(documents="eod")
    assert_same(alone, trainings.run(*cp(size), ranks_used=size, documents="eod"), 1e-9)


def test_documents_change_the_training(trainings: Trainings) -> None:
    assert differences(trainings.run(documents="eod"), trainings.run(hooked=False))["loss"] > 1e-3


@pytest.mark.parametrize("flags", [(), ("--pipeline-model-parallel-size", "2")], ids=["", "two stages"])
def test_documents_by_the_script_s_offsets_are_those_by_eod(
    trainings: Trainings, flags: tuple[str, ...]
) -> None:
    one = ("--micro-batch-size", "1", *flags)
    size = 2 if flags else 1
    by_eod = trainings.run(*one, ranks_used=size, documents="eod")
    by_offsets = trainings.run(
        *one, *cp(2), ranks_used=2 * size, documents="cu_seqlens", train=train_by_offsets
    )
    assert_same(by_eod, by_offsets, 1e-9)


def test_documents_by_positions_are_those_by_eod(trainings: Trainings) -> None:
    by_eod = trainings.run("--reset-position-ids", *cp(2), ranks_used=2, documents="eod")
    by_positions = trainings.run("--reset-position-ids", *cp(2), ranks_used=2, documents="positions")
    assert_same(by_eod, by_positions, 1e-12)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "balanced", "per_document"])
def test_every_layout_trains_the_same_float64(trainings: Trainings, layout: str) -> None:
    rows = ("--micro-batch-size", "1") if layout == "per_document" else ()
    alone = trainings.run(*rows, documents="eod")
    assert_same(alone, trainings.run(*rows, *cp(2), ranks_used=2, documents="eod", layout=layout), 1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        ("--cp-comm-type", "exchange", "--recompute-granularity", "full", "--recompute-method", "uniform",
         "--recompute-num-layers", "1"),
        ("--position-embedding-type", "learned_absolute", "--reset-position-ids"),
    ],
    ids=["exchange, recomputed", "learned positions"],
)  # fmt: skip
def test_a_layout_for_each_micro_batch_trains_the_same_float64(
    trainings: Trainings, flags: tuple[str, ...]
) -> None:
    shared = flags[2:] if flags[0] == "--cp-comm-type" else flags
    alone = trainings.run(*shared, documents="eod")
    split = trainings.run(*cp(4), *flags, ranks_used=4, documents="eod", layout="balanced")
    assert_same(alone, split, 1e-9)


def test_later_pipeline_stages_find_the_same_layouts_float64(trainings: Trainings) -> None:
    pp = ("--pipeline-model-parallel-size", "2")
    alone = trainings.run(*pp, ranks_used=2, documents="eod")
    split = trainings.run(*pp, *cp(2), ranks_used=4, documents="eod", layout="balanced")
    assert_same(alone, split, 1e-9)


@pytest.mark.parametrize(
    "flags",
    [
        ("--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"),
        ("--recompute-granularity", "selective"),
    ],
)
def test_recompute_trains_the_same_float64(trainings: Trainings, flags: tuple[str, ...]) -> None:
    alone = trainings.run(documents="eod")
    assert_same(alone, trainings.run(*cp(2), *flags, ranks_used=2, documents="eod"), 1e-9)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("per_token", [(), ("--calculate-per-token-loss",)])
def test_answer_only_mask_trains_the_same_float64(
    trainings: Trainings, size: int, per_token: tuple[str, ...]
) -> None:
    alone = trainings.run("--answer-only", *per_token, hooked=False)
    assert_same(alone, trainings.run("--answer-only", *per_token, *cp(size), ranks_used=size), 1e-9)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_mask_that_leaves_one_rank_no_token_trains_the_same_float64(
    trainings: Trainings, layout: str
) -> None:
    middle = ("--loss-mask-range", "16", "48")  # zigzag over 2: rank 0 holds 0-15 and 48-63
    first_half = ("--loss-mask-range", "0", "32")
    flags = middle if layout == "zigzag" else first_half
    alone = trainings.run(*flags, hooked=False)
    assert_same(alone, trainings.run(*flags, *cp(2), ranks_used=2, layout=layout), 1e-9)


def test_learned_positions_train_the_same_float64(trainings: Trainings) -> None:
    learned = ("--position-embedding-type", "learned_absolute")
    alone = trainings.run(*learned, hooked=False)
    for size in (2, 4):
        assert_same(alone, trainings.run(*learned, *cp(size), ranks_used=size), 1e-9)


@pytest.mark.parametrize("documents", ["off", "eod"])
@pytest.mark.parametrize(
    "flags",
    [
        ("--tensor-model-parallel-size", "2"),
        ("--tensor-model-parallel-size", "2", "--sequence-parallel"),
        ("--pipeline-model-parallel-size", "2"),
        ("--pipeline-model-parallel-size", "2", "--virtual-pipeline-model-parallel-size", "1"),
        (),  # data parallel 2
    ],
    ids=["tp2", "tp2 sequence parallel", "pp2", "pp2 interleaved", "dp2"],
)
def test_context_parallel_beside_another_axis_trains_the_same_float64(
    trainings: Trainings, flags: tuple[str, ...], documents: str
) -> None:
    if "--virtual-pipeline-model-parallel-size" in flags:
        flags = (*flags[:-1], "2", "--num-layers", "4")
    alone = trainings.run(*flags, ranks_used=2, hooked=documents != "off", documents=documents)
    both = trainings.run(*flags, *cp(2), ranks_used=4, documents=documents)
    assert_same(alone, both, 1e-9)


def test_D66_pipeline_messages_hold_one_share_of_the_sequence_and_train_the_same_float64(
    trainings: Trainings,
) -> None:
    flags = (
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
        "--pipeline-model-parallel-size",
        "2",
    )
    alone = trainings.run(*flags, ranks_used=4, documents="eod")
    both = trainings.run(*flags, *cp(2), ranks_used=8, documents="eod")
    assert_same(alone, both, 1e-9)
    # [S / tp, B, hidden] and [S / (cp * tp), B, hidden]
    assert {tuple(shape) for record in alone.records for shape in record["stage_inputs"]} == {
        (SEQ // 2, 2, 32)
    }
    assert {tuple(shape) for record in both.records for shape in record["stage_inputs"]} == {
        (SEQ // 4, 2, 32)
    }


DROPOUT = ("--attention-dropout", "0.2", "--hidden-dropout", "0.2")


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ((), 2),
        ((), 4),
        (("--cp-comm-type", "a2a", *FULL_RECOMPUTE), 2),
        (("--tensor-model-parallel-size", "2", "--sequence-parallel"), 2),
        (("--pipeline-model-parallel-size", "2"), 2),
    ],
    ids=["cp2", "cp4", "cp2 a2a recompute", "tp2 cp2 sequence parallel", "pp2 cp2"],
)
def test_D36_dropout_from_positions_trains_the_same_at_every_size_float64(
    trainings: Trainings, flags: tuple[str, ...], size: int
) -> None:
    world = 2 if any("model-parallel" in flag for flag in flags) else 1
    alone = trainings.run(*flags, *DROPOUT, ranks_used=world, documents="eod", dropout="positions")
    split = trainings.run(
        *flags, *DROPOUT, *cp(size), ranks_used=world * size, documents="eod", dropout="positions"
    )
    assert_same(alone, split, 1e-9)
    if not flags:
        assert differences(alone, trainings.run(documents="eod"))["loss"] > 1e-3


def test_distributed_optimizer_trains_the_same_float32(trainings: Trainings) -> None:
    # Without biases: the gradient of a key's bias is 0 but for rounding (softmax does not see it), and Adam makes steps of noise.
    # Other elements of next to no gradient are the reason for the small learning rate: what they differ by is a share of it.
    plain = ("--disable-bias-linear", "--lr", "3e-4")
    flags = ("--use-distributed-optimizer", *plain)
    alone = trainings.run(*flags, ranks_used=2, dtype="float32", documents="eod")
    assert_same(alone, trainings.run(*flags, *cp(2), ranks_used=4, dtype="float32", documents="eod"), 1e-5)
    one = trainings.run(*plain, dtype="float32", documents="eod")
    assert_same(one, trainings.run(*flags, *cp(4), ranks_used=4, dtype="float32", documents="eod"), 1e-5)


def test_hooked_once_and_taken_out_again_leaves_no_trace(trainings: Trainings) -> None:
    before = trainings.run(hooked=False)
    trainings.run(*cp(2), ranks_used=2)
    trainings.done.pop(next(k for k in trainings.done if k == ("1", "float64", "False", "train_here")))
    after = trainings.run(hooked=False)
    assert differences(before, after) == {"loss": 0.0, "grad_norm": 0.0, "parameter": 0.0}


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_d42_a_checkpoint_of_one_size_goes_on_at_another_as_if_never_stopped_float64(
    trainings: Trainings, before: int, after: int, tmp_path: Path
) -> None:
    whole = trainings.run(documents="eod")
    folder, half = str(tmp_path), str(STEPS // 2)
    saved = trainings.run(
        *cp(before), "--save", folder, "--exit-interval", half, ranks_used=before, documents="eod"
    )
    resumed = trainings.run(*cp(after), "--load", folder, ranks_used=after, documents="eod")
    assert [r["iteration"] for r in (*saved.records, *resumed.records)] == [*range(1, STEPS + 1)]
    found = differences(Run(whole.records[STEPS // 2 :], whole.parameters), resumed)
    assert max(found.values()) <= 1e-9, found


PACKED = ("--pack-documents", "--cut-documents", "--calculate-per-token-loss")


@pytest.mark.parametrize("loss", [(), ("--loss-per-document",)], ids=["by token", "by document"])
@pytest.mark.parametrize("size", [2, 4])
def test_packed_documents_train_the_same_at_any_size_float64(
    trainings: Trainings, size: int, loss: tuple[str, ...]
) -> None:
    flags = (*PACKED, *loss)
    alone = trainings.run(*flags, documents="positions")
    layout = {2: "auto", 4: "balanced"}[size]
    split = trainings.run(
        *flags,
        *cp(size),
        "--cp-comm-type",
        "exchange",
        ranks_used=size,
        documents="positions",
        layout=layout,
    )
    assert_same(alone, split, 1e-9)


def test_a_loss_by_document_is_another_than_by_token(trainings: Trainings) -> None:
    by_token = trainings.run(*PACKED, documents="positions")
    by_document = trainings.run(*PACKED, "--loss-per-document", documents="positions")
    assert differences(by_token, by_document)["grad_norm"] > 1e-3


def test_packed_documents_on_two_replicas_and_two_pipeline_stages_train_the_same_float64(
    trainings: Trainings,
) -> None:
    flags = (*PACKED, "--pipeline-model-parallel-size", "2")
    alone = trainings.run(*flags, ranks_used=4, documents="positions")
    split = trainings.run(*flags, *cp(2), ranks_used=8, documents="positions", layout="balanced")
    assert_same(alone, split, 1e-9)


def test_d09_a_model_on_a_copy_of_the_config_counts_tokens_over_all_ranks_float64(
    trainings: Trainings,
) -> None:
    """Megatron-Bridge#4974: what was set on one config was not on the model's, and per-token gradients were never divided."""
    flags = ("--answer-only", "--calculate-per-token-loss")
    alone = trainings.run(*flags, ranks_used=2, hooked=False)
    split = trainings.run(*flags, *cp(2), ranks_used=4, train=train_on_a_copied_config)
    assert_same(alone, split, 1e-9)
