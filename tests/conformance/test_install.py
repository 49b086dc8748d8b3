"""Putting the hooks in and taking them out, on the real megatron-core: nothing is done twice, and nothing stays behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.testing import ranks
from tests.conformance.loop import Run, differences
from tests.conformance.test_example_loop import Trainings, cp

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")


@pytest.fixture
def fresh(corpus: Path, tmp_path: Path) -> Iterator[Trainings]:
    """Trainings in workers that have never seen megacp; none is taken from what another test has run."""
    ranks.shutdown()
    yield Trainings(corpus, tmp_path)
    ranks.shutdown()


def assert_bit_identical(a: Run, b: Run) -> None:
    assert differences(a, b) == {"loss": 0.0, "grad_norm": 0.0, "parameter": 0.0}
    for shard, tensors in a.parameters.items():
        assert all(torch.equal(value, b.parameters[shard][name]) for name, value in tensors.items())


def test_install_train_uninstall_train_is_bit_identical_to_a_run_that_was_never_hooked(
    fresh: Trainings,
) -> None:
    flags = ("--answer-only", "--calculate-per-token-loss")  # so that the seams of the loss are in use too
    never = fresh.run(*flags, hooked=False)
    ranks.shutdown()
    for documents in ("off", "eod"):  # hooked as modules are imported, then late, into modules that are there
        hooked = fresh.run(*flags, *cp(2), ranks_used=2, documents=documents)
        assert differences(never, hooked)["parameter"] > 0  # other sums, or other documents: it was hooked
        fresh.done.clear()
        assert_bit_identical(never, fresh.run(*flags, hooked=False))
        fresh.done.clear()


# -- every place of the table, in a process of its own ----------------------------------------------------------------


def places() -> dict[str, Any]:
    """What is stored now at every target of the table that is there, and every by-value copy of it."""
    from megacp.hosts import hooks, megatron

    found: dict[str, Any] = {}
    for row in megatron.rows(lambda: pytest.fail("a seam ran")):
        for target in row.targets:
            name = target.partition(":")[0]
            place = hooks.find(target, sys.modules[name]) if name in sys.modules else None
            if isinstance(place, hooks.Place):
                found[target] = place.raw
                for module, values in [
                    (m, vars(sys.modules[m])) for m in list(sys.modules) if m.startswith("megatron")
                ]:
                    found |= {f"{module}.{key}": v for key, v in list(values.items()) if v is place.raw}
    return found


def in_and_out() -> dict[str, Any]:
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    import megatron.core.datasets.gpt_dataset
    import megatron.core.distributed
    import megatron.core.models.gpt
    import megatron.core.pipeline_parallel.schedules  # noqa: F401

    # What the command line says is nobody's business here: the framework has a parser of its own.
    sys.argv = ["train.py", "--megacp-layout", "nonsense", "--context-parallel-size", "banana"]
    before, finders = places(), list(sys.meta_path)
    megacp.install(Config(layout="contiguous", report="off"))
    once, hooked_finders = places(), list(sys.meta_path)
    megacp.install()
    twice, report = places(), megacp.report()
    settings = megacp.hosts._current().config.layout  # type: ignore[attr-defined]
    same_finders = list(sys.meta_path) == hooked_finders
    megacp.uninstall()
    after = places()
    return {
        "hooked": sorted(name for name in before if once[name] is not before[name]),
        "changed by the second": [name for name in once if twice[name] is not once[name]] or not same_finders,
        "left behind": [name for name in before if after[name] is not before[name]]
        or list(sys.meta_path) != finders,
        "settings": settings,
        "report": report,
    }


def test_installing_twice_is_a_no_op_and_uninstall_restores_every_place_and_copy() -> None:
    ranks.shutdown()
    (found,) = ranks.run(in_and_out, 1)
    ranks.shutdown()
    assert len(found["hooked"]) >= 20, found
    assert not found["changed by the second"] and not found["left behind"], found
    assert (
        "megatron.core.distributed.finalize_model_grads" in found["hooked"]
    )  # a copy: the late install rebinds it
    assert "also in megatron.core.distributed.finalize_model_grads" in found["report"]  # ... and says so
    assert found["settings"] == "contiguous"


def rivals() -> tuple[str, str]:
    """Somebody else hooks the same attention before us, and another one after us."""
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    forward = DotProductAttention.forward
    source = "def take(f):\n    def theirs(*a, **k):\n        return f(*a, **k)\n    theirs.__wrapped__ = f\n    return theirs\n"
    first: dict[str, Any] = {"__name__": "firstframework.patches"}
    second: dict[str, Any] = {"__name__": "secondframework.patches"}
    exec(source, first)
    exec(source, second)
    DotProductAttention.forward = first["take"](forward)
    try:
        megacp.install(Config(report="off"))
        before = megacp.report()
        DotProductAttention.forward = second["take"](DotProductAttention.forward)
        return before, megacp.report()
    finally:
        megacp.uninstall()
        DotProductAttention.forward = forward


def test_hooks_of_two_frameworks_on_one_target_are_reported() -> None:
    ranks.shutdown()
    ((before, after),) = ranks.run(rivals, 1)
    ranks.shutdown()
    assert "was hooked before megacp by firstframework.patches.theirs; we wrap that" in before
    assert "was hooked after megacp by secondframework.patches.theirs, which wraps us" in after
