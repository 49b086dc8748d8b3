"""GPTs around Transformer Engine's attention, trained on the ranks of tools/te_check."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

STEPS, LAYERS, LENGTH, WORDS = 3, 2, 32, 64


@dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
        methods: --cp-comm-type, one for all layers or one for each. regroup: what set_context_parallel_group then asks of every layer.
        expected: the methods that the layers must have in the end.
    """

    name: str = "Megatron's own attention, never hooked"
    cp: int = 1
    hooked: bool = True
    methods: tuple[str, ...] = ("p2p",)
    regroup: str = ""
    expected: list[str] = field(default_factory=list)


JOBS = (
    Job("1 rank", 1, expected=["p2p", "p2p"]),
    Job("2 ranks", 2, expected=["p2p", "p2p"]),
    Job("2 ranks, one method a layer", 2, methods=("a2a", "all_gather"), expected=["a2a", "all_gather"]),
    Job("2 ranks, set_context_parallel_group", 2, regroup="all_gather", expected=["all_gather"] * 2),
)


@dataclass
class Trained:
    """What a training left behind.

    Attributes:
        losses: of each step. gradients: by step and parameter. methods: by which megacp's attention went, call by call.
        own_forwards, own_context_parallel: calls of Transformer Engine's own. ours: calls of megacp's attention.
    """

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    methods: list[str] = field(default_factory=list)
    own_forwards: int = 0
    own_context_parallel: int = 0
    ours: int = 0


@dataclass
class OnGPUs:
    """One training step of whole Transformer Engine layers.

    Attributes:
        kernel: whose attention ran. allowed: how far its own bfloat16 gradients are off its float32 ones. off: how far megacp's are.
        trained: what megacp's step left behind.
    """

    kernel: str
    allowed: float
    off: float
    trained: Trained


def distance(a: Trained, b: Trained) -> float:
    """Return the largest relative difference of losses and of gradients."""
    losses = [abs(x - y) / abs(y) for x, y in zip(a.losses, b.losses, strict=True)]
    assert a.gradients.keys() == b.gradients.keys()
    gradients = [
        float((a.gradients[n] - g).norm() / g.norm().clamp(min=1e-30)) for n, g in b.gradients.items()
    ]
    return max(losses + gradients)


def train(job: Job) -> Trained:
    """Take some steps of gradient descent in float64, on CPU tensors."""
    from megacp.testing import cpu

    cpu.install()
    found = Trained()
    with (
        _hooked(job.hooked, job.cp),
        _groups(job.cp),
        _counted(found) if job.hooked else contextlib.nullcontext(),
    ):
        model = _model(job.cp, list(job.methods), with_te=job.hooked).double()
        if job.regroup:
            _regroup(model, job.regroup)
        for step in range(STEPS):
            found.losses.append(_step(model, step, job.cp, job.hooked))
            for name, parameter in model.named_parameters():
                assert parameter.grad is not None
                found.gradients[f"{step} {name}"] = parameter.grad.clone()
                with torch.no_grad():
                    parameter -= 0.5 * parameter.grad
                parameter.grad = None
    return found


def whole() -> int:
    """Build a GPT of whole layers of Transformer Engine over two ranks; return how many attention layers are hooked."""
    from megacp.testing import cpu

    cpu.install()
    with _hooked(True, 2), _groups(2):
        model = _model(2, ["p2p"], with_te=True, whole=True)
        return sum(hasattr(module, "megacp_method") for module in model.modules())


def on_gpus(meeting: str) -> OnGPUs:
    """Train whole layers on one GPU a rank: Transformer Engine alone in float32 and bfloat16, then megacp over all ranks in bfloat16.

    Args: meeting: a file that does not exist yet, for the ranks to meet at.
    """
    from megacp.kernels import Options, Request, transformer_engine

    rank, cp = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    dist.destroy_process_group()  # it is gloo's, which sends no GPU's tensors
    dist.init_process_group("nccl", init_method=f"file://{meeting}", rank=rank, world_size=cp)
    right = _whole_step(1, torch.float32)
    own = _whole_step(1, torch.bfloat16)
    request = Request("cuda", torch.bfloat16, 4, 2, 16, 16, Options(0.25))
    reason = transformer_engine.refuses(request)
    kernel = "transformer_engine" if reason is None else "auto"
    ours = _whole_step(cp, torch.bfloat16, kernel)
    used = kernel if reason is None else f"auto's choice, as {reason}"
    return OnGPUs(used, distance(own, right), distance(ours, right), ours)


