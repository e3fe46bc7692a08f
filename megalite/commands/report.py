"""Draws the report of a run again, or compares several runs on common axes.

python scripts/report.py runs/my-run
python scripts/report.py runs/first runs/second --out comparison.html

One folder: its report.html. Several: comparison.html, here. The files are read as they are, also of a run that goes on.
Exit status: 0, or 2 refused.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from megalite.errors.problems import REFUSED, UserError
from megalite.observe.report.write import write_report
from megalite.observe.screens import print_lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: RUN_DIR/report.html)")
    options = parser.parse_args(arguments)
    try:
        print_lines([str(write_report(options.runs, options.out))])
    except UserError as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0
