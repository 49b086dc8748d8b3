"""Dropout that is the same at every context-parallel size: what is dropped follows from global positions, not from who computes it.

Each micro-batch gets a key when it enters the model. The key is made of the state of the host's own generator, the one that
all tensor- and context-parallel ranks hold alike and that checkpoints restore, and of the data-parallel rank; it travels in
the ticket, so recompute has it too. Each place of the model that drops something makes its own seed of the key.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from megacp.dropout import combined, drop
from megacp.errors import SeamError, UnsupportedError
from megacp.hosts.hooks import Function
from megacp.hosts.megatron.settings import parallel_state
from megacp.hosts.session import Session
from megacp.hosts.splits import Split, redeem

_ATTENTION, _HIDDEN = 1, 2


@dataclass
class Site:
    """The part of a model that runs now: the embedding (layer 0) or a layer. count: places in it that have dropped something."""

    split: Split
    layer: int
    count: int = 0

    def drop(self, x: torch.Tensor, p: float) -> torch.Tensor:
        """Drop from x [S, B, hidden]: this rank's tokens, or its tensor-parallel part of them under sequence parallelism."""
        self.count += 1
        seed = combined(self.split.dropout_key, _HIDDEN, self.layer, self.count)
        return drop(x, p, seed, _positions(self.split, x.shape[0]))


def _positions(split: Split, length: int) -> torch.Tensor:
    """Return the global positions of the tokens at hand, int64 [length]."""
    whole = split.layout.positions(split.group.rank)
    if length == len(whole):
        return whole
    rank = parallel_state().get_tensor_model_parallel_rank()
    if length * parallel_state().get_tensor_model_parallel_world_size() != len(whole):
        raise UnsupportedError(
            f"megacp: --megacp-dropout positions: a layer drops from {length} tokens, and this rank holds {len(whole)}. "
            "Which ones these are is not known. Set --hidden-dropout 0."
        )
    return whole[rank * length : (rank + 1) * length]


def keyed(split: Split, model: Any, run: Session) -> Split:
    """Give a micro-batch its key, if it is to be trained with dropout."""
    config = model.config
    if (
        not run.has_keyed_dropout
        or not model.training
        or not (config.hidden_dropout or config.attention_dropout)
    ):
        return split
    replica = parallel_state().get_data_parallel_rank()
    chunk = getattr(model, "vp_stage", None) or 0
    return replace(split, dropout_key=combined(_next_state(), replica, chunk))


def _next_state() -> int:
    """Read the state of the host's generator for what is alike on tensor-parallel ranks, and turn it on by one draw.

    The state lies in the host's memory on a GPU too, so nothing waits for the device.
    """
    random = sys.modules["megatron.core.tensor_parallel.random"]
    name = random.get_data_parallel_rng_tracker_name()
    tracker = random.get_cuda_rng_tracker()
    if not tracker.is_initialized() or name not in tracker.get_states():
        raise SeamError(
            f"megacp: --megacp-dropout positions needs the host's random state {name!r}, which is made by "
            "tensor_parallel.model_parallel_cuda_manual_seed(seed). Call it before the first step."
        )
    with tracker.fork(name):
        state = torch.cuda.get_rng_state()
        torch.rand(1, device=torch.cuda.current_device())
    digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def of_attention(module: Any, split: Split, run: Session) -> dict[str, Any]:
    """Give attention() its dropout for one layer; nothing where nothing is dropped.

    Raises: UnsupportedError if the layer drops and megacp is not asked to.
    """
    p = module.config.attention_dropout if module.megacp_dropout is None else module.megacp_dropout
    if not p or not module.training:
        return {}
    if not run.has_keyed_dropout:
        raise UnsupportedError(
            f"megacp: a layer has attention dropout {p}. Set --attention-dropout 0, or add --megacp-dropout positions."
        )
    heads = parallel_state().get_tensor_model_parallel_rank()  # other heads on each
    return {
        "dropout_p": p,
        "dropout_seed": combined(split.dropout_key, _ATTENTION, _number(module), heads),
    }


def number_layers(model: Any) -> None:
    """Tell layers of multi-token prediction, which the host numbers from 1 again, from those of the decoder."""
    for name, module in model.named_modules():
        if hasattr(module, "layer_number") or hasattr(module, "megacp_number"):
            module.megacp_is_mtp = name.startswith("mtp")


def _number(module: Any) -> int:
    return 2 * int(getattr(module, "megacp_number", 0) or module.layer_number) + bool(
        getattr(module, "megacp_is_mtp", False)
    )


@contextmanager
def at(run: Session, split: Split, layer: int, drops: bool) -> Iterator[None]:
    """Let what is dropped in this block belong to one layer of a micro-batch.

    drops: the part has dropout. Raises: UnsupportedError if megacp then saw none, so that the host drew it itself.
    """
    before, run.site = run.site, Site(split, layer)
    try:
        yield
        if drops and run.site.count == 0:
            raise UnsupportedError(
                f"megacp: --megacp-dropout positions: {f'layer {layer // 2}' if layer else 'the embedding'} has hidden dropout, "
                "but not by the host's bias-dropout-add or embedding, so it would differ with the size. Set --hidden-dropout 0."
            )
    finally:
        run.site = before


def transformer_layer(original: Function, session: Callable[[], Session]) -> Function:
    """Know which layer of which micro-batch runs, in recompute too: the ticket is among its arguments."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        run = session()
        if not run.has_keyed_dropout or not self.training:
            return original(self, *args, **kwargs)
        given = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        split = next((found for found in map(redeem, given) if found is not None), None)
        if split is None:
            return original(self, *args, **kwargs)
        with at(run, split, _number(self), drops=bool(split.dropout_key and self.hidden_dropout)):
            return original(self, *args, **kwargs)

    return forward


def bias_dropout_add(original: Function, session: Callable[[], Session]) -> Function:
    """Drop from the output of attention and MLP by positions; the host's function adds the residual."""

    @functools.wraps(original)
    def get_bias_dropout_add(training: bool, *args: Any, **kwargs: Any) -> Any:
        run, add = session(), original(training, *args, **kwargs)
        if not training or not run.has_keyed_dropout:
            return add

        def keyed_add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> Any:
            if not prob:
                return add(x_with_bias, residual, prob)
            x, bias = x_with_bias
            x = x if bias is None else x + bias
            return add((_site(run).drop(x, prob), None), residual, 0.0)

        return keyed_add

    return get_bias_dropout_add


def embedding(original: Function, session: Callable[[], Session]) -> Function:
    """Drop from the embedding by positions, in place of the host's own dropout."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = getattr(self, "embedding_dropout", None)
        p = getattr(own, "p", 0)
        if not session().has_keyed_dropout or not self.training or not p or own is None:
            return original(self, *args, **kwargs)
        own.p = 0.0
        try:
            out = original(self, *args, **kwargs)
        finally:
            own.p = p
        return _site(session()).drop(out, p)

    return forward


def _site(run: Session) -> Site:
    if run.site is None:
        raise UnsupportedError(
            "megacp: --megacp-dropout positions: a layer drops outside the forward pass of a model and a layer that megacp sees, so "
            "its positions are not known. Set --hidden-dropout 0, or leave schedules that run parts of layers away."
        )
    site: Site = run.site
    return site
