"""Draws the report of a run again, or compares several runs: megalite/commands/report.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.report import main

if __name__ == "__main__":
    sys.exit(main())
