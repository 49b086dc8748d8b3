"""Kernels: blocks are cut exactly, each library is called as it documents, and what a kernel cannot do it refuses by name.

The libraries for CUDA are not here. Their stand-ins (stand_ins.py) take the same parameters and compute what the libraries document,
so what is checked is everything but the libraries: cumulative lengths, windows, gathering, log-sum-exp layouts, gradients.
"""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import megacp
from megacp import Layout, Mask, kernels
from megacp.errors import ConfigError, UnsupportedError
from megacp.kernels import (
    Gradients,
    Options,
    Request,
    Sum,
    cuts,
    flash_attn,
    flex,
    packed,
    sdpa_cuda,
    sdpa_cudnn,
    signatures,
)
from megacp.kernels import transformer_engine as te
from megacp.merge import State
from megacp.plans import Block
from megacp.slices import UNBOUNDED
from megacp.testing import ranks
from tests import oracle
from tests.unit import stand_ins

ROOT = Path(__file__).resolve().parents[2]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _one_thread():
    """Many small products: on a busy machine, threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# -- cuts --------------------------------------------------------------------------------------------------------------


def pairs_of(block: Block, size: int) -> np.ndarray:
    q, k = np.arange(size)[:, None], np.arange(size)[None, :]
    inside = (block.q_start <= q) & (q < block.q_stop) & (block.k_start <= k) & (k < block.k_stop)
    return inside & (block.lo <= k - q) & (k - q <= block.hi)


def pairs_of_part(part: cuts.Part, size: int) -> np.ndarray:
    """Spell a part out from its description alone: aligned at the bottom right, counted from the end if flipped."""
    s, t = part.q_stop - part.q_start, part.k_stop - part.k_start
    delta = np.arange(t)[None, :] - np.arange(s)[:, None] - (t - s)
    seen = np.ones((s, t), bool)
    if part.is_causal:
        seen &= delta <= 0
    if part.window != cuts.UNLIMITED:
        seen &= delta >= -part.window
    out = np.zeros((size, size), int)
    out[part.q_start : part.q_stop, part.k_start : part.k_stop] = seen[::-1, ::-1] if part.flipped else seen
    return out


@st.composite
def any_block(draw: st.DrawFn, size: int = 20) -> Block:
    q0, q1 = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    k0, k1 = sorted(draw(st.lists(st.integers(0, size), min_size=2, max_size=2)))
    diagonal = st.integers(-size, size)
    return Block(
        -1, q0, q1, k0, k1, draw(st.just(-UNBOUNDED) | diagonal), draw(st.just(UNBOUNDED) | diagonal)
    )


@settings(max_examples=400, deadline=None)
@given(any_block(), st.booleans(), st.booleans())
def test_the_parts_of_a_block_hold_each_of_its_pairs_once(block: Block, square: bool, windows: bool) -> None:
    found = list(cuts.parts(block, square=square, windows=windows))
    total = sum((pairs_of_part(part, 20) for part in found), np.zeros((20, 20), int))
    assert np.array_equal(total, pairs_of(block, 20).astype(int))


@settings(max_examples=400, deadline=None)
@given(any_block(), st.booleans(), st.booleans())
def test_every_part_is_of_a_shape_that_was_asked_for(block: Block, square: bool, windows: bool) -> None:
    for part in cuts.parts(block, square=square, windows=windows):
        s, t = part.q_stop - part.q_start, part.k_stop - part.k_start
        seen = pairs_of_part(part, 20)[part.q_start : part.q_stop, part.k_start : part.k_stop]
        assert s > 0 and t > 0 and seen.any(0).all() and seen.any(1).all()
        assert not part.is_causal or s == t or (s < t and (part.window >= 0 or not square))
        assert part.window == cuts.UNLIMITED or (windows and part.is_causal and not part.flipped)


def test_a_causal_zigzag_step_stays_one_part() -> None:
    plan = megacp.plan(Layout.zigzag(64, 4), Mask.causal(64))
    for rank in range(4):
        for step in plan.steps(rank):
            assert len([part for block in step.blocks for part in cuts.parts(block)]) == 1


def test_a_band_without_windows_is_two_triangles_for_each_width_of_queries() -> None:
    found = list(cuts.parts(Block(0, 8, 24, 0, 24, -7, 0), windows=False))
    assert len(found) == 4 and all(part.is_causal for part in found)
    assert sum(part.flipped for part in found) == 2


# -- the libraries' calls ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One step's blocks with queries [B, S] and keys [B, T]; a truth for them alone."""

    blocks: tuple[Block, ...]
    rows: int
    q_slots: int
    k_slots: int

    def mask(self) -> torch.Tensor:
        out = np.zeros((self.rows, self.q_slots, self.k_slots), bool)
        size = max(self.q_slots, self.k_slots)
        for block in self.blocks:
            rows = slice(None) if block.row < 0 else block.row
            out[rows] |= pairs_of(block, size)[: self.q_slots, : self.k_slots]
        return torch.from_numpy(out)


