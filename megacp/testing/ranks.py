"""Run a function on several ranks of one machine, as a distributed test needs it.

Starting processes and importing torch takes seconds, so the workers are started once and kept. Every call gets a
fresh default process group (gloo) under its own prefix of one store that the parent hosts; nothing of the group, of
the environment, of the random state or of the default dtype is left for the next call.

    results = ranks.run(fn, 4, x, scale=0.5)     # fn(x, scale=0.5) on ranks 0..3 -> [result of rank 0, ...]

    with ranks.Pool(2) as pool:                  # the same with a pool of one's own
        pool.run(fn, x)

A call has a hard limit. When a rank raises, dies or does not come back, one error in the parent names every failed
rank with its traceback and every rank that was still waiting with the line it stood at. The workers are then killed,
and the next call starts new ones. No worker outlives its parent, however the parent ends.
"""

from __future__ import annotations

import atexit
import faulthandler
import io
import os
import pickle
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.context import SpawnProcess

__all__ = ["Pool", "RanksError", "run", "shutdown"]

START_LIMIT = 180.0  # seconds for a worker to import torch, on a machine that is busy with other things
GRACE = 3.0  # seconds that the other ranks get to fail too, once one has
GROUP_SHARE = 0.75  # a stuck collective gives up at this share of the limit, so that its traceback is seen


class RanksError(RuntimeError):
    """Some ranks of a call failed.

    `failed` maps a rank to its traceback or its way of dying; `waiting` maps a rank that had not come back to the
    place where it stood.
    """

    def __init__(self, what: str, failed: dict[int, str], waiting: dict[int, str]) -> None:
        self.failed, self.waiting = failed, waiting
        lines = [what]
        for rank, text in sorted(failed.items()):
            lines += [f"--- rank {rank} failed ---", text.rstrip()]
        for rank, text in sorted(waiting.items()):
            lines += [f"--- rank {rank} was still waiting ---", text.rstrip() or "(it did not say where)"]
        super().__init__("\n".join(lines))


