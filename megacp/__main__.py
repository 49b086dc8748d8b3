"""``python -m megacp SCRIPT ARGS...``, short for ``megacp run``; also under ``torchrun -m megacp``."""

from __future__ import annotations

import sys

from megacp.cli import main

if __name__ == "__main__":
    sys.exit(main())
