"""What a Megatron asks of CUDA beside torch, and what it is given instead.

Nothing here imports a host. Each patch is applied right after the host's own module has run, and only to what
the module turns out to have. Two kinds stand here: what chooses or builds a CUDA kernel, and what breaks
because without Transformer Engine and Apex a Megatron falls back to torch's norm and torch's Adam.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from megacp.after_import import AfterImport, is_findable
from megacp.testing import _apex
from megacp.testing._changes import Changes

__all__ = ["bridge"]


def bridge(changes: Changes) -> str:
    """Patch the hosts' modules that are imported, and the others when they are; return a line of report."""
    finder = _HostFinder(changes)
    sys.meta_path.insert(0, finder)
    changes.undo(functools.partial(sys.meta_path.remove, finder))
    for name in _PATCHES:
        if name in sys.modules:
            finder.patch(name, sys.modules[name])
    logger = logging.getLogger("megatron.core.tensor_parallel.random")
    quiet = _Quiet()
    logger.addFilter(quiet)
    changes.undo(functools.partial(logger.removeFilter, quiet))
    return f"hosts: {len(_PATCHES)} modules of a Megatron, each patched and listed here once it is imported"


class _Quiet(logging.Filter):
    """Drops the warning that drawing from the device's generator moved the CPU's: here they are one."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed within GPU RNG context" not in record.getMessage()


# Kernels.


def _fused_kernels(changes: Changes, module: ModuleType) -> str:
    """Look for no nvcc: the loader does so even where it has nothing left to build."""
    changes.attribute(module, "load", lambda *_, **__: None)
    return "load() builds nothing"


# Arguments that choose a CUDA kernel, and the value with which Megatron computes the same thing without one.
_ARGUMENTS = {
    "transformer_impl": "local",
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
    "memory_efficient_layer_norm": False,
}


def _arguments(changes: Changes, module: ModuleType) -> str:
    """Have the arguments choose no CUDA kernel, whatever the command line says; rank 0 says what changed."""
    original = getattr(module, "validate_args", None)
    if original is None:  # a host that has fewer kernels to choose from
        return "left as they are"

    @functools.wraps(original)
    def validate_args(args: Any, *rest: Any, **kwargs: Any) -> Any:
        found = {name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)}
        changed = {name: value for name, value in found.items() if value != _ARGUMENTS[name]}
        if changes.in_force and changed:
            vars(args).update({name: _ARGUMENTS[name] for name in changed})
            line = ", ".join(f"{name}={_ARGUMENTS[name]} (was {value})" for name, value in changed.items())
            changes.lines.append(f"arguments: {line}")
            if os.environ.get("RANK", "0") == "0":
                print(f"megacp: no CUDA kernel runs on a CPU, so {line}.", file=sys.stderr, flush=True)
        return original(args, *rest, **kwargs)

    for holder in list(sys.modules.values()):  # a late install finds it imported by value elsewhere
        if getattr(holder, "__dict__", {}).get("validate_args") is original:
            changes.attribute(holder, "validate_args", validate_args)
    return "the arguments choose no CUDA kernel"


# Modules that import triton whether it is there or not, for kernels that run only when they are asked for.
_IMPORT_TRITON = (
    "megatron.core.inference.contexts.attention_context.triton.tensor_ops",
    "megatron.core.ssm.ops.common.causal_conv1d_varlen",
    "megatron.core.ssm.ops.mamba2.batch_invariant_decode",
    "megatron.core.transformer.custom_layers.batch_invariant_kernels",
    "megatron.core.transformer.moe.ops.paged_stash",
    "megatron.core.transformer.moe.paged_stash",
)


class _Triton(ModuleType):
    """Enough of triton to define kernels with, and nothing to run them."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []  # a package, so that its submodules can be asked for
        self.__version__ = "0"  # too old for whatever asks

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Triton(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if len(args) == 1 and (callable(args[0]) or isinstance(args[0], bool)) else self


@contextlib.contextmanager
def _triton_to_import() -> Iterator[None]:
    """Let `import triton` succeed in this block where triton is not installed."""
    if "triton" in sys.modules or importlib.util.find_spec("triton") is not None:
        yield  # it is there, or one of these modules imports another
        return
    sys.modules["triton"] = triton = _Triton("triton")
    sys.modules["triton.language"] = triton.language
    try:
        yield
    finally:
        del sys.modules["triton"], sys.modules["triton.language"]


# Fallbacks.


def _old_numpy(changes: Changes, module: ModuleType) -> str:
    """Give numpy back the names of python's own types, which hosts of before 2023 use."""
    numpy = importlib.import_module("numpy")
    for name, kind in (("float", float), ("int", int), ("bool", bool)):
        if name not in vars(numpy):
            changes.attribute(numpy, name, kind)
    return "numpy has the names of python's types again"


def _old_layer_norm(changes: Changes, module: ModuleType) -> str:
    """Have layers find the kernels that they look for by name when they are built."""
    original = module.MixedFusedLayerNorm.__init__

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        with _apex.apex_to_import():
            original(*args, **kwargs)

    changes.attribute(module.MixedFusedLayerNorm, "__init__", init)
    return "layer norms are torch's"


def _core_layer_norm(changes: Changes, module: ModuleType) -> str:
    """Give a core that has no norm but Apex's that norm, by torch."""
    others = ("torch_layer_norm", "torch_norm")
    if getattr(module, "HAVE_FUSED_LAYER_NORM", True) or any(
        is_findable(f"megatron.core.transformer.{name}") for name in others
    ):
        return "left as it is"
    with _apex.apex_to_import():
        found = importlib.import_module("apex.normalization.fused_layer_norm")
    changes.attribute(module, "FusedLayerNormAffineFunction", found.FusedLayerNormAffineFunction)
    changes.attribute(module, "HAVE_FUSED_LAYER_NORM", True)
    return "Apex's layer norm is torch's"


def _yarn(changes: Changes, module: ModuleType) -> str:
    """Build YaRN's table on the CPU: its `with torch.device(number)` needs an accelerator."""
    embedding = module.YarnRotaryEmbedding
    original = embedding.__init__
    signature = inspect.signature(original)

    @functools.wraps(original)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if "use_cpu_initialization" in signature.parameters:
            given.arguments["use_cpu_initialization"] = True
        original(*given.args, **given.kwargs)

    changes.attribute(embedding, "__init__", init)
    return "YaRN's table is built on the CPU"


def _router(changes: Changes, module: ModuleType) -> str:
    """Say that Transformer Engine's product is not there: the router asks whether the name is None."""
    if not hasattr(module, "te_general_gemm"):
        changes.attribute(module, "te_general_gemm", None)
    return "the router multiplies with torch"


def _latent(changes: Changes, module: ModuleType) -> str:
    """Say that Transformer Engine is not there: its wrapper can be imported without it, and names no class."""
    if not isinstance(getattr(module, "TELinear", None), type) and getattr(module, "HAVE_TE", False):
        changes.attribute(module, "HAVE_TE", False)
    return "multi-latent attention asks for no class of Transformer Engine"


def _inference_layers(changes: Changes, module: ModuleType) -> str:
    """Put empty classes in the place of what derives from Transformer Engine's: Megatron asks what is an instance of them."""
    for name in ("InferenceColumnParallelLinear", "InferenceLayerNormColumnParallelLinear"):
        if not isinstance(getattr(module, name, None), type):
            changes.attribute(module, name, type(name, (), {}))
    return "layers for inference are classes"


def _attention(changes: Changes, module: ModuleType) -> str:
    """Let Megatron's own attention take values of another size than keys, as multi-latent attention has them."""
    attention = module.DotProductAttention
    original = attention.__init__
    if "v_channels" in inspect.signature(original).parameters:
        return "left as it is"

    @functools.wraps(original)
    def init(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if v_channels is not None:  # its output is viewed as [S, B, this]
            self.hidden_size_per_partition = v_channels * self.num_attention_heads_per_partition

    changes.attribute(attention, "__init__", init)
    return "attention takes values of another size than keys"


def _fp8(changes: Changes, module: ModuleType) -> str:
    """Quantize nothing without complaint: the distributed optimizer asks for it with an empty list too."""
    original = getattr(module, "_quantize_param_shard_impl", None)
    if original is None or getattr(module, "HAVE_TE", False):
        return "left as it is"

    def quantize(model_params: Any, *args: Any, **kwargs: Any) -> Any:
        return original(model_params, *args, **kwargs) if len(model_params) else None

    changes.attribute(module, "_quantize_param_shard_impl", quantize)
    return "where no parameter has 8 bits, Transformer Engine is not asked for"


def _recompute(changes: Changes, module: ModuleType) -> str:
    """Recompute without asking Transformer Engine about FP8, which Megatron does also without it."""
    recompute = getattr(module, "CheckpointWithoutOutput", None)
    if recompute is None or getattr(module, "HAVE_TE", False):
        return "left as it is"
    original = recompute.__init__

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.fp8 = False

    changes.attribute(recompute, "__init__", init)
    return "recompute asks for no FP8"


def _torch_norm(changes: Changes, module: ModuleType) -> str:
    """Build torch's norm for sequence parallelism too, with the mark that Megatron's own norms set.

    By that mark Megatron sums the parameters' gradients over the tensor-parallel group.
    """
    norm = module.WrappedTorchNorm
    original = norm.__new__

    @functools.wraps(original)
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
    return "torch's norms work with sequence parallelism"


def _torch_layer_norm(changes: Changes, module: ModuleType) -> str:
    """Do the same for the norm of older hosts, which is a LayerNorm that refuses in its `__init__`."""
    norm = getattr(module, "WrappedTorchLayerNorm", None)
    if not (isinstance(norm, type) and issubclass(norm, torch.nn.LayerNorm)):
        return "left as it is"
    original = norm.__init__

    @functools.wraps(original)
    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        is_parallel = config.sequence_parallel
        config.sequence_parallel = False
        try:
            original(self, config, *args, **kwargs)
        finally:
            config.sequence_parallel = is_parallel
        for parameter in self.parameters():
            parameter.sequence_parallel = is_parallel

    changes.attribute(norm, "__init__", init)
    return "torch's norms work with sequence parallelism"


def _torch_adam(changes: Changes, module: ModuleType) -> str:
    """Let the distributed optimizer load a checkpoint into torch's Adam, and into float32 parameters.

    Before it loads, Megatron reads the number of steps from Adam's state, and torch makes none before the
    first step. Then it gives all parameters one step tensor, which Adam would count up once for each;
    overwrites the step that it loaded with the one from before; or misses it, since the checkpoint holds it
    once and not for each parameter. And the shards of float32 parameters are views that autograd lets nobody
    write to.
    """
    optimizer = module.DistributedOptimizer
    describe, load = optimizer.state_dict, optimizer.load_state_dict
    set_states = getattr(optimizer, "_set_main_param_and_optimizer_states", None)

    @functools.wraps(describe)
    def state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:
            for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
        return describe(self, *args, **kwargs)

    @functools.wraps(load)
    def load_state_dict(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            loaded = load(self, *args, **kwargs)
        for state in getattr(self.optimizer, "state", {}).values():
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].clone()
        return loaded

    changes.attribute(optimizer, "state_dict", state_dict)
    changes.attribute(optimizer, "load_state_dict", load_state_dict)
    if set_states is not None:

        def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> Any:
            own = self._get_main_param_and_optimizer_states(model_param)
            if "step" in own:
                tensors = {**tensors, "step": own["step"]}
            return set_states(self, model_param, tensors)

        changes.attribute(
            optimizer, "_set_main_param_and_optimizer_states", set_main_param_and_optimizer_states
        )
    return "the distributed optimizer loads checkpoints into torch's Adam and float32 parameters"


_PATCHES: dict[str, Callable[[Changes, ModuleType], str]] = {
    "megatron.arguments": _arguments,
    "megatron.core.fp8_utils": _fp8,
    "megatron.core.fusions.fused_layer_norm": _core_layer_norm,
    "megatron.global_vars": _old_numpy,
    "megatron.model.fused_layer_norm": _old_layer_norm,
    "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding": _yarn,
    "megatron.core.optimizer.distrib_optimizer": _torch_adam,
    "megatron.core.tensor_parallel.random": _recompute,
    "megatron.core.tensor_parallel.inference_layers": _inference_layers,
    "megatron.core.transformer.dot_product_attention": _attention,
    "megatron.core.transformer.moe.moe_utils": _router,
    "megatron.core.transformer.multi_latent_attention": _latent,
    "megatron.core.transformer.torch_layer_norm": _torch_layer_norm,
    "megatron.core.transformer.torch_norm": _torch_norm,
    "megatron.fused_kernels": _fused_kernels,
    "megatron.legacy.fused_kernels": _fused_kernels,
    "megatron.training.arguments": _arguments,
}


class _HostFinder(AfterImport):
    """Patches the modules of the table when they have run; offers triton to those that cannot be without."""

    def __init__(self, changes: Changes) -> None:
        super().__init__((*_PATCHES, *_IMPORT_TRITON, *_apex.IMPORT_APEX), self.patch)
        self._changes = changes

    def patch(self, name: str, module: ModuleType) -> None:
        """Patch a module that has run."""
        if self._changes.in_force and name in _PATCHES:
            self._changes.lines.append(f"{name}: {_PATCHES[name](self._changes, module)}")

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        lend = _triton_to_import if fullname in _IMPORT_TRITON else _apex.apex_to_import
        if spec is not None and fullname in (*_IMPORT_TRITON, *_apex.IMPORT_APEX):
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: ModuleType) -> None:
                with lend():
                    execute(module)

            loader.exec_module = exec_module
        return spec
