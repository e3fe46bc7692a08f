"""Who talks to whom: every group of ranks of a layout: megalite/commands/ranks.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.ranks import main

if __name__ == "__main__":
    sys.exit(main())
