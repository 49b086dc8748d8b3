"""The next micro-batch's layout and plan, made in a thread while this one's step runs.

Plans are kept by value, so it is enough to make them once: the step then finds them. The batch is read one ahead for it, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from megacp import attend
from megacp.errors import MegacpError
from megacp.hosts.documents import document_mask, starts_of
from megacp.hosts.placement import place
from megacp.hosts.session import Session

__all__ = ["Ahead", "planned"]


class Ahead:
    """Iterate over batches; each is read, and prepared, while the one before it is in use.

    batches: read by one thread only. prepare: is given each batch in that thread.
    Raises: what reading a batch raises, when that batch is asked for.
    """

    def __init__(self, batches: Iterator[Any], prepare: Callable[[Any], None]) -> None:
        self._batches, self._prepare = batches, prepare
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="megacp-ahead")
        self._coming: Future[list[Any]] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        taken = (self._coming or self._thread.submit(self._take)).result()
        if not taken:
            raise StopIteration
        self._coming = self._thread.submit(self._take)
        return taken[0]

    def _take(self) -> list[Any]:
        """Read a batch; an empty list is the end, as StopIteration cannot leave a thread."""
        for batch in self._batches:
            self._prepare(batch)
            return [batch]
        return []


def planned(batch: Any, run: Session, rank: int, cp_size: int) -> None:
    """Make the layout and plans of a batch of tokens [B, G], as the model's entry and its layers will ask for them.

    What cannot be made is left to the step, which says why.
    """
    config, (tokens, positions) = run.model_config, (batch.get(name) for name in ("tokens", "position_ids"))
    if config is None or tokens is None:
        return
    with suppress(MegacpError):
        mask = document_mask(starts_of(run.config.documents, tokens, positions, run.eod))
        layout = place(run.config.layout, mask, cp_size, config, run.methods, run.device).layout
        for method in dict.fromkeys(run.methods):
            if method != "auto":  # chosen by the layers' own sizes
                attend.plan(layout, mask, method).steps(rank)
