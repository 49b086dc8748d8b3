"""Context-parallel groups of hosts that have none: which ranks are in them, for every rank of 16 and several orders of ranks.

No process is started: each rank's view is asked in turn, of a torch.distributed that only notes which groups are made. With
MEGACP_APEX naming a checkout of NVIDIA/apex (25.09 or older, which have apex.transformer), its parallel_state is asked too.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from itertools import permutations
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

from megacp.config import Config
from megacp.errors import ConfigError
from megacp.hosts import legacy
from megacp.hosts.legacy import groups
from megacp.hosts.seams import Seams
from megacp.hosts.session import Session

WORLD = 16
APEX = os.environ.get("MEGACP_APEX", "")


class Made:
    """A process group that was only made."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks


class World:
    """What torch.distributed would say to one rank after another."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.rank, self.log = 0, []
        self.views: list[tuple[int, ...]] = []
        answers = {
            "is_initialized": lambda: True,
            "get_world_size": lambda group=None: WORLD if group is None else len(group.ranks),
            "get_rank": lambda group=None: self.rank if group is None else self._place(group),
            "new_group": self._new_group,
            "get_process_group_ranks": lambda group: list(group.ranks),
            "all_gather_object": self._all_gather_object,
        }
        for name, answer in answers.items():
            patch.setattr(dist, name, answer)

    def _place(self, group: Made) -> int:
        return group.ranks.index(self.rank) if self.rank in group.ranks else -1

    def _new_group(self, ranks, **_):
        self.log.append(tuple(ranks))
        return Made(tuple(ranks))

    def _all_gather_object(self, out, mine):
        self.views.append(mine)
        out[:] = self.everyone if hasattr(self, "everyone") else [mine] * WORLD


def host_of_order(order: str, tp: int, pp: int) -> ModuleType:
    """Make a registry of groups as old Megatrons have it, in any order of ranks (fastest first)."""
    host = ModuleType("host")
    sizes = {"tp": tp, "pp": pp, "dp": WORLD // (tp * pp)}
    names = order.split("-")

    def initialize_model_parallel(tensor_model_parallel_size=1, pipeline_model_parallel_size=1):
        for ranks in data_parallel(names, sizes):
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                host._GROUP = group

    host.initialize_model_parallel = initialize_model_parallel
    host.get_data_parallel_group = lambda: host._GROUP
    return host


def data_parallel(names: list[str], sizes: dict[str, int]) -> list[tuple[int, ...]]:
    """Say by arithmetic of its own which ranks a data-parallel group has, in rising place along that axis."""
    found: dict[tuple[int, ...], dict[int, int]] = {}
    for rank in range(WORLD):
        place, rest = {}, rank
        for name in names:
            place[name], rest = rest % sizes[name], rest // sizes[name]
        key = tuple(place[name] for name in names if name != "dp")
        found.setdefault(key, {})[place["dp"]] = rank
    return [tuple(ranks[at] for at in sorted(ranks)) for ranks in found.values()]


@pytest.fixture
def world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        yield World(patch)


def expected(names: list[str], sizes: dict[str, int], cp: int, rank: int) -> tuple[tuple[int, ...], ...]:
    """Place ranks on five axes, context parallel the inner part of data parallel, and read the groups off."""
    whole = next(ranks for ranks in data_parallel(names, sizes) if rank in ranks)
    at = whole.index(rank)
    context = tuple(whole[at - at % cp + i] for i in range(cp))
    batches = tuple(whole[i] for i in range(len(whole)) if i % cp == at % cp)
    return context, batches, whole


@pytest.mark.parametrize("order", ["-".join(p) for p in permutations(("tp", "dp", "pp"))])
def test_every_rank_of_16_is_in_the_groups_of_its_place_in_any_order(world: World, order: str) -> None:
    for tp, pp, cp in ((2, 2, 2), (1, 2, 4), (4, 1, 2), (1, 1, 8), (2, 2, 4), (2, 2, 1)):
        sizes = {"tp": tp, "pp": pp, "dp": WORLD // (tp * pp)}
        names = order.split("-")
        world.everyone = [expected(names, sizes, cp, rank)[2] for rank in range(WORLD)]
        logs = []
        for world.rank in range(WORLD):
            host = host_of_order(order, tp, pp)
            host.initialize_model_parallel(tp, pp)
            world.log = []
            found = groups.register(host, host.get_data_parallel_group, cp)
            logs.append(list(world.log))
            context, batches, whole = expected(names, sizes, cp, world.rank)
            assert found.context.global_ranks == context
            assert found.batches.global_ranks == batches
            assert found.replicas.global_ranks == whole
            assert (found.context.rank, found.batches.rank) == (
                context.index(world.rank),
                batches.index(world.rank),
            )
        for log in logs:
            assert log == logs[0]  # every rank makes all groups, in one order


def test_a_size_that_does_not_divide_the_data_parallel_group_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 does not divide .* 8 ranks"):
        groups.split(range(8), 3)


def get_data_parallel_world_size():
    return -1


def get_data_parallel_rank():
    return -1


def test_callers_that_mean_batches_see_samples_and_what_they_call_may_mean_replicas(world: World) -> None:
    host = host_of_order("tp-dp-pp", 1, 1)
    world.rank, world.everyone = 5, [tuple(range(WORLD))] * WORLD
    host.initialize_model_parallel()
    run = Session(Config(), lambda: "", lambda: None)
    run.groups = groups.register(host, host.get_data_parallel_group, 4)
    session = lambda: run  # noqa: E731
    size = groups.data_parallel(get_data_parallel_world_size, session, "world_size")
    rank = groups.data_parallel(get_data_parallel_rank, session, "rank")

    def norm():
        return size()

    reduce = groups.as_replicas(norm, session)
    train = groups.as_batches(lambda: (size(), rank(), reduce()), session)
    assert train() == (4, 1, 16)
    assert (size(), rank()) == (16, 5)
    assert size(with_context_parallel=False) == 4
    assert groups.as_batches(lambda: size(with_context_parallel=True), session)() == 16
    with pytest.raises(KeyError):
        groups.as_batches(lambda: {}[1], session)()
    assert size() == 16  # a role ends with its caller, however that ends


def test_the_getters_have_megatron_s_names_and_are_taken_out_again(world: World) -> None:
    host = host_of_order("tp-dp-pp", 1, 1)
    package = ModuleType("package")
    package.initialize_model_parallel = host.initialize_model_parallel
    world.rank, world.everyone = 6, [tuple(range(WORLD))] * WORLD
    host.initialize_model_parallel()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "host", host)
        patch.setitem(sys.modules, "package", package)
        found = groups.register(host, host.get_data_parallel_group, 4)
    for module in (host, package):
        assert module.get_context_parallel_world_size() == 4
        assert module.get_context_parallel_rank() == 2
        assert module.get_context_parallel_global_ranks() == [4, 5, 6, 7]
        assert module.get_context_parallel_group().ranks == (4, 5, 6, 7)
    groups.withdraw(found)
    assert not any(name.startswith("get_context") for name in [*vars(host), *vars(package)])


@pytest.mark.skipif(not APEX, reason="MEGACP_APEX names no checkout of NVIDIA/apex that has apex.transformer")
@pytest.mark.parametrize(("tp", "pp", "cp"), [(2, 2, 2), (1, 2, 4), (4, 1, 2), (2, 4, 2)])
def test_apex_transformer_has_the_groups_on_every_rank(world: World, tp: int, pp: int, cp: int) -> None:
    sizes = {"tp": tp, "pp": pp, "dp": WORLD // (tp * pp)}
    names = ["tp", "dp", "pp"]
    world.everyone = [expected(names, sizes, cp, rank)[2] for rank in range(WORLD)]
    with pytest.MonkeyPatch.context() as patch:
        for name in ("apex", "apex.transformer"):  # without their kernels, which need a CUDA build
            package = ModuleType(name)
            package.deprecated_warning = lambda *_: None
            package.__path__ = [os.path.join(APEX, *name.split("."))]
            patch.setitem(sys.modules, name, package)
        for world.rank in range(WORLD):
            run = Session(Config(), lambda: "", lambda: None)
            seams = Seams(legacy.rows(lambda run=run: run))
            seams.install()
            try:
                state = importlib.import_module("apex.transformer.parallel_state")
                patch.setattr(state, "new_process_group", lambda ranks, backend: dist.new_group(ranks))
                state.initialize_model_parallel(tp, pp, context_parallel_size=cp)
                context, batches, whole = expected(names, sizes, cp, world.rank)
                assert state.get_context_parallel_group().ranks == context
                assert state.get_data_parallel_group(with_context_parallel=False).ranks == batches
                assert state.get_data_parallel_group().ranks == whole
                assert state.get_data_parallel_world_size(with_context_parallel=False) == len(batches)
                assert state.get_data_parallel_rank(with_context_parallel=False) == batches.index(world.rank)
                assert state.get_data_parallel_src_rank() == whole[0]
                state.destroy_model_parallel()
                assert not hasattr(state, "get_context_parallel_group")
            finally:
                seams.uninstall()
                for name in [n for n in sys.modules if n.startswith("apex.transformer.")]:
                    del sys.modules[name]


def test_positions_start_again_after_each_end_of_document() -> None:
    from megacp.hosts.legacy.model import _positions

    data = torch.tensor([[5, 9, 5, 5, 9, 5], [9, 9, 5, 5, 5, 5]])
    assert _positions(data, 9).tolist() == [[0, 1, 0, 1, 2, 0], [0, 0, 0, 1, 2, 3]]
    assert _positions(data, None).tolist() == [[0, 1, 2, 3, 4, 5]] * 2
