"""Documents on their way to the model: packing them into rows.

Pure numpy, no process group: every rank computes the same.
"""

from megacp.data.packing import Packer, Piece, Step, first_fit_decreasing

__all__ = ["Packer", "Piece", "Step", "first_fit_decreasing"]
