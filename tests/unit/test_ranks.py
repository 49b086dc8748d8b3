"""The pool of ranks: what it gives back, what it says when a rank fails, and that nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist

from megacp.testing import ranks


def _rank_and_sum(x, scale=1.0):
    total = x * scale * (dist.get_rank() + 1)
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total


def _pid():
    return os.getpid()


def _store_is_clean():
    """Use the same keys in every call; a store that leaks would hand back the other call's value."""
    store = dist.distributed_c10d._get_default_store()
    seen = store.add("count", 1)
    dist.barrier()
    return seen


def _raise_on(rank):
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank} is unhappy")
    dist.barrier()


def _raise_everywhere():
    raise ArithmeticError(f"from rank {dist.get_rank()}")


def _stand_still_here():
    time.sleep(600)


def _hang_on(rank):
    if dist.get_rank() == rank:
        _stand_still_here()


def _die_on(rank):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _exit_on(rank):
    if dist.get_rank() == rank:
        sys.exit("leaving early")


def _leave_settings_behind():
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.set_num_threads(2)
    torch.use_deterministic_algorithms(True)
    os.environ["MEGACP_LEFT_BEHIND"] = "1"
    os.chdir("/")
    torch.rand(3)


def _settings():
    state = (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
    state += (torch.are_deterministic_algorithms_enabled(), "MEGACP_LEFT_BEHIND" in os.environ, os.getcwd())
    return *state, float(torch.rand(1))


def _tensors(view):
    big = torch.arange(1_000_000.0)
    return {
        "view": big[10:13],
        "bf16": torch.ones(2, 2, dtype=torch.bfloat16),
        "scalar": torch.tensor(7),
        "empty": torch.empty(0, 3),
        "bool": torch.tensor([True, False]),
        "graph": torch.ones(2, requires_grad=True) * 2,
        "transposed": view.transpose(0, 1),
        "column": big.reshape(1000, 1000)[:3, 1],
        "shared": big.is_shared() or view.is_shared(),
    }


def _unpicklable():
    return lambda: None


def _start_child(path):
    child = subprocess.Popen(["sleep", "600"])
    with open(f"{path}/{dist.get_rank()}", "w") as file:
        file.write(f"{child.pid} {os.getpid()}")
    time.sleep(600)


def _big(value):
    return value.sum(), value * 2


def _is_alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def _all_gone(pids, seconds=10.0):
    limit = time.monotonic() + seconds
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < limit:
        time.sleep(0.05)
    return not any(_is_alive(pid) for pid in pids)


def test_results_come_back_in_rank_order():
    for size in (1, 2, 3):
        results = ranks.run(_rank_and_sum, size, torch.ones(2), scale=2.0)
        assert [r[:2] for r in results] == [(rank, size) for rank in range(size)]
        for _, _, total in results:
            assert total.tolist() == [size * (size + 1.0)] * 2


def test_workers_are_kept_and_a_smaller_call_uses_the_first_ones():
    three = ranks.run(_pid, 3)
    assert ranks.run(_pid, 3) == three
    assert ranks.run(_pid, 2) == three[:2]
    assert len(set(three)) == 3 and os.getpid() not in three


def test_every_call_has_a_fresh_group_and_store():
    assert sorted(ranks.run(_store_is_clean, 2)) == [1, 2]
    assert sorted(ranks.run(_store_is_clean, 2)) == [1, 2]


def test_nothing_that_a_function_sets_is_left_for_the_next_call():
    before = ranks.run(_settings, 2)
    ranks.run(_leave_settings_behind, 2)
    assert ranks.run(_settings, 2) == before
    assert before[0] == (torch.float32, True, 1, False, False, os.getcwd(), before[0][-1])


def test_tensors_travel_by_value_whatever_their_dtype_shape_and_graph():
    got = ranks.run(_tensors, 1, torch.arange(6).reshape(2, 3))[0]
    assert got["view"].tolist() == [10, 11, 12] and got["view"].untyped_storage().nbytes() == 12
    assert got["bf16"].dtype == torch.bfloat16 and got["bf16"].tolist() == [[1, 1], [1, 1]]
    assert got["scalar"].shape == () and got["scalar"].item() == 7
    assert got["empty"].shape == (0, 3)
    assert got["bool"].tolist() == [True, False]
    assert got["graph"].tolist() == [2, 2] and got["graph"].is_leaf
    assert got["transposed"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert got["column"].tolist() == [1, 1001, 2001]
    assert not got["shared"] and not got["view"].is_shared()
    got["view"].add_(1)  # ours alone, and writable


def test_large_arguments_and_results_do_not_block_each_other():
    value = torch.ones(4_000_000)
    for total, doubled in ranks.run(_big, 2, value):
        assert total == 4_000_000 and doubled[-1] == 2


def test_a_rank_that_raises_is_named_with_its_traceback_and_the_others_with_their_place():
    start = time.monotonic()
    with pytest.raises(ranks.RanksError, match="only rank 1 is unhappy") as caught:
        ranks.run(_raise_on, 3, 1)
    assert time.monotonic() - start < 20
    assert set(caught.value.failed) == {1} and set(caught.value.waiting) == {0, 2}
    assert "KeyError" in caught.value.failed[1] and "_raise_on" in caught.value.failed[1]
    assert "_raise_on" in caught.value.waiting[0] and "rank 0 was still waiting" in str(caught.value)
    assert [r[0] for r in ranks.run(_rank_and_sum, 3, torch.ones(1))] == [0, 1, 2]


def test_when_all_ranks_raise_all_are_named():
    with pytest.raises(ranks.RanksError) as caught:
        ranks.run(_raise_everywhere, 2)
    assert set(caught.value.failed) == {0, 1} and not caught.value.waiting
    assert all(f"from rank {rank}" in str(caught.value) for rank in (0, 1))


def test_a_rank_that_hangs_ends_at_the_limit_and_says_where_it_stood():
    old = ranks.run(_pid, 2)
    start = time.monotonic()
    with pytest.raises(ranks.RanksError, match=r"limit of 2 s.*1 of 2") as caught:
        ranks.run(_hang_on, 2, 1, timeout=2.0)
    assert time.monotonic() - start < 10
    assert set(caught.value.waiting) == {1} and "_stand_still_here" in caught.value.waiting[1]
    assert _all_gone(old) and not set(old) & set(ranks.run(_pid, 2))


def test_a_rank_that_is_killed_is_named_with_the_signal():
    with pytest.raises(ranks.RanksError, match="SIGKILL") as caught:
        ranks.run(_die_on, 2, 0)
    assert 0 in caught.value.failed
    assert ranks.run(_pid, 1)


def test_a_rank_that_exits_is_a_failure_and_not_a_result():
    with pytest.raises(ranks.RanksError, match="leaving early"):
        ranks.run(_exit_on, 2, 1)


def test_a_worker_that_died_between_two_calls_is_noticed_and_replaced():
    with ranks.Pool(2) as pool:
        victim = pool.run(_pid)[1]
        os.kill(victim, signal.SIGKILL)
        assert _all_gone([victim])
        with pytest.raises(ranks.RanksError, match="rank 1 failed"):
            pool.run(_pid)
        assert victim not in pool.run(_pid)


def test_a_local_function_is_refused_before_anything_starts():
    with pytest.raises(TypeError, match="module level"):
        ranks.run(lambda: None, 2)


def test_a_result_that_cannot_be_pickled_is_reported_as_the_rank_s_failure():
    with pytest.raises(ranks.RanksError, match="_unpicklable"):
        ranks.run(_unpicklable, 1)


@pytest.mark.parametrize("size", [0, -1])
def test_a_world_size_below_one_is_refused(size):
    with pytest.raises(ValueError, match="world_size >= 1"):
        ranks.run(_pid, size)
    with pytest.raises(ValueError, match="world_size >= 1"):
        ranks.Pool(size)


def test_closing_a_pool_ends_its_workers_and_what_they_started(tmp_path):
    pool = ranks.Pool(2)
    workers = pool.run(_pid)
    pool.close()
    assert _all_gone(workers)
    with pytest.raises(ranks.RanksError):
        pool.run(_start_child, str(tmp_path), timeout=2.0)
    pids = [int(word) for rank in (0, 1) for word in (tmp_path / str(rank)).read_text().split()]
    assert len(pids) == 4 and _all_gone(pids)


PARENT = """
    import os, signal, sys, time
    from megacp.testing import ranks
    from tests.unit.test_ranks import _pid, _stand_still_here

    if __name__ == "__main__":
        print(*ranks.run(_pid, 2), flush=True)
        how = sys.argv[1]
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "raise":
            raise SystemExit(3)
        if how == "kill while running":
            import threading
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
            ranks.run(_stand_still_here, 2)
"""


@pytest.mark.parametrize("how", ["return", "raise", "kill", "kill while running"])
def test_no_worker_outlives_its_parent(tmp_path, how):
    script = tmp_path / "parent.py"
    script.write_text(textwrap.dedent(PARENT))
    path = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, str(script), how],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        check=False,
    )
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and _all_gone(pids)
    assert not list(tmp_path.glob("megacp-ranks-*"))


def test_a_warm_call_is_cheap():
    ranks.run(_pid, 2)
    times = []
    for _ in range(10):
        start = time.perf_counter()
        ranks.run(_pid, 2)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.25  # 0.03 s on an idle machine; a pool that is started anew takes seconds
