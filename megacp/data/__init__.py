"""Documents on their way to the model: read from Megatron's files, packed into rows, made into batches, given ranks.

Pure numpy, no process group: every rank computes the same.
"""

from megacp.data.batches import Documents, PackedRows
from megacp.data.indexed import IndexedDocuments, IndexedWriter
from megacp.data.packing import Packer, Piece, Step, first_fit_decreasing
from megacp.data.waves import Cost, Row, Waves, block_sizes, spread

__all__ = [
    "Cost",
    "Documents",
    "IndexedDocuments",
    "IndexedWriter",
    "PackedRows",
    "Packer",
    "Piece",
    "Row",
    "Step",
    "Waves",
    "block_sizes",
    "first_fit_decreasing",
    "spread",
]
