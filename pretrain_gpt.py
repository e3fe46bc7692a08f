"""Trains a GPT: `python pretrain_gpt.py [name=value ...]`, or the same under torchrun or srun; see --help. Exit status:
0 finished or stopped after saving, 2 refused (said by rank 0), 128 and its number for a signal before the first step
(130: Ctrl-C), else a failure."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

from megalite.commands.train import main, main_to_the_end

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main_to_the_end(sys.argv[1:]))
