"""One training step of a small GPT of any family, in the host's own schedule and data parallelism: its loss and all gradients.

Weights are set by the names of the parameters, so they are the same however the model is spread. A step is run hooked, or never
hooked on one rank, in float64; gradients are what the host's optimizer would get.
"""

from __future__ import annotations

import itertools
import re
import sys
import traceback
import zlib
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

EOD = 7


@dataclass(frozen=True)
class Step:
    """What is trained: sizes of the groups, settings of the host's configuration, and the data.

    Attributes:
        settings: of TransformerConfig, beyond the plain ones. position: its position_embedding_type.
        rows, samples: of a micro-batch, and of the global batch. seq: tokens of a row.
        documents: megacp's setting. pads: so many tokens at the end of each row are padding, and masked.
        apart: each document of a sample is a micro-batch of its own, the oracle of documents that are kept apart.
        starved: the last expert gets no token.
    """

    hooked: bool = True
    cp: int = 1
    ep: int = 1
    pp: int = 1
    dp: int = 1
    layers: int = 2
    rows: int = 1
    samples: int = 2
    seq: int = 32
    position: str = "rope"
    documents: str = "off"
    mask: str = "random"
    pads: int = 0
    layout: str = "auto"
    apart: bool = False
    starved: bool = False
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.cp * self.pp * self.dp

    def on(self, **more: Any) -> Step:
        """Change fields."""
        return replace(self, **more)


@dataclass(frozen=True)
class Found:
    """What a step gave: the mean loss, the norm of all gradients, each gradient by name, and the losses that were logged."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    logged: dict[str, list[float]]


def take(steps: list[Step]) -> list[Found | str]:
    """Take steps one after another in this rank; a step that raises gives its error as text."""
    out: list[Found | str] = []
    for step in steps:
        try:
            out.append(_take(step))
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            out.append(f"{type(error).__name__}: {error}")
    return out


def _take(step: Step) -> Found:
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    megacp.uninstall()
    if step.hooked:
        megacp.install(Config(report="off", documents=step.documents, eod_token=EOD, layout=step.layout))
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        context_parallel_size=step.cp,
        pipeline_model_parallel_size=step.pp,
        expert_model_parallel_size=step.ep,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    try:
        model, config = _model(step)
        return _one_step(step, model, config)
    finally:
        parallel_state.destroy_model_parallel()
        megacp.uninstall()


def _model(step: Step) -> tuple[Any, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    plain = {
        "num_layers": step.layers,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "context_parallel_size": step.cp,
        "expert_model_parallel_size": step.ep,
        "pipeline_model_parallel_size": step.pp,
        "pipeline_dtype": torch.float64,
        "use_cpu_initialization": True,
        "params_dtype": torch.float64,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "add_bias_linear": False,
        "moe_router_dtype": "fp64",
        "moe_token_dispatcher_type": "alltoall",
    }
    is_mla = step.settings.get("multi_latent_attention", False)
    settings = {**plain, **step.settings}
    kind = MLATransformerConfig if is_mla else TransformerConfig
    config = kind(**{name: value for name, value in settings.items() if name in kind.__dataclass_fields__})
    for name, value in settings.items():
        if not hasattr(config, name):
            setattr(config, name, value)
    layer, prediction = _specs(config)
    model = GPTModel(
        config,
        layer,
        vocab_size=64,
        max_sequence_length=128,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=step.position,
        mtp_block_spec=prediction if parallel_state.is_pipeline_last_stage() else None,
    ).double()
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(_global_name(model, step, name).encode()))
        with torch.no_grad():
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(values * 0.2 + ("norm" in name and name.endswith("weight")))
    if step.starved:
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                buffer[-1] = -10
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model), config


def _specs(config: Any) -> tuple[Any, Any]:
    """Return the specs of the layers and of multi-token prediction."""
    from megatron.core.models.gpt import gpt_layer_specs

    block = gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    prediction = None
    if config.mtp_num_layers:
        prediction = gpt_layer_specs.get_gpt_mtp_block_spec(
            config, block.layer_specs[-1], use_transformer_engine=False
        )
    return block, prediction


def _global_name(model: Any, step: Step, name: str) -> str:
    """Name a parameter as on one rank: layers and experts by their global numbers."""
    from megatron.core import parallel_state

    found = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if found:
        name = f"decoder.layers.{model.decoder.layers[int(found[1])].layer_number - 1}.{found[2]}"
    found = re.match(r"(.*\.local_experts)\.(\d+)\.(.*)", name)
    if found:
        local = step.settings["num_moe_experts"] // step.ep
        number = int(found[2]) + parallel_state.get_expert_model_parallel_rank() * local
        name = f"{found[1]}.{number}.{found[3]}"
    return name


def sample(step: Step, number: int) -> dict[str, torch.Tensor]:
    """Make the samples of one micro-batch, [rows, seq]."""
    generator = torch.Generator().manual_seed(100 + number)
    shape = (step.rows, step.seq)
    ids = torch.randint(8, 64, (step.rows, step.seq + 1), generator=generator)
    for row in range(step.rows):
        for at in torch.randint(2, step.seq - 2, (3,), generator=generator).tolist():
            ids[row, at] = EOD
    weights = {
        "random": torch.rand(shape, generator=generator) < 0.6,
        "end": torch.arange(step.seq).expand(shape) >= step.seq - 5,
        "all": torch.ones(shape, dtype=torch.bool),
    }[step.mask]
    padding = torch.arange(step.seq).expand(shape) >= step.seq - step.pads
    positions = torch.arange(step.seq).expand(shape)
    if step.position == "mrope":
        positions = torch.randint(0, step.seq, (3, *shape), generator=generator)
    return {
        "input_ids": ids[:, :-1].contiguous(),
        "labels": ids[:, 1:].contiguous(),
        "position_ids": positions.contiguous(),
        "loss_mask": (weights & ~padding).double(),
        "padding_mask": padding,
    }


def documents(batch: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Cut a sample of one row into its documents, whose last labels count for nothing."""
    (ids,) = batch["input_ids"]
    stops = [at + 1 for at in (ids == EOD).nonzero().flatten().tolist()]
    borders = sorted({0, *stops, len(ids)})
    out = []
    for start, stop in itertools.pairwise(borders):
        part = {name: value[..., start:stop].clone() for name, value in batch.items()}
        part["loss_mask"][..., -1] = 0
        out.append(part)
    return out


