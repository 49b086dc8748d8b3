"""Each document over as many ranks as it needs: the gradients of a whole model are those of fixed sizes and of one rank."""

from __future__ import annotations

import importlib.util
import random
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import megacp
from megacp import ConfigError, Layout, Mask, dynamic
from megacp.data import Cost, spread
from megacp.errors import ShapeError
from megacp.testing import ranks

WIDTH, HEADS, KV_HEADS, VOCAB = 16, 4, 2, 29
CAPACITY = 12
COST = Cost(token=1.0, pair=0.05, key=0.1, row=0.5)
LENGTHS = [40, 1, 20, 3, 7, 12, 0, 2, 1, 9, 5, 23, 11]


def turned(x, positions):
    """Rotate pairs of features by angles that grow with the position in the document, [1, S, heads, size]."""
    half = x.shape[-1] // 2
    angle = positions.double()[..., None, None] / 50.0 ** (torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)


class Model(torch.nn.Module):
    """A decoder of two layers; attend(q, k, v) is whoever's attention."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB, WIDTH)
        self.places = torch.nn.Embedding(
            sum(LENGTHS), WIDTH
        )  # beside rotary positions, which are the same wherever they begin
        size = WIDTH // HEADS
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "norm": torch.nn.RMSNorm(WIDTH),
                    "into": torch.nn.Linear(WIDTH, size * (HEADS + 2 * KV_HEADS)),
                    "back": torch.nn.Linear(WIDTH, WIDTH),
                    "up": torch.nn.Linear(WIDTH, 2 * WIDTH),
                    "down": torch.nn.Linear(2 * WIDTH, WIDTH),
                }
            )
            for _ in range(2)
        )
        self.head = torch.nn.Linear(WIDTH, VOCAB)

    def forward(self, batch, attend):
        x = self.embedding(batch["tokens"]) + self.places(batch["position_ids"])
        for layer in self.layers:
            size = WIDTH // HEADS
            q, k, v = (
                layer["into"](layer["norm"](x))
                .unflatten(-1, (-1, size))
                .split([HEADS, KV_HEADS, KV_HEADS], 2)
            )
            q, k = turned(q, batch["position_ids"]), turned(k, batch["position_ids"])
            x = x + layer["back"](attend(q, k, v).flatten(2))
            x = x + layer["down"](torch.nn.functional.silu(layer["up"](x)))
        logits = self.head(x)
        return torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), batch["labels"].flatten(), reduction="none", ignore_index=-100
        ).view(batch["labels"].shape)


def made():
    torch.manual_seed(0)
    return Model().double()


def samples(lengths, seed=1):
    """Documents with weights of their own: some tokens do not count, nor does a whole document, and some count half."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for number, length in enumerate(lengths):
        ids = torch.randint(VOCAB, (length + 1,), generator=generator)
        weights = torch.randint(0, 3, (length,), generator=generator).double() / 2
        out.append({"tokens": ids[:-1], "labels": ids[1:], "loss_mask": weights * (number != 5)})
    return out


def dense(q, k, v):
    """Attend within one document, on one rank, in the plainest way."""
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 2) for x in (k, v))
    logits = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
    later = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
    return torch.einsum("bhij,bjhd->bihd", logits.masked_fill(later, -torch.inf).softmax(-1), v)


def truth(data):
    """Take each document alone on one rank; give the mean loss and all gradients."""
    model, total, count = made(), 0.0, 0.0
    for sample in data:
        if not len(sample["tokens"]):
            continue
        batch = {name: x[None] for name, x in sample.items()}
        batch["position_ids"] = torch.arange(len(sample["tokens"]))[None]
        total = total + (model(batch, dense) * batch["loss_mask"]).sum()
        count = count + float(batch["loss_mask"].sum())
    (total / count).backward()
    return float(total.detach()) / count, {name: p.grad for name, p in model.named_parameters()}


