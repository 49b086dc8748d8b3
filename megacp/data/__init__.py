"""Documents on their way to the model: read from Megatron's files, packed into rows, made into batches.

Pure numpy, no process group: every rank computes the same.
"""

from megacp.data.batches import Documents, PackedRows
from megacp.data.indexed import IndexedDocuments, IndexedWriter
from megacp.data.packing import Packer, Piece, Step, first_fit_decreasing

__all__ = [
    "Documents",
    "IndexedDocuments",
    "IndexedWriter",
    "PackedRows",
    "Packer",
    "Piece",
    "Step",
    "first_fit_decreasing",
]
