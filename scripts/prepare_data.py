"""Text to token files, and a check of token files: megalite/commands/prepare.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.prepare import main

if __name__ == "__main__":
    sys.exit(main())
