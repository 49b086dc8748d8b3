"""A CPU in the place of CUDA: an unmodified Megatron, with no GPU, on gloo.

`install()` lets code that was written for CUDA run where there is none: every device it names is this process's CPU.
It changes torch, not the host, wherever torch is what decides. The few places where a host asks for more than torch
are patched when the host's module is imported. `uninstall()` puts back every object it replaced; `report()` says what
is bridged.

It is for tests, examples and debugging. Arithmetic is the CPU's own, with the dtypes the host asked for, and nothing
is emulated: an operation that has no CPU kernel still fails. Streams keep program order, so a missing wait does not
show here, and a tensor is its own `.cuda()` and its own `.cpu()`.

TorchFunctionMode is not used for the redirection: torch leaves the mode while `Tensor.backward` runs, so recompute
and custom backward functions would see CUDA again.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed
import torch.serialization
import torch.utils._device

from megacp.testing import _cuda_names

__all__ = ["active", "install", "report", "uninstall"]

_CPU = torch.device("cpu")
_ABSENT = object()

_ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # Megatron asks for it when tensor or context parallel size exceeds 1
    "TORCHDYNAMO_DISABLE": "1",  # torch.compile would build each fused function with a C++ compiler
}
_METHODS = ("to", "new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like")


class _Changes:
    """What was replaced, in order, so that it can be put back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.lines: list[str] = []

    def attribute(self, owner: Any, name: str, value: Any) -> None:
        """Set owner.name, remembering whether it was the owner's own or inherited."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self.undo(functools.partial(delattr, owner, name) if before is _ABSENT else
                  functools.partial(setattr, owner, name, before))  # fmt: skip

    def item(self, mapping: MutableMapping[Any, Any], key: Any, value: Any) -> None:
        """Set mapping[key]."""
        before = mapping.get(key, _ABSENT)
        mapping[key] = value
        self.undo(functools.partial(mapping.pop, key, None) if before is _ABSENT else
                  functools.partial(mapping.__setitem__, key, before))  # fmt: skip

    def undo(self, step: Callable[[], Any]) -> None:
        """Run `step` when everything is put back."""
        self._undo.append(step)

    def restore(self) -> None:
        """Put everything back, last change first."""
        while self._undo:
            self._undo.pop()()


_changes: _Changes | None = None


def active() -> bool:
    """Say whether the runtime is installed in this process."""
    return _changes is not None


def report() -> list[str]:
    """Return one line for each thing bridged; empty when the runtime is not installed."""
    return [] if _changes is None else list(_changes.lines)


def install() -> None:
    """Answer for CUDA with the CPU. Best before the host is imported; installing twice does nothing."""
    global _changes
    if _changes is not None:
        return
    _changes = changes = _Changes()
    try:
        for part in (
            _environment,
            _torch_cuda,
            _devices,
            _type_names,
            _tensor_moves,
            _checkpoints,
            _groups,
            _spawned,
            _hosts,
        ):
            changes.lines.append(part(changes))
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put back every object that install() replaced."""
    global _changes
    if _changes is not None:
        changes, _changes = _changes, None
        changes.restore()


# The parts. Each makes its changes and returns its line of the report.


def _environment(changes: _Changes) -> str:
    for name, value in _ENVIRONMENT.items():
        changes.item(os.environ, name, value)
    return "environment: " + ", ".join(f"{name}={value}" for name, value in _ENVIRONMENT.items())


def _torch_cuda(changes: _Changes) -> str:
    count = 0
    for module_name, answers in _cuda_names.names().items():
        module = importlib.import_module(module_name)
        for name, answer in answers.items():
            if hasattr(module, name):
                changes.attribute(module, name, answer)
                count += 1
    return (
        f"torch.cuda: {count} names answered by the CPU (one device a local rank; is_available() is True except to "
        "torch itself; memory is this process's; events hold real times; its generator is the CPU's)"
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


def _devices(changes: _Changes) -> str:
    # torch keeps the set of these functions as they are when it is first asked, for `with torch.device(...)`.
    constructors = {function for function in torch.utils._device._device_constructors()}
    constructors |= {getattr(torch, name) for name in _LIKE}
    count = 0
    for module in (torch, torch.fft, torch.nested):
        for name, function in list(vars(module).items()):
            if callable(function) and _hashable(function) and function in constructors:
                wrapper = _redirected(function)
                changes.attribute(module, name, wrapper)
                _script_as(function, wrapper)
                count += 1
    for name in _METHODS:
        changes.attribute(
            torch.Tensor, name, _redirected(getattr(torch.Tensor, name), 1 if name == "to" else None)
        )
    context = torch.utils._device.DeviceContext
    changes.attribute(context, "__init__", _redirected(context.__init__, position=1))
    changes.attribute(torch, "set_default_device", _redirected(torch.set_default_device, position=0))
    return f"devices: {count} functions and {len(_METHODS)} methods put on the CPU what they are told to put on CUDA"


def _hashable(value: Any) -> bool:
    return getattr(type(value), "__hash__", None) is not None


def _script_as(function: Callable[..., Any], wrapper: Callable[..., Any]) -> None:
    """Let TorchScript, which knows functions by identity, compile a call of the wrapper as one of the function."""
    from torch.jit import _builtins

    operator = _builtins._find_builtin(function)
    if operator is not None:
        _builtins._register_builtin(wrapper, operator)


def _type_names(changes: _Changes) -> str:
    original = torch.Tensor.type

    @functools.wraps(original)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str):
            args = (args[0].replace("torch.cuda.", "torch."), *args[1:])
        name = original(self, *args, **kwargs)
        if args or kwargs or _cuda_names.calling_module() == "torch" or self.device.type != "cpu":
            return name
        return f"torch.cuda.{'Float' if self.dtype is torch.float64 else name.partition('.')[2].removesuffix('Tensor')}Tensor"

    changes.attribute(torch.Tensor, "type", type_)
    return "type names: Tensor.type() says 'torch.cuda.FloatTensor'; float64 too, so that optimizers keep it as it is"


