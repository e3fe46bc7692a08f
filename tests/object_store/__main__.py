"""Faults of an object store: small runs upload to a real S3 server on this machine that fails on purpose.

python -m tests.object_store --runs 12
python -m tests.object_store --runs 100 --seed 7

Each run goes on in another folder, from what is in the store, and must end as the undisturbed run does, bit for bit.
The same seed strikes the same runs in the same order; when exactly, the machine decides. docs/reliability.md shows what
it prints. Exit status: 0 all holds, 1 something does not.
"""

import shutil
import sys
import tempfile
from argparse import Namespace
from pathlib import Path

from megalite.commands.command import COUNT, Shown, command, option
from megalite.errors.problems import Problem, UserError, to_stderr


@command(
    option("--runs", **COUNT, default=12, help="trials, each with the next of twelve faults (default: %(default)s)"),
    option("--seed", **COUNT, default=0, help="of layouts, moments and places (default: %(default)s)"),
)
def main(options: Namespace, overrides: list[str]) -> Shown:
    if overrides:
        raise UserError(Problem(overrides[0], "", "no setting of its runs can be chosen", "--help says what can"))
    from tests.object_store.campaign import campaign, table
    from tests.object_store.server import running

    folder, outcomes = Path(tempfile.mkdtemp(prefix="megalite-store-")), []
    with running() as store:
        for number, outcome in enumerate(campaign(store, folder / "trials", runs=options.runs, seed=options.seed)):
            outcomes.append(outcome)
            for flaw in outcome.flaws:
                to_stderr(f"megalite: trial {number}, {outcome.fault}: {flaw}")
    holds = not any(outcome.flaws for outcome in outcomes)
    if holds:
        shutil.rmtree(folder)
    else:
        to_stderr(f"megalite: {folder} keeps what does not hold")
    return Shown(table(outcomes), 0 if holds else 1)


if __name__ == "__main__":
    sys.exit(main())
