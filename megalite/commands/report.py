"""Draws the report of a run again, or compares several runs on common axes.

python -m megalite report runs/my-run
python -m megalite report runs/first runs/second --out comparison.html

One folder: its report.html. Several: comparison.html, here. The files are read as they are, also of a run that goes on.
Exit status: 0, or 2 refused.
"""

from argparse import Namespace
from pathlib import Path

from megalite.commands.command import Shown, command, option
from megalite.observe.report.write import write_report


@command(
    option("runs", nargs="+", type=Path, metavar="RUN_DIR", help="the folder of a run"),
    option("--out", type=Path, metavar="FILE", help="where to (default: RUN_DIR/report.html)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    return Shown([str(write_report([*options.runs, *map(Path, overrides)], options.out))])
