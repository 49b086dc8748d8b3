"""The matrix: method x layout x mask x option x dtype x kernel x size of the group, each cell exact or refused.

A cell names one value of each axis. `run` carries cells out on ranks; `judge` holds what came back against the truth: out, lse, what
else was asked for, and all gradients, of real rows only, and silence in padding slots, which are filled with large numbers. A cell
that cannot be done must be refused in words that name the setting, the same on every rank: `refusal` says which cells those are, from
the documented rules alone. So a cell that is refused though it need not be, or done though it should not, is wrong as well.

`everything` lists the full product in a fixed order, `covering` a seeded part of it in which each pair (triple, ...) of values of
different axes occurs. tests/distributed/test_matrix.py runs a part on every change, tools/matrix.py all of it.

The truth shares no code with the package: masks come from `tests.oracle`, dropout's generator is written here a second time.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import megacp
from megacp import Layout, Mask
from tests import oracle

LENGTHS, OTHERS = [1, 2, 11, 16, 7], [20, 1, 16]  # documents of the row, and of a second row that differs
LENGTH, CU, OTHER_CU = sum(LENGTHS), oracle.offsets(LENGTHS), oracle.offsets(OTHERS)
SPANS = [(4, 9), (20, 31)]
SEED, DROPPED = 11, 0.3
FILL = 1e3  # what padding slots hold

# -- the axes ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """heads: query heads, key/value heads. dims: head size of q and k, of v. settings: what attention is given."""

    heads: tuple[int, int] = (8, 8)
    dims: tuple[int, int] = (8, 8)
    format: str = "bshd"
    sinks: bool = False
    alibi: bool = False
    return_lse: bool = True
    settings: dict[str, Any] = field(default_factory=dict)


def _coarse() -> Tensor:
    """A mask of no system: blocks of 5 tokens that see each other or not, at random, and one token that sees nothing."""
    blocks = torch.rand(8, 8, generator=torch.Generator().manual_seed(4)) > 0.5
    mask = blocks.repeat_interleave(5, 0).repeat_interleave(5, 1)[:LENGTH, :LENGTH].clone()
    mask[3] = False
    return mask


def _with_spans() -> Tensor:
    mask = oracle.causal(LENGTH)
    for start, stop in SPANS:
        mask[start:stop, start:stop] = True
    return mask


METHODS = ("all_gather", "all_to_all", "exchange", "hierarchical", "ring")
LAYOUTS = ("contiguous", "zigzag", "per_document", "balanced")
MASKS: dict[str, tuple[Callable[[], Mask], Callable[[], Tensor]]] = {  # ours, and the truth's
    "causal": (lambda: Mask.causal(LENGTH), lambda: oracle.causal(LENGTH)),
    "full": (lambda: Mask.full(LENGTH), lambda: oracle.full(LENGTH)),
    "window": (lambda: Mask.causal(LENGTH, window=6), lambda: oracle.causal(LENGTH, 6)),
    "documents": (lambda: Mask.documents(CU), lambda: oracle.documents(CU)),
    "documents, window": (lambda: Mask.documents(CU, window=5), lambda: oracle.documents(CU, True, 5)),
    "documents by row": (
        lambda: Mask.documents([CU, OTHER_CU]),
        lambda: torch.stack([oracle.documents(CU), oracle.documents(OTHER_CU)])[:, None],
    ),
    "prefix": (lambda: Mask.prefix(LENGTH, 9), lambda: oracle.prefix(LENGTH, 9)),
    "spans": (lambda: Mask.causal(LENGTH).with_spans(SPANS), _with_spans),
    "dense": (lambda: Mask.from_dense(_coarse()), _coarse),
}
OPTIONS = {
    "plain": Option(return_lse=False),
    "GQA": Option(heads=(8, 2)),
    "MQA": Option(heads=(5, 1)),
    "Dk != Dv": Option(heads=(8, 4), dims=(12, 5)),
    "sinks": Option(heads=(8, 4), sinks=True),
    "softcap": Option(heads=(8, 4), settings={"softcap": 1.5}),
    "ALiBi": Option(heads=(8, 4), alibi=True),
    "dropout": Option(heads=(8, 4), settings={"dropout_p": DROPPED, "dropout_seed": SEED}),
    "scale": Option(heads=(8, 4), settings={"scale": 0.7}),
    "max logit": Option(heads=(8, 4), settings={"return_max_logit": True}),
    "sbhd": Option(heads=(8, 4), format="sbhd"),
    "thd": Option(heads=(8, 4), format="thd"),
    "return lse": Option(),
}
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
KERNELS = ("reference", "sdpa")
SIZES = (1, 2, 3, 4, 5, 6, 8)

HIERARCHY = {1: (1, 1), 2: (2, 1), 3: (3, 1), 4: (2, 2), 5: (5, 1), 6: (2, 3), 8: (4, 2)}
TOLERANCE = {"float64": 1e-10, "float32": 1e-5}
BESIDE_ONE_RANK = 1.3  # 16 bit: how much larger than on one rank an error may be
LEAST = 1e-6  # and an error below this is none


class Cell(NamedTuple):
    method: str
    layout: str
    mask: str
    option: str
    dtype: str
    kernel: str
    cp_size: int

    @property
    def name(self) -> str:
        return " | ".join(map(str, self))


AXES: tuple[tuple[Any, ...], ...] = (
    METHODS,
    LAYOUTS,
    tuple(MASKS),
    tuple(OPTIONS),
    tuple(DTYPES),
    KERNELS,
    SIZES,
)


def everything(**only: Sequence[Any]) -> Iterator[Cell]:
    """List the full product, or that of the given values of some axes, in the order of AXES."""
    named = zip(Cell._fields, AXES, strict=True)
    return itertools.starmap(Cell, itertools.product(*(only.get(name, axis) for name, axis in named)))


def covering(strength: int, seed: int = 0, tries: int = 20) -> list[Cell]:
    """Draw cells until every combination of values of any ``strength`` axes is in one of them.

    Greedy: each cell starts from a combination that is still missing, and is the best of some random completions.
    """
    draw = random.Random(seed)
    choices = list(itertools.combinations(range(len(AXES)), strength))
    missing = {(axes, values) for axes in choices for values in itertools.product(*(AXES[a] for a in axes))}
    order = sorted(missing, key=str)
    draw.shuffle(order)
    found: list[Cell] = []
    for axes, values in order:
        if (axes, values) not in missing:
            continue
        best: tuple[int, list[Any]] = (-1, [])
        for _ in range(tries):
            cell = [draw.choice(axis) for axis in AXES]
            for axis, value in zip(axes, values, strict=True):
                cell[axis] = value
            gain = sum((c, tuple(cell[a] for a in c)) in missing for c in choices)
            best = max(best, (gain, cell), key=lambda b: b[0])
        missing -= {(c, tuple(best[1][a] for a in c)) for c in choices}
        found.append(Cell(*best[1]))
    return found


# -- what must be refused ----------------------------------------------------------------------------------------------


class Refusal(NamedTuple):
    """error: its class's name. words: what its text must hold. reason: a sentence for people."""

    error: str
    words: tuple[str, ...]
    reason: str