def _whole_step(cp: int, dtype: torch.dtype, kernel: str = "") -> Trained:
    """Take one step; a kernel means that megacp is hooked."""
    found, hooked = Trained(), bool(kernel)
    with (
        _hooked(hooked, cp, kernel or "auto"),
        _groups(cp),
        _counted(found) if hooked else contextlib.nullcontext(),
    ):
        model = _model(cp, ["p2p"], with_te=True, whole=True, dtype=dtype).cuda()
        found.losses.append(_step(model, 0, cp, hooked, device="cuda"))
        found.gradients = {n: p.grad.float().cpu() for n, p in model.named_parameters() if p.grad is not None}
    return found


def refused() -> str:
    """Set a group of this rank alone on a layer that is split over two; give the answer."""
    from megacp.errors import UnsupportedError
    from megacp.testing import cpu

    cpu.install()
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    with _hooked(True, 2), _groups(2):
        model = _model(2, ["p2p"], with_te=True).double()
        for layer in model.decoder.layers:
            layer.self_attention.core_attention.set_context_parallel_group(
                alone, [dist.get_rank()], None, "p2p"
            )
        try:
            _step(model, 0, 2, True)
        except UnsupportedError as error:
            return f"refused: {str(error)[:120]}..."
    return "was not noticed"


@contextlib.contextmanager
def _hooked(wanted: bool, cp: int, kernel: str = "auto") -> Iterator[None]:
    """Install megacp. On one rank it is in force only where documents are kept apart, so positions are watched there."""
    import megacp
    from megacp.config import Config

    if wanted:
        megacp.install(Config(report="off", documents="off" if cp > 1 else "positions", kernel=kernel))
    try:
        yield
    finally:
        megacp.uninstall()


@contextlib.contextmanager
def _groups(cp: int) -> Iterator[None]:
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)
    try:
        yield
    finally:
        parallel_state.destroy_model_parallel()


@contextlib.contextmanager
def _counted(found: Trained) -> Iterator[None]:
    """Count calls of Transformer Engine's own attention, of its context parallelism, and of megacp's attention."""
    from transformer_engine.pytorch.attention.dot_product_attention import backends, context_parallel
    from transformer_engine.pytorch.attention.dot_product_attention.dot_product_attention import (
        DotProductAttention,
    )

    from megacp import attend

    def counting(original: Any, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            setattr(found, name, getattr(found, name) + 1)
            if name == "ours":
                found.methods.append(kwargs["method"])
            return original(*args, **kwargs)

        return call

    places = [
        (DotProductAttention, "forward", "own_forwards"),
        (context_parallel, "attn_forward_func_with_cp", "own_context_parallel"),
        (backends, "attn_forward_func_with_cp", "own_context_parallel"),
        (attend, "attention", "ours"),
    ]
    before = [(holder, name, getattr(holder, name)) for holder, name, _ in places]
    for holder, name, counter in places:
        setattr(holder, name, counting(getattr(holder, name), counter))
    try:
        yield
    finally:
        for holder, name, original in before:
            setattr(holder, name, original)


def _model(
    cp: int, methods: list[str], with_te: bool, whole: bool = False, dtype: torch.dtype = torch.float64
) -> Any:
    from megatron.core.extensions.transformer_engine import TEDotProductAttention
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=64,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        context_parallel_size=cp,
        cp_comm_type=methods if len(methods) > 1 else methods[0],
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
    )
    if whole:
        layers = get_gpt_layer_with_transformer_engine_spec()
    else:  # with Megatron's own norms, the last one too
        layer = get_gpt_layer_local_spec()
        if with_te:
            layer.submodules.self_attention.submodules.core_attention = TEDotProductAttention
        layers = TransformerBlockSubmodules(layer_specs=[layer] * LAYERS, layer_norm=WrappedTorchNorm)
    return GPTModel(
        config, layers, vocab_size=WORDS, max_sequence_length=LENGTH, position_embedding_type="rope"
    )


def _regroup(model: Any, method: str) -> None:
    """Do as frameworks do that set the group after the model is built."""
    from megatron.core import parallel_state

    group = parallel_state.get_context_parallel_group()
    for layer in model.decoder.layers:
        layer.self_attention.core_attention.set_context_parallel_group(
            group, dist.get_process_group_ranks(group), None, method
        )


def _step(model: Any, step: int, cp: int, hooked: bool, device: str = "cpu") -> float:
    """Run one forward and backward pass; gradients are averaged over the group, as the host's data parallelism does."""
    make = torch.Generator().manual_seed(10 + step)
    tokens, labels = (torch.randint(0, WORDS, (2, LENGTH), generator=make).to(device) for _ in range(2))
    positions = torch.arange(LENGTH, device=device).expand(2, LENGTH)
    hidden = (
        None if hooked else torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=device).triu(1)[None, None]
    )
    per_token = model(tokens, positions, hidden, labels=labels)
    loss = per_token[:, :-1].mean()  # where documents are kept apart the last token has no label
    loss.backward()
    if cp > 1:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= cp
    return float(loss.detach())
