"""A fork that calls everything otherwise and has no context parallelism is hooked by a file of names only.

The fork is written to a folder, with the metadata of an installed package, whose entry point of the group megacp.seams reads the
file. Its own batch function, its groups and its attention class share no name with Megatron's.
"""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

from megacp.testing import ranks

FORK = {
    "groups.py": """
        import torch.distributed as dist
        _REPLICAS = None

        def initialize_model_parallel(tensor_size=1):
            global _REPLICAS
            world = dist.get_world_size()
            for first in range(tensor_size):
                ranks = list(range(first, world, tensor_size))
                group = dist.new_group(ranks)
                if dist.get_rank() in ranks:
                    _REPLICAS = group

        def replicas():
            return _REPLICAS

        def replica_count():
            return dist.get_world_size(replicas())

        def replica_number():
            return dist.get_rank(replicas())
    """,
    "batches.py": """
        import torch
        from toyfork import groups

        def next_rows(length, vocabulary):
            rows = torch.randint(0, vocabulary, (4, length + 1), generator=torch.Generator().manual_seed(3))
            return rows.chunk(groups.replica_count())[groups.replica_number()]

        def fetch(length, vocabulary, split_by=None):
            rows = next_rows(length, vocabulary)
            ids, targets = rows[:, :-1], rows[:, 1:]
            if split_by is not None:  # a fork that splits its batches itself
                ids, targets = (x.chunk(split_by[1], 1)[split_by[0]] for x in (ids, targets))
            places = torch.arange(ids.shape[1]).expand_as(ids)
            return ids, places, targets
    """,
    "heads.py": """
        import torch

        class CausalHeads(torch.nn.Module):
            def mix(self, q, k, v, hidden):
                out = torch.nn.functional.scaled_dot_product_attention(
                    *(t.permute(1, 2, 0, 3) for t in (q, k, v)), is_causal=True
                )
                return out.permute(2, 0, 1, 3).flatten(2)
    """,
    "network.py": """
        import torch
        from toyfork.heads import CausalHeads

        class Speaker(torch.nn.Module):
            def __init__(self, vocabulary, length, width=16, heads=4):
                super().__init__()
                self.words = torch.nn.Embedding(vocabulary, width)
                self.at = torch.nn.Embedding(length, width)
                self.qkv = torch.nn.Linear(width, 3 * width)
                self.heads, self.count = CausalHeads(), heads
                self.out = torch.nn.Linear(width, vocabulary)

            def speak(self, ids, places, hidden, targets):
                x = (self.words(ids) + self.at(places)).transpose(0, 1)
                mixed = self.qkv(x)
                q, k, v = mixed.view(*x.shape[:2], self.count, -1).chunk(3, -1)
                x = x + self.heads.mix(q, k, v, hidden)
                scores = self.out(x.transpose(0, 1))
                return torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
    """,
    "cp.py": """
        from pathlib import Path
        from megacp.hosts import fork_rows

        def rows():
            return fork_rows(Path(__file__).with_name("seams.toml"))
    """,
    "seams.toml": """
        [[seam]]
        role = "groups to split"
        target = "toyfork.groups:initialize_model_parallel"

        [[seam]]
        role = "data parallel group"
        target = "toyfork.groups:replicas"

        [[seam]]
        role = "data parallel world_size"
        target = "toyfork.groups:replica_count"

        [[seam]]
        role = "data parallel rank"
        target = "toyfork.groups:replica_number"

        [[seam]]
        role = "callers that mean batches"
        target = "toyfork.batches:next_rows"

        [[seam]]
        role = "model"
        target = "toyfork.network:Speaker.speak"
        parameters = {input_ids = "ids", position_ids = "places", attention_mask = "hidden", labels = "targets"}

        [[seam]]
        role = "core attention"
        target = "toyfork.heads:CausalHeads.mix"
        parameters = {query_layer = "q", key_layer = "k", value_layer = "v", attention_mask = "hidden"}
    """,
    "__init__.py": "",
}
LENGTH, VOCABULARY = 32, 40


def write(folder: Path, without: str = "") -> str:
    package, about = folder / "toyfork", folder / "toyfork-1.0.dist-info"
    package.mkdir()
    about.mkdir()
    for name, text in FORK.items():
        (package / name).write_text(textwrap.dedent(text))
    if without:
        parts = (package / "seams.toml").read_text().split("[[seam]]")
        kept = [part for part in parts if f'role = "{without}"' not in part]
        assert len(kept) == len(parts) - 1
        (package / "seams.toml").write_text("[[seam]]".join(kept))
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toyfork\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[megacp.seams]\ntoyfork = toyfork.cp:rows\n")
    return str(folder)


def step(folder: str, cp: int, splits_itself: bool = False) -> dict[str, Any]:
    """Take one gradient in the fork's own loop, which asks nobody about context parallelism."""
    import torch.distributed as dist

    import megacp

    sys.path.insert(0, folder)
    torch.set_default_dtype(torch.float64)
    try:
        if cp > 1:
            megacp.install()
        from toyfork import batches, groups, network

        groups.initialize_model_parallel(**({"context_parallel_size": cp} if cp > 1 else {}))
        torch.manual_seed(1)
        model = network.Speaker(VOCABULARY, LENGTH)
        split_by = (groups.get_context_parallel_rank(), cp) if splits_itself else None
        ids, places, targets = batches.fetch(LENGTH, VOCABULARY, split_by)
        loss = model.speak(ids, places, None, targets)[:, -9 * ids.shape[1] // LENGTH :].mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=groups.replicas())
            parameter.grad /= groups.replica_count()
        dist.all_reduce(loss, group=groups.replicas())
        found = {name: p.grad for name, p in model.named_parameters()}
        return {"loss": float(loss) / groups.replica_count(), "gradients": found, "report": megacp.report()}
    finally:
        megacp.uninstall()
        sys.path.remove(folder)
        for name in [name for name in sys.modules if name.partition(".")[0] == "toyfork"]:
            del sys.modules[name]


@pytest.mark.parametrize(("cp", "world"), [(2, 2), (2, 4), (4, 4)], ids=["cp2", "dp2 cp2", "cp4"])
def test_a_fork_is_hooked_by_a_file_of_its_names_and_trains_the_same(
    tmp_path: Path, cp: int, world: int
) -> None:
    folder = write(tmp_path)
    (alone,) = ranks.run(step, 1, folder, 1)
    for found in ranks.run(step, world, folder, cp):
        assert "toyfork.heads:CausalHeads.mix" in found["report"]
        assert found["loss"] == pytest.approx(alone["loss"], rel=1e-12)
        for name, gradient in alone["gradients"].items():
            assert torch.allclose(gradient, found["gradients"][name], rtol=1e-10, atol=1e-14), name


def test_a_fork_that_splits_its_batch_itself_too_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ranks.RanksError, match="do not all hold the same batch") as error:
        ranks.run(step, 2, write(tmp_path), 2, splits_itself=True)
    assert len(error.value.failed) == 2 and "something else splits the batch already" in str(error.value)


def test_a_fork_whose_batch_is_split_nowhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ranks.RanksError, match="did not come through a model that megacp splits") as error:
        ranks.run(step, 2, write(tmp_path, without="model"), 2)
    assert len(error.value.failed) == 2 and "CausalHeads" in str(error.value)
