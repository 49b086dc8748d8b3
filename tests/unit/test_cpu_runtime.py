"""The CPU in the place of CUDA: what it answers, that it trains, and that it leaves no trace."""

from __future__ import annotations

import gc
import importlib.util
import io
import logging
import multiprocessing
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megacp.testing import _cuda_hosts, _cuda_names, cpu, ranks
from megacp.testing._changes import Changes

# These tests put a CPU where CUDA would be; where there is CUDA nobody would.
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")

OWNERS = [
    torch,
    torch.fft,
    torch.nested,
    torch.Tensor,
    torch.nn.Module,
    torch.cuda,
    torch.cuda.graphs,
    torch.cuda.memory,
    torch.cuda.nvtx,
    torch.cuda.random,
    torch.cuda.streams,
    torch.distributed,
    torch.distributed.distributed_c10d,
    torch.utils._device.DeviceContext,
    multiprocessing.spawn,
]


@pytest.fixture
def runtime():
    cpu.install()
    yield cpu
    cpu.uninstall()


@pytest.fixture
def one_rank():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def host_module(name, body, monkeypatch, tmp_path):
    """Write a host's module to disk as `name`, to be imported instead of any host that is installed."""
    *packages, last = name.split(".")
    for package in packages:
        tmp_path = tmp_path / package
        tmp_path.mkdir()
        (tmp_path / "__init__.py").touch()
    (tmp_path / f"{last}.py").write_text(textwrap.dedent(body))
    monkeypatch.syspath_prepend(str(tmp_path.parents[len(packages) - 1]))
    for loaded in [loaded for loaded in sys.modules if loaded.partition(".")[0] == packages[0]]:
        monkeypatch.delitem(sys.modules, loaded)


def everything():
    """Return every attribute of every module and class that is touched, by identity."""
    return {(owner.__name__, name): value for owner in OWNERS for name, value in vars(owner).items()}


def test_uninstall_restores_every_attribute_exactly():
    torch.utils._device._device_constructors()

    before, environment, finders = everything(), dict(os.environ), list(sys.meta_path)
    registry = list(torch.serialization._package_registry)
    scripted = dict(torch.jit._builtins._get_builtin_table())
    filters = list(logging.getLogger("megatron.core.tensor_parallel.random").filters)

    cpu.install()
    changed = [key for key, value in everything().items() if before.get(key) is not value]
    assert len(changed) > 120
    cpu.uninstall()

    after = everything()
    assert after.keys() == before.keys()
    assert [key for key in before if before[key] is not after[key]] == []
    assert dict(os.environ) == environment
    assert sys.meta_path == finders
    assert torch.serialization._package_registry == registry
    assert torch.jit._builtins._get_builtin_table() == scripted
    assert logging.getLogger("megatron.core.tensor_parallel.random").filters == filters


def test_what_was_replaced_twice_is_put_back_to_the_first():
    class Owner:
        name = 1

    class Heir(Owner):
        pass

    changes = Changes()
    for owner in (Owner, Heir):
        changes.attribute(owner, "name", 2)
        changes.attribute(owner, "name", 3)
    keys = {"a": 1}
    for key in ("a", "b"):
        changes.item(keys, key, 2)
        changes.item(keys, key, 3)
    assert Heir.name == 3 and keys == {"a": 3, "b": 3} and changes.in_force
    changes.restore()
    assert Owner.name == 1 and "name" not in vars(Heir) and keys == {"a": 1} and not changes.in_force


def test_install_twice_does_nothing_and_uninstall_twice_neither(runtime):
    zeros, lines = torch.zeros, runtime.report()
    runtime.install()
    assert torch.zeros is zeros and runtime.report() == lines
    runtime.uninstall()
    assert not runtime.active() and runtime.report() == []
    runtime.uninstall()


def test_the_report_has_a_line_for_each_part(runtime):
    assert runtime.active()
    subjects = [line.partition(":")[0] for line in runtime.report()]
    assert {"torch.cuda", "devices", "torch.load", "process groups", "hosts"} <= set(subjects)