class Pool:
    """Keep `world_size` worker processes; every `run` uses all of them."""

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"megacp: a pool of ranks needs world_size >= 1, got {world_size}.")
        self.world_size = world_size
        self._workers: list[_Worker] = []
        self._store: Any = None  # TCPStore, hosted here
        self._folder: str | None = None  # where stuck workers write their stacks
        self._calls = 0
        self._lock = threading.Lock()
        self._owner = os.getpid()
        atexit.register(self.close)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Call `fn(*args, **kwargs)` on every rank, and return the results in rank order.

        fn is a module-level function; arguments and results are pickled. Tensors travel by value: they arrive
        detached and contiguous, and no memory is shared. `timeout` is in seconds and does not count the start of
        the workers.
        Raises: RanksError.
        """
        return self._run(self.world_size, fn, args, kwargs, timeout)

    def close(self) -> None:
        """Kill the workers. The pool can be used again; it then starts new ones."""
        if self._owner == os.getpid():
            self._kill()
            atexit.unregister(self.close)

    # -- inside --------------------------------------------------------------------------------------------------

    def _run(
        self,
        world_size: int,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        timeout: float,
    ) -> list[Any]:
        payload = _dump_call(fn, args, kwargs)
        with self._lock:
            done = False
            try:
                self._start(world_size)
                results = self._call(world_size, payload, timeout)
                done = True
            finally:
                if not done:  # also after KeyboardInterrupt: what the workers are doing is unknown
                    self._kill()
        return results

    def _start(self, world_size: int) -> None:
        import torch.distributed as dist

        if self._store is None:
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._folder = tempfile.mkdtemp(prefix="megacp-ranks-")
            atexit.register(self.close)
        new = range(len(self._workers), world_size)
        for index in new:
            self._workers.append(_Worker(os.path.join(str(self._folder), f"{index}.stack"), self._store.port))
        for index in new:
            worker = self._workers[index]
            if not worker.conn.poll(START_LIMIT) or not worker.says_ready():
                raise RanksError(f"megacp: worker {index} did not start.", {index: worker.fate()}, {})

    def _call(self, world_size: int, payload: bytes, timeout: float) -> list[Any]:
        self._calls += 1
        call = pickle.dumps((f"call{self._calls}", world_size, timeout * GROUP_SHARE, sys.path, payload))
        results: dict[int, Any] = {}
        failed: dict[int, str] = {}
        waiting = set(range(world_size))
        for rank in range(world_size):
            try:
                self._workers[rank].conn.send_bytes(pickle.dumps(rank))
                self._workers[rank].conn.send_bytes(call)
            except OSError:
                pass  # it died between two calls; the loop below finds out how
        deadline = time.monotonic() + timeout
        late = False
        while waiting and not late:
            for rank, good, value in self._answers(waiting, deadline - time.monotonic()):
                waiting.discard(rank)
                (results if good else failed)[rank] = value
            if failed:
                deadline = min(deadline, time.monotonic() + GRACE)
            late = time.monotonic() >= deadline
        if failed or waiting:
            name = f"megacp: {len(failed)} of {world_size} ranks failed"
            if not failed:
                name = f"megacp: the limit of {timeout:g} s passed with {len(waiting)} of {world_size} ranks waiting"
            raise RanksError(name, failed, self._stacks(waiting))
        for rank in range(world_size):
            self._workers[rank].conn.send_bytes(b"")  # all are through: let go of the group
        return [results[rank] for rank in range(world_size)]

    def _answers(self, waiting: set[int], seconds: float) -> list[tuple[int, bool, Any]]:
        """Wait for the next ranks that answer or die."""
        answers = []
        sources: dict[Any, int] = {}
        for rank in waiting:
            sources[self._workers[rank].conn] = sources[self._workers[rank].process.sentinel] = rank
        for rank in {sources[ready] for ready in connection.wait(list(sources), max(seconds, 0.0))}:
            worker = self._workers[rank]
            try:
                good, value = pickle.loads(worker.conn.recv_bytes())
            except (EOFError, OSError):
                good, value = False, worker.fate()
            answers.append((rank, good, value))
        return answers

    def _stacks(self, waiting: set[int]) -> dict[int, str]:
        """Ask ranks that are stuck where they stand."""
        ask = getattr(signal, "SIGUSR1", None)
        if ask is not None and waiting:
            for rank in waiting:
                pid = self._workers[rank].process.pid
                if pid is not None and self._workers[rank].process.is_alive():
                    os.kill(pid, ask)
            time.sleep(0.2)
        return {rank: self._workers[rank].stack() for rank in waiting}

    def _kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.process.join(10)
        self._workers = []
        self._store = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


class _Worker:
    """One process and the pipe to it, as the parent sees them."""

    def __init__(self, stack_path: str, port: int) -> None:
        context = get_context("spawn")
        self.stack_path = stack_path
        self.conn, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, stack_path, port), daemon=True
        )
        self.process.start()
        theirs.close()

    def says_ready(self) -> bool:
        try:
            return self.conn.recv_bytes() == b"ready"
        except (EOFError, OSError):
            return False

    def fate(self) -> str:
        self.process.join(5)
        code = self.process.exitcode
        if code is None:
            return "The process closed its pipe but has not ended."
        if code < 0:
            return f"The process was killed by signal {-code} ({signal.Signals(-code).name})."
        return f"The process exited with code {code}."

    def stack(self) -> str:
        try:
            with open(self.stack_path) as file:
                return file.read()
        except OSError:
            return ""

    def kill(self) -> None:
        self.conn.close()
        pid = self.process.pid
        if pid is None or self.process.exitcode is not None:
            return
        try:
            os.killpg(pid, signal.SIGKILL)  # with whatever the function under test has started
        except (OSError, AttributeError):
            self.process.kill()


# -- what travels ------------------------------------------------------------------------------------------------


class _ByValue(pickle.Pickler):
    """Pickle CPU tensors as their own bytes: a view does not drag its storage along, and nothing is shared."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is None or type(value) not in (torch.Tensor, torch.nn.Parameter):
            return NotImplemented
        if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
            return NotImplemented
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        return _rebuild, (
            flat.view(torch.uint8).numpy().tobytes(),
            value.dtype,
            tuple(value.shape),
            value.requires_grad,
        )


