"""Who talks to whom: every group of ranks of a layout: megalite/commands/plan.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.plan import ranks

if __name__ == "__main__":
    sys.exit(ranks())
