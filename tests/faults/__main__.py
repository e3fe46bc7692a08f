"""A fault campaign: small runs are killed, stopped and damaged at random, started once more, and compared.

python -m tests.faults --runs 8
python -m tests.faults --runs 200 --seed 7 --flips 1000

Every trial must end as the undisturbed run does, bit for bit, whatever was done to it. The same seed strikes the same
runs in the same order; when exactly, the machine decides. Two ranks, on the CPU, in a temporary folder that stays if
something does not hold. docs/reliability.md shows what it prints. Exit status: 0 all holds, 1 something does not.
"""

import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from megalite.commands.command import COUNT, Shown, command, option
from megalite.commands.train import main_to_the_end
from megalite.errors.problems import Problem, UserError, to_stderr


@command(
    option("--runs", **COUNT, default=8, help="trials, each with the next of eight faults (default: %(default)s)"),
    option("--seed", **COUNT, default=0, help="of layouts, moments and places (default: %(default)s)"),
    option("--flips", **COUNT, default=100, help="single bits flipped in a checkpoint (default: %(default)s)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    if overrides:
        raise UserError(Problem(overrides[0], "", "no setting of its runs can be chosen", "--help says what can"))
    from tests.faults.campaign import campaign, flip_bits, table

    folder = Path(tempfile.mkdtemp(prefix="megalite-faults-"))
    outcomes, trials = [], campaign(main_to_the_end, folder / "trials", runs=options.runs, seed=options.seed)
    for number, outcome in enumerate(trials):
        outcomes.append(outcome)
        for flaw in outcome.flaws:
            to_stderr(f"megalite: trial {number}, {outcome.fault}: {flaw}")
    checkpoint = max((folder / "trials" / "undisturbed-0" / "run" / "checkpoints").glob("step-*"))
    unnoticed = flip_bits(checkpoint, options.flips, options.seed)
    for place in unnoticed:
        to_stderr(f"megalite: not noticed: {place}")
    holds = not unnoticed and not any(outcome.flaws for outcome in outcomes)
    if holds:
        shutil.rmtree(folder)
    else:
        to_stderr(f"megalite: {folder} keeps what does not hold")
    noticed = f"{options.flips - len(unnoticed):,} of {options.flips:,} single-bit flips were noticed"
    return Shown([*table(outcomes), "", f"{noticed}, over all files of a checkpoint"], 0 if holds else 1)


if __name__ == "__main__":
    sys.exit(main())
