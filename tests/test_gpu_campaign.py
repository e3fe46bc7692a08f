"""The campaign runs every rung in its turn, whatever becomes of the others, and leaves one line for each."""

import importlib
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from megalite.config.schema import Config

ROOT = Path(__file__).parents[1]
RUNGS = """
import sys, time
name, device, file = sys.argv[1:]
print("last words of", name, device)
if name == "slow":
    import subprocess
    child = subprocess.Popen(["sleep", "60"])
    open(file, "w").write('{"child": %d}' % child.pid)
    time.sleep(60)
if name == "breaks":
    raise SystemExit("broken")
open(file, "w").write('{"speed": 2.5}')
"""


@pytest.fixture(scope="module")
def campaign() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "scripts")
        yield importlib.import_module("gpu_campaign")


def is_alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().split()[2] != "Z"


def test_a_rung_that_fails_or_hangs_stops_no_other(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpu_rungs.py").write_text(RUNGS)
    monkeypatch.setattr(campaign, "__file__", str(tmp_path / "gpu_campaign.py"))
    rungs = [campaign.Rung(1, name, print, limit) for name, limit in (("breaks", 20), ("slow", 1), ("good", 20))]
    out = tmp_path / "part-1.jsonl"
    out.write_text('{"rung": "of another day"}\n')
    records = campaign.run_part(rungs, out, "cpu")
    assert [record["status"] for record in records] == ["failed", "too slow", "ok"]
    assert [record["figures"].get("speed") for record in records] == [None, None, 2.5]
    assert "broken" in records[0]["last_words"]
    assert not is_alive(records[1]["figures"]["child"]), "what a rung has started ends with it"
    assert [json.loads(line) for line in out.read_text().splitlines()][1:] == records
    fields = {"commit", "torch", "device", "driver", "rung", "status", "seconds", "figures", "last_words"}
    assert all(record.keys() == fields | {"clocks_before", "clocks_after"} for record in records)
    assert "| good | ok | 0 | speed 2.5 |" in campaign.table(records)


def test_a_second_start_runs_what_is_not_ok_yet_for_this_commit_and_device(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses = {"good": "ok", "bad": "failed"}
    runs: list[str] = []

    def run(rung: Any, *_: object) -> dict[str, Any]:
        runs.append(rung.name)
        return {"status": statuses[rung.name], "seconds": 1.0, "figures": {}}

    monkeypatch.setattr(campaign, "_run", run)
    rungs = [campaign.Rung(1, name, print, 1.0) for name in statuses]
    all_of_them = [*statuses]
    for commit, wanted in (
        ("a", all_of_them),
        ("a", ["bad"]),
        ("b", all_of_them),
        ("", all_of_them),
        ("", all_of_them),
    ):
        runs.clear()
        monkeypatch.setattr(campaign, "_output", Mock(return_value=commit))
        records = campaign.run_part(rungs, tmp_path / "part-1.jsonl", "cpu")
        assert runs == wanted
        assert [record["status"] for record in records] == ["ok", "failed"], "also those of before"


def test_what_no_other_part_measures_comes_before_ladders(campaign: ModuleType) -> None:
    names = [rung.name for rung in campaign.RUNGS if rung.part == 3]
    chosen = [at for at, name in enumerate(names) if any(word in name for word in ("fp8", "cuda_graph=", "moe"))]
    assert chosen == list(range(6))


def test_when_the_time_of_a_part_is_over_the_rest_is_noted_and_not_run(campaign: ModuleType, tmp_path: Path) -> None:
    rungs = [campaign.Rung(1, "ceilings", print, 20)]
    [record] = campaign.run_part(rungs, tmp_path / "part-1.jsonl", "cpu", limit_s=0.0)
    assert (record["status"], record["figures"]) == ("no time", {})


def test_every_part_has_rungs_of_names_of_their_own_and_every_file_of_gpu_tests_is_one(campaign: ModuleType) -> None:
    names = [rung.name for rung in campaign.RUNGS]
    assert len(set(names)) == len(names)
    assert {rung.part for rung in campaign.RUNGS} == {1, 2, 3}
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in ROOT.glob("tests/**/test_*.py")}
    marked = {name for name, text in texts.items() if re.search(r"pytest\.mark\.gpu[)\n]", text)}
    assert marked == {name for name in names if name.startswith("tests/")}
    assert "tests/test_gpu_campaign.py" not in marked, "it only speaks of them"


@pytest.mark.parametrize("name", ["products", "fp8_products", "attention", "head_and_loss", "embedding", "steps"])
def test_a_rung_finds_the_cpu_right(campaign: ModuleType, name: str) -> None:
    import torch

    work = next(rung.work for rung in campaign.RUNGS if rung.name == name)
    found = work(torch.device("cpu"))
    assert found
    assert all(0 <= figure < 0.05 for figure in found.values())


def test_one_side_at_a_time_is_in_memory_and_one_that_fails_loses_only_its_own_figures(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    rungs = importlib.import_module("gpu_rungs")
    alive, taken = set[str](), list[str]()

    class Side:
        def __init__(self, name: str, config: Config, limit_s: float) -> None:
            self.name = name

        def __enter__(self) -> "Side":
            assert not alive
            alive.add(self.name)
            return self

        def __exit__(self, *_: object) -> None:
            alive.clear()

        def turn(self, repeat: int) -> Any:
            taken.append(self.name)
            if self.name == "peer" and taken.count("peer") == 2:
                raise RuntimeError("out of memory")
            return rungs.Turn(float(len(taken)), 0.5, 2.0)

    monkeypatch.setattr(rungs, "Side", Side)
    file = tmp_path / "figures.json"
    with pytest.raises(AssertionError, match=r"peer.*out of memory"):
        rungs.write(rungs.beside("124M", torch.device("cpu")), file)
    assert taken == ["megalite", "peer", "plain loop"] * 2 + ["megalite", "plain loop"]
    found = json.loads(file.read_text())
    speeds = {name.split()[0]: value for name, value in found.items() if name.endswith("tokens_per_s")}
    assert speeds == {"megalite": 32 / 4, "peer": 32 / 2, "plain": 32 / 6}, "medians"
    assert 0 < found["peer of_products"] < 1


def test_a_run_that_was_not_resumed_is_no_proof_of_resuming(
    campaign: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is one that ended before it was killed. Each run here is one line of shell."""
    import torch

    rungs = importlib.import_module("gpu_rungs")
    line = (
        """mkdir -p $0; echo '{"loss": 1.0}' > $0/metrics.jsonl; echo '{"kind": "%s", "step": %d}' > $0/events.jsonl"""
    )
    started, events, last = subprocess.Popen, [("resume", 10)], ""

    def popen(command: list[str]) -> "subprocess.Popen[bytes]":
        folder = next(word for word in command if word.startswith("run_dir=")).removeprefix("run_dir=")
        return started(["sh", "-c", line % events[-1] + last, folder])

    monkeypatch.setattr(rungs.subprocess, "Popen", popen)
    with pytest.raises(AssertionError, match="exit status 0"):
        rungs.resuming(torch.device("cpu"))
    last = "; [ ${0%broken} = $0 ] || [ -e $0/killed ] || { touch $0/killed; kill -9 $$; }"
    assert rungs.resuming(torch.device("cpu")) == {"steps": 1, "resumed_at": 10}
    for event in (("resume", 0), ("start", 0)):
        events.append(event)
        with pytest.raises((AssertionError, ValueError)):
            rungs.resuming(torch.device("cpu"))


def test_cublas_lt_is_asked_for_before_it_is_measured(campaign: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    rungs, calls = importlib.import_module("gpu_rungs"), list[str]()
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", calls.append)
    monkeypatch.setattr(rungs, "choice", lambda *_: calls.append("measured"))
    rungs.with_cublas_lt(torch.device("cuda", 0))
    assert calls == ["cublaslt", "measured"]


@pytest.mark.long
@pytest.mark.parametrize("part", [1, 2, 3])
def test_a_part_is_rehearsed_on_a_cpu(campaign: ModuleType, part: int, tmp_path: Path) -> None:
    arguments = ["--part", str(part), "--out", str(tmp_path), "--device", "cpu"]
    assert campaign.main(arguments) == 0, (tmp_path / f"part-{part}.jsonl").read_text()


def test_the_page_holds_the_measurements_of_the_folder(campaign: ModuleType) -> None:
    page = (ROOT / "docs" / "performance.md").read_text()
    assert campaign.page_with(page, ROOT / "docs" / "measurements") == page


def test_measurements_stand_between_the_marks_of_the_page(campaign: ModuleType, tmp_path: Path) -> None:
    record = {"commit": "abc", "torch": "2.11", "device": "H200", "driver": "580", "rung": "124M"}
    record |= {"status": "ok", "seconds": 3.0, "figures": {"mfu": 0.41234}}
    (tmp_path / "part-2.jsonl").write_text(json.dumps(record) + "\n")
    before = f"above\n{campaign.BEGIN}old\n{campaign.END}below\n"
    text = campaign.page_with(before, tmp_path)
    assert "**part-2**: H200, driver 580, torch 2.11, commit abc" in text
    assert "| 124M | ok | 3 | mfu 0.4123 |" in text
    assert "old" not in text
    assert text.startswith("above\n")
    assert text.endswith("below\n")
