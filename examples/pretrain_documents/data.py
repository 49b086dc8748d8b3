"""From Megatron's indexed dataset to micro-batches: each rank reads whole samples, its data-parallel rank says which.

Samples are Megatron's own, documents one after the other and cut where a sample ends; or, with --pack-documents, rows of whole
documents, packed by megacp.data, whose stream goes on after a resume wherever it stood, at any size of anything.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import sentencepiece
import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list

from megacp.data import IndexedDocuments, PackedRows, Packer

Batch = dict[str, torch.Tensor]


class Tokenizer:
    """What Megatron's datasets ask of a tokenizer: how many tokens it has, and which one ends a document."""

    def __init__(self, path: str) -> None:
        model = sentencepiece.SentencePieceProcessor(model_file=path)
        self.vocab_size = model.get_piece_size()
        self.eod = model.eos_id()
        self.unique_identifiers = {"sentencepiece": path}  # goes into the name of the cached index


def build_datasets(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[GPTDataset, GPTDataset | None]:
    """Build the training and validation samples on every rank; rank 0 writes the index, the others read it."""
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=get_blend_from_list(args.data_path),
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizer,
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,  # S x S booleans a sample; the attention is causal without them
    )
    sizes = [args.train_iters * args.global_batch_size, args.eval_iters * args.global_batch_size, 0]
    train, valid, _ = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
    return train, valid


class PureDataParallelSampler:
    """Give the sample numbers of one rank's micro-batches, in Megatron's order.

    Only the data-parallel rank enters: ranks that share a replica (tensor, pipeline or context
    parallel) read the same samples.
    """

    def __init__(self, args: argparse.Namespace, iteration: int, iterations: int) -> None:
        self.first = iteration * args.global_batch_size
        self.last = iterations * args.global_batch_size
        self.size = args.micro_batch_size
        self.rank = parallel_state.get_data_parallel_rank()
        self.ranks = parallel_state.get_data_parallel_world_size()

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self.first + self.rank * self.size, self.last, self.size * self.ranks):
            yield list(range(start, start + self.size))


def pack_documents(args: argparse.Namespace, tokenizer: Tokenizer) -> PackedRows:
    """Pack the documents of the training data into rows of whole documents, alike on every rank."""
    documents = IndexedDocuments(args.data_path[0])
    packer = Packer(
        documents.lengths,
        args.seq_length,
        args.global_batch_size,
        ranks=args.data_parallel_size,
        seed=args.seed,
        cut=args.cut_documents,
    )
    kind = "document" if args.loss_per_document else "token"
    return PackedRows(documents, packer, tokenizer.eod, loss=kind)


def packed_batches(
    args: argparse.Namespace, rows: PackedRows, iteration: int, iterations: int
) -> Iterator[Batch]:
    """Give this data-parallel rank's micro-batches of packed rows, from step `iteration` up to `iterations`."""
    mine = args.global_batch_size // args.data_parallel_size
    first = parallel_state.get_data_parallel_rank() * mine
    for number in range(iteration, iterations):
        for start in range(first, first + mine, args.micro_batch_size):
            at = range(start, start + args.micro_batch_size)
            samples = [rows.row(number, row) for row in at]
            if args.log_documents:
                for row, sample in zip(at, samples, strict=True):
                    _note(args, number, rows, row, sample["tokens"])
            yield {name: torch.stack([torch.from_numpy(s[name]) for s in samples]) for name in samples[0]}


def _note(args: argparse.Namespace, number: int, rows: PackedRows, row: int, tokens: Any) -> None:
    """Append what a row holds, with a hash of each document's tokens, to a file of this rank's."""
    path = Path(args.log_documents) / f"rank{torch.distributed.get_rank()}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    at = 0
    with path.open("a") as log:
        for piece in rows.pieces(number, row):
            digest = hashlib.blake2b(tokens[at : at + piece.tokens].tobytes(), digest_size=8).hexdigest()
            log.write(
                json.dumps({"step": number + 1, "row": row, "piece": list(piece), "hash": digest}) + "\n"
            )
            at += piece.tokens


def batches(
    args: argparse.Namespace, dataset: GPTDataset | PackedRows, chunks: int, iteration: int, iterations: int
) -> list[Iterator[Batch]]:
    """Give one iterator a model chunk (virtual pipeline stage), from step `iteration` up to `iterations`."""

    def loader() -> Iterator[Batch]:
        if isinstance(dataset, PackedRows):
            return packed_batches(args, dataset, iteration, iterations)
        sampler = PureDataParallelSampler(args, iteration, iterations)
        return iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=args.num_workers))

    return [loader() for _ in range(chunks)]


def get_batch(args: argparse.Namespace, iterator: Iterator[Batch], first: bool, last: bool) -> dict[str, Any]:
    """Read one micro-batch and keep what this pipeline stage needs, as Megatron's pretrain_gpt.py does.

    Shapes: tokens, position_ids (first stage), labels, loss_mask (last stage): [B, G]; None on other stages.
    """
    batch = next(iterator)
    start, stop = args.loss_range
    batch["loss_mask"][:, :start] = 0
    batch["loss_mask"][:, stop:] = 0
    keep = {"tokens": first, "position_ids": first, "labels": last, "loss_mask": last}
    return {name: batch[name].cuda(non_blocking=True) if wanted else None for name, wanted in keep.items()}
