"""Each fault of the campaign once. docs/reliability.md has the command for many of each."""

import subprocess
import sys
from pathlib import Path

from tests.object_store.campaign import FAULTS, campaign
from tests.object_store.server import ObjectStore


def test_a_run_survives_each_fault_of_its_store(object_store: ObjectStore, tmp_path: Path) -> None:
    outcomes = list(campaign(object_store, tmp_path / "trials", runs=len(FAULTS), seed=1))
    assert {outcome.fault for outcome in outcomes} == set(FAULTS)
    assert [outcome for outcome in outcomes if outcome.flaws] == []
    assert any(outcome.uploaded for outcome in outcomes)


def test_the_documented_command_runs() -> None:
    command = [sys.executable, "-m", "tests.object_store", "train.steps=1"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no setting of its runs can be chosen" in done.stderr
