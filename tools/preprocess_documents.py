"""Turn documents into Megatron's indexed dataset: tokens in PREFIX.bin and PREFIX.idx.

One document is one item with the tokenizer's end-of-document token appended. The order is that of the input (paths sorted, lines as
they come), and the bytes are the same, whatever the number of workers, and however often it was stopped: started again with the same
input, it goes on after the last part that was whole. The outputs appear under their names only when they are whole::

    python tools/preprocess_documents.py --output-prefix runs/stdlib --stdlib --train-tokenizer --vocab-size 4096
    python tools/preprocess_documents.py --output-prefix runs/notes --folder notes --glob '**/*.md' \\
        --tokenizer-model runs/stdlib.model
    python tools/preprocess_documents.py --output-prefix runs/web --jsonl a.jsonl b.jsonl.gz c.jsonl.zst --key text \\
        --tokenizer-model tokenizer.json --eod-token '<|endoftext|>'
    python tools/preprocess_documents.py --output-prefix runs/web --parquet web.parquet --dataset saved --key text \\
        --tokenizer-model runs/stdlib.model
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import sentencepiece
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone need not be installed

from megacp.data import sources
from megacp.data.sources import BadRecord, Record
from megacp.data.tokenize import preprocess
from megacp.errors import ConfigError

STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
LISTED_BAD_RECORDS = 20


def find_records(args: argparse.Namespace) -> Iterator[Record]:
    """Give every record in order, up to --max-documents and --max-bytes."""
    size = 0
    for count, record in enumerate(_all_records(args), 1):
        size += record.size
        if (args.max_documents and count > args.max_documents) or (args.max_bytes and size > args.max_bytes):
            return
        yield record


def _all_records(args: argparse.Namespace) -> Iterator[Record]:
    limit = args.max_record_bytes
    for name in args.folder:
        yield from sources.folder(Path(name), args.glob, limit=limit)
    if args.stdlib:
        yield from sources.folder(Path(sysconfig.get_path("stdlib")), ["**/*.py"], STDLIB_SKIPPED, limit)
    for name in args.jsonl:
        yield from sources.lines(Path(name), args.key, limit)
    for name in args.parquet:
        yield from sources.parquet(Path(name), args.key, limit)
    for name in args.dataset:
        yield from sources.saved(Path(name), args.key, limit)


def _inputs(args: argparse.Namespace) -> list[list[object]]:
    """Tell this input from another: settings, and each file's name, size and time."""
    chosen = ("glob", "key", "max_documents", "max_bytes", "max_record_bytes", "stdlib")
    told: list[list[object]] = [[name, getattr(args, name)] for name in chosen]
    names = [*args.jsonl, *args.parquet]
    if args.stdlib:
        names.append(sysconfig.get_path("stdlib"))
    for name in [*names, *args.folder, *args.dataset]:
        path = Path(name)
        files = [path] if path.is_file() else sorted(f for f in path.rglob("*") if f.is_file())
        told += [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]
    return told