def test_a_failing_part_leaves_nothing_installed(monkeypatch):
    def fails(changes):
        raise RuntimeError("no")

    zeros = torch.zeros
    monkeypatch.setattr(cpu, "_PARTS", (*cpu._PARTS, fails))
    with pytest.raises(RuntimeError, match="no"):
        cpu.install()
    assert torch.zeros is zeros and not cpu.active()


def test_importing_the_runtime_imports_no_host():
    script = (
        "import sys, megacp.testing.cpu as c; c.install(); print([m for m in sys.modules if m.split('.')[0]"
    )
    script += " in ('megatron', 'transformer_engine', 'apex')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Devices.


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0, torch.device("cuda", 1)])
def test_tensors_asked_for_on_cuda_land_on_the_cpu(runtime, device):
    made = [
        torch.empty(2, device=device),
        torch.zeros(2, device=device, pin_memory=True),
        torch.tensor([1.0, 2.0], device=device),
        torch.as_tensor([1.0], device=device),
        torch.arange(3, device=device),
        torch.randn(2, device=device, requires_grad=True),
        torch.zeros_like(torch.ones(2), device=device),
        torch.ones(2).new_zeros(2, device=device),
        torch.ones(2).to(device),
        torch.ones(2).to(device=device, dtype=torch.bfloat16),
        torch.ones(2).cuda(),
        torch.nn.Linear(2, 2, device=device).weight,
        torch.nn.Linear(2, 2).to(device).weight,
        torch.fft.fftfreq(4, device=device),
    ]
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_other_devices_are_left_alone(runtime):
    assert torch.empty(2, device="meta").device.type == "meta"
    assert torch.ones(2).to("meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype is torch.float64
    assert torch.ones(2, dtype=torch.float64).to(torch.ones(1, dtype=torch.int8)).dtype is torch.int8
    with torch.device("meta"):
        assert torch.empty(2).device.type == "meta"
        assert torch.nn.Linear(2, 2).weight.device.type == "meta"


def test_a_device_block_of_cuda_is_a_block_of_the_cpu(runtime):
    with torch.device("cuda"):
        assert torch.empty(2).device.type == "cpu"
    with torch.cuda.device(0):
        assert torch.cuda.current_device() == 0


def test_backward_and_recompute_see_the_cpu_too(runtime):
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * torch.full((), 2.0, device="cuda")

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.full((), 2.0, device=torch.cuda.current_device())

    for reentrant in (True, False):
        x = torch.ones(3, requires_grad=True)
        checkpoint(Scale.apply, x, use_reentrant=reentrant).sum().backward()
        assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_each_local_rank_has_a_device(runtime, monkeypatch):
    assert torch.cuda.device_count() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert torch.cuda.device_count() == 4
    torch.cuda.set_device(3)
    assert torch.cuda.current_device() == 3
    torch.cuda.set_device("cuda:0")
    assert torch.cuda.current_device() == 0


def test_only_torch_and_megacp_are_told_that_there_is_no_cuda(runtime):
    ask = "import torch\nanswer = torch.cuda.is_available()"
    for name, answer in [("megatron.x", True), ("__main__", True), ("torch.x", False), ("megacp.x", False)]:
        asking = {"__name__": name}
        exec(ask, asking)
        assert asking["answer"] is answer, name


def test_torchscript_still_compiles_factories(runtime):
    @torch.jit.script
    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.zeros(2)])

    assert padded(torch.ones(1)).tolist() == [1.0, 0.0, 0.0]


def test_type_names_are_those_of_cuda(runtime):
    kinds = {torch.float32: "Float", torch.float16: "Half", torch.bfloat16: "BFloat16", torch.int64: "Long"}
    for dtype, kind in kinds.items():
        assert torch.zeros(1, dtype=dtype).type() == f"torch.cuda.{kind}Tensor"
    assert torch.zeros(1, dtype=torch.float64).type() == "torch.cuda.FloatTensor"  # keeps its full precision
    assert torch.zeros(1).type("torch.cuda.LongTensor").dtype is torch.int64
    assert torch.zeros(1).type(torch.float64).dtype is torch.float64
    assert isinstance(torch.cuda.FloatTensor([1.0]), torch.cuda.FloatTensor)
    assert torch.cuda.IntTensor([3]).dtype is torch.int32


