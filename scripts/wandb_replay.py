"""Send runs to Weights and Biases after the fact: what wandb does not have yet of their metrics and samples.

python scripts/wandb_replay.py RUN_DIR [RUN_DIR ...]

A run keeps its id (RUN_DIR/wandb.json), so nothing is doubled. WANDB_MODE=offline writes to RUN_DIR/wandb only.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megalite.config.problems import REFUSED, UserError
from megalite.train.wandb_replay import ReplayError, checked, replay


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="RUN_DIR")
    folders = parser.parse_args(arguments).folders
    try:
        mode = checked(folders, os.environ)
        for folder in folders:
            print(f"{folder}: {replay(folder, mode)}", flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except ReplayError as error:
        print(f"megalite: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
