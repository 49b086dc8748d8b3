"""Turn a folder or jsonl of documents into Megatron's indexed dataset: sentencepiece tokens in PREFIX.bin and .idx.

One document is one item with the tokenizer's end-of-sequence token appended (Megatron's EOD). The
order is that of the input (paths sorted, lines as they come), whatever the number of workers, and
the outputs appear under their names only when they are whole::

    python tools/preprocess_documents.py --output-prefix runs/stdlib --stdlib --train-tokenizer --vocab-size 4096
    python tools/preprocess_documents.py --output-prefix runs/notes --folder notes --glob '**/*.md' \\
        --tokenizer-model runs/stdlib.model
    python tools/preprocess_documents.py --output-prefix runs/web --jsonl a.jsonl b.jsonl --json-key text \\
        --tokenizer-model runs/stdlib.model
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import sentencepiece
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that a clone need not be installed

from megacp.data import IndexedWriter

STDLIB_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
LISTED_BAD_RECORDS = 20


class BadRecord(Exception):
    """A record that holds no usable document."""


@dataclass(frozen=True)
class Record:
    """Where a document is: a whole file, or (with a key) one line of a jsonl; sizes in bytes."""

    name: str
    path: Path
    start: int
    size: int
    key: str | None = None

    def read(self) -> str:
        """Give the document's text.

        Raises: BadRecord if it cannot be read or decoded, or holds nothing.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self.start)
                text = file.read(self.size).decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(f"not UTF-8 at byte {error.start}") from error
        except OSError as error:
            raise BadRecord(f"cannot be read: {error.strerror}") from error
        if self.key is not None:
            text = self._from_json(text, self.key)
        if not text.strip():
            raise BadRecord("empty")
        return text

    @staticmethod
    def _from_json(line: str, key: str) -> str:
        try:
            text = json.loads(line)[key]
        except json.JSONDecodeError as error:
            raise BadRecord("empty" if not line.strip() else f"not JSON: {error.msg}") from error
        except (KeyError, TypeError, IndexError) as error:
            raise BadRecord(f"has no {key!r}") from error
        if not isinstance(text, str):
            raise BadRecord(f"its {key!r} is no text")
        return text


@dataclass(frozen=True)
class Tokens:
    """One document's token ids, EOD included; or why there are none."""

    name: str
    size: int = 0
    ids: np.ndarray | None = None
    problem: str | None = None


def find_records(args: argparse.Namespace) -> Iterator[Record]:
    """Give every record in order, up to --max-documents and --max-bytes; only a jsonl is read for it."""
    size = 0
    for count, record in enumerate(_all_records(args), 1):
        size += record.size
        if (args.max_documents and count > args.max_documents) or (args.max_bytes and size > args.max_bytes):
            return
        yield record


def _all_records(args: argparse.Namespace) -> Iterator[Record]:
    folders = [(Path(folder), args.glob, frozenset[str]()) for folder in args.folder]
    if args.stdlib:
        folders.append((Path(sysconfig.get_path("stdlib")), ["**/*.py"], STDLIB_SKIPPED))
    for folder, patterns, skipped in folders:
        if not folder.is_dir():
            raise SystemExit(f"preprocess_documents: {folder} is not a folder.")
        paths = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
        for path in sorted(paths, key=lambda path: path.parts):
            if not skipped.intersection(path.relative_to(folder).parts[:-1]):
                yield Record(str(path), path, 0, path.stat().st_size)
    for name in args.jsonl:
        path, start = Path(name), 0
        if not path.is_file():
            raise SystemExit(f"preprocess_documents: {path} is not a file.")
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                yield Record(f"{path}:{number}", path, start, len(line), args.json_key)
                start += len(line)


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


_tokenizer: sentencepiece.SentencePieceProcessor


def _start_worker(model: bytes) -> None:
    global _tokenizer
    _tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)


def _tokenize(record: Record) -> Tokens:
    try:
        text = record.read()
    except BadRecord as error:
        return Tokens(record.name, problem=str(error))
    ids = [*_tokenizer.encode(text), _tokenizer.eos_id()]
    return Tokens(record.name, len(text.encode("utf-8")), np.asarray(ids, dtype=np.int32))


def tokenize(records: list[Record], model: bytes, workers: int) -> Iterator[Tokens]:
    """Tokenize with `workers` processes (1 is this one); results come in the order of `records`."""
    if workers == 1:
        _start_worker(model)
        yield from map(_tokenize, records)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with multiprocessing.get_context(method).Pool(workers, _start_worker, (model,)) as pool:
        yield from pool.imap(_tokenize, records, chunksize=8)