def fixed(data, size):
    """Take all documents as one row over all ranks, each zigzagged alone; gradients summed over ranks."""
    lengths = [len(s["tokens"]) for s in data if len(s["tokens"])]
    offsets = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    mask, layout = Mask.documents(offsets), Layout.per_document(offsets, size)
    row = {name: torch.cat([s[name] for s in data])[None] for name in data[0]}
    row["position_ids"] = mask.document_positions()[None]
    local = megacp.shard(row, layout)
    model = made()
    loss = model(local, lambda q, k, v: megacp.attention(q, k, v, mask=mask, layout=layout))
    mean = megacp.masked_mean(loss, local["loss_mask"], reduction="sum")
    mean.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
    return float(mean.detach()), {name: p.grad for name, p in model.named_parameters()}


def train(waves, data, blocks, **options):
    """Take one step by the schedule."""
    model, step = made(), dynamic.Step(waves, blocks, **options)
    for share in step:
        batch = share.pack(data)
        loss = model(batch, lambda q, k, v, share=share: megacp.attention(q, k, v, **share.attention))
        share.sum(loss, batch["loss_mask"]).backward()
    mean = step.finish(model.parameters())
    return float(mean), {name: p.grad for name, p in model.named_parameters()}


def apart(found, expected):
    """Largest relative difference of the loss and of any parameter's gradient."""
    (loss, grads), (true_loss, true_grads) = found, expected
    assert grads.keys() == true_grads.keys()
    gaps = [float((grads[name] - g).norm() / g.norm()) for name, g in true_grads.items()]
    return max(abs(loss - true_loss) / true_loss, *gaps)


def _all_ways():
    data, blocks = samples(LENGTHS), dynamic.Blocks()
    expected = truth(data)
    found = {"fixed": apart(fixed(data, 4), expected)}
    for method in ("exchange", "ring", "all_gather", "all_to_all"):
        waves = spread(LENGTHS, 4, CAPACITY, COST)
        found[method] = apart(train(waves, data, blocks, method=method), expected)
    for sizes in ((4,), (2, 4), (1, 4)):
        found[sizes] = apart(train(spread(LENGTHS, 4, CAPACITY, COST, sizes), data, blocks), expected)
    return found, [row is not None for row in spread(LENGTHS, 4, CAPACITY, COST).rows(dist.get_rank())]


def test_all_gradients_are_those_of_fixed_size_and_of_one_rank():
    sizes = {row.size for row in spread(LENGTHS, 4, CAPACITY, COST)}
    assert sizes == {1, 2, 4}
    results = ranks.run(_all_ways, 4)
    for found, _ in results:
        assert len(found) == 8 and max(found.values()) <= 1e-9, found
    worked = torch.tensor([waves for _, waves in results])
    assert worked.shape[1] >= 3 and not worked.all()  # several waves, and some rank has nothing in one


def _drawn(seeds):
    """Take steps of documents that are drawn, between one token and all that the ranks hold."""
    blocks, gaps, sizes = dynamic.Blocks(), [], set()
    for seed in seeds:
        rng = random.Random(seed)
        capacity = rng.randint(3, 12)
        lengths = [rng.randint(1, rng.choice([2, capacity, 4 * capacity])) for _ in range(rng.randint(1, 12))]
        cost = Cost(token=1.0, pair=rng.choice([0.01, 1.0]), key=rng.choice([0.0, 2.0]), row=rng.random())
        waves, data = spread(lengths, 4, capacity, cost), samples(lengths, seed)
        for sample in data:
            sample["loss_mask"][0] = 1
        gaps.append(apart(train(waves, data, blocks), truth(data)))
        sizes |= {row.size for row in waves}
    return gaps, sizes


def test_gradients_of_drawn_documents_are_those_of_one_rank():
    for gaps, sizes in ranks.run(_drawn, 4, range(8)):
        assert max(gaps) <= 1e-9 and sizes == {1, 2, 4}


def _one_document():
    data, blocks = samples([3]), dynamic.Blocks()
    waves = spread([3], 4, 8, Cost(token=1.0, pair=0.1, key=100.0), (1, 4))
    idle = not any(waves.rows(dist.get_rank()))
    return idle, apart(train(waves, data, blocks), truth(data))


