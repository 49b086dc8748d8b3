"""Documents on their way to the model: packing them into rows, and giving each as many ranks as it needs.

Pure numpy, no process group: every rank computes the same.
"""

from megacp.data.packing import Packer, Piece, Step, first_fit_decreasing
from megacp.data.waves import Cost, Row, Waves, block_sizes, spread

__all__ = [
    "Cost",
    "Packer",
    "Piece",
    "Row",
    "Step",
    "Waves",
    "block_sizes",
    "first_fit_decreasing",
    "spread",
]
