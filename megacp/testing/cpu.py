"""A CPU in the place of CUDA: an unmodified Megatron, with no GPU, on gloo.

`install()` lets code that was written for CUDA run where there is none: every device it names is this
process's CPU. It changes torch, not the host, wherever torch is what decides. The few places where a host
asks for more than torch are patched when the host's module is imported. `uninstall()` puts back every object
that was replaced; `report()` says what is bridged.

It is for tests, examples and debugging. Arithmetic is the CPU's own, with the dtypes the host asked for, and
nothing is emulated: an operation that has no CPU kernel still fails. Work is done in program order, so a
missing wait does not show here, and a tensor is its own `.cuda()` and its own `.cpu()`.

Devices are redirected by replacing torch's functions, not by a TorchFunctionMode: torch leaves the mode while
`Tensor.backward` runs, so recompute and custom backward functions would see CUDA again.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import multiprocessing.spawn
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.distributed_c10d as c10d
import torch.jit._builtins
import torch.serialization
import torch.utils._device

from megacp.testing import _cuda_hosts, _cuda_names
from megacp.testing._changes import Changes

__all__ = ["active", "install", "report", "uninstall"]

_CPU = torch.device("cpu")

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it when tensor or context parallel size exceeds 1
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile would build each fused function with a C++ compiler
}
_FLOAT32_TYPE = "torch.cuda.FloatTensor"
_METHODS = ("to", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")

_installed: Changes | None = None


def active() -> bool:
    """Say whether the runtime is installed in this process."""
    return _installed is not None


def report() -> list[str]:
    """Return one line for each thing bridged; empty when the runtime is not installed."""
    return [] if _installed is None else list(_installed.lines)


def install() -> None:
    """Answer for CUDA with the CPU. Best before the host is imported; installing twice does nothing."""
    global _installed
    if _installed is not None:
        return
    _installed = changes = Changes()
    try:
        for part in _PARTS:
            changes.lines.append(part(changes))
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put back every object that install() replaced."""
    global _installed
    if _installed is not None:
        changes, _installed = _installed, None
        changes.restore()


# The parts. Each makes its changes and returns its line of the report.


def _environment(changes: Changes) -> str:
    for name, value in _ENVIRONMENT.items():
        if name not in os.environ:
            changes.item(os.environ, name, value)
    return "environment: " + ", ".join(f"{name}={os.environ[name]}" for name in _ENVIRONMENT)


def _torch_cuda(changes: Changes) -> str:
    count = 0
    for module_name, answers in _cuda_names.names().items():
        module = importlib.import_module(module_name)
        for name, answer in answers.items():
            if hasattr(module, name):
                changes.attribute(module, name, answer)
                count += 1
    return (
        f"torch.cuda: {count} names answered by the CPU (one device a local rank; is_available() is True "
        "except to torch itself; memory is this process's; events hold real times; one generator for both)"
    )


def _on_cpu(device: Any) -> Any:
    """Return the CPU where `device` names a CUDA device, else `device`."""
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    if isinstance(device, str):
        return _CPU if device.partition(":")[0] == "cuda" else device
    # A bare number is a CUDA device.
    return _CPU if isinstance(device, int) and not isinstance(device, bool) else device


