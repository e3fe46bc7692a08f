"""Which gradient bucket holds which parameters, and who owns what of it: megalite/commands/buffers.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.buffers import main

if __name__ == "__main__":
    sys.exit(main())