def _problems() -> list[Problem]:
    cu = [0, 5, 6, 19, 40]
    masks = [
        Mask.causal(40),
        Mask.causal(40, window=7),
        Mask.full(40, window=5),
        Mask.full(40),
        Mask.documents(cu),
        Mask.documents(cu, window=4),
        Mask.documents(cu, causal=False, window=9),
        Mask.documents([cu, [0, 40]]),
        Mask.prefix(40, 11),
    ]
    layouts = [
        Layout.zigzag(40, 2),
        Layout.contiguous(40, 3),
        Layout.per_document(cu, 2),
        Layout.contiguous(40, 1),
    ]
    found: dict[Problem, None] = {}
    for mask in masks:
        for layout in layouts:
            for method in ("ring", "all_gather"):
                for rank in range(layout.cp_size):
                    for step in megacp.plan(layout, mask, method).steps(rank):
                        if step.blocks:
                            k_slots = layout.seq_len if method == "all_gather" else layout.local_len
                            found[Problem(step.blocks, mask.rows or 2, layout.local_len, k_slots)] = None
    return list(found)


PROBLEMS = _problems()
# Queries after the last key and before the first: where a library that drops windows that are too wide would go wrong.
TALL = [
    Problem((Block(-1, 0, 12, 0, 3, -UNBOUNDED, 0),), 1, 12, 3),
    Problem((Block(-1, 0, 12, 0, 4, -10, UNBOUNDED),), 1, 12, 4),
    Problem((Block(-1, 2, 20, 1, 9, -11, 3),), 1, 20, 10),
    Problem((Block(-1, 0, 1, 0, 9, -UNBOUNDED, UNBOUNDED), Block(-1, 3, 9, 2, 7, -2, 2)), 2, 9, 9),
]


def check(kernel: object, problem: Problem, heads=(4, 2), dims=(8, 8), options=None, tolerance=2e-6) -> None:
    """Hold a kernel's partial results, merged, and its gradients against the oracle, in float32."""
    make = torch.Generator().manual_seed(len(problem.blocks))
    draw = lambda *shape: torch.randn(*shape, generator=make)  # noqa: E731
    b, s, t = problem.rows, problem.q_slots, problem.k_slots
    q, d_out = draw(b, s, heads[0], dims[0]), draw(b, s, heads[0], dims[1])
    k, v = draw(b, t, heads[1], dims[0]), draw(b, t, heads[1], dims[1])
    options = options or Options(0.4)
    true = oracle.attention(
        q, k, v, problem.mask()[:, None], d_out, scale=options.scale, softcap=options.softcap
    )
    state = State((b, s, heads[0], dims[1]), torch.float32, q.device)
    for part in kernel.forward(q, k, v, problem.blocks, options):
        state.add(part)
    out, lse = state.finish()
    assert oracle.rel(out, true.out) <= tolerance and oracle.rel(lse, true.lse) <= tolerance
    # Backward, as if half of the softmax's weight lay on keys that another step has.
    into = Gradients(*(Sum(x, torch.float32) for x in (q, k, v)))
    lse, out = true.lse.float() + 0.7, true.out.float() * 0.5 + 0.1
    kernel.backward(d_out, q, k, v, out, lse, problem.blocks, options, into)
    right = Gradients(*(Sum(x, torch.float64) for x in (q, k, v)))
    doubles = [x.double() for x in (d_out, q, k, v, out, lse)]
    kernels.choose("reference", Request("cpu", q.dtype, *heads, *dims, options)).backward(
        *doubles, problem.blocks, options, right
    )
    for name in ("dq", "dk", "dv"):
        assert oracle.rel(getattr(into, name).tensor, getattr(right, name).tensor) <= tolerance, name


