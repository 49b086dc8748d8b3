"""Pretrain a GPT on documents with megatron-core's public API, on any mix of tensor, pipeline, context and data ranks.

The loop knows nothing of how a sequence is split: each rank loads whole samples, calls the model
with whole tensors, and gets a loss for each token back. Run it by itself on GPUs::

    torchrun --nproc-per-node 2 examples/pretrain_documents/pretrain.py --data-path ... --tokenizer-model ...

and with its sequences over two ranks, on a machine with or without GPUs::

    torchrun --nproc-per-node 2 -m megacp examples/pretrain_documents/pretrain.py ... --context-parallel-size 2
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any

import checkpoint
import torch
import torch.distributed as dist
from arguments import parse_args
from data import Batch, Tokenizer, batches, build_datasets, get_batch, pack_documents
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module
from progress import Reporter, peak_memory
from versions import known


def initialize(args: argparse.Namespace) -> None:
    """Join the process group, build Megatron's groups and seed every generator."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if torch.cuda.is_available():
        torch.cuda.set_device(local_rank)
    if not dist.is_initialized():
        backend = args.distributed_backend or ("nccl" if torch.cuda.is_available() else "gloo")
        dist.init_process_group(backend, rank=int(os.environ.get("RANK", "0")), world_size=args.world_size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
    )
    seed = args.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def build_config(args: argparse.Namespace) -> TransformerConfig:
    """Translate the flags; the fusions that need Transformer Engine or Apex stay off."""
    return TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        add_bias_linear=not args.disable_bias_linear,
        attention_dropout=args.attention_dropout,
        hidden_dropout=args.hidden_dropout,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        sequence_parallel=args.sequence_parallel,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=args.virtual_pipeline_model_parallel_size,
        context_parallel_size=args.context_parallel_size,
        cp_comm_type=args.cp_comm_type[0] if len(args.cp_comm_type) == 1 else args.cp_comm_type,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=args.params_dtype,
        pipeline_dtype=args.params_dtype,
        # interleaved stages on two ranks need the sends and receives one by one, else they pair up wrongly
        overlap_p2p_comm=args.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=args.virtual_pipeline_model_parallel_size is None,
        calculate_per_token_loss=args.calculate_per_token_loss,
        recompute_granularity=args.recompute_granularity,
        recompute_method=args.recompute_method,
        recompute_num_layers=args.recompute_num_layers,
        use_cpu_initialization=args.use_cpu_initialization,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build_model(args: argparse.Namespace, config: TransformerConfig, vocab_size: int) -> list[Any]:
    """Build this rank's model chunks, one a virtual pipeline stage, wrapped for data parallelism."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=args.use_distributed_optimizer,
        grad_reduce_in_fp32=args.bf16 or args.fp16,
    )
    model = []
    for i in range(args.virtual_pipeline_model_parallel_size or 1):
        stage = None
        if args.virtual_pipeline_model_parallel_size is not None:
            stage = i
            parallel_state.set_virtual_pipeline_model_parallel_rank(
                i
            )  # asked up to 0.12, told as vp_stage later
        is_first, is_last = parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage
        chunk = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=-(-vocab_size // multiple) * multiple,
            max_sequence_length=args.seq_length,
            pre_process=is_first(ignore_virtual=False, **known(is_first, vp_stage=stage)),
            post_process=is_last(ignore_virtual=False, **known(is_last, vp_stage=stage)),
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type=args.position_embedding_type,
            **known(GPTModel, vp_stage=stage),
        ).cuda(torch.cuda.current_device())
        for parameter in chunk.parameters():
            tensor_parallel.set_defaults_if_not_set_tensor_model_parallel_attributes(parameter)
        # .to() because torch's norms start in float32 whatever params_dtype says
        chunk = Float16Module(config, chunk) if args.bf16 or args.fp16 else chunk.to(args.params_dtype)
        model.append(DistributedDataParallel(config, ddp_config, chunk, disable_bucketing=i > 0))
    return model


def build_optimizer(args: argparse.Namespace, model: list[Any]) -> tuple[Any, OptimizerParamScheduler]:
    """Build Megatron's Adam and its schedule: linear warm-up, then a cosine down to the last step."""
    config = OptimizerConfig(
        lr=args.lr,
        min_lr=args.min_lr,
        weight_decay=args.weight_decay,
        adam_beta2=args.adam_beta2,
        clip_grad=args.clip_grad,
        bf16=args.bf16,
        fp16=args.fp16,
        params_dtype=args.params_dtype,
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=args.use_distributed_optimizer,
    )
    optimizer = get_megatron_optimizer(config, model)
    scheduler = OptimizerParamScheduler(  # counts samples, as Megatron-LM's does
        optimizer,
        init_lr=0.0,
        max_lr=args.lr,
        min_lr=args.min_lr,
        lr_warmup_steps=args.lr_warmup_iters * args.global_batch_size,
        lr_decay_steps=args.train_iters * args.global_batch_size,
        lr_decay_style="cosine",
        start_wd=args.weight_decay,
        end_wd=args.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Give Megatron's triple: the sum of this rank's losses, how many tokens that is, and what to log.

    Shapes: loss_mask, output [B, G].
    """
    losses = output.view(-1).to(torch.promote_types(output.dtype, torch.float32))
    mask = loss_mask.view(-1).to(losses.dtype)
    loss = torch.sum(losses * mask)
    num_tokens = mask.sum().detach().round().to(torch.int)
    return loss, num_tokens, {"lm loss": torch.stack([loss.detach().clone(), num_tokens.to(loss.dtype)])}


def forward_step(args: argparse.Namespace, iterator: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
    """Run one micro-batch through one model chunk; called by Megatron's pipeline schedule."""
    inner = checkpoint.unwrap(chunk)
    batch = get_batch(args, iterator, first=inner.pre_process, last=inner.post_process)
    output = chunk(
        batch["tokens"],
        batch["position_ids"],
        attention_mask=None,
        labels=batch["labels"],
        **known(inner.forward, loss_mask=batch["loss_mask"]),
    )
    return output, partial(loss_func, batch["loss_mask"])


def run_schedule(
    args: argparse.Namespace, model: list[Any], data: list[Iterator[Batch]], forward_only: bool
) -> float:
    """Run forward (and backward) over one global batch; give the mean loss per token, the same on every rank."""
    reports = get_forward_backward_func()(
        forward_step_func=partial(forward_step, args),
        data_iterator=data if len(model) > 1 else data[0],
        model=model,
        num_microbatches=args.num_microbatches,
        seq_length=args.seq_length,
        micro_batch_size=args.micro_batch_size,
        forward_only=forward_only,
    )
    total = torch.zeros(2, dtype=torch.float64, device=torch.cuda.current_device())
    for report in reports:  # only the last pipeline stage has any
        total += report["lm loss"].to(total)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(total, last, group=parallel_state.get_pipeline_model_parallel_group())
    return float(total[0] / total[1].clamp(min=1))


def gradient_norm(optimizer: Any) -> float:
    """Give the norm of all gradients in float64; the optimizer gives its own only when it clips."""
    squares = 0.0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        total = torch.zeros(1, dtype=torch.float64, device=torch.cuda.current_device())
        for gradient in part.get_main_grads_for_grad_norm():
            total += gradient.double().square().sum()
        dist.all_reduce(total, group=part.get_grad_stats_parallel_group())
        squares += float(total)
    return float(squares**0.5)


def train_step(
    args: argparse.Namespace, model: list[Any], optimizer: Any, scheduler: Any, data: list[Iterator[Batch]]
) -> dict[str, Any]:
    """Take one optimizer step over one global batch and give its record."""
    begin = time.perf_counter()
    for chunk in model:
        chunk.zero_grad_buffer()
    optimizer.zero_grad()
    lr = max(group["lr"] for group in optimizer.param_groups)
    loss = run_schedule(args, model, data, forward_only=False)
    success, grad_norm, _ = optimizer.step()
    if args.clip_grad == 0:
        grad_norm = gradient_norm(optimizer)
    if success:
        scheduler.step(increment=args.global_batch_size)
    peak = torch.tensor([peak_memory()], device=torch.cuda.current_device())
    dist.all_reduce(peak, op=dist.ReduceOp.MAX)
    seconds = time.perf_counter() - begin
    return {
        "loss": loss,
        "grad_norm": float("nan") if grad_norm is None else float(grad_norm),
        "lr": lr,
        "skipped": not success,
        "seconds": seconds,
        "tokens_per_second": args.global_batch_size * args.seq_length / seconds,
        "peak_memory_bytes": int(peak),
    }


def evaluate(args: argparse.Namespace, model: list[Any], dataset: Any) -> float:
    """Give the mean loss of the same `eval_iters` global batches of the validation split every time."""
    data = batches(args, dataset, len(model), 0, args.eval_iters)
    for chunk in model:
        chunk.eval()
    with torch.no_grad():
        losses = [run_schedule(args, model, data, forward_only=True) for _ in range(args.eval_iters)]
    for chunk in model:
        chunk.train()
    return sum(losses) / len(losses)


def train(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Build everything, take the steps and give their records."""
    tokenizer = Tokenizer(args.tokenizer_model)
    config = build_config(args)
    model = build_model(args, config, tokenizer.vocab_size)
    optimizer, scheduler = build_optimizer(args, model)
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    train_set, valid_set = build_datasets(args, tokenizer)
    packed = pack_documents(args, tokenizer) if args.pack_documents else None
    if packed is not None:
        train_set = packed
    done = checkpoint.load(args, model, optimizer, scheduler, packed) if args.load else 0
    data = batches(args, train_set, len(model), done, args.train_iters)
    title = f"context-parallel size {args.context_parallel_size}"
    with closing(Reporter(title, args.train_iters, done, args.log_interval, args.log_json)) as report:
        count = sum(p.numel() for chunk in model for p in chunk.parameters())
        report.say(
            f"{count:,} parameters on rank 0; {args.train_iters} steps of {args.global_batch_size} x {args.seq_length}"
            f" tokens; tensor {args.tensor_model_parallel_size}, pipeline {args.pipeline_model_parallel_size},"
            f" context {args.context_parallel_size}, data {args.data_parallel_size}"
        )
        for iteration in range(done + 1, args.train_iters + 1):
            record = train_step(args, model, optimizer, scheduler, data)
            report.step({"iteration": iteration, **record}, args.train_iters)
            final = iteration == args.train_iters or bool(
                args.exit_interval and iteration % args.exit_interval == 0
            )
            if args.eval_iters and (final or iteration % args.eval_interval == 0):
                loss = evaluate(args, model, valid_set)
                report.evaluation({"iteration": iteration, "validation_loss": loss})
            if args.save and (final or (args.save_interval and iteration % args.save_interval == 0)):
                checkpoint.save(args, iteration, model, optimizer, scheduler, packed)
            if final:
                break
    if args.dump_parameters:
        checkpoint.dump_parameters(args.dump_parameters, model)
    return report.records


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run from the flags in `argv` (default: the command line) and give one record a step.

    May be called repeatedly in one process; a process group that the caller made is used and left.
    """
    args = parse_args(argv)
    caller_owns_group = dist.is_initialized()
    initialize(args)
    records = train(args)
    dist.barrier()
    parallel_state.destroy_model_parallel()
    if not caller_owns_group:
        dist.destroy_process_group()
    return records


if __name__ == "__main__":
    main()