def test_what_was_saved_on_cuda_is_loaded_on_the_cpu(runtime):
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    for where in ("cuda", "cuda:1", torch.device("cuda", 0)):
        file.seek(0)
        assert torch.load(file, map_location=where).tolist() == [0.0, 1.0, 2.0]
    # A file names the device on which its tensors were.
    legacy = io.BytesIO()
    torch.save(torch.arange(3.0), legacy, _use_new_zipfile_serialization=False)
    moved = legacy.getvalue().replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:7")
    assert moved != legacy.getvalue()
    assert torch.load(io.BytesIO(moved), weights_only=False).tolist() == [0.0, 1.0, 2.0]


# Randomness.


def test_the_device_generator_is_the_one_that_the_cpu_draws_from(runtime):
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), first)
    assert torch.cuda.initial_seed() == 5
    assert len(torch.cuda.get_rng_state_all()) == torch.cuda.device_count()
    assert torch.equal(torch.cuda.default_generators[0].get_state(), torch.get_rng_state())


def test_names_imported_by_value_before_the_install_work_too():
    from torch.cuda import _lazy_call, _lazy_init, get_rng_state, manual_seed

    cpu.install()
    try:
        ran = []
        _lazy_init()
        _lazy_call(lambda: ran.append(True))
        manual_seed(7)
        assert ran == [True]
        assert torch.equal(get_rng_state(), torch.get_rng_state())
    finally:
        cpu.uninstall()


@pytest.mark.skipif(
    importlib.util.find_spec("megatron.core") is None, reason="megatron-core is not installed"
)
def test_the_random_tracker_of_megatron_forks_and_returns(runtime, caplog):
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    tracker = CudaRNGStatesTracker()
    torch.manual_seed(1)
    tracker.add("model-parallel-rng", 99)
    with tracker.fork():
        inside = torch.rand(4, device=torch.cuda.current_device())
    outside = torch.rand(4)
    with tracker.fork():
        more = torch.rand(4)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(4), outside)  # the fork left the outer stream where it was
    torch.manual_seed(99)
    assert torch.equal(torch.rand(4), inside) and torch.equal(torch.rand(4), more)
    assert "CPU RNG state changed" not in caplog.text


# Streams, events, memory.


def test_event_times_are_real(runtime):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    time.sleep(0.02)
    end.record(torch.cuda.current_stream())
    end.synchronize()
    assert 15 < start.elapsed_time(end) < 2000  # milliseconds
    with pytest.raises(RuntimeError, match="must be recorded"):
        start.elapsed_time(torch.cuda.Event())


def test_streams_nest_and_return(runtime):
    outer, inner = torch.cuda.Stream(), torch.cuda.Stream()
    default = torch.cuda.current_stream()
    with torch.cuda.stream(outer):
        with torch.cuda.stream(inner), torch.cuda.stream(None):
            assert torch.cuda.current_stream() is inner
            inner.wait_stream(outer)
            inner.wait_event(outer.record_event())
        assert torch.cuda.current_stream() is outer
        assert isinstance(torch.cuda.current_stream(), torch.cuda.Stream)
    assert torch.cuda.current_stream() is default is torch.cuda.default_stream()
    torch.ones(1).record_stream(outer)
    torch.cuda.nvtx.range_push("x")
    torch.cuda.nvtx.range_pop()