def refusal(cell: Cell) -> Refusal | None:
    """Say how a cell must be refused, or None if it must be exact."""
    option = OPTIONS[cell.option]
    if cell.mask == "documents by row" and option.format == "thd":
        words = ("mask has 2 different rows", "batch 1")
        return Refusal("ShapeError", words, "thd with a mask whose rows differ: a packed tensor has one row")
    if cell.method == "all_to_all" and option.heads[0] < cell.cp_size:
        words = (f"{option.heads[0]} query heads", f"of {cell.cp_size} ranks")
        return Refusal("UnsupportedError", words, "more ranks than query heads (5 heads over 6 or 8 ranks)")
    if cell.kernel == "sdpa":
        asked = {
            "softcap": "softcap",
            "ALiBi": "alibi_slopes",
            "dropout": "dropout_p",
            "max logit": "max_logit",
        }
        if cell.option in asked:
            reason = "kernel sdpa, whose operator lacks softcap, ALiBi, dropout and max logit; 'auto' takes another"
            return Refusal("UnsupportedError", ("sdpa", asked[cell.option]), reason)
    return None


# -- on the ranks ------------------------------------------------------------------------------------------------------


@functools.cache
def inputs(option: str, dtype: str) -> dict[str, Tensor]:
    """q, k, v, d_out (global, [B, G, heads, size], already rounded to dtype), sinks and slopes (never below float32)."""
    what, make = OPTIONS[option], torch.Generator().manual_seed(7)
    (heads, kv_heads), (d, e) = what.heads, what.dims
    shapes = {"q": (heads, d), "k": (kv_heads, d), "v": (kv_heads, e), "d_out": (heads, e)}
    batch = 1 if what.format == "thd" else 2
    made = {
        name: torch.randn(batch, LENGTH, *shape, generator=make, dtype=torch.float64).to(DTYPES[dtype])
        for name, shape in shapes.items()
    }
    exact = torch.float64 if dtype == "float64" else torch.float32
    made["sinks"] = torch.randn(heads, generator=make, dtype=torch.float64).to(exact)
    made["slopes"] = torch.linspace(0.05, 0.6, heads, dtype=torch.float64).to(exact)
    return made


