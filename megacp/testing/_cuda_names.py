"""Stand-ins for the names of torch.cuda, answered by the CPU.

Nothing here changes torch. `names()` says which name should answer what, and `megacp.testing.cpu` puts the
answers in place and takes them away again. The stand-ins keep to one rule: work is done when the call
returns. So a stream has nothing to wait for, an event is the time at which it was recorded, and device memory
is this process's memory.

torch's own `_lazy_call`, `manual_seed` and `get_rng_state` are not replaced. They reach their device through
`is_initialized`, `current_device` and `default_generators`, which are, so that they act on the CPU's
generator also where a host imported them by value.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import time
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["TENSOR_TYPES", "Event", "Stream", "calling_module", "current_memory", "names", "peak_memory"]

TENSOR_TYPES = ("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long", "Short")
# Those who ask torch.cuda.is_available to decide whether *they* may call CUDA get the truth.
_TOLD_THE_TRUTH = ("torch", "megacp")
_KIB = 1024
# Ampere: has bfloat16, and Megatron asks it for nothing that only a newer device can do.
_CAPABILITY = (8, 0)


def calling_module(depth: int = 2) -> str:
    """Return the top-level package of the caller `depth` frames up."""
    name = sys._getframe(depth).f_globals.get("__name__", "")
    return str(name).partition(".")[0]


# Memory, in bytes.


def current_memory(*_: Any, **__: Any) -> int:
    """Return the process's resident memory in bytes, or its peak where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return peak_memory()
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_memory(*_: Any, **__: Any) -> int:
    """Return the process's peak resident memory in bytes, since the last reset if the system can reset it."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with contextlib.suppress(
        OSError, IndexError, ValueError
    ):  # getrusage keeps the peak through a reset, this does not
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:", 1)[1].split(None, 1)[0]) * _KIB
    return peak if sys.platform == "darwin" else peak * _KIB


def _reset_peak_memory(*_: Any, **__: Any) -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _total_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _memory_stats(*_: Any, **__: Any) -> dict[str, int]:
    stats: dict[str, int] = defaultdict(int)
    for kind in ("allocated_bytes", "reserved_bytes", "active_bytes", "requested_bytes"):
        stats[f"{kind}.all.current"] = current_memory()
        stats[f"{kind}.all.peak"] = peak_memory()
    return stats


def _memory_summary(*_: Any, **__: Any) -> str:
    return f"process memory: {current_memory()} bytes resident, {peak_memory()} bytes at its peak"


# Devices. Every rank of this node has one, numbered by its local rank, and they are all this process's CPU.


class _Devices:
    current = 0

    @staticmethod
    def count() -> int:
        return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))

    @classmethod
    def select(cls, device: Any) -> None:
        index = device if isinstance(device, int) else torch.device(device).index
        cls.current = cls.current if index is None else index

    @classmethod
    def exchange(cls, device: int) -> int:
        before = cls.current
        cls.current = device if device >= 0 else before
        return before


class _Generators:
    """The CPU's generator, whatever the device's number."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __iter__(self) -> Iterator[torch.Generator]:
        return iter([torch.default_generator] * len(self))

    def __len__(self) -> int:
        return _Devices.count()


def _is_available() -> bool:
    return calling_module() not in _TOLD_THE_TRUTH


def _properties(*_: Any, **__: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name="cpu",
        major=_CAPABILITY[0],
        minor=_CAPABILITY[1],
        total_memory=_total_memory(),
        multi_processor_count=os.cpu_count() or 1,
    )


# Streams and events.


class Stream:
    """A queue that is always empty: what was put on it is done."""

    cuda_stream = 0
    stream_id = 0
    device_index = 0
    priority = 0
    device = torch.device("cpu")

    def __init__(self, *_: Any, **__: Any) -> None:
        self._outer: list[Stream] = []

    def __enter__(self) -> Stream:
        self._outer.append(_current_stream())
        _set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        _set_stream(self._outer.pop())

    def wait_stream(self, stream: Any) -> None:
        """Return at once: the other stream is empty."""

    def wait_event(self, event: Any) -> None:
        """Return at once: the event has happened."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that all work is done."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record the event now and return it."""
        event = Event() if event is None else event
        event.record(self)
        return event