def write_dataset(
    results: Iterable[Tokens], prefix: Path, vocab_size: int, on_error: str
) -> tuple[list[Tokens], list[int]]:
    """Write PREFIX.bin and PREFIX.idx; give the bad records and the good documents' lengths in tokens.

    Megatron's cached sample index of an older PREFIX.bin is removed: it is not told apart by content.
    """
    bad: list[Tokens] = []
    size = 0
    with IndexedWriter(prefix, vocab_size) as writer:
        for result in results:
            if result.ids is None:
                if on_error == "fail":
                    raise SystemExit(
                        f"preprocess_documents: {result.name}: {result.problem}. Nothing was written."
                    )
                bad.append(result)
                continue
            writer.add(result.ids)
            size += result.size
        if not writer.lengths:
            raise SystemExit(
                f"preprocess_documents: none of {len(bad)} records holds a document. Nothing was written."
            )
        shutil.rmtree(prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    lengths = writer.lengths
    print(
        f"{prefix}.bin: {len(lengths):,} documents, {sum(lengths):,} tokens, {size / sum(lengths):.2f} bytes a token"
    )
    return bad, lengths


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
    group.add_argument("--jsonl", nargs="+", default=[], help="each line is a document")
    group.add_argument("--json-key", default="text")
    group.add_argument(
        "--stdlib", action="store_true", help="the Python standard library's sources, tests left out"
    )
    group.add_argument("--max-documents", type=int, default=None)
    group.add_argument("--max-bytes", type=int, default=None)
    group = parser.add_argument_group("tokenizer (one of these)")
    kind = group.add_mutually_exclusive_group(required=True)
    kind.add_argument("--tokenizer-model", help="a sentencepiece model")
    kind.add_argument(
        "--train-tokenizer", action="store_true", help="train one on these documents: PREFIX.model"
    )
    group.add_argument("--vocab-size", type=int, default=4096)
    group.add_argument("--tokenizer-sentences", type=int, default=40_000, help="lines to train on, at most")
    group = parser.add_argument_group("output")
    group.add_argument("--output-prefix", type=Path, required=True)
    group.add_argument("--workers", type=int, default=min(8, os.cpu_count() or 1))
    group.add_argument("--on-error", choices=["skip", "fail"], default="skip",
                       help="what to do with a record that cannot be decoded or is empty")  # fmt: skip
    return parser


def main(argv: list[str] | None = None) -> int:
    """Run the command line; give the number of bad records that were skipped."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if not (args.folder or args.jsonl or args.stdlib):
        parser.error("name some documents: --folder, --jsonl or --stdlib.")
    if args.workers < 1:
        parser.error(f"--workers {args.workers} is less than 1.")
    records = list(find_records(args))
    args.output_prefix.parent.mkdir(parents=True, exist_ok=True)
    if args.train_tokenizer:
        model = train_tokenizer(records, args.vocab_size, args.tokenizer_sentences)
        path = args.output_prefix.with_name(f"{args.output_prefix.name}.model")
        path.with_name(f"{path.name}.tmp").write_bytes(model)
        os.replace(path.with_name(f"{path.name}.tmp"), path)
        print(f"{path}: a sentencepiece model of {args.vocab_size:,} pieces")
    else:
        if not Path(args.tokenizer_model).is_file():
            raise SystemExit(f"preprocess_documents: {args.tokenizer_model} is not a file.")
        model = Path(args.tokenizer_model).read_bytes()
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    if tokenizer.eos_id() < 0:
        raise SystemExit(
            f"preprocess_documents: {args.tokenizer_model} has no end-of-sequence piece to end documents with."
        )
    results = tokenize(records, model, args.workers)
    bar = Progress(
        TextColumn("documents"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        console=Console(file=sys.stderr), disable=not sys.stderr.isatty(),
    )  # fmt: skip
    with bar:
        tracked = bar.track(results, total=len(records))
        bad, lengths = write_dataset(tracked, args.output_prefix, tokenizer.get_piece_size(), args.on_error)
    print(f"median {int(np.median(lengths)):,} tokens, longest {max(lengths):,}")
    print(histogram(lengths))
    if bad:
        print(f"skipped {len(bad)} bad records:")
        for result in bad[:LISTED_BAD_RECORDS]:
            print(f"  {result.name}: {result.problem}")
        if len(bad) > LISTED_BAD_RECORDS:
            print(f"  and {len(bad) - LISTED_BAD_RECORDS} more")
    return len(bad)


if __name__ == "__main__":
    main()