def _rebuild(data: bytes, dtype: Any, shape: tuple[int, ...], requires_grad: bool) -> Any:
    import torch

    flat = torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype)
    return flat.reshape(shape).requires_grad_(requires_grad)


def _dump(value: Any) -> bytes:
    buffer = io.BytesIO()
    _ByValue(buffer, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return buffer.getvalue()


def _dump_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    try:
        return _dump((fn, args, kwargs))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise TypeError(
            f"megacp: {getattr(fn, '__qualname__', fn)} cannot be sent to the ranks: {error}. "
            "Use a function at module level, and arguments that can be pickled."
        ) from error


# -- inside a worker ---------------------------------------------------------------------------------------------


def _serve(conn: connection.Connection, stack_path: str, port: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    if hasattr(os, "setsid"):
        os.setsid()
    threading.Thread(target=_end_with_parent, args=(os.path.dirname(stack_path),), daemon=True).start()
    stack_file = open(stack_path, "w")  # noqa: SIM115 - held for the life of the process
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=False)
    if os.path.isdir("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name that does not resolve costs seconds
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    conn.send_bytes(b"ready")
    while True:
        try:
            rank = pickle.loads(conn.recv_bytes())
            prefix, world_size, group_limit, path, payload = pickle.loads(conn.recv_bytes())
            sys.path[:] = path
            conn.send_bytes(_answer(store, prefix, rank, world_size, group_limit, payload))
            conn.recv_bytes()  # the others may still read what this rank has sent: keep the group until all are through
        except (EOFError, OSError):
            os._exit(0)  # the parent has closed the pool
        _forget()


def _end_with_parent(folder: str) -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed could not
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _answer(store: Any, prefix: str, rank: int, world_size: int, group_limit: float, payload: bytes) -> bytes:
    """Join the call's group, run the function, and pickle (True, result) or (False, traceback)."""
    import torch
    import torch.distributed as dist

    environment, folder = dict(os.environ), os.getcwd()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    try:
        torch.manual_seed(0)
        store.set_timeout(timedelta(seconds=group_limit))
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(prefix, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_limit),
        )
        fn, args, kwargs = pickle.loads(payload)
        return _dump((True, fn(*args, **kwargs)))
    except BaseException:  # SystemExit too: the worker must live to report it
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(folder)


def _forget() -> None:
    """Drop the default group and every process-wide setting that a function commonly changes."""
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    torch.set_deterministic_debug_mode("default")


# -- the shared pool ---------------------------------------------------------------------------------------------

_shared: Pool | None = None


def run(
    fn: Callable[..., Any], world_size: int, *args: Any, timeout: float = 60.0, **kwargs: Any
) -> list[Any]:
    """Call `fn(*args, **kwargs)` on `world_size` ranks of the pool that this process keeps.

    The pool grows to the largest world size asked for; smaller calls use its first workers. See `Pool.run`.
    """
    global _shared
    if world_size < 1:
        raise ValueError(f"megacp: ranks.run needs world_size >= 1, got {world_size}.")
    if _shared is None or _shared._owner != os.getpid():
        _shared = Pool(world_size)
    return _shared._run(world_size, fn, args, kwargs, timeout)


def shutdown() -> None:
    """Kill the shared pool's workers now rather than at exit."""
    if _shared is not None:
        _shared.close()