def train_tokenizer(records: Iterable[Record], vocab_size: int, sentences: int) -> bytes:
    """Train a byte-pair model whose decoding gives the text back, and give it serialised.

    At most 16 x `sentences` lines are looked at, and evenly spaced `sentences` of them used; one
    thread, no sampling: the same corpus gives the same model everywhere.
    """
    lines: list[str] = []
    for record in records:
        try:
            lines.extend(line for line in record.read().splitlines(keepends=True) if line.strip())
        except BadRecord:
            continue
        if len(lines) >= 16 * sentences:
            break
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines[:: max(1, -(-len(lines) // sentences))]),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            user_defined_symbols=["\n"],
            split_digits=True,
            pad_id=0,
            unk_id=1,
            bos_id=2,
            eos_id=3,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise SystemExit(
            f"preprocess_documents: no tokenizer of {vocab_size} pieces can be trained on these {len(lines)} lines:"
            f" {error}"
        ) from error
    return model.getvalue()


def histogram(lengths: list[int], width: int = 40) -> str:
    """Draw how many documents have 1, 2-3, 4-7, ... tokens."""
    powers = np.log2(np.asarray(lengths)).astype(int)
    counts = np.bincount(powers)
    rows = []
    for power in range(int(powers.min()), len(counts)):
        bar = "#" * -(-width * int(counts[power]) // int(counts.max()))
        rows.append(f"{2**power:>9,} to {2 ** (power + 1) - 1:>9,} tokens {counts[power]:>7,}  {bar}")
    return "\n".join(rows)


def build_parser() -> argparse.ArgumentParser:
    """Give the command line."""
    parser = argparse.ArgumentParser(description="Documents to Megatron's .bin and .idx.", allow_abbrev=False)
    group = parser.add_argument_group("documents (one or more of these)")
    group.add_argument("--folder", nargs="+", default=[], help="each file below is a document")
    group.add_argument("--glob", nargs="+", default=["**/*"], help="which files of the folders")
    group.add_argument(
        "--jsonl", nargs="+", default=[], help="each line is a document; .gz and .zst are unpacked"
    )
    group.add_argument("--parquet", nargs="+", default=[], help="each row is a document")
    group.add_argument("--dataset", nargs="+", default=[], help="folders of Hugging Face's save_to_disk")
    group.add_argument("--key", "--json-key", default="text", help="the field or column that holds the text")
    group.add_argument(
        "--stdlib", action="store_true", help="the Python standard library's sources, tests left out"
    )
    group.add_argument("--max-documents", type=int, default=None)
    group.add_argument("--max-bytes", type=int, default=None)
    group.add_argument(
        "--max-record-bytes", type=int, default=1 << 30, help="a longer record is a bad one, and not read"
    )
    group = parser.add_argument_group("tokenizer (one of these)")
    kind = group.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer-model", help="a sentencepiece model, or a tokenizer.json")
    kind.add_argument(
        "--train-tokenizer", action="store_true", help="train one on these documents: PREFIX.model"
    )
    group.add_argument(
        "--eod-token", default=None, help="the token that ends a document; a sentencepiece model has its own"
    )
    group.add_argument("--vocab-size", type=int, default=4096)
    group.add_argument("--tokenizer-sentences", type=int, default=40_000, help="lines to train on, at most")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", type=Path, required=True)
    group.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    group.add_argument("--on-error", choices=["skip", "fail"], default="skip",
                       help="what to do with a record that cannot be decoded or is empty")  # fmt: skip
    return parser


def _model(args: argparse.Namespace) -> bytes:
    """Read the tokenizer, or train it and keep it beside the dataset."""
    if not args.train_tokenizer:
        if not Path(args.tokenizer_model).is_file():
            raise ConfigError(f"{args.tokenizer_model} is not a file.")
        return Path(args.tokenizer_model).read_bytes()
    model = train_tokenizer(find_records(args), args.vocab_size, args.tokenizer_sentences)
    path = args.output_prefix.with_name(f"{args.output_prefix.name}.model")
    path.with_name(f"{path.name}.tmp").write_bytes(model)
    os.replace(path.with_name(f"{path.name}.tmp"), path)
    print(f"{path}: a sentencepiece model of {args.vocab_size:,} pieces")
    return model


def main(argv: list[str] | None = None) -> int:
    """Run the command line; give the number of bad records that were skipped."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not (args.folder or args.jsonl or args.stdlib or args.parquet or args.dataset):
        parser.error("name some documents: --folder, --jsonl, --parquet, --dataset or --stdlib.")
    if args.workers < 1:
        parser.error(f"--workers {args.workers} is less than 1.")
    try:
        return _run(args)
    except ConfigError as error:
        raise SystemExit(f"preprocess_documents: {error}") from error


def _run(args: argparse.Namespace) -> int:
    # Records of files and plain lines are small, so they are counted first; others come as they are read.
    is_small = not (
        args.parquet or args.dataset or any(name.endswith((".gz", ".zst")) for name in args.jsonl)
    )
    records = list(find_records(args)) if is_small else find_records(args)
    args.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    model = _model(args)
    bar = Progress(
        TextColumn("documents"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        task = bar.add_task("", total=len(records) if isinstance(records, list) else None)
        done = preprocess(
            records,
            model,
            args.output_prefix,
            eod=args.eod_token,
            workers=args.workers,
            is_fatal=args.on_error == "fail",
            made_from=_inputs(args),
            notice=lambda count: bar.advance(task, count),
        )
    # Megatron's cached sample index of an older PREFIX.bin is not told apart by content.
    shutil.rmtree(args.output_prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    total = sum(done.lengths)
    print(
        f"{args.output_prefix}.bin: {len(done.lengths):,} documents, {total:,} tokens, {done.size / total:.2f} bytes a token"
    )
    if done.parts_kept:
        print(f"went on after {done.parts_kept} parts of a run that was stopped")
    print(f"median {int(np.median(done.lengths)):,} tokens, longest {max(done.lengths):,}")
    print(histogram(done.lengths))
    if done.bad:
        print(f"skipped {len(done.bad)} bad records:")
        for bad in done.bad[:LISTED_BAD_RECORDS]:
            print(f"  {bad.name}: {bad.problem}")
        if len(done.bad) > LISTED_BAD_RECORDS:
            print(f"  and {len(done.bad) - LISTED_BAD_RECORDS} more")
    return len(done.bad)


if __name__ == "__main__":
    main()