def _redirected(function: Callable[..., Any], position: int | None = None) -> Callable[..., Any]:
    """Wrap a function that takes `device`, by keyword or at `position`, and perhaps `pin_memory`."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if position is not None and len(args) > position:
            args = (*args[:position], _on_cpu(args[position]), *args[position + 1 :])
        return function(*args, **kwargs)

    return call


def _devices(changes: Changes) -> str:
    # For `with torch.device(...)` torch keeps the set of these functions, as they are when it is first asked.
    constructors = set(torch.utils._device._device_constructors())
    constructors |= {getattr(torch, name) for name in _LIKE}
    # TorchScript knows functions by identity: let it compile a call of the wrapper as one of the function.
    scripted = torch.jit._builtins._get_builtin_table()
    count = 0
    for module in (torch, torch.fft, torch.nested):
        for name, function in list(vars(module).items()):
            if callable(function) and _hashable(function) and function in constructors:
                wrapper = _redirected(function)
                changes.attribute(module, name, wrapper)
                if id(function) in scripted:
                    changes.item(scripted, id(wrapper), scripted[id(function)])
                count += 1
    for name in _METHODS:
        position = 1 if name == "to" else None
        changes.attribute(torch.Tensor, name, _redirected(getattr(torch.Tensor, name), position))
    changes.attribute(torch.nn.Module, "to", _redirected(torch.nn.Module.to, position=1))
    context = torch.utils._device.DeviceContext
    changes.attribute(context, "__init__", _redirected(context.__init__, position=1))
    changes.attribute(torch, "set_default_device", _redirected(torch.set_default_device, position=0))
    return f"devices: {count} functions and {len(_METHODS)} methods take the CPU where they are told CUDA"


def _hashable(value: Any) -> bool:
    return getattr(type(value), "__hash__", None) is not None


def _type_names(changes: Changes) -> str:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        answer = original(self, *args, **kwargs)
        if args or kwargs or self.device.type != "cpu" or _cuda_names.calling_module() == "torch":
            return answer
        # Megatron sorts parameters by these names and knows no float64; called "Float" they stay as they are.
        return _FLOAT32_TYPE if self.dtype is torch.float64 else answer.replace("torch.", "torch.cuda.", 1)

    changes.attribute(torch.Tensor, "type", type_)
    return f"type names: Tensor.type() says {_FLOAT32_TYPE!r}, of float64 too: optimizers then keep it"


def _tensor_moves(changes: Changes) -> str:
    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    changes.attribute(torch.Tensor, "cuda", itself)
    changes.attribute(torch.Tensor, "pin_memory", itself)
    changes.attribute(torch.Tensor, "record_stream", lambda *_: None)
    changes.attribute(torch.nn.Module, "cuda", itself)
    return "moves: .cuda() and .pin_memory() return the tensor or module itself"


def _checkpoints(changes: Changes) -> str:
    def restore(storage: Any, location: str) -> Any:
        return storage if location.partition(":")[0] == "cuda" else None

    registry = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(15, lambda _: None, restore)  # before CUDA's own, which has 20
    changes.undo(functools.partial(registry.__setitem__, slice(None), before))
    return "torch.load: what was saved on CUDA, or is asked for there, is loaded on the CPU"


def _groups(changes: Changes) -> str:
    def on_gloo(function: Callable[..., Any], default: str) -> Callable[..., Any]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs).arguments
            if "nccl" in str(given.get("backend") or default):
                given["backend"] = "gloo"
                given.pop("pg_options", None)
            given.pop("device_id", None)
            return function(**given)

        return call

    @functools.wraps(c10d.isend)
    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron frees a stage's output right after it has begun to send it, by giving it other data: safe
        # on NCCL's stream, a use after free on gloo's thread. The alias keeps the storage until it is sent.
        return isend(tensor.detach(), *args, **kwargs)

    @functools.wraps(c10d.all_to_all_single)
    def all_to_all(*args: Any, **kwargs: Any) -> Any:
        # Megatron's dispatcher of tokens makes numbers of these tensors only where they are on a GPU.
        given = sizes.bind(*args, **kwargs).arguments
        for name in ("output_split_sizes", "input_split_sizes"):
            if isinstance(given.get(name), torch.Tensor):
                given[name] = given[name].tolist()
        return all_to_all_single(**given)

    sizes = inspect.signature(c10d.all_to_all_single)
    all_to_all_single = c10d.all_to_all_single
    isend = c10d.isend
    wrappers = {
        "init_process_group": on_gloo(c10d.init_process_group, default="nccl"),
        "new_group": on_gloo(c10d.new_group, default="as the world has"),
        "isend": send,
        "all_to_all_single": all_to_all,
    }
    for name, wrapper in wrappers.items():
        changes.attribute(c10d, name, wrapper)
        changes.attribute(torch.distributed, name, wrapper)
    return "process groups: gloo where nccl is asked for; isend keeps what it sends alive; split sizes may be tensors"


def _spawned(changes: Changes) -> str:
    """Install the runtime in spawned processes too: before their work they import the host's script again."""
    original = multiprocessing.spawn.get_command_line

    @functools.wraps(original)
    def get_command_line(**kwargs: Any) -> list[str]:
        command = original(**kwargs)
        if "-c" in command:
            package = str(Path(__file__).resolve().parents[2])
            program = command.index("-c") + 1
            command[program] = (
                f"import sys; sys.path.append({package!r}); from {__name__} import install; install(); "
                f"{command[program]}"
            )
        return command

    changes.attribute(multiprocessing.spawn, "get_command_line", get_command_line)
    return "processes: spawned ones have this runtime too"


_PARTS = (
    _environment,
    _torch_cuda,
    _devices,
    _type_names,
    _tensor_moves,
    _checkpoints,
    _groups,
    _spawned,
    _cuda_hosts.bridge,
)