def test_a_rank_without_any_document_gets_the_gradients_of_the_others():
    results = ranks.run(_one_document, 4)
    assert [idle for idle, _ in results] == [False, True, True, True]
    assert max(gap for _, gap in results) <= 1e-9


def _parts_of_the_world():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = dist.get_rank() % 2
    blocks = dynamic.Blocks(groups[mine])
    lengths = [[9, 2, 4, 14], [5, 21, 1, 1, 2, 3]][mine]
    data = samples(lengths, seed=mine)
    return apart(train(spread(lengths, 2, CAPACITY, COST), data, blocks), truth(data))


def test_groups_that_are_parts_of_the_world_take_steps_of_their_own():
    assert max(ranks.run(_parts_of_the_world, 4)) <= 1e-9


def _nothing_counts():
    data, blocks = samples([5, 3]), dynamic.Blocks()
    for sample in data:
        sample["loss_mask"].zero_()
    loss, grads = train(spread([5, 3], 2, 8, COST), data, blocks)
    return loss, max(float(g.abs().max()) for g in grads.values())


def test_a_step_in_which_no_token_counts_has_no_gradient():
    assert ranks.run(_nothing_counts, 2) == [(0.0, 0.0)] * 2


def _error(run):
    try:
        run()
    except (ConfigError, ShapeError) as error:
        return str(error)
    return None


def _refusals():
    blocks, rank = dynamic.Blocks(), dist.get_rank()
    found = {}
    found["other documents"] = _error(lambda: dynamic.Step(spread([5 + rank, 3], 2, 8, COST), blocks))
    found["other ranks"] = _error(lambda: dynamic.Step(spread([5, 3], 4, 8, COST), blocks))
    step = dynamic.Step(spread([5, 3, 8, 8], 2, 8, COST), blocks)
    one = Cost(token=1.0, pair=0.0, key=1e3)
    step = dynamic.Step(spread([8, 8], 2, 8, one), blocks)
    if rank == 0:
        share = step.shares[0]
        share.sum(torch.ones(1, 8), torch.ones(1, 8))
        found["again"] = _error(lambda: share.sum(torch.ones(1, 8), torch.ones(1, 8)))
        found["shape"] = _error(lambda: share.sum(torch.ones(1, 9), torch.ones(1, 8)))
        found["length"] = _error(lambda: share.pack([{"tokens": torch.ones(7)}] * 2))
    found["rows left"] = _error(step.totals)
    found["sizes"] = _error(lambda: dynamic.Blocks(sizes=[2, 3]))
    return found


def test_what_cannot_be_right_is_refused_on_every_rank():
    first, second = ranks.run(_refusals, 2)
    for found in (first, second):
        assert "ranks [1] have another schedule than rank 0" in found["other documents"]
        assert "for 4 ranks" in found["other ranks"] and "does not fit 2 ranks" in found["other ranks"]
        assert "1 of its rows have not gone through share.sum()" in found["rows left"]
        assert "blocks of [2, 3] ranks do not fit 2 ranks" in found["sizes"]
    assert "before in this step" in first["again"]
    assert "the 8 tokens that this rank has" in first["shape"]
    assert "document 0 has shape (7,)" in first["length"]


@pytest.mark.parametrize("size", [1])
def test_one_rank_alone_needs_no_process_group(size):
    data = samples([5, 3, 9])
    found = train(spread([5, 3, 9], size, 12, COST), data, dynamic.Blocks())
    assert apart(found, truth(data)) <= 1e-12


def example(*words):
    """Run the script of docs/documents.md in this rank; give its exit status."""
    path = Path(__file__).resolve().parents[2] / "examples" / "dynamic_cp.py"
    spec = importlib.util.spec_from_file_location("dynamic_cp", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main(["--steps", "1", "--documents", "6", *words])


def test_the_example_trains_with_the_gradients_of_one_rank():
    assert ranks.run(example, 4) == [0] * 4
