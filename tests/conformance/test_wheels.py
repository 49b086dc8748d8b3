"""The example's loop on older megatron-cores, from the package index: the same training at context-parallel size 1 and 2.

The wheels are fetched once, by pip as it is configured here, into pytest's cache; nothing is installed into the environment.
megatron-core 0.16.1, which is installed there, is held by test_example_loop.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from megacp.testing import ranks
from tests.conformance.loop import differences
from tests.conformance.test_example_loop import Trainings, cp

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")


def unpacked(version: str, folder: Path) -> Path:
    """Give a folder that holds this megatron-core and nothing else."""
    place = folder / version
    if not (place / "done").exists():
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--upgrade",
            "--quiet",
        ]
        command += [
            "--timeout",
            "15",
            "--retries",
            "1",
            "--disable-pip-version-check",
            "--target",
            str(place),
        ]
        done = subprocess.run(
            [*command, f"megatron-core=={version}"], capture_output=True, text=True, timeout=300
        )
        if done.returncode != 0:
            pytest.skip(
                f"pip cannot get a wheel of megatron-core {version}: {done.stderr.strip().splitlines()[-1]}"
            )
        (place / "done").touch()
    return place


@pytest.fixture(scope="module", params=["0.10.0", "0.12.1", "0.14.0"])
def old(
    request: pytest.FixtureRequest, corpus: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Trainings]:
    """Train on one old version: it comes first on the workers' path."""
    cache = getattr(request.config, "cache", None)  # pytest can be told to keep none
    folder = cache.mkdir("megatron-core") if cache is not None else tmp_path_factory.mktemp("megatron-core")
    place = unpacked(request.param, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(place)
        ranks.shutdown()
        (where,) = ranks.run(core_file, 1)
        assert where == str(place / "megatron" / "core" / "__init__.py")
        yield Trainings(corpus, tmp_path_factory.mktemp("runs"))
        ranks.shutdown()


def core_file() -> str:
    from megacp.testing import cpu

    cpu.install()
    import megatron.core

    return str(megatron.core.__file__)


@pytest.mark.parametrize(
    ("flags", "documents"),
    [((), "off"), (("--answer-only", "--calculate-per-token-loss"), "off"), (("--answer-only",), "eod")],
    ids=["plain", "answers only, per-token loss", "answers only, documents"],
)
def test_an_older_megatron_core_trains_the_same_float64(
    old: Trainings, flags: tuple[str, ...], documents: str
) -> None:
    alone = old.run(*flags, hooked=documents != "off", documents=documents)
    both = old.run(*flags, *cp(2), ranks_used=2, documents=documents)
    found = differences(alone, both)
    assert max(found.values()) <= 1e-9, found
