"""A fault campaign: megalite/commands/faults.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.faults import main

if __name__ == "__main__":
    sys.exit(main())