def _one_step(step: Step, model: Any, config: Any) -> Found:
    from megatron.core import parallel_state
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config.finalize_model_grads_func = finalize_model_grads
    _clear_logs()
    mine = range(parallel_state.get_data_parallel_rank(), step.samples // step.rows, step.dp)
    batches = [sample(step, number) for number in mine]
    if step.apart:
        batches = [part for batch in batches for part in documents(batch)]
    data = iter(batches)

    def count(mask: torch.Tensor, output: torch.Tensor) -> Any:
        total, tokens = (output * mask).sum(), mask.sum().to(torch.int)
        return total, tokens, {"lm loss": torch.stack([total.detach().clone(), tokens.double()])}

    def forward(iterator: Any, chunk: Any) -> Any:
        batch = next(iterator)
        inner = chunk.module
        length = batch["labels"].shape[-1]
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
        more = {"padding_mask": batch["padding_mask"]} if step.pads else {}
        output = chunk(
            batch["input_ids"] if inner.pre_process or inner.mtp_process else None,
            batch["position_ids"] if inner.pre_process or inner.mtp_process else None,
            None if step.hooked else hidden,
            labels=batch["labels"] if inner.post_process else None,
            loss_mask=batch["loss_mask"] if inner.post_process else None,
            **more,
        )
        return output, partial(count, batch["loss_mask"])

    model.train()
    model.zero_grad_buffer()
    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=data,
        model=[model],
        num_microbatches=len(batches),
        seq_length=step.seq,
        micro_batch_size=step.rows,
        forward_only=False,
    )
    total = sum((report["lm loss"] for report in reports), torch.zeros(2, dtype=torch.float64))
    dist.all_reduce(total)
    gradients = {
        _global_name(model.module, step, name): parameter.main_grad.detach().clone()
        for name, parameter in model.module.named_parameters()
    }
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradients)
    whole: dict[str, torch.Tensor] = {}
    for part in gathered:
        for name, value in part.items():
            if name in whole:
                torch.testing.assert_close(value, whole[name], rtol=1e-9, atol=1e-12, msg=name)
            whole.setdefault(name, value)
    norm = float(sum(float(g.square().sum()) for g in whole.values()) ** 0.5)
    return Found(float(total[0] / total[1]), norm, whole, _logs(step))


def _clear_logs() -> None:
    for module, scaler in (
        ("moe.moe_utils", "MoEAuxLossAutoScaler"),
        ("multi_token_prediction", "MTPLossAutoScaler"),
    ):
        held = sys.modules.get(f"megatron.core.transformer.{module}")
        if held is not None:
            getattr(held, scaler).main_loss_backward_scale = None
    prediction = sys.modules.get("megatron.core.transformer.multi_token_prediction")
    if prediction is not None:
        prediction.MTPLossLoggingHelper.tracker.clear()
    moe = sys.modules.get("megatron.core.transformer.moe.moe_utils")
    if hasattr(moe, "get_moe_layer_wise_logging_tracker"):
        moe.get_moe_layer_wise_logging_tracker().clear()
    later = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if hasattr(later, "get_moe_metrics_tracker"):
        later.get_moe_metrics_tracker()._metrics.clear()


def _logs(step: Step) -> dict[str, list[float]]:
    """Return the losses of multi-token prediction as logged: averaged over all ranks that have them."""
    helper = getattr(
        sys.modules.get("megatron.core.transformer.multi_token_prediction"), "MTPLossLoggingHelper", None
    )
    if not step.settings.get("mtp_num_layers") or helper is None or step.pp > 1:
        return {}
    values = helper.tracker.get("values", helper.tracker.get("loss_values"))
    values = values.double()
    dist.all_reduce(values)
    return {"mtp": (values / dist.get_world_size() * step.dp).tolist()}


def gap(a: Found, b: Found) -> dict[str, float]:
    """Largest relative differences of the loss, the norm, each gradient and what was logged."""
    assert a.gradients.keys() == b.gradients.keys() and a.gradients
    largest = max(float(g.norm()) for g in a.gradients.values())
    apart = {"loss": abs(a.loss - b.loss) / abs(a.loss), "norm": abs(a.norm - b.norm) / a.norm}
    for name, gradient in a.gradients.items():
        scale = max(float(gradient.norm()), 1e-9 * largest)
        apart[name] = float((b.gradients[name] - gradient).norm()) / scale
    return apart
