"""The example's flags: a subset of Megatron-LM's, under Megatron-LM's names."""

from __future__ import annotations

import argparse
import os

import torch

DTYPES = {"float32": torch.float32, "float64": torch.float64}


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


def build_parser() -> argparse.ArgumentParser:
    """Give the parser; abbreviations are off, as in Megatron-LM."""
    parser = argparse.ArgumentParser(description="Pretrain a GPT on documents.", allow_abbrev=False)

    group = parser.add_argument_group("parallelism")
    group.add_argument("--tensor-model-parallel-size", type=positive, default=1)
    group.add_argument("--sequence-parallel", action="store_true", help="with tensor parallelism")
    group.add_argument("--pipeline-model-parallel-size", type=positive, default=1)
    group.add_argument("--virtual-pipeline-model-parallel-size", type=positive, default=None)
    group.add_argument("--context-parallel-size", type=positive, default=1)
    group.add_argument("--cp-comm-type", nargs="+", default=["p2p"], help="one value, or one a layer")
    group.add_argument("--use-distributed-optimizer", action="store_true")
    group.add_argument("--distributed-backend", choices=["nccl", "gloo"], default=None,
                       help="default: nccl where CUDA is, gloo elsewhere")  # fmt: skip

    group = parser.add_argument_group("model")
    group.add_argument("--num-layers", type=positive, default=4)
    group.add_argument("--hidden-size", type=positive, default=256)
    group.add_argument("--num-attention-heads", type=positive, default=8)
    group.add_argument("--group-query-attention", action="store_true")
    group.add_argument("--num-query-groups", type=positive, default=1)
    group.add_argument("--seq-length", type=positive, default=1024)
    group.add_argument("--position-embedding-type", choices=["rope", "learned_absolute"], default="rope")
    group.add_argument("--untie-embeddings-and-output-weights", action="store_true")
    group.add_argument("--disable-bias-linear", action="store_true")
    group.add_argument("--attention-dropout", type=float, default=0.0)
    group.add_argument("--hidden-dropout", type=float, default=0.0)
    group.add_argument("--make-vocab-size-divisible-by", type=positive, default=128)
    group.add_argument("--recompute-granularity", choices=["full", "selective"], default=None)
    group.add_argument("--recompute-method", choices=["uniform", "block"], default=None)
    group.add_argument("--recompute-num-layers", type=positive, default=None)
    group.add_argument("--use-cpu-initialization", action="store_true",
                       help="draw whole weights and cut them, so that they do not depend on the tensor-parallel size")  # fmt: skip

    group = parser.add_argument_group("precision")
    kind = group.add_mutually_exclusive_group()
    kind.add_argument("--bf16", action="store_true")
    kind.add_argument("--fp16", action="store_true")
    kind.add_argument("--fp32", action="store_true", help="the default")
    kind.add_argument("--params-dtype", choices=list(DTYPES), default="float32",
                      help="float64 is for comparisons; it wants --clip-grad 0 and no distributed optimizer")  # fmt: skip

    group = parser.add_argument_group("training")
    group.add_argument("--micro-batch-size", type=positive, default=1)
    group.add_argument("--global-batch-size", type=positive, default=None)
    group.add_argument("--train-iters", type=positive, default=40)
    group.add_argument("--lr", type=float, default=1e-3)
    group.add_argument("--min-lr", type=float, default=0.0)
    group.add_argument("--lr-warmup-iters", type=int, default=0)
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--adam-beta2", type=float, default=0.95)
    group.add_argument("--clip-grad", type=float, default=1.0, help="0 turns clipping off")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument("--calculate-per-token-loss", action="store_true")
    group.add_argument("--eval-interval", type=positive, default=1000)
    group.add_argument("--eval-iters", type=int, default=0, help="0 turns evaluation off")

    group = parser.add_argument_group("data")
    group.add_argument(
        "--data-path", nargs="+", required=True, help="prefix of a .bin and .idx, or WEIGHT PREFIX ..."
    )
    group.add_argument("--split", default="95,5,0")
    group.add_argument("--data-cache-path", default=None)
    group.add_argument("--tokenizer-model", required=True, help="a sentencepiece model")
    group.add_argument("--num-workers", type=int, default=0)
    group.add_argument("--reset-position-ids", action="store_true")
    group.add_argument("--reset-attention-mask", action="store_true")
    group.add_argument("--eod-mask-loss", action="store_true")
    group.add_argument("--answer-only", action="store_true",
                       help="count the loss of only the last 15 %% of each sample, as fine-tuning on answers does")  # fmt: skip
    group.add_argument("--loss-mask-range", nargs=2, type=int, metavar=("START", "STOP"), default=None,
                       help="count the loss of only these positions of each sample")  # fmt: skip

    group.add_argument("--pack-documents", action="store_true",
                       help="rows of whole documents; keep them apart with --megacp-documents positions")  # fmt: skip
    group.add_argument("--cut-documents", action="store_true",
                       help="with --pack-documents: cut what is longer than a row; else it is refused")  # fmt: skip
    group.add_argument("--loss-per-document", action="store_true",
                       help="with --pack-documents: each document counts alike, however long it is")  # fmt: skip
    group.add_argument("--log-documents", default=None, metavar="FOLDER",
                       help="with --pack-documents: a JSON line, with a hash, for each document trained on")  # fmt: skip

    group = parser.add_argument_group("checkpoints and logs")
    group.add_argument("--save", default=None, metavar="FOLDER")
    group.add_argument("--load", default=None, metavar="FOLDER")
    group.add_argument("--save-interval", type=positive, default=None)
    group.add_argument(
        "--exit-interval", type=positive, default=None, help="stop at a multiple of this many steps"
    )
    group.add_argument("--log-interval", type=positive, default=1)
    group.add_argument(
        "--log-json", default=None, metavar="FILE", help="one JSON line a step, at full precision"
    )
    group.add_argument("--dump-parameters", default=None, metavar="FOLDER",
                       help="at the end, each tensor- and pipeline-parallel shard as FOLDER/tp0-pp0.pt")  # fmt: skip
    return parser


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the flags; every rank comes to the same verdict, before any communication."""
    parser = build_parser()
    args = parser.parse_args(argv)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    model_size = (
        args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    )
    if args.world_size % model_size:
        parser.error(
            f"{args.world_size} processes cannot be divided into replicas of tensor {args.tensor_model_parallel_size}"
            f" x pipeline {args.pipeline_model_parallel_size} x context {args.context_parallel_size} = {model_size}."
        )
    args.data_parallel_size = args.world_size // model_size
    samples = args.micro_batch_size * args.data_parallel_size
    args.global_batch_size = args.global_batch_size or samples
    if args.global_batch_size % samples:
        parser.error(
            f"--global-batch-size {args.global_batch_size} is not a multiple of --micro-batch-size"
            f" {args.micro_batch_size} x data-parallel size {args.data_parallel_size} = {samples}."
        )
    args.num_microbatches = args.global_batch_size // samples
    if not 0 <= args.lr_warmup_iters < args.train_iters:
        parser.error(
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --train-iters {args.train_iters}."
        )
    args.params_dtype = (
        torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else DTYPES[args.params_dtype]
    )
    if args.params_dtype == torch.float64 and (args.clip_grad > 0 or args.use_distributed_optimizer):
        parser.error(
            "Megatron's gradient clipping and its distributed optimizer take no float64 gradients:"
            " --params-dtype float64 needs --clip-grad 0 and no --use-distributed-optimizer."
        )
    if not args.pack_documents and (args.cut_documents or args.loss_per_document or args.log_documents):
        parser.error("--cut-documents, --loss-per-document and --log-documents need --pack-documents.")
    if args.pack_documents and len(args.data_path) != 1:
        parser.error("--pack-documents takes one --data-path, a prefix without a weight.")
    if args.loss_per_document and not args.calculate_per_token_loss:
        parser.error(
            "--loss-per-document needs --calculate-per-token-loss: one mean over the whole global batch."
        )
    args.loss_range = (0, args.seq_length)
    if args.loss_mask_range is not None:
        args.loss_range = tuple(args.loss_mask_range)
    elif args.answer_only:
        args.loss_range = (args.seq_length - max(1, args.seq_length * 15 // 100), args.seq_length)
    start, stop = args.loss_range
    if not 0 <= start < stop <= args.seq_length:
        parser.error(
            f"the loss range {start} to {stop} is empty or not within --seq-length {args.seq_length}."
        )
    return args