class Event:
    """A point in time, taken from the process's clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds: float | None = None

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        self._seconds = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds from this event to `end_event`.

        Raises: RuntimeError if either was not recorded, as torch does.
        """
        if self._seconds is None or end_event._seconds is None:
            raise RuntimeError(
                "Both events must be recorded before calculating elapsed time: call record() on each."
            )
        return (end_event._seconds - self._seconds) * 1000.0

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """Answer that the event has happened."""
        return True


_DEFAULT_STREAM = Stream()
_streams = {"current": _DEFAULT_STREAM}


def _current_stream(*_: Any, **__: Any) -> Stream:
    return _streams["current"]


def _set_stream(stream: Any, *_: Any, **__: Any) -> None:
    _streams["current"] = _DEFAULT_STREAM if stream is None else stream


def _stream(stream: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if stream is None else stream


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def names() -> dict[str, dict[str, Any]]:
    """Return {module: {name: what it answers}} for torch.cuda and the modules that define its names."""
    memory = {
        **dict.fromkeys(("memory_allocated", "memory_reserved", "memory_cached"), current_memory),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved", "max_memory_cached"), peak_memory),
        **dict.fromkeys(("reset_peak_memory_stats", "reset_max_memory_allocated"), _reset_peak_memory),
        **dict.fromkeys(("empty_cache", "set_per_process_memory_fraction"), _answer(None)),
        "mem_get_info": lambda *_, **__: (_total_memory() - current_memory(), _total_memory()),
        "memory_stats": _memory_stats,
        "memory_summary": _memory_summary,
        "memory_snapshot": _answer([]),
    }
    streams = {"Stream": Stream, "ExternalStream": Stream, "Event": Event}
    device = {
        **dict.fromkeys(("init", "synchronize", "ipc_collect", "set_sync_debug_mode"), _answer(None)),
        **dict.fromkeys(("can_device_access_peer", "is_current_stream_capturing"), _answer(False)),
        **dict.fromkeys(("utilization", "memory_usage", "temperature", "power_draw"), _answer(0)),
        **dict.fromkeys(("clock_rate", "get_sync_debug_mode"), _answer(0)),
        **dict.fromkeys(("_exchange_device", "_maybe_exchange_device"), _Devices.exchange),
        "is_available": _is_available,
        "is_initialized": _answer(True),
        "is_bf16_supported": _answer(True),
        "device_count": _Devices.count,
        "current_device": lambda: _Devices.current,
        "set_device": _Devices.select,
        "get_device_name": _answer("cpu"),
        "get_device_capability": _answer(_CAPABILITY),
        "get_device_properties": _properties,
        "device_memory_used": current_memory,
        "default_generators": _Generators(),
        "current_stream": _current_stream,
        "default_stream": _answer(_DEFAULT_STREAM),
        "set_stream": _set_stream,
        "stream": _stream,
    }
    kinds = {f"{kind}Tensor": getattr(torch, f"{kind}Tensor") for kind in TENSOR_TYPES}
    by_value = {name: device[name] for name in ("current_device", "device_count", "is_initialized")}
    return {
        "torch.cuda": {**device, **memory, **streams, **kinds},
        "torch.cuda.memory": memory,
        "torch.cuda.streams": streams,
        "torch.cuda.random": by_value,
        "torch.cuda.graphs": {"is_current_stream_capturing": device["is_current_stream_capturing"]},
        "torch.cuda.nvtx": dict.fromkeys(
            ("range_push", "range_pop", "range_start", "range_end", "mark"), _answer(0)
        ),
    }