@functools.cache
def our_mask(name: str) -> Mask:
    return MASKS[name][0]()


@functools.cache
def our_layout(name: str, mask: str, cp_size: int) -> Layout:
    """The layout is one of the row's documents also where the mask knows none: any layout goes with any mask."""
    if name == "per_document":
        return Layout.per_document(CU, cp_size)
    if name == "balanced":
        return Layout.balanced(our_mask(mask), cp_size)
    return {"contiguous": Layout.contiguous, "zigzag": Layout.zigzag}[name](LENGTH, cp_size)


def _formatted(x: Tensor, form: str) -> Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[0]}[form].contiguous()


def _plain(x: Tensor, form: str) -> Tensor:
    return {"bshd": x, "sbhd": x.transpose(0, 1), "thd": x[None]}[form]


def attend(cell: Cell, group: Any = None) -> dict[str, Tensor]:
    """Run one cell on this rank: local out, lse and gradients as [B, S, ...], and what is not local."""
    option, x = OPTIONS[cell.option], inputs(cell.option, cell.dtype)
    in_group = dist.is_initialized()
    rank = dist.get_rank(group) if in_group else 0
    layout = our_layout(cell.layout, cell.mask, cell.cp_size)
    local = {name: layout.shard(x[name], rank, fill=FILL) for name in ("q", "k", "v", "d_out")}
    leaves = [_formatted(local[name], option.format).requires_grad_() for name in "qkv"]
    asked: dict[str, Any] = dict(option.settings)
    sinks = x["sinks"].clone().requires_grad_() if option.sinks else None
    if option.alibi:
        asked["alibi_slopes"] = x["slopes"]
    result = megacp.attention(
        *leaves,
        mask=our_mask(cell.mask),
        layout=layout,
        group=group,
        method=cell.method,
        hierarchy=HIERARCHY[cell.cp_size] if cell.method == "hierarchical" else None,
        kernel=cell.kernel,
        format=option.format,
        sinks=sinks,
        return_lse=option.return_lse,
        **asked,
    )
    out, *more = result if isinstance(result, tuple) else (result,)
    out.backward(_formatted(local["d_out"], option.format))
    found = {"out": _plain(out.detach(), option.format)}
    if option.return_lse:
        found["lse"] = more[0].detach()
    if "return_max_logit" in asked:
        found["max_logit"] = more[-1].detach()
    for name, leaf in zip(("dq", "dk", "dv"), leaves, strict=True):
        assert leaf.grad is not None
        found[name] = _plain(leaf.grad, option.format)
    if sinks is not None:
        assert sinks.grad is not None
        found["dsinks"] = sinks.grad
    return found


Answer = dict[str, Tensor] | tuple[str, str]


