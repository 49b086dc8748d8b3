"""Write down what each step of a training computes, for ``megacp verify``: losses, gradients, and the output of every layer.

With ``MEGACP_RECORD=FOLDER`` in the environment these seams join the table, and each rank writes FOLDER/rank<R>.jsonl: a line a step.
A tensor is written as two numbers that do not depend on who holds which token: its sum of squares, and its sum along a fixed
random direction, which also sees a change that keeps the norm.
"""

from __future__ import annotations

import functools
import inspect
import json
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megacp.hosts.hooks import Function
from megacp.hosts.megatron.settings import parallel_state
from megacp.hosts.seams import Seam

__all__ = ["rows"]

_CORE = "megatron.core"


class _Recorder:
    """The step at hand. Micro-batches of an evaluation are not part of one."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self.is_training = False
        self.steps = 0
        self.depth = 0  # of optimizers that step inside another
        self.now: dict[str, Any] = {}

    def begin(self) -> None:
        self.is_training = True
        self.now = {"losses": [], "layers": {}, "gradients": {}, "sharded": False, "grad_norm": None}

    def write(self) -> None:
        """Add the line of this step."""
        if not self.now:
            return
        state, self.steps = parallel_state(), self.steps + 1
        ranks = {
            "tp": state.get_tensor_model_parallel_rank(),
            "pp": state.get_pipeline_model_parallel_rank(),
            "dp": state.get_data_parallel_rank(),
            "cp": state.get_context_parallel_rank(),
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / f"rank{dist.get_rank()}.jsonl").open("a") as file:
            file.write(json.dumps({"step": self.steps, "ranks": ranks, **self.now}) + "\n")
        self.now = {}


def rows(folder: str) -> list[Seam]:
    """List the seams at which a step is seen. None is needed: what is missing is not written down."""
    recorder = _Recorder(folder)

    def seam(name: str, targets: tuple[str, ...], wrap: Any, needs: tuple[str, ...] = ()) -> Seam:
        return Seam(
            f"record of {name}",
            targets,
            functools.partial(wrap, recorder=recorder),
            needs,
            every=True,
            absent_means=f"the comparison of {name} by megacp verify",
        )

    optimizers = ("ChainedOptimizer", "MixedPrecisionOptimizer", "FP32Optimizer")
    return [
        seam("losses", (f"{_CORE}.pipeline_parallel.schedules:get_forward_backward_func",), _losses),
        seam("layers", (f"{_CORE}.transformer.transformer_layer:TransformerLayer.forward",), _layer),
        seam(
            "gradients",
            (f"{_CORE}.distributed.finalize_model_grads:finalize_model_grads",),
            _gradients,
            ("model",),
        ),
        seam("steps", tuple(f"{_CORE}.optimizer.optimizer:{name}.step" for name in optimizers), _step),
    ]


def _losses(original: Function, recorder: _Recorder) -> Function:
    """Note what the schedule gives back: for each micro-batch what the loss function reports, in order."""

    def get_forward_backward_func(*args: Any, **kwargs: Any) -> Any:
        schedule = original(*args, **kwargs)
        signature = inspect.signature(schedule)

        @functools.wraps(schedule)
        def recorded(*inner: Any, **named: Any) -> Any:
            if signature.bind(*inner, **named).arguments.get("forward_only"):
                return schedule(*inner, **named)
            recorder.begin()
            result = schedule(*inner, **named)
            recorder.is_training = False
            recorder.now["losses"] = [
                number
                for report in result or []
                for value in (report.values() if isinstance(report, dict) else [])
                for number in _numbers(value)
            ]
            return result

        return recorded

    return get_forward_backward_func


def _layer(original: Function, recorder: _Recorder) -> Function:
    """Add up each layer's output over the micro-batches; this rank's tokens only."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(self, *args, **kwargs)
        hidden = out[0] if isinstance(out, tuple) else out
        if recorder.is_training and isinstance(hidden, torch.Tensor):
            layers = recorder.now["layers"]
            name = str(self.layer_number)
            x = hidden.detach()  # [S, B, hidden]
            along = _direction("layer", x.shape[-1], x)
            found = (float(x.double().square().sum()), float((x.double().sum((0, 1)) * along).sum()))
            layers[name] = [a + b for a, b in zip(layers.get(name, (0.0, 0.0)), found, strict=True)]
        return out

    return forward


def _gradients(original: Function, recorder: _Recorder) -> Function:
    """Note each parameter's gradient when it is whole: reduced over all ranks and divided as the host does."""
    parameters = inspect.signature(original).parameters

    @functools.wraps(original)
    def finalize_model_grads(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        model = kwargs["model"] if "model" in kwargs else args[list(parameters).index("model")]
        if recorder.now:
            for index, chunk in enumerate(model):
                _note_gradients(recorder.now, chunk, f"chunk{index}." if len(model) > 1 else "")
        return result

    return finalize_model_grads


def _note_gradients(now: dict[str, Any], chunk: Any, prefix: str) -> None:
    if getattr(getattr(chunk, "ddp_config", None), "use_distributed_optimizer", False):
        now["sharded"] = True  # each rank's buffer is whole in its own shard only
        return
    for name, parameter in chunk.named_parameters():
        gradient = getattr(parameter, "main_grad", None)
        gradient = parameter.grad if gradient is None else gradient
        if gradient is not None:
            while name.startswith("module."):
                name = name.removeprefix("module.")
            x = gradient.detach().double().flatten()
            along = float((x * _direction(name, x.numel(), x)).sum())
            now["gradients"][prefix + name] = [float(x.square().sum()), along]
            now["dtype"] = str(parameter.dtype).removeprefix("torch.")


def _step(original: Function, recorder: _Recorder) -> Function:
    """Note the gradient norm that the outermost optimizer gives, and end the step."""

    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.depth += 1
        try:
            result = original(self, *args, **kwargs)
        finally:
            recorder.depth -= 1
        if recorder.depth == 0 and recorder.now:
            norm = result[1] if isinstance(result, tuple) and len(result) > 1 else None
            recorder.now["grad_norm"] = None if norm is None else float(norm)
            recorder.write()
        return result

    return step


def _numbers(value: Any) -> list[float]:
    if isinstance(value, torch.Tensor):
        return [float(x) for x in value.detach().flatten().tolist()]
    if isinstance(value, (tuple, list)):
        return [number for part in value for number in _numbers(part)]
    return [float(value)] if isinstance(value, (int, float)) else []


def _direction(name: str, length: int, like: torch.Tensor) -> torch.Tensor:
    """Draw the same float64 numbers for a name in every run, without touching the run's own random state."""
    make = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(length, generator=make, dtype=torch.float64).to(like.device)
