"""D25: rotary tables of the host, hooked: each rank has the rows of the global table at its own positions, and the global scale.

The report is Megatron-LM#4977: tables made from the local length restart on each rank, and length-dependent scaling sees S / cp.
"""

from __future__ import annotations

import pytest
import torch

from megacp import Layout
from megacp.testing import ranks

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install 'megacp[megatron]'")

SEQ = 64


def tables(layout: str, hooked: bool) -> dict[str, tuple[torch.Tensor, float]]:
    """Give (table [S, 1, 1, D], scale) of plain positions, with half-split and interleaved pairs, and of YaRN's."""
    import megacp
    from megacp.config import Config
    from megacp.testing import cpu

    cpu.install()
    if hooked:
        megacp.install(Config(report="off", layout=layout))
    from megatron.core import parallel_state
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

    parallel_state.initialize_model_parallel(context_parallel_size=torch.distributed.get_world_size())
    found = {}
    for interleaved in (False, True):
        plain = RotaryEmbedding(8, 1.0, rotary_interleaved=interleaved, use_cpu_initialization=True)
        found[f"plain, interleaved {interleaved}"] = (plain(SEQ), 1.0)
    yarn = YarnRotaryEmbedding(
        8, use_cpu_initialization=True, scaling_factor=4.0, original_max_position_embeddings=16
    )
    found["yarn"] = yarn(SEQ)  # the host has it for half-split pairs only
    parallel_state.destroy_model_parallel()
    megacp.uninstall()
    return found


def both_layouts() -> dict[str, dict[str, tuple[torch.Tensor, float]]]:
    return {layout: tables(layout, hooked=True) for layout in ("zigzag", "contiguous")}


def test_d25_the_host_s_tables_are_rows_of_the_global_ones_bit_for_bit() -> None:
    ranks.shutdown()
    (whole,) = ranks.run(tables, 1, "zigzag", hooked=False)
    parts = ranks.run(both_layouts, 4)
    ranks.shutdown()
    assert len(whole) == 3 and whole["yarn"][1] != 1.0
    for layout in ("zigzag", "contiguous"):
        placed = getattr(Layout, layout)(SEQ, 4)
        for rank, part in enumerate(parts):
            for name, (table, scale) in whole.items():
                rows, found = part[layout][name]
                assert table.shape[0] == SEQ and torch.equal(rows, table[placed.positions(rank)]), (
                    name,
                    rank,
                )
                assert found == scale