def run(cells: Sequence[Cell], group: Any = None) -> list[Answer]:
    """Run cells of this group's size on this rank; a cell that is refused gives the error's class and text."""
    answers: list[Answer] = []
    for cell in cells:
        try:
            answers.append(attend(cell, group))
        except ValueError as error:
            answers.append((type(error).__name__, str(error)))
    return answers


# -- the truth ---------------------------------------------------------------------------------------------------------


def _mixed(x: int) -> int:
    """SplitMix64's output function (Steele, Lea and Flood 2014) in plain integers."""
    most = (1 << 64) - 1
    x = (x + 0x9E3779B97F4A7C15) & most
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & most
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & most
    return x ^ (x >> 31)


@functools.cache
def kept(rows: int, heads: int) -> Tensor:
    """Which pairs dropout keeps, bool [B, H, G, G]: the generator that megacp.dropout describes, pair by pair."""
    golden, out = 0x9E3779B97F4A7C15, torch.empty(rows, heads, LENGTH, LENGTH, dtype=torch.bool)
    start = _mixed(SEED)
    for b in range(rows):
        at_row = _mixed(start + b * golden)
        for h in range(heads):
            at_head = _mixed(at_row + h * golden)
            for i in range(LENGTH):
                at_query = _mixed(at_head + i * golden)
                numbers = [(_mixed(at_query + j * golden) >> 11) * 2.0**-53 for j in range(LENGTH)]
                out[b, h, i] = torch.tensor(numbers, dtype=torch.float64) >= DROPPED
    return out


def _biased(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, slopes: Tensor | None, keep: Tensor | None
) -> Tensor:
    """Attention with a penalty on distance, or with probabilities dropped: what the oracle does not know."""
    each = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(each, 2), v.repeat_interleave(each, 2)
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    if slopes is not None:
        at = torch.arange(LENGTH)
        logits = logits - slopes[:, None, None] * (at[:, None] - at).abs()
    sees = visible.any(-1, keepdim=True)
    weights = logits.masked_fill(~visible & sees, -torch.inf).softmax(-1) * sees
    if keep is not None:
        weights = weights * keep / (1 - DROPPED)
    return torch.einsum("bhij,bjhe->bihe", weights, v)


@functools.cache
def their_mask(name: str) -> Tensor:
    return MASKS[name][1]()


@functools.cache
def truth(mask: str, option: str, dtype: str) -> dict[str, Tensor]:
    """Everything that a cell gives, in float64, global."""
    what, x = OPTIONS[option], {name: t.double() for name, t in inputs(option, dtype).items()}
    visible = their_mask(mask)
    if what.format == "thd" and visible.dim() > 2:
        visible = visible[:1]
    known = {name: what.settings[name] for name in ("softcap", "scale") if name in what.settings}
    true = oracle.attention(
        x["q"], x["k"], x["v"], visible, x["d_out"], sinks=x["sinks"] if what.sinks else None, **known
    )
    found = {"out": true.out, "lse": true.lse, "dq": true.dq, "dk": true.dk, "dv": true.dv}
    if true.dsinks is not None:
        found["dsinks"] = true.dsinks
    if what.alibi or "dropout_p" in what.settings:
        leaves = [x[name].clone().requires_grad_() for name in "qkv"]
        keep = kept(x["q"].shape[0], what.heads[0]) if not what.alibi else None
        out = _biased(*leaves, visible, x["slopes"] if what.alibi else None, keep)
        found |= zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, x["d_out"]), strict=True)
        found["out"] = out.detach()
    each = what.heads[0] // what.heads[1]
    scale = what.settings.get("scale", what.dims[0] ** -0.5)
    logits = torch.einsum("bihd,bjhd->bhij", x["q"], x["k"].repeat_interleave(each, 2)) * scale
    if what.alibi:
        at = torch.arange(LENGTH)
        logits = logits - x["slopes"][:, None, None] * (at[:, None] - at).abs()
        found["lse"] = torch.logsumexp(logits.masked_fill(~visible, -torch.inf), -1)
    found["max_logit"] = logits.masked_fill(~visible, -torch.inf).amax((0, 2, 3))
    return found


