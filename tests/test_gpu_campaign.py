"""The campaign runs every rung, whatever becomes of the others, leaves one line for each, and goes on where it was."""

import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RUNGS = """
import os, sys, time
name, device, file = sys.argv[1:]
print("last words of", name, device)
if name == "slow":
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    open(file, "w").write('{"child": %d}' % child.pid)
    time.sleep(60)
if name == "breaks":
    raise SystemExit("broken")
if name.startswith("pair"):  # each waits for the other
    open(os.path.dirname(file) + "/" + name, "w")
    while not os.path.exists(os.path.dirname(file) + "/" + {"pair 1": "pair 2", "pair 2": "pair 1"}[name]):
        time.sleep(0.01)
open(file, "w").write('{"speed": 2.5}')
"""
ABOUT = {"commit": "a", "torch": "2.11", "device": "H200"}


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        yield importlib.import_module("gpu_campaign")


@pytest.fixture
def rungs(campaign: ModuleType) -> ModuleType:
    return importlib.import_module("gpu_rungs")


@pytest.fixture
def scripted(campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpu_rungs.py").write_text(RUNGS)
    monkeypatch.setattr(campaign, "__file__", str(tmp_path / "gpu_campaign.py"))


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


@pytest.mark.usefixtures("scripted")
def test_a_rung_that_fails_or_hangs_stops_no_other(campaign: ModuleType, tmp_path: Path) -> None:
    at_work = campaign.Campaign(tmp_path / "out", [], ABOUT, "cpu", 60.0)
    at_work.run(["breaks", "slow", "good"], 1, 2.0)
    at_work.run(["pair 1", "pair 2"], 2, 20.0)
    records = [*at_work.records.values()]
    assert [record["status"] for record in records] == ["failed", "too slow", "ok", "ok", "ok"]
    assert [record["figures"].get("speed") for record in records] == [None, None, 2.5, 2.5, 2.5]
    assert "broken" in records[0]["last_words"]
    assert not is_alive(records[1]["figures"]["child"]), "what a rung has started ends with it"
    assert [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()] == records
    assert all(record.items() >= ABOUT.items() for record in records)
    assert "| good | ok | 0 | speed 2.5 |" in campaign.table(records)


@pytest.mark.usefixtures("scripted")
def test_a_second_start_does_what_is_not_ok_yet_for_this_commit_and_device(
    campaign: ModuleType, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    for number, (out, changed, wanted) in enumerate(
        [
            (first, {}, ["good", "breaks"]),
            (first, {}, ["breaks"]),
            (tmp_path / "other", {}, ["breaks"]),
            (tmp_path / "later", {"commit": "b"}, ["good", "breaks"]),
        ]
    ):
        before = len((out / "results.jsonl").read_text().splitlines()) if out.exists() else 0
        known = [first / "results.jsonl"] if number else []
        campaign.Campaign(out, known, ABOUT | changed, "cpu", 60.0).run(["good", "breaks"], 1, 20.0)
        lines = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
        assert [line["rung"] for line in lines[before:]] == wanted


def test_every_rung_has_its_work_and_seven_timings_come_before_all_others(campaign: ModuleType, rungs: Any) -> None:
    names = [*campaign.RIGHT, *campaign.WARM, *campaign.FAST]
    assert len(set(names)) == len(names)
    assert set(names) <= set(rungs.RUNGS)
    seven = [timing.name for timing in campaign.TIMINGS[:7]]
    assert campaign.FAST[:8] == ("ceilings", *seven)
    assert {name.split(" ", 1)[0] for name in seven} == {"megalite", "plain", "peer"}
    assert "megalite 124M train.deterministic=true" in campaign.FAST
    next_ones = ("megalite experts, 4 layers", "megalite experts, 4 layers microbatches=4", "megalite 124M batch=4")
    assert campaign.FAST[8:11] == next_ones, "figures of docs/performance.md"
    assert {timing.shape for timing in campaign.TIMINGS} <= {*rungs.CAMPAIGN, *rungs.SHAPES}


def test_the_tests_of_the_campaign_are_those_marked_gpu_and_none_that_passes_is_no_proof(
    rungs: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> "subprocess.CompletedProcess[str]":
        commands.append(command)
        return subprocess.CompletedProcess(command, 0, "== 110 passed, 2 skipped in 38.7s ==", "")

    monkeypatch.setattr(rungs.subprocess, "run", run)
    assert rungs.gpu_tests(torch.device("cpu")) == {"passed": 110, "skipped": 2}
    monkeypatch.setattr(rungs.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, "112 skipped", ""))
    with pytest.raises(AssertionError):
        rungs.gpu_tests(torch.device("cuda"))
    files = {Path(word) for word in commands[0] if word.endswith(".py")}
    marker = r"mark\.gpu[)\n]|triton_device[:] "  # the fixture of conftest.py has the mark
    marked = {path for path in ROOT.glob("tests/**/test_*.py") if re.search(marker, path.read_text())}
    assert files == marked - {Path(__file__)}, "this one only speaks of them"


@pytest.mark.parametrize("name", ["products", "fp8_products", "attention", "head_and_loss", "embedding", "steps"])
def test_a_rung_finds_the_cpu_right(rungs: ModuleType, name: str) -> None:
    import torch

    found = rungs.RUNGS[name](torch.device("cpu"))
    assert found
    assert all(0 <= figure < 0.05 for figure in found.values())


@pytest.mark.long
def test_the_campaign_is_rehearsed_on_a_cpu(campaign: ModuleType, tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--device", "cpu", "--seconds", "1200"]
    assert campaign.main(arguments) == 0, (tmp_path / "results.jsonl").read_text()
