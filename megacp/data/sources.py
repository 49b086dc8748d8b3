"""Where documents come from: files of a folder, lines of (compressed) JSON, rows of Parquet and of saved Hugging Face datasets.

Plain files are read by whoever tokenizes them; what has to be read in order is read by one process and handed on. Nothing here
holds more than a record at a time, and no record longer than a limit is kept.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from megacp.errors import ConfigError

__all__ = ["BadRecord", "Record", "folder", "lines", "parquet", "saved"]


class BadRecord(Exception):
    """A record that holds no usable document."""


@dataclass(frozen=True)
class Record:
    """Where a document is: a whole file, or (with a key) one line of a file; or its text, or what is wrong with it.

    size, limit: bytes. Give it to whoever is to :meth:`read` it; it is small unless it carries its text.
    """

    name: str
    path: Path
    start: int
    size: int
    key: str | None = None
    limit: int | None = None
    content: bytes | None = None
    problem: str | None = None

    def read(self) -> str:
        """Give the document's text.

        Raises: BadRecord if it cannot be read or decoded, is too long, or holds nothing.
        """
        if self.problem is not None:
            raise BadRecord(self.problem)
        if self.limit is not None and self.size > self.limit:
            raise BadRecord(f"has {self.size:,} bytes, and {self.limit:,} are allowed")
        try:
            text = self._bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise BadRecord(f"not UTF-8 at byte {error.start}") from error
        except OSError as error:
            raise BadRecord(f"cannot be read: {error.strerror}") from error
        if self.key is not None:
            text = _from_json(text, self.key)
        if not text.strip():
            raise BadRecord("empty")
        return text

    def _bytes(self) -> bytes:
        if self.content is not None:
            return self.content
        with self.path.open("rb") as file:
            file.seek(self.start)
            return file.read(self.size)


def _from_json(line: str, key: str) -> str:
    try:
        text = json.loads(line)[key]
    except json.JSONDecodeError as error:
        raise BadRecord("empty" if not line.strip() else f"not JSON: {error.msg}") from error
    except (KeyError, TypeError, IndexError) as error:
        raise BadRecord(f"has no {key!r}") from error
    except RecursionError as error:
        raise BadRecord("not JSON: nested too deep") from error
    if not isinstance(text, str):
        raise BadRecord(f"its {key!r} is no text")
    return text


def folder(
    path: Path, patterns: Sequence[str], skipped: frozenset[str] = frozenset(), limit: int | None = None
) -> Iterator[Record]:
    """Give each file below a folder, sorted by path, without those in folders named in ``skipped``."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder.")
    found = {file for pattern in patterns for file in path.glob(pattern) if file.is_file()}
    for file in sorted(found, key=lambda file: file.parts):
        if not skipped.intersection(file.relative_to(path).parts[:-1]):
            yield Record(str(file), file, 0, file.stat().st_size, limit=limit)


def lines(path: Path, key: str, limit: int | None = None) -> Iterator[Record]:
    """Give each line of a file of JSON objects, plain or compressed (.gz, .zst), whose ``key`` is the text."""
    is_plain = path.suffix not in (".gz", ".zst")
    start = 0
    with _opened(path) as file:
        for number, (line, size) in enumerate(_bounded(file, limit), 1):
            name = f"{path}:{number}"
            if is_plain:
                yield Record(name, path, start, size, key, limit)
            else:
                yield Record(name, path, 0, size, key, limit, line)
            start += size


def _bounded(file: IO[bytes], limit: int | None) -> Iterator[tuple[bytes, int]]:
    """Give each line with its size; of a line longer than the limit only its size is right."""
    most = -1 if limit is None else limit + 1
    while line := file.readline(most):
        size = len(line)
        if limit is not None and size > limit and not line.endswith(b"\n"):
            line = b""
            while more := file.readline(1 << 20):
                size += len(more)
                if more.endswith(b"\n"):
                    break
        yield line, size


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file.")
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rb") as file:
                yield file  # type: ignore[misc]
        elif path.suffix == ".zst":
            zstandard = _package("zstandard", path)
            with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as plain:
                yield io.BufferedReader(plain)
        else:
            with path.open("rb") as file:
                yield file
    except (gzip.BadGzipFile, EOFError) as error:
        raise ConfigError(f"{path} is no whole gzip file: {error}") from error


def parquet(path: Path, column: str, limit: int | None = None) -> Iterator[Record]:
    """Give each row of a Parquet file whose ``column`` is the text."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file.")
    file = _package("pyarrow.parquet", path).ParquetFile(path)
    if column not in file.schema_arrow.names:
        raise ConfigError(f"{path} has no column {column!r}; it has {', '.join(file.schema_arrow.names)}.")
    number = 0
    for batch in file.iter_batches(batch_size=64, columns=[column]):
        for value in batch.column(0):
            number += 1
            yield _of_text(f"{path}:{number}", path, column, value.as_py(), limit)


def saved(path: Path, column: str, limit: int | None = None) -> Iterator[Record]:
    """Give each row of a Hugging Face dataset saved in a folder (``Dataset.save_to_disk``) whose ``column`` is the text."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder.")
    rows = _package("datasets", path).load_from_disk(str(path))
    names = getattr(rows, "column_names", None)
    if not isinstance(names, list) or column not in names:
        raise ConfigError(f"{path} has no column {column!r}; it has {names}. Name one split's folder.")
    for number, row in enumerate(rows.select_columns([column]), 1):
        yield _of_text(f"{path}:{number}", path, column, row[column], limit)


def _of_text(name: str, path: Path, column: str, text: Any, limit: int | None) -> Record:
    if not isinstance(text, str):
        return Record(name, path, 0, 0, problem=f"its {column!r} is no text")
    content = text.encode("utf-8", "surrogatepass")
    return Record(name, path, 0, len(content), limit=limit, content=content)


def _package(name: str, path: Path) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ConfigError(
            f"{path} needs the package {package}, which is not installed: pip install {package}."
        ) from error