@functools.cache
def alone(mask: str, option: str, dtype: str, kernel: str) -> dict[str, float]:
    """Errors of the same kernel on one rank, without any group."""
    cell = Cell("ring", "contiguous", mask, option, dtype, kernel, 1)
    return errors(cell, [attend(cell)])


# -- the judgement -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """status: "exact", "refused" or "wrong". error: the largest relative error. share: the largest of what is allowed."""

    status: str
    error: float = 0.0
    share: float = 0.0
    detail: str = ""


def errors(cell: Cell, parts: Sequence[dict[str, Tensor]]) -> dict[str, float]:
    """Put the ranks' parts together, and give the relative error of each result."""
    layout = our_layout(cell.layout, cell.mask, cell.cp_size)
    true, found = truth(cell.mask, cell.option, cell.dtype), {}
    for name in parts[0]:
        mine = [part[name] for part in parts]
        if name == "dsinks":
            whole = torch.stack(mine).double().sum(0)
        elif name == "max_logit":
            whole = (
                mine[0] if all(torch.equal(x, mine[0]) for x in mine) else torch.full_like(mine[0], torch.nan)
            )
        else:
            whole = layout.unshard(mine, dim=2 if name == "lse" else 1)
        found[name] = oracle.rel(whole, true[name])
    return found


def judge(cell: Cell, answers: Sequence[Answer]) -> Verdict:
    """Hold what the ranks gave against the truth, or against the refusal that is due."""
    due = refusal(cell)
    refused = [answer for answer in answers if isinstance(answer, tuple)]
    if due is not None or refused:
        return _judge_refusal(due, answers, refused)
    parts = [answer for answer in answers if isinstance(answer, dict)]
    found = errors(cell, parts)
    one = {} if cell.dtype in TOLERANCE else alone(cell.mask, cell.option, cell.dtype, cell.kernel)
    allowed = {n: TOLERANCE.get(cell.dtype) or max(BESIDE_ONE_RANK * one[n], LEAST) for n in found}
    share = max(found[name] / allowed[name] for name in found)
    wrong = {
        n: f"{found[n]:.2e} where {allowed[n]:.2e} is allowed" for n in found if not found[n] <= allowed[n]
    }
    wrong |= _noise(cell, parts)
    return Verdict("wrong" if wrong else "exact", max(found.values()), share, str(wrong) if wrong else "")


def _judge_refusal(
    due: Refusal | None, answers: Sequence[Answer], refused: Sequence[tuple[str, str]]
) -> Verdict:
    if due is None:
        return Verdict("wrong", detail=f"refused though it need not be: {refused[0]}")
    if len(refused) < len(answers) or len(set(refused)) > 1:
        return Verdict(
            "wrong", detail=f"{len(refused)} of {len(answers)} ranks refused it, saying {set(refused)}"
        )
    error, text = refused[0]
    if error != due.error or not all(word in text for word in due.words):
        return Verdict(
            "wrong", detail=f"should be refused by {due.error} naming {due.words}, was by {refused[0]}"
        )
    return Verdict("refused", detail=due.reason)


def _noise(cell: Cell, parts: Sequence[dict[str, Tensor]]) -> dict[str, str]:
    """Name what padding slots hold beside 0 (lse: -inf), and results of another dtype than the inputs'."""
    layout, found = our_layout(cell.layout, cell.mask, cell.cp_size), {}
    for rank, part in enumerate(parts):
        pad = layout.positions(rank) < 0
        for name in ("out", "dq", "dk", "dv"):
            if bool((part[name][:, pad] != 0).any()):
                found[f"{name} in padding of rank {rank}"] = "not zero"
            if part[name].dtype != DTYPES[cell.dtype]:
                found[f"dtype of {name}"] = str(part[name].dtype)
        if "lse" in part and bool((part["lse"][:, :, pad] != -torch.inf).any()):
            found[f"lse in padding of rank {rank}"] = "not -inf"
    return found
