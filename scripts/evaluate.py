"""Loss, perplexity and bits per byte of a model on data: megalite/commands/evaluate.py; see --help."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(main())