def test_memory_is_that_of_this_process(runtime):
    size = 200 << 20
    gc.collect()
    before = torch.cuda.memory_allocated()
    block = torch.ones(size // 4)
    assert torch.cuda.memory_allocated() - before > size * 0.9
    # Asking takes memory too: each is asked after the one that it cannot be below.
    in_use, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
    assert in_use <= peak <= torch.cuda.memory_stats()["allocated_bytes.all.peak"]
    assert torch.cuda.memory_stats()["what nobody counts"] == 0
    del block
    free, total = torch.cuda.mem_get_info()
    assert 0 < free < total == torch.cuda.get_device_properties(0).total_memory


def test_the_memory_peak_can_be_reset(runtime):
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system resets no peak")
    block = torch.ones(200 << 18)
    peak = torch.cuda.max_memory_allocated()
    del block
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() < peak - (100 << 20)


# Processes.


def test_nccl_becomes_gloo(runtime, one_rank):
    assert dist.get_backend() == "gloo"
    for group in (dist.new_group([0], backend="nccl", pg_options=object()), dist.new_group([0])):
        assert dist.get_backend(group) == "gloo"
    x = torch.ones(2, device="cuda")
    dist.all_reduce(x)
    assert x.tolist() == [1.0, 1.0]


def _send_and_free(free):
    """Send large tensors and give each other data at once, as Megatron's interleaved schedule does."""
    cpu.install()
    try:
        shape = (1 << 20,)
        if dist.get_rank() == 1:
            time.sleep(0.2)  # let the other free before this one takes
            return [float(_received(shape).min()) for _ in range(4)]
        works = []
        for value in range(4):
            x = torch.full(shape, float(value))
            works.append(dist.isend(x, 1))
            x.data = torch.empty(1)
            torch.full(shape, -1.0)  # takes the memory that was freed
        for work in works:
            work.wait()
        return None
    finally:
        cpu.uninstall()


def _received(shape):
    x = torch.empty(shape)
    dist.irecv(x, 0).wait()
    return x


def test_a_tensor_that_is_freed_after_isend_arrives_whole():
    assert ranks.run(_send_and_free, 2, True)[1] == [0.0, 1.0, 2.0, 3.0]


def test_spawned_processes_have_the_runtime_too(runtime, tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        textwrap.dedent(
            """
            import multiprocessing, torch

            def device(_):
                return torch.zeros(1, device="cuda").device.type

            if __name__ == "__main__":
                from megacp.testing import cpu
                cpu.install()
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    print(pool.map(device, [0]))
            """
        )
    )
    root = str(Path(cpu.__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "['cpu']", done.stderr


# Hosts, as modules written here.


def test_arguments_choose_no_cuda_kernel_and_rank_zero_says_so(runtime, monkeypatch, tmp_path, capsys):
    body = "def validate_args(args, defaults={}):\n    args.seen = args.transformer_impl\n    return args\n"
    host_module("megatron.training.arguments", body, monkeypatch, tmp_path)
    from megatron.training.arguments import validate_args

    asked = {
        "transformer_impl": "transformer_engine",
        "apply_rope_fusion": True,
        "masked_softmax_fusion": False,
    }
    args = validate_args(types.SimpleNamespace(**asked), {})
    assert args.seen == "local" and args.apply_rope_fusion is False
    assert not hasattr(args, "no_persist_layer_norm")  # a host without the argument gets none
    line = "transformer_impl=local (was transformer_engine), apply_rope_fusion=False (was True)"
    assert line in capsys.readouterr().err
    assert f"arguments: {line}" in runtime.report()
    assert any(entry.startswith("megatron.training.arguments:") for entry in runtime.report())

    runtime.uninstall()
    args = validate_args(types.SimpleNamespace(**asked), {})  # taken by value, and inert now
    assert args.seen == "transformer_engine"


def test_a_host_imported_before_the_install_is_patched_and_restored(monkeypatch, tmp_path):
    host_module(
        "megatron.legacy.fused_kernels", "def load(args):\n    return 'nvcc'\n", monkeypatch, tmp_path
    )
    from megatron.legacy import fused_kernels

    cpu.install()
    try:
        assert fused_kernels.load(None) is None
    finally:
        cpu.uninstall()
    assert fused_kernels.load(None) == "nvcc"


def test_torch_norms_carry_the_mark_of_sequence_parallelism(runtime, monkeypatch, tmp_path):
    body = """
        import torch
        class WrappedTorchNorm:
            def __new__(cls, config, hidden_size, eps=1e-5):
                assert not config.sequence_parallel, "not supported"
                return torch.nn.LayerNorm(hidden_size, eps)
        """
    host_module("megatron.core.transformer.torch_norm", body, monkeypatch, tmp_path)
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    config = types.SimpleNamespace(sequence_parallel=True)
    norm = WrappedTorchNorm(config, 8)
    assert isinstance(norm, torch.nn.LayerNorm) and config.sequence_parallel is True
    assert norm.weight.sequence_parallel is True and norm.bias.sequence_parallel is True
    assert (
        WrappedTorchNorm(types.SimpleNamespace(sequence_parallel=False), 8).weight.sequence_parallel is False
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is not None, reason="triton is installed")
def test_a_module_that_cannot_be_without_triton_is_imported_without(runtime, monkeypatch, tmp_path):
    body = """
        import triton
        import triton.language as tl

        @triton.jit
        def kernel(x, BLOCK: tl.constexpr):
            return tl.load(x)

        @triton.jit(launch_metadata=None)
        def other(x):
            return x
        """
    host_module(_cuda_hosts._IMPORT_TRITON[0], body, monkeypatch, tmp_path)
    module = importlib.import_module(_cuda_hosts._IMPORT_TRITON[0])
    assert callable(module.kernel) and module.other(3) == 3
    assert "triton" not in sys.modules and "triton.language" not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("triton")


def test_torch_adam_resumes_in_the_distributed_optimizer(runtime, monkeypatch, tmp_path):
    body = """
        class DistributedOptimizer:
            def __init__(self, optimizer):
                self.optimizer = optimizer
            def state_dict(self):
                steps = {state["step"].item() for state in self.optimizer.state.values()}
                assert len(steps) == 1
                return steps.pop()
            def load_state_dict(self, step):
                import torch
                shared = torch.tensor(float(step))
                for state in self.optimizer.state.values():
                    state["step"] = shared
            def _get_main_param_and_optimizer_states(self, param):
                return {"param": param, **self.optimizer.state[param]}
            def _set_main_param_and_optimizer_states(self, param, tensors):
                for key, value in self._get_main_param_and_optimizer_states(param).items():
                    value.copy_(tensors[key])
        """
    host_module("megatron.core.optimizer.distrib_optimizer", body, monkeypatch, tmp_path)
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizer = DistributedOptimizer(torch.optim.Adam(parameters))
    assert optimizer.state_dict() == 0.0  # before any step
    optimizer.load_state_dict(3)
    loaded = {"param": torch.zeros(2), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    with torch.no_grad():
        optimizer._set_main_param_and_optimizer_states(parameters[0], loaded)
        optimizer._set_main_param_and_optimizer_states(parameters[1], {**loaded, "step": torch.tensor(0.0)})
    assert optimizer.state_dict() == 3.0
    for parameter in parameters:
        parameter.grad = torch.ones(2)
    optimizer.optimizer.step()
    assert optimizer.state_dict() == 4.0  # and not 3 + the number of parameters


def test_what_asks_for_transformer_engine_without_having_it_is_answered(runtime, monkeypatch, tmp_path):
    body = """
        HAVE_TE = False
        class CheckpointWithoutOutput:
            def __init__(self, fp8=False):
                self.fp8 = fp8 is not None
        """
    host_module("megatron.core.tensor_parallel.random", body, monkeypatch, tmp_path)
    from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

    assert CheckpointWithoutOutput().fp8 is False

    (tmp_path / "megatron/core/transformer/moe").mkdir(parents=True)
    (tmp_path / "megatron/core/transformer/moe/moe_utils.py").write_text("")
    module = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    assert module.te_general_gemm is None
    runtime.uninstall()
    assert not hasattr(module, "te_general_gemm")


def test_the_yarn_table_is_built_on_the_cpu(runtime, monkeypatch, tmp_path):
    body = """
        import torch
        class YarnRotaryEmbedding:
            def __init__(self, size, use_cpu_initialization=False):
                with torch.device("cpu" if use_cpu_initialization else torch.cuda.current_device()):
                    self.table = torch.arange(size)
        """
    name = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding"
    host_module(name, body, monkeypatch, tmp_path)
    assert importlib.import_module(name).YarnRotaryEmbedding(3).table.tolist() == [0, 1, 2]


def test_the_names_answered_for_exist_in_this_torch():
    missing = [
        f"{module}.{name}"
        for module, answers in _cuda_names.names().items()
        for name in answers
        if not hasattr(importlib.import_module(module), name)
    ]
    assert len(missing) < 5, (
        missing
    )  # probing hides a misspelt name; a torch without a few of them is in order