@pytest.fixture(params=[2, 3, 4])
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Put one generation's stand-in in place of the library."""
    generation: int = request.param
    stand_ins.install(monkeypatch, stand_ins.FLASH[generation])
    monkeypatch.setattr(flash_attn, "_DEVICE", "cpu")
    monkeypatch.setattr(packed, "capability", lambda: {2: 8, 3: 9, 4: 10}[generation])
    flash_attn._interface.cache_clear()
    yield generation
    flash_attn._interface.cache_clear()


@pytest.fixture(params=[False, True], ids=["packed_lse", "padded_lse"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_ins.install(monkeypatch, stand_ins.transformer_engine(request.param))
    monkeypatch.setattr(te, "_DEVICE", "cpu")
    te._backend.cache_clear()
    yield
    te._backend.cache_clear()


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, stand_in in (
        (sdpa_cuda, "_flash", stand_ins.aten_flash),
        (sdpa_cuda, "_flash_backward", stand_ins.aten_flash_backward),
        (sdpa_cudnn, "_attend", stand_ins.aten_cudnn),
        (sdpa_cudnn, "_attend_backward", stand_ins.aten_cudnn_backward),
    ):
        monkeypatch.setattr(module, name, stand_in)


@pytest.fixture
def eager_flex(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run PyTorch's own flex_attention without compiling, and let it compute gradients on the CPU."""
    module = flex._flex()
    monkeypatch.setattr(module, "_validate_device", lambda *_: None, raising=False)
    monkeypatch.setattr(flex, "_function", lambda: module.flex_attention)


def test_flash_attention_is_called_as_it_documents(flash: int) -> None:
    for problem in PROBLEMS[flash % 3 :: 3] + TALL:
        check(flash_attn, problem)
    for problem in PROBLEMS[::20]:
        check(flash_attn, problem, heads=(3, 1), dims=(12, 5))
        check(flash_attn, problem, options=Options(0.4, softcap=1.5))


def test_transformer_engine_is_called_as_it_documents(engine: None) -> None:
    for problem in PROBLEMS[1::3] + TALL:
        check(te, problem)
    for problem in PROBLEMS[::20]:
        check(te, problem, heads=(3, 1), dims=(12, 5))


@pytest.mark.parametrize("kernel", [sdpa_cuda, sdpa_cudnn], ids=["flash", "cudnn"])
def test_the_operators_for_cuda_are_called_as_they_document(kernel: object, operators: None) -> None:
    for problem in PROBLEMS[2::3] + TALL:
        check(kernel, problem)
    for problem in PROBLEMS[::20]:
        check(kernel, problem, heads=(3, 1), dims=(12, 5))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention_is_exact_in_both_directions(eager_flex: None) -> None:
    of_rows = next(problem for problem in PROBLEMS if problem.blocks[0].row >= 0)
    some = [of_rows, *random.Random(0).sample(PROBLEMS, 6)]
    for problem in some + TALL:
        check(flex, problem, dims=(16, 16))
    check(flex, some[0], heads=(3, 1), dims=(16, 24), options=Options(0.4, softcap=1.5))


def test_the_tiles_of_flex_hold_every_pair_and_are_full_only_if_all_of_it_is_seen() -> None:
    plan = megacp.plan(Layout.contiguous(700, 1), Mask.documents([0, 1, 601, 700], window=400), "all_gather")
    blocks = plan.steps(0)[0].blocks
    (call,) = flex._calls(blocks, 1, 700, torch.device("cpu"))
    dense = Problem(blocks, 1, 700, 700).mask()[0]
    mask, grid = call.mask, torch.zeros(6, 6, dtype=torch.int64)
    for counts, indices, kind in (
        (mask.kv_num_blocks, mask.kv_indices, 1),
        (mask.full_kv_num_blocks, mask.full_kv_indices, 2),
    ):
        for i in range(6):
            grid[i, indices[0, 0, i, : counts[0, 0, i]].long()] += kind
    for i in range(6):
        for j in range(6):
            tile = dense[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
            assert grid[i, j] in (0, 1, 2)
            assert grid[i, j] > 0 or not tile.any()
            assert grid[i, j] != 2 or (tile.all() and tile.shape[1] == 128)
    assert (grid == 2).any()


def test_all_documents_of_a_step_go_in_one_call(flash: int) -> None:
    plan = megacp.plan(Layout.contiguous(64, 1), Mask.documents([0, 5, 20, 21, 64]), "all_gather")
    stand_ins.CALLS.clear()
    check(flash_attn, Problem(plan.steps(0)[0].blocks, 1, 64, 64))
    assert stand_ins.CALLS == [{"sequences": 4, "window": (-1, 0)}]


def test_short_documents_join_the_call_of_those_that_the_window_cuts(flash: int) -> None:
    plan = megacp.plan(Layout.contiguous(64, 1), Mask.documents([0, 5, 20, 21, 64], window=16), "all_gather")
    stand_ins.CALLS.clear()
    check(flash_attn, Problem(plan.steps(0)[0].blocks, 1, 64, 64))
    assert stand_ins.CALLS == [{"sequences": 4, "window": (15, 0)}]


def test_a_causal_part_joins_a_window_only_if_that_takes_nothing_from_it() -> None:
    window = cuts.Part(0, 0, 9, 0, 9, is_causal=True, window=4)
    fits, long = (cuts.Part(0, 10, 10 + n, 10, 10 + n, is_causal=True) for n in (5, 6))
    assert packed._families([window, fits]) == [[window, fits]]
    assert packed._families([window, long]) == [[window], [long]]


def test_queries_that_lie_in_order_are_passed_as_views_and_others_gathered() -> None:
    in_order = (Block(-1, 0, 8, 0, 8, -UNBOUNDED, 0), Block(-1, 8, 16, 8, 16, -UNBOUNDED, 0))
    (call,) = packed._calls(in_order, 1, 16, 16, torch.device("cpu"), True)
    assert call.queries == slice(0, 16) and call.keys == slice(0, 16) and call.places is None
    (call,) = packed._calls(in_order[1:], 2, 16, 16, torch.device("cpu"), True)
    assert call.queries.tolist() == [*range(8, 16), *range(24, 32)] and call.places is None


def test_keys_that_two_sequences_share_get_the_sum_of_their_gradients_in_a_fixed_order() -> None:
    blocks = (Block(-1, 0, 4, 0, 6, -UNBOUNDED, UNBOUNDED), Block(-1, 4, 8, 2, 6, -UNBOUNDED, UNBOUNDED))
    (call,) = packed._calls(blocks, 1, 8, 8, torch.device("cpu"), True)
    assert [slots for _, slots in call.returns] == [slice(0, 6), slice(2, 6)]


# -- end to end --------------------------------------------------------------------------------------------------------


class _Toy:
    """A third party's kernel: the reference by another name, for one head size."""

    name = "toy"

    def __init__(self) -> None:
        self.calls = 0

    def refuses(self, request: Request) -> str | None:
        return None if request.head_dim == 8 else "only has head size 8"

    def forward(self, *args):
        self.calls += 1
        return kernels._registry["reference"].forward(*args)

    def backward(self, *args):
        self.calls += 1
        kernels._registry["reference"].backward(*args)


def _attend_with(name, prepare, dtype):
    """Run attention and its gradients on this rank with a kernel that `prepare` makes ready."""
    with pytest.MonkeyPatch.context() as patch:
        kernel = prepare(patch)
        try:
            make = torch.Generator().manual_seed(1)
            q, d_out = (torch.randn(2, 24, 4, 8, generator=make).to(dtype) for _ in range(2))
            k, v = (torch.randn(2, 24, 2, 8, generator=make).to(dtype) for _ in range(2))
            mask, layout = Mask.documents([0, 9, 24], window=6), Layout.zigzag(24, 2)
            rank = torch.distributed.get_rank()
            q_, k_, v_ = (layout.shard(x, rank).requires_grad_() for x in (q, k, v))
            out = megacp.attention(q_, k_, v_, mask=mask, layout=layout, kernel=name)
            out.backward(layout.shard(d_out, rank))
            return out.detach(), q_.grad, k_.grad, v_.grad, getattr(kernel, "calls", None)
        finally:
            kernels.unregister("toy")
            flash_attn._interface.cache_clear()
            te._backend.cache_clear()


def _toy(_):
    toy = _Toy()
    kernels.register(toy)
    return toy


def _with_flash(patch):
    stand_ins.install(patch, stand_ins.FLASH[2])
    patch.setattr(flash_attn, "_DEVICE", "cpu")


def _with_engine(patch):
    stand_ins.install(patch, stand_ins.transformer_engine(pads=False))
    patch.setattr(te, "_DEVICE", "cpu")


def _true(dtype):
    make = torch.Generator().manual_seed(1)
    q, d_out = (torch.randn(2, 24, 4, 8, generator=make).to(dtype) for _ in range(2))
    k, v = (torch.randn(2, 24, 2, 8, generator=make).to(dtype) for _ in range(2))
    return oracle.attention(q, k, v, oracle.documents([0, 9, 24], True, 6), d_out)


@pytest.mark.parametrize(
    ("name", "prepare", "dtype", "allowed"),
    [
        ("toy", _toy, torch.float64, 1e-10),
        ("flash_attn", _with_flash, BF16, 1.5e-2),
        ("transformer_engine", _with_engine, BF16, 1.5e-2),
    ],
)
def test_a_kernel_from_outside_and_the_libraries_stand_ins_train_over_two_ranks(
    name, prepare, dtype, allowed
):
    results = ranks.run(_attend_with, 2, name, prepare, dtype)
    true, layout = _true(dtype), Layout.zigzag(24, 2)
    for i, right in enumerate((true.out, true.dq, true.dk, true.dv)):
        assert oracle.rel(layout.unshard([r[i] for r in results]), right) <= allowed
    if name == "toy":
        assert all(r[4] >= 2 for r in results)


def test_a_kernel_from_outside_is_listed_and_forgotten_again() -> None:
    before = kernels.names()
    toy = _Toy()
    kernels.register(toy)
    try:
        assert kernels.names() == [*before, "toy"]
        with pytest.raises(ConfigError, match="registered already"):
            kernels.register(_Toy())
        with pytest.raises(UnsupportedError, match="toy  only has head size 8"):
            kernels.choose("toy", Request("cpu", torch.float32, 4, 2, 16, 16, Options(1.0)))
    finally:
        kernels.unregister("toy")
    assert kernels.names() == before
    with pytest.raises(ConfigError, match="'toy' is not known"):
        kernels.choose("toy", Request("cpu", torch.float32, 4, 2, 8, 8, Options(1.0)))


# -- refusals ----------------------------------------------------------------------------------------------------------


def request(**changes) -> Request:
    asked = {
        "device": "cuda",
        "dtype": BF16,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "value_dim": 64,
        "options": Options(1.0),
    }
    return Request(**{**asked, **changes})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signatures, "is_installed", lambda package: False)
    assert flash_attn.refuses(request()) == "the package flash-attn is not installed"
    assert te.refuses(request()) == "the package transformer-engine is not installed"
    assert "package triton is not installed" in flex.refuses(request())


@pytest.mark.parametrize("kernel", [flash_attn, te, sdpa_cuda, sdpa_cudnn, flex], ids=lambda k: k.name)
def test_a_kernel_for_cuda_refuses_the_cpu_and_float64(kernel, monkeypatch) -> None:
    monkeypatch.setattr(signatures, "is_installed", lambda package: True)
    monkeypatch.setattr(packed, "capability", lambda: 9)
    assert "cuda, not cpu" in kernel.refuses(request(device="cpu"))
    assert "float64" in kernel.refuses(request(dtype=torch.float64))


@pytest.mark.parametrize("kernel", [flash_attn, te, sdpa_cuda, sdpa_cudnn], ids=lambda k: k.name)
def test_an_old_or_absent_cuda_device_is_refused(kernel, monkeypatch) -> None:
    monkeypatch.setattr(signatures, "is_installed", lambda package: True)
    monkeypatch.setattr(packed, "capability", lambda: 7)
    assert "compute capability 8 or newer" in kernel.refuses(request())


def test_head_sizes_and_softcap_are_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed, "capability", lambda: 9)
    assert sdpa_cuda.refuses(request()) is None
    assert "up to 256, not 264" in sdpa_cuda.refuses(request(value_dim=264))
    assert "no softcap" in sdpa_cuda.refuses(request(options=Options(1.0, 30.0)))
    assert "no softcap" in sdpa_cudnn.refuses(request(options=Options(1.0, 30.0)))
    assert "not 192 and 192" in sdpa_cudnn.refuses(request(head_dim=192, value_dim=192))
    assert "from 16 on, not 8 and 64" in flex.refuses(request(head_dim=8))


def test_the_library_at_hand_limits_flash_attention(flash: int) -> None:
    assert flash_attn.refuses(request(device="cpu")) is None
    assert flash_attn.refuses(request(device="cpu", options=Options(1.0, 30.0))) is None
    reason = flash_attn.refuses(request(device="cpu", head_dim=264))
    assert f"FlashAttention {generation} has head sizes up to" in reason if (generation := flash) else reason
    assert "bfloat16 and float16" in flash_attn.refuses(request(device="cpu", dtype=torch.float32))


def test_an_interface_without_a_parameter_that_is_relied_on_is_refused_by_its_name(monkeypatch) -> None:
    def older(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal
    ): ...

    both = {"_flash_attn_varlen_forward": older, "_flash_attn_varlen_backward": older}
    stand_ins.install(monkeypatch, {"flash_attn": {}, "flash_attn.flash_attn_interface": both})
    monkeypatch.setattr(flash_attn, "_DEVICE", "cpu")
    flash_attn._interface.cache_clear()
    reason = flash_attn.refuses(request(device="cpu"))
    assert reason == (
        "FlashAttention 2 has no parameter window_size or window_size_left of _flash_attn_varlen_forward"
    )
    flash_attn._interface.cache_clear()


def test_what_transformer_engine_does_not_offer_is_refused(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert te.refuses(request(device="cpu")) is None
    assert "sizes 192 and 64" in te.refuses(request(device="cpu", head_dim=192))
    assert "no softcap" in te.refuses(request(device="cpu", options=Options(1.0, 30.0)))
    stand_ins.install(monkeypatch, stand_ins.transformer_engine(pads=False, offers=False))
    te._backend.cache_clear()
    assert "no fused attention for packed sequences with mask padding" in te.refuses(request(device="cpu"))


def test_transformer_engine_is_asked_for_deterministic_gradients_by_its_own_variable_too(
    engine: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    assert te.refuses(request(device="cpu")) is None
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    assert "no fused attention that is deterministic for packed" in te.refuses(request(device="cpu"))


@dataclass(frozen=True)
class _MoreOptions(Options):
    novelty: float = 0.0
    table: torch.Tensor | None = None


@pytest.mark.parametrize("kernel", list(kernels._registry.values()), ids=lambda k: k.name)
def test_an_option_that_a_kernel_does_not_know_is_refused_until_it_learns_it(kernel, monkeypatch) -> None:
    monkeypatch.setattr(signatures, "is_installed", lambda package: True)
    monkeypatch.setattr(packed, "capability", lambda: 9)
    device = "cpu" if kernel.name in ("sdpa", "reference") else "cuda"
    unknown = _MoreOptions(1.0, novelty=0.1, table=torch.zeros(2))
    assert kernel.refuses(request(device=device, options=unknown)) == "does not offer novelty, table"


def test_the_error_lists_every_kernel_with_its_reason() -> None:
    with pytest.raises(UnsupportedError) as error:
        kernels.choose("auto", request(options=_MoreOptions(1.0, novelty=0.1)))
    lines = str(error.value).splitlines()
    assert "no kernel can do this attention exactly on cuda in torch.bfloat16 with 4 query heads" in lines[0]
    assert [line.split()[0] for line in lines[1:]] == kernels.names()
    assert all(len(line.split(maxsplit=1)[1]) > 10 for line in lines[1:])


def test_auto_takes_sdpa_on_the_cpu_and_the_reference_where_that_cannot() -> None:
    assert kernels.choose("auto", request(device="cpu")).name == "sdpa"
    assert kernels.choose("auto", request(device="cpu", options=Options(1.0, 30.0))).name == "reference"


def test_auto_tries_the_kernels_for_cuda_in_the_documented_order() -> None:
    assert kernels.names() == [
        "sdpa",
        "flash_attn",
        "transformer_engine",
        "sdpa_cuda",
        "sdpa_cudnn",
        "flex",
        "reference",
    ]


def test_importing_the_kernels_imports_no_attention_library() -> None:
    code = "import megacp.kernels, sys; print([m for m in sys.modules if m.split('.')[0] in {names}])"
    names = {"flash_attn", "flash_attn_interface", "flash_attn_3", "transformer_engine", "triton"}
    command = [sys.executable, "-c", code.replace("{names}", repr(names))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


# -- PyTorch's operators -----------------------------------------------------------------------------------------------

aten = torch.ops.aten
SCHEMAS = {
    aten._flash_attention_forward.default: "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    " scale window_size_left window_size_right",
    aten._flash_attention_backward.default: "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p"
    " is_causal rng_state unused scale window_size_left window_size_right",
    aten._scaled_dot_product_cudnn_attention.default: "query key value attn_bias compute_log_sumexp dropout_p is_causal"
    " return_debug_mask scale",
    aten._scaled_dot_product_cudnn_attention_backward.default: "grad_out query key value out logsumexp philox_seed philox_offset"
    " attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
    aten._scaled_dot_product_flash_attention_for_cpu.default: "query key value dropout_p is_causal attn_mask scale",
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: "grad_out query key value out logsumexp dropout_p is_causal"
    " attn_mask scale",
}


@pytest.mark.parametrize("operator", SCHEMAS, ids=lambda o: o.name())
def test_this_pytorch_has_the_operators_with_the_parameters_relied_on(operator) -> None:
    has = [argument.name for argument in operator._schema.arguments]
    wanted = SCHEMAS[operator].split()
    positional = [
        name for name in wanted if name not in ("scale", "attn_mask", "window_size_left", "window_size_right")
    ]
    assert has[: len(positional)] == positional  # passed by position
    assert set(wanted) <= set(has)


def test_the_flash_operator_describes_a_packed_log_sum_exp() -> None:
    assert sdpa_cuda._unfit() is None


def test_the_operators_take_what_the_kernels_pass_as_far_as_shapes_can_tell() -> None:
    """Run the kernels on tensors without storage: PyTorch checks every argument against the operator's schema."""
    q = torch.empty(2, 16, 4, 12, dtype=BF16, device="meta")
    k = torch.empty(2, 16, 2, 12, dtype=BF16, device="meta")
    blocks, options = (Block(-1, 0, 16, 0, 16, -9, 0),), Options(0.3)
    for kernel in (sdpa_cuda, sdpa_cudnn):
        for part in kernel.forward(q, k, k, blocks, options):
            assert part.out.shape[2:] == (4, 12) and part.lse.shape[1] == 4
            assert part.out.shape[1] == part.lse.shape[2] == part.q_stop - part.q_start
        into = Gradients(*(Sum(x, torch.float32) for x in (q, k, k)))
        lse = torch.empty(2, 4, 16, device="meta")
        kernel.backward(q, q, k, k, q, lse, blocks, options, into)


# -- signatures --------------------------------------------------------------------------------------------------------


def test_a_function_gets_what_it_takes_of_what_is_offered_and_none_for_the_rest_it_needs() -> None:
    def function(a, b, c=3, *, d=4):
        return a, b, c, d

    assert signatures.call(function, a=1, d=9, e=5) == (1, None, 3, 9)
    assert signatures.lacks(function, "a", "x|b", "d") is None
    assert signatures.lacks(function, "x|y", "z") == "x or y"


def test_a_custom_operator_shows_its_parameters_too() -> None:
    operator = SimpleNamespace(_opoverload=aten._flash_attention_forward.default)
    found = signatures.parameters(operator)
    assert found["max_q"] is True and found["window_size_left"] is False
    assert signatures.is_installed("torch") and not signatures.is_installed("no_such_package_of_ours")


# -- tools/gpu_check.py ------------------------------------------------------------------------------------------------


@pytest.fixture
def tool():
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "tools" / "gpu_check.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


class _Wrong(_Toy):
    """A kernel whose gradient of the keys is a hundredth too large."""

    def backward(self, *args):
        into = args[-1]
        before = into.dk.tensor.clone()
        super().backward(*args)
        into.dk.add((into.dk.tensor - before) * 0.01)

    def refuses(self, request: Request) -> str | None:
        return None if request.dtype == torch.float64 else "only computes in float64"


def _run_tool(tool, monkeypatch, *words: str) -> int:
    few = ["--device", "cpu", "--tokens", "24", "--timed-tokens", "0", "--mask", "causal", "--kernel", "toy"]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *few, *words])
    status: int = tool.main()
    return status


def test_the_gpu_check_fails_for_a_kernel_that_is_slightly_wrong(tool, monkeypatch, capsys) -> None:
    kernels.register(_Wrong())
    try:
        assert _run_tool(tool, monkeypatch, "--method", "ring") == 1
    finally:
        kernels.unregister("toy")
    said = capsys.readouterr().out
    assert "WRONG    worst dk 1.0e-02" in said and "0 exact" in said


def test_the_gpu_check_fails_where_a_rank_fails_and_waits_for_nobody(tool, monkeypatch, capsys) -> None:
    class Broken(_Wrong):
        def forward(self, *args):
            raise RuntimeError("no such kernel image")

    kernels.register(Broken())
    try:
        assert _run_tool(tool, monkeypatch, "--method", "ring") == 1
    finally:
        kernels.unregister("toy")
    assert "FAILED   RuntimeError: no such kernel image" in capsys.readouterr().out


def test_messages_between_ranks_of_one_process_arrive_in_the_order_of_posting(tool) -> None:
    def work(group):
        peer = 1 - group.rank
        first, second = torch.zeros(2), torch.zeros(2)
        sends = [(torch.full((2,), float(10 * group.rank + i)), peer) for i in range(2)]
        late = megacp.comm.post(group, sends[:1], [(first, peer)], "first")
        soon = megacp.comm.post(group, sends[1:], [(second, peer)], "second")
        soon.wait()
        late.wait()
        parts, posted = megacp.comm.exchange(
            group, torch.arange(3.0) + 10 * group.rank, [1, 2], [group.rank + 1] * 2, "x"
        )
        posted.wait()
        gathered = megacp.comm.all_gather(group, torch.tensor([float(group.rank)]), "y")
        kept = megacp.comm.reduce_scatter(group, torch.arange(2.0)[:, None] + group.rank, "z")
        return first.tolist(), second.tolist(), parts.tolist(), gathered.flatten().tolist(), kept.tolist()

    import megacp.comm

    before = megacp.comm.post
    assert tool.on_ranks(2, work) == [
        ([10.0, 10.0], [11.0, 11.0], [0.0, 10.0], [0.0, 1.0], [1.0]),
        ([0.0, 0.0], [1.0, 1.0], [1.0, 2.0, 11.0, 12.0], [0.0, 1.0], [3.0]),
    ]
    assert megacp.comm.post is before
