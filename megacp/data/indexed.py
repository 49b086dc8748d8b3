"""Read Megatron's indexed datasets, PREFIX.bin and PREFIX.idx, as documents; with numpy alone.

PREFIX.idx: the magic, version 1 (uint64), a code of the tokens' dtype (uint8), numbers of sequences and of document ends (uint64
each), the sequences' lengths in tokens (int32), where in PREFIX.bin they begin (int64, bytes), and for each document its first
sequence, then the number of sequences (int64). Multimodal sets have a byte a sequence after that, which is not read. Files are
input from others: every number is checked against the files' sizes before anything is allocated or mapped.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from megacp.errors import ConfigError

__all__ = ["IndexedDocuments"]

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


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
