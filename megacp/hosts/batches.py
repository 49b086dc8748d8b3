"""One rank of a group reads the batches, the others get them from it: the data file is read once a group, not once a rank.

A batch may be anything that can be pickled, with tensors of any shape and dtype in it, and the next one may look different: each
is sent with its own description, so no rank has to know shapes beforehand.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch

from megacp import comm
from megacp.errors import ShapeError
from megacp.groups import Group

__all__ = ["Shared"]

_BATCH, _END, _FAILED = range(3)


class Shared:
    """Iterate over the batches of the group's first rank, on every rank of it. Each rank must take every batch.

    batches: the first rank's iterator; what other ranks give is not read. Tensors arrive on the CPU.
    Raises: StopIteration on every rank where the batches end; what reading raised on the first rank, as a ShapeError on the others.
    """

    def __init__(self, batches: Iterator[Any] | None, group: Group) -> None:
        self._batches, self._group = batches, group

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._group.size == 1:
            return next(self._batches)  # type: ignore[arg-type]
        return self._read() if self._group.rank == 0 else self._receive()

    def _read(self) -> Any:
        try:
            batch = next(self._batches)  # type: ignore[arg-type]
            parts = _pack(batch)
        except StopIteration:
            self._send(_END, b"", torch.empty(0, dtype=torch.uint8))
            raise
        except Exception as error:
            self._send(_FAILED, repr(error).encode(), torch.empty(0, dtype=torch.uint8))
            raise
        self._send(_BATCH, *parts)
        return batch

    def _send(self, kind: int, form: bytes, data: torch.Tensor) -> None:
        device = _device(self._group)
        header = torch.tensor([kind, len(form), data.numel()], dtype=torch.int64, device=device)
        comm.broadcast(self._group, header, 0, "the size of a batch")
        if form:
            both = torch.cat([torch.frombuffer(bytearray(form), dtype=torch.uint8), data])
            comm.broadcast(self._group, both.to(device), 0, "a batch")

    def _receive(self) -> Any:
        device = _device(self._group)
        header = torch.zeros(3, dtype=torch.int64, device=device)
        comm.broadcast(self._group, header, 0, "the size of a batch")
        kind, form, data = header.tolist()
        both = torch.empty(form + data, dtype=torch.uint8, device=device)
        if form:
            comm.broadcast(self._group, both, 0, "a batch")
        both = both.cpu()
        if kind == _END:
            raise StopIteration
        if kind == _FAILED:
            raise ShapeError(
                f"megacp: rank {self._group.global_ranks[0]} reads the data for ranks {list(self._group.global_ranks)}, and failed: "
                f"{bytes(both.tolist()).decode()}"
            )
        return _unpack(both[:form].numpy().tobytes(), both[form:])


def _device(group: Group) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device()) if group.backend == "nccl" else torch.device("cpu")
    )


def _pack(batch: Any) -> tuple[bytes, torch.Tensor]:
    """Take a batch apart: what it is without the numbers in its tensors, and these, uint8."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(batch)
    return stream.getvalue(), torch.cat([*packer.pieces, torch.empty(0, dtype=torch.uint8)])


def _unpack(form: bytes, data: torch.Tensor) -> Any:
    return _Unpacker(io.BytesIO(form), data).load()


class _Packer(pickle.Pickler):
    """Leave tensors out; views do not drag along what they are views of."""

    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream)
        self.pieces: list[torch.Tensor] = []

    def persistent_id(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return None
        piece = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self.pieces.append(piece)
        return x.dtype, tuple(x.shape), piece.numel()


class _Unpacker(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, data: torch.Tensor) -> None:
        super().__init__(stream)
        self._data, self._at = data, 0

    def persistent_load(self, what: Any) -> torch.Tensor:
        dtype, shape, size = what
        piece = self._data[self._at : self._at + size].clone()
        self._at += size
        return piece.view(dtype).reshape(shape)
