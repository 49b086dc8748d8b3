"""From records to an indexed dataset: many processes tokenize, one writes, and what is done stays done.

The dataset is made in *parts*, files of their own that appear when they are whole. A run that was stopped goes on after the last of
them, if documents, tokenizer and settings are those it began with. Parts are cut by records and bytes, and joined in order, so the
result is the same bytes however many processes there were and however often it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megacp.data.indexed import IndexedDocuments, IndexedWriter
from megacp.data.sources import BadRecord, Record
from megacp.errors import ConfigError

__all__ = ["Bad", "Summary", "Vocabulary", "load_vocabulary", "preprocess"]

PART_RECORDS, PART_BYTES = 10_000, 1 << 28


class Vocabulary(Protocol):
    """A tokenizer: how many ids there are, which one ends a document, and text to ids."""

    size: int
    eod: int

    def encode(self, text: str) -> list[int]:
        """Give the ids of a text, without the one that ends a document."""


class _SentencePiece:
    def __init__(self, model: bytes, eod: str | None) -> None:
        import sentencepiece

        try:
            self._model = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise ConfigError("the tokenizer is no sentencepiece model.") from error
        self.size = self._model.get_piece_size()
        self.eod = self._model.eos_id() if eod is None else self._model.piece_to_id(eod)
        if self.eod < 0 or (eod is not None and self._model.id_to_piece(self.eod) != eod):
            raise ConfigError(
                "the tokenizer has no end-of-sequence piece to end documents with."
                if eod is None
                else f"the tokenizer has no piece {eod!r}."
            )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids


class _Tokenizers:
    def __init__(self, model: bytes, eod: str | None) -> None:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ConfigError(
                "a tokenizer.json needs the package tokenizers, which is not installed: pip install tokenizers."
            ) from error
        try:
            self._model = Tokenizer.from_str(model.decode())
        except Exception as error:  # the package raises Exception itself
            raise ConfigError(f"the tokenizer is no tokenizer.json: {error}") from error
        self.size = self._model.get_vocab_size()
        found = None if eod is None else self._model.token_to_id(eod)
        if found is None:
            raise ConfigError(
                f"which token ends a document? A tokenizer.json does not say, and {eod!r} is none of its tokens. "
                "Name one, as in --eod-token '<|endoftext|>'."
            )
        self.eod = found

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text, add_special_tokens=False).ids
        return ids


def load_vocabulary(model: bytes, eod: str | None = None) -> Vocabulary:
    """Load a tokenizer from the bytes of its file: Hugging Face's tokenizer.json, or a sentencepiece model.

    Args:
        eod: the token that ends a document; a sentencepiece model has one of its own.
    Raises: ConfigError for a file that is neither, or without such a token.
    """
    return _Tokenizers(model, eod) if model.lstrip()[:1] == b"{" else _SentencePiece(model, eod)


@dataclass(frozen=True)
class Bad:
    """A record that was left out, and why."""

    name: str
    problem: str


@dataclass(frozen=True)
class Summary:
    """What was written: tokens of each document, bytes of text, records left out; and parts that were there already."""

    lengths: list[int]
    size: int
    bad: list[Bad]
    parts_kept: int


def preprocess(
    records: Iterable[Record],
    model: bytes,
    prefix: Path,
    *,
    eod: str | None = None,
    workers: int = 1,
    is_fatal: bool = False,
    made_from: Any = None,
    notice: Callable[[int], None] = lambda count: None,
) -> Summary:
    """Write PREFIX.bin and PREFIX.idx, a document a record, each ended by the token for it.

    Args:
        records: in the order of the dataset. model, eod: see :func:`load_vocabulary`. workers: processes; 1 is this one.
        is_fatal: stop at a bad record, and write nothing. made_from: plain values that tell this input from another (names, sizes,
            times); a run that was stopped goes on only if they are the same. notice: is told how many more records are done.
    Raises: ConfigError for a bad record if that is fatal, or if there is no document at all; nothing is then written.
    """
    vocabulary = load_vocabulary(model, eod)
    parts = _Parts(prefix, [made_from, eod, is_fatal, hashlib.blake2b(model).hexdigest()])
    stream, number = iter(records), 0
    kept = parts.begin()
    with _workers(workers, model, eod) as tokenize:
        while chunk := list(_chunk(stream)):
            if number >= kept:
                try:
                    parts.write(number, tokenize(chunk), vocabulary.size, is_fatal, notice)
                except ConfigError:
                    parts.remove()
                    raise
            else:
                notice(len(chunk))
            number += 1
    return parts.join(number, vocabulary.size, kept)


def _chunk(records: Iterator[Record]) -> Iterator[Record]:
    size = 0
    for record in islice(records, PART_RECORDS):
        yield record
        size += record.size
        if size >= PART_BYTES:
            return


class _Parts:
    """The folder PREFIX.parts: for each part its .bin and .idx, and then a .json, whose presence says that it is whole."""

    def __init__(self, prefix: Path, made_from: Any) -> None:
        self._prefix, self._folder = prefix, prefix.with_name(f"{prefix.name}.parts")
        form = json.dumps([1, PART_RECORDS, PART_BYTES, made_from], sort_keys=True)
        self._made_from = hashlib.blake2b(form.encode()).hexdigest()

    def begin(self) -> int:
        """Make the folder, or keep what is in it of the same input; count the parts that are whole."""
        told = self._folder / "made_from"
        if not told.is_file() or told.read_text() != self._made_from:
            self.remove()
            self._folder.mkdir(parents=True)
            _put(told, self._made_from)
        count = 0
        while (self._folder / f"{count:06d}.json").is_file():
            count += 1
        return count

    def write(
        self,
        number: int,
        found: Iterable[tuple[str, int, np.ndarray | str]],
        vocab_size: int,
        is_fatal: bool,
        notice: Callable[[int], None],
    ) -> None:
        bad: list[tuple[str, str]] = []
        total = 0
        path = self._folder / f"{number:06d}"
        with IndexedWriter(path, vocab_size) as writer:
            for name, size, result in found:
                notice(1)
                if isinstance(result, str):
                    if is_fatal:
                        raise ConfigError(f"{name}: {result}. Nothing was written.")
                    bad.append((name, result))
                    continue
                writer.add(result)
                total += size
        _put(path.with_suffix(".json"), json.dumps({"size": total, "bad": bad}))

    def join(self, count: int, vocab_size: int, kept: int) -> Summary:
        """Put the parts together under the final name, and take the folder away."""
        bad: list[Bad] = []
        size = 0
        for number in range(count):
            one = json.loads((self._folder / f"{number:06d}.json").read_text())
            bad += [Bad(*each) for each in one["bad"]]
            size += one["size"]
        with IndexedWriter(self._prefix, vocab_size) as writer:
            for number in range(count):
                documents = IndexedDocuments(self._folder / f"{number:06d}")
                for document in range(len(documents)):
                    writer.add(documents.tokens(document))
            if not writer.lengths:
                self.remove()
                raise ConfigError(f"none of {len(bad)} records holds a document. Nothing was written.")
        self.remove()
        return Summary(writer.lengths, size, bad, min(kept, count))

    def remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _put(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    begun = path.with_name(f"{path.name}.tmp")
    with begun.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(begun, path)


_vocabulary: Vocabulary


def _start(model: bytes, eod: str | None) -> None:
    global _vocabulary
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # these processes are the parallelism
    _vocabulary = load_vocabulary(model, eod)


def _tokenize(record: Record) -> tuple[str, int, np.ndarray | str]:
    """Give a record's name, its bytes of text, and its ids, or what is wrong with it."""
    try:
        text = record.read()
    except BadRecord as error:
        return record.name, 0, str(error)
    ids = _vocabulary.encode(text)
    ids.append(_vocabulary.eod)
    return record.name, len(text.encode("utf-8")), np.asarray(ids, dtype=np.int32)


class _workers:
    """A function from records to results in their order, by some processes."""

    def __init__(self, count: int, model: bytes, eod: str | None) -> None:
        self._pool = None
        if count == 1:
            _start(model, eod)
            return
        method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
        self._pool = multiprocessing.get_context(method).Pool(count, _start, (model, eod))

    def __enter__(self) -> Callable[[list[Record]], Iterator[tuple[str, int, np.ndarray | str]]]:
        pool = self._pool
        if pool is None:
            return lambda records: map(_tokenize, records)
        return lambda records: pool.imap(_tokenize, records, chunksize=8)

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.terminate()
            self._pool.join()