def _tensor_moves(changes: _Changes) -> str:
    def itself(self: Any, *_: Any, **__: Any) -> Any:
        return self

    changes.attribute(torch.Tensor, "cuda", itself)
    changes.attribute(torch.Tensor, "pin_memory", itself)
    changes.attribute(torch.Tensor, "record_stream", lambda *_: None)
    changes.attribute(torch.nn.Module, "cuda", itself)
    return "moves: .cuda() and .pin_memory() return the tensor or module itself"


def _checkpoints(changes: _Changes) -> str:
    def restore(storage: Any, location: str) -> Any:
        return storage if location.partition(":")[0] == "cuda" else None

    registry = torch.serialization._package_registry
    before = list(registry)
    torch.serialization.register_package(15, lambda _: None, restore)  # before CUDA's own, which has 20
    changes.undo(functools.partial(registry.__setitem__, slice(None), before))
    return "torch.load: what was saved on CUDA, or is asked for there, is loaded on the CPU"


def _groups(changes: _Changes) -> str:
    def on_gloo(function: Callable[..., Any], position: int) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            named = args[position] if len(args) > position else kwargs.get("backend")
            if named is not None and "nccl" in str(named):
                kwargs.pop("pg_options", None)
                if len(args) > position:
                    args = (*args[:position], "gloo", *args[position + 1 :])
                else:
                    kwargs["backend"] = "gloo"
            kwargs.pop("device_id", None)
            return function(*args, **kwargs)

        return call

    import torch.distributed.distributed_c10d as c10d

    isend = c10d.isend

    @functools.wraps(isend)
    def sending_isend(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # Megatron frees a stage's output right after it began to send it, by giving it other data: safe on NCCL's
        # stream, a use after free on gloo's thread. The alias keeps the storage until the send is done.
        return isend(tensor.detach(), *args, **kwargs)

    wrappers = {
        "init_process_group": on_gloo(c10d.init_process_group, 0),
        "new_group": on_gloo(c10d.new_group, 2),
        "isend": sending_isend,
    }
    for name, wrapper in wrappers.items():
        changes.attribute(c10d, name, wrapper)
        changes.attribute(torch.distributed, name, wrapper)
    return "process groups: gloo where nccl is asked for; isend keeps what it sends alive"


def _spawned(changes: _Changes) -> str:
    """Install the runtime in spawned processes too: they import the host's script again before they do their work."""
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


# The hosts. Names only: nothing of a host is imported here.


def _without_fused_kernels(changes: _Changes, module: ModuleType) -> None:
    """Build no CUDA extension: the loader looks for nvcc before it finds nothing to build."""
    changes.attribute(module, "load", lambda *_, **__: None)


def _sequence_parallel_norm(changes: _Changes, module: ModuleType) -> None:
    """Build torch's norm where Megatron refuses to, with the mark on its parameters that Megatron's own norms set.

    With that mark Megatron sums their gradients over the tensor-parallel group.
    """
    norm = module.WrappedTorchNorm
    original = norm.__new__

    def new(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        is_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            built = original(cls, config, *args, **kwargs)
        finally:
            config.sequence_parallel = is_parallel
        for parameter in built.parameters():
            parameter.sequence_parallel = is_parallel
        return built

    changes.attribute(norm, "__new__", staticmethod(new))


def _resumable_torch_adam(changes: _Changes, module: ModuleType) -> None:
    """Let the distributed optimizer load a checkpoint into torch's Adam, and into float32 parameters.

    Megatron reads the number of steps from Adam's state before it loads, and torch makes none before the first step.
    It then gives all parameters one step tensor, which Adam would count up once for each of them. And the shards of
    float32 parameters are views that autograd lets nobody write to.
    """
    optimizer = module.DistributedOptimizer
    describe, load = optimizer.state_dict, optimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            loaded = load(self, *args, **kwargs)
        for state in self.optimizer.state.values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return loaded

    @functools.wraps(describe)
    def state_dict(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:
            for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return describe(self)

    changes.attribute(optimizer, "state_dict", state_dict)
    changes.attribute(optimizer, "load_state_dict", load_state_dict)


# Arguments that choose a CUDA kernel, and the value with which Megatron computes the same thing without one.
_ARGUMENTS_ON_CPU = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "memory_efficient_layer_norm": False,
}


def _arguments(changes: _Changes, module: ModuleType) -> None:
    """Have the host's arguments choose no CUDA kernel, whatever the command line says, and say so on rank 0."""
    original = module.validate_args

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        if _changes is changes:
            asked = {name: getattr(args, name, value) for name, value in _ARGUMENTS_ON_CPU.items()}
            line = ", ".join(f"{name}={_ARGUMENTS_ON_CPU[name]} (was {value})" for name, value in asked.items()
                             if value != _ARGUMENTS_ON_CPU[name])  # fmt: skip
            if line:
                vars(args).update({name: _ARGUMENTS_ON_CPU[name] for name in asked if hasattr(args, name)})
                changes.lines.append(f"arguments: {line}")
                if os.environ.get("RANK", "0") == "0":
                    print(f"megacp: no CUDA kernel runs on a CPU, so {line}", file=sys.stderr, flush=True)
        return original(args, *rest, **kwargs)

    for holder in (
        module,
        *list(sys.modules.values()),
    ):  # those that imported it by value before a late install
        if getattr(holder, "__dict__", {}).get("validate_args") is original:
            changes.attribute(holder, "validate_args", validate_args)


_HOST_MODULES: dict[str, tuple[Callable[[_Changes, ModuleType], None], str]] = {
    "megatron.legacy.fused_kernels": (_without_fused_kernels, "load() builds nothing"),
    "megatron.fused_kernels": (_without_fused_kernels, "load() builds nothing"),
    "megatron.core.transformer.torch_norm": (
        _sequence_parallel_norm, "torch norms work with sequence parallelism",
    ),
    "megatron.core.optimizer.distrib_optimizer": (
        _resumable_torch_adam, "the distributed optimizer can load a checkpoint into torch's Adam and float32 parameters",
    ),
    "megatron.training.arguments": (_arguments, "arguments choose no CUDA kernel"),
    "megatron.arguments": (_arguments, "arguments choose no CUDA kernel"),
}  # fmt: skip


# Modules that import triton whether it is there or not, for kernels that only run when asked for.
_IMPORT_TRITON = ("megatron.core.transformer.custom_layers.batch_invariant_kernels",)


class _Triton(ModuleType):
    """Enough of triton to define kernels with, and nothing to run them."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self


@contextlib.contextmanager
def _triton_to_import() -> Iterator[None]:
    """Let `import triton` succeed in this block where triton is not installed."""
    if importlib.util.find_spec("triton") is not None:
        yield
        return
    sys.modules["triton"] = triton = _Triton("triton")
    sys.modules["triton.language"] = triton.language
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a patch on a host's module right after the module's own body."""

    def __init__(self, changes: _Changes) -> None:
        self._changes = changes
        self._looking: set[str] = set()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as the other finders do, and have it patched once it has run."""
        if fullname in self._looking or not (fullname in _HOST_MODULES or fullname in _IMPORT_TRITON):
            return None
        self._looking.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            with _triton_to_import() if fullname in _IMPORT_TRITON else contextlib.nullcontext():
                execute(module)
            self.patch(module)

        loader.exec_module = exec_module
        return spec

    def patch(self, module: ModuleType) -> None:
        """Patch a module that has run, if the runtime that asked for it is still the one installed."""
        if self._changes is not _changes or module.__name__ not in _HOST_MODULES:
            return
        patch, line = _HOST_MODULES[module.__name__]
        patch(self._changes, module)
        self._changes.lines.append(f"{module.__name__}: {line}")


def _hosts(changes: _Changes) -> str:
    finder = _AfterImport(changes)
    sys.meta_path.insert(0, finder)
    changes.undo(functools.partial(sys.meta_path.remove, finder))
    for name in _HOST_MODULES:
        if name in sys.modules:
            finder.patch(sys.modules[name])
    quiet = _Quiet()
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    logger.addFilter(quiet)
    changes.undo(functools.partial(logger.removeFilter, quiet))
    return f"hosts: {len(_HOST_MODULES)} modules are patched when they are imported (listed once they are)"


class _Quiet(logging.Filter):
    """Drops the warning that drawing from the device's generator moved the CPU's: here they are one."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every other record."""
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()
