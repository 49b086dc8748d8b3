"""Read and write Megatron's indexed datasets, PREFIX.bin and PREFIX.idx, as documents; with numpy alone.

PREFIX.idx: the magic, version 1 (uint64), a code of the tokens' dtype (uint8), numbers of sequences and of document ends (uint64
each), the sequences' lengths in tokens (int32), where in PREFIX.bin they begin (int64, bytes), and for each document its first
sequence, then the number of sequences (int64). Multimodal sets have a byte a sequence after that, which is not read. Files are
input from others: every number is checked against the files' sizes before anything is allocated or mapped.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np

from megacp.errors import ConfigError

__all__ = ["IndexedDocuments", "IndexedWriter"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


_UINT16_VOCABULARY = 65500  # as Megatron decides it


class IndexedWriter:
    """Write documents one after the other; both files appear under their names when all is written, or not at all.

    Use as a context manager: leaving it by an exception writes nothing, and removes what was begun.

    Args:
        prefix: of PREFIX.bin and PREFIX.idx. vocab_size: 2-byte tokens where it permits them, else 4-byte ones.
    """

    def __init__(self, prefix: str | Path, vocab_size: int) -> None:
        self.dtype = np.dtype(np.uint16 if vocab_size < _UINT16_VOCABULARY else np.int32)
        self._files = {kind: Path(f"{prefix}.{kind}") for kind in ("bin", "idx")}
        self._begun = {kind: Path(f"{path}.tmp") for kind, path in self._files.items()}
        self._lengths: list[int] = []

    def __enter__(self) -> IndexedWriter:
        self._bin = self._begun["bin"].open("wb", buffering=1 << 20)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._bin.close()
            for path in self._begun.values():
                path.unlink(missing_ok=True)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document so far."""
        return self._lengths

    def add(self, tokens: np.ndarray) -> None:
        """Append a document. Raises: ConfigError for an id that the dtype cannot hold."""
        if len(tokens) and not (int(tokens.min()) >= 0 and int(tokens.max()) <= np.iinfo(self.dtype).max):
            raise ConfigError(
                f"megacp: document {len(self._lengths)} has ids from {tokens.min()} to {tokens.max()}, which {self.dtype} cannot hold."
            )
        self._bin.write(np.ascontiguousarray(tokens, self.dtype).data)
        self._lengths.append(len(tokens))

    def _finish(self) -> None:
        lengths = np.array(self._lengths, "<i4")
        code = next(code for code, dtype in _DTYPES.items() if self.dtype == dtype)
        with self._begun["idx"].open("wb") as idx:
            idx.write(_HEADER.pack(_MAGIC, 1, code, len(lengths), len(lengths) + 1))
            idx.write(lengths.tobytes())
            ahead = np.cumsum(lengths, dtype=np.int64) * self.dtype.itemsize
            idx.write(np.concatenate([[0], ahead[:-1]])[: len(lengths)].astype("<i8").tobytes())
            idx.write(np.arange(len(lengths) + 1, dtype="<i8").tobytes())
            _to_disk(idx)
        _to_disk(self._bin)
        self._files["idx"].unlink(missing_ok=True)  # never an old index beside new tokens
        for kind in ("bin", "idx"):
            os.replace(self._begun[kind], self._files[kind])


class IndexedDocuments:
    """The documents of PREFIX.bin and PREFIX.idx, mapped into memory.

    Attributes:
        lengths: tokens of each document, int64. dtype: of a token.
    Raises: ConfigError naming the file for one that is missing, cut off or says what cannot be.
    """

    def __init__(self, prefix: str | Path) -> None:
        self._idx, self._bin = (Path(f"{prefix}.{kind}") for kind in ("idx", "bin"))
        try:
            stored, data = self._idx.stat().st_size, self._bin.stat().st_size
            with self._idx.open("rb") as file:
                header = file.read(_HEADER.size)
        except OSError as error:
            raise ConfigError(
                f"megacp: {error.filename} cannot be read: {error.strerror}. {prefix} must name a .bin and an .idx."
            ) from error
        if len(header) < _HEADER.size or not header.startswith(_MAGIC):
            raise self._wrong("is no index of an indexed dataset: it does not begin with MMIDIDX")
        _, version, code, sequences, ends = _HEADER.unpack(header)
        if version != 1 or code not in _DTYPES:
            raise self._wrong(
                f"has version {version} and dtype {code}, and 1 and a kind of integer are known"
            )
        needed = _HEADER.size + 12 * sequences + 8 * ends
        if stored not in (needed, needed + sequences):
            raise self._wrong(
                f"names {sequences} sequences and {ends} document ends, for which its {stored} bytes do not fit"
            )
        table = np.memmap(self._idx, np.uint8, mode="r")
        at = _HEADER.size
        self._sizes = table[at : at + 4 * sequences].view("<i4")
        self._places = table[at + 4 * sequences : at + 12 * sequences].view("<i8")
        self._firsts = table[at + 12 * sequences : needed].view("<i8")
        self.dtype = np.dtype(_DTYPES[code])
        self._check(sequences, data)
        self._tokens = np.memmap(self._bin, self.dtype, mode="r") if data else np.empty(0, self.dtype)
        ahead = np.concatenate([[0], np.cumsum(self._sizes, dtype=np.int64)])
        self.lengths = np.diff(ahead[self._firsts])

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def tokens(self, document: int, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Give tokens [start, stop) of a document, a view of the file where its sequences lie side by side.

        Raises: ConfigError for a document or a place that there is not.
        """
        length = int(self.lengths[document]) if 0 <= document < len(self) else -1
        stop = length if stop is None else stop
        if not 0 <= start <= stop <= length:
            raise ConfigError(
                f"megacp: {self._bin} has {len(self)} documents, and no tokens {start} to {stop} of document {document}."
            )
        of = slice(int(self._firsts[document]), int(self._firsts[document + 1]))
        parts = zip(self._places[of].tolist(), self._sizes[of].tolist(), strict=True)
        joined: list[tuple[int, int]] = []
        for place, size in parts:
            first = place // self.dtype.itemsize
            if joined and joined[-1][1] == first:
                joined[-1] = joined[-1][0], first + size
            else:
                joined.append((first, first + size))
        if len(joined) == 1:
            first = joined[0][0]
            return self._tokens[first + start : first + stop]
        whole = [self._tokens[a:b] for a, b in joined]
        return np.concatenate([*whole, self._tokens[:0]])[start:stop]

    def _check(self, sequences: int, data: int) -> None:
        width, firsts = self.dtype.itemsize, self._firsts
        if data % width:
            raise self._wrong(f"has tokens of {width} bytes, and {self._bin} has {data} bytes")
        if not len(firsts) or firsts[0] != 0 or firsts[-1] != sequences or (np.diff(firsts) < 0).any():
            raise self._wrong(f"has document ends that do not rise from 0 to its {sequences} sequences")
        sizes, places = self._sizes.astype(np.int64), self._places
        if (sizes < 0).any() or (places < 0).any() or (places % width).any():
            raise self._wrong("has lengths or places below 0, or places within a token")
        if (places > data - sizes * width).any():
            raise self._wrong(f"has sequences beyond the {data} bytes of {self._bin}")

    def _wrong(self, what: str) -> ConfigError:
        return ConfigError(
            f"megacp: {self._idx} {what}. Write it again, for example with tools/preprocess_documents.py."
        )


def _to_disk(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
