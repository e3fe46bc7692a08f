"""Jobs of a real SLURM end as people expect: what is preempted, runs out of time or is cancelled has lost nothing."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megalite.train.history import read_events
from tests.cluster.slurm import ENDED, Cluster, cluster, missing
from tests.train.runs import ROOT, metrics, overrides, state_bytes, write_text

pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(missing()), reason=missing())]
BATCH = {
    "torchrun": ["--ntasks-per-node=1", "scripts/slurm/pretrain.sbatch"],
    "srun": ["--ntasks-per-node=2", "scripts/slurm/pretrain_srun.sbatch"],
}
TWO_BY_TWO = ("parallel.tp=2", "parallel.pp=2", "model.num_attention_heads=2", "train.steps=60")
STEPS = 60


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(tmp_path_factory.mktemp("slurm") / "cluster") as found:
        write_text(found.folder / "text.txt")
        yield found


@pytest.fixture(scope="module")
def undisturbed(slurm: Cluster) -> Path:
    """A run of four ranks on two nodes."""
    return finish(slurm, submit(slurm, "undisturbed"))


def submit(
    slurm: Cluster, run: str, *extra: str, by: str = "torchrun", options: tuple[str, ...] = ()
) -> tuple[str, Path]:
    """A job of two nodes with two ranks each; its number and its run folder (one of an array: the parent of theirs)."""
    environment = {**slurm.environment, "OMP_NUM_THREADS": "1", "RANKS_PER_NODE": "2"}
    environment["LOGS"] = str(slurm.folder / "logs")
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    arguments = overrides(slurm.folder, run, *TWO_BY_TWO, *extra)
    log = f"--output={slurm.folder}/%x-%j.out"
    words = ["sbatch", "--parsable", "--nodes=2", log, *options, *BATCH[by], *arguments]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip(), slurm.folder / run


def finish(slurm: Cluster, submitted: tuple[str, Path], state: str = "COMPLETED") -> Path:
    """The run of a job that comes to its end in this state, however often it is requeued."""
    number, run = submitted

    def over() -> bool:
        job = slurm.job(number)
        if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime":  # SLURM lets a requeued job wait two minutes
            time.sleep(2)  # what starts in the second of its requeue fails: "Job credential revoked"
            slurm("scontrol", "update", f"JobId={number}", "StartTime=now")
        return job["JobState"] in ENDED  # and neither SIGNALING nor REQUEUED

    slurm.follow(over, lambda: said(slurm, number))
    assert slurm.job(number)["JobState"] == state, said(slurm, number)
    return run


def said(slurm: Cluster, number: str) -> str:
    texts = [*slurm.folder.glob(f"*-{number}.out"), *slurm.folder.glob(f"logs/*{number}*")]
    return "\n".join(f"== {path.name}\n{path.read_text()}" for path in texts)


def wait_for_step(slurm: Cluster, submitted: tuple[str, Path], step: int) -> None:
    number, run = submitted
    slurm.follow(lambda: any(each["step"] >= step for each in metrics(run)), lambda: said(slurm, number))


def stops(run: Path) -> list[str]:
    return [event["by"] for event in read_events(run / "events.jsonl") if event["kind"] == "stopped"]


def same(run: Path, other: Path) -> bool:
    return metrics(run) == metrics(other) and state_bytes(run, STEPS) == state_bytes(other, STEPS)


def preempt(slurm: Cluster) -> None:
    urgent = ["-p", "high", "--nodes=2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1"]
    slurm.wait(slurm("sbatch", "--parsable", *urgent), "COMPLETED")


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_a_preempted_job_saves_is_requeued_and_goes_on_bit_for_bit(slurm: Cluster, undisturbed: Path, by: str) -> None:
    submitted = submit(slurm, f"preempted-{by}", by=by)
    wait_for_step(slurm, submitted, 8)
    preempt(slurm)
    run = finish(slurm, submitted)
    assert stops(run) in (["SIGTERM"], ["a signal to another rank"])
    assert slurm.job(submitted[0])["Restarts"] == "1"
    assert same(run, undisturbed), said(slurm, submitted[0])


SLOW = """
import os, sys, time
class Slow:  # an import of a rank that takes longer than its job has
    def find_spec(self, name, *_):
        if name == "megalite.train.run" and "SLURM_PROCID" in os.environ:
            print("at the import", flush=True)
            time.sleep(3600)
sys.meta_path.insert(0, Slow())
"""


@pytest.fixture
def slow_import(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    (slurm.folder / "sitecustomize.py").write_text(SLOW)
    monkeypatch.setitem(slurm.environment, "PYTHONPATH", str(slurm.folder))


@pytest.mark.parametrize("by", ["torchrun", "srun"])
@pytest.mark.usefixtures("slow_import")
def test_a_job_that_is_preempted_in_its_start_up_comes_again(slurm: Cluster, by: str) -> None:
    """SLURM tells the ranks alone, who have written no status yet."""
    number, _ = submit(slurm, f"early-{by}", by=by)
    slurm.follow(lambda: said(slurm, number).count("at the import") == 4)
    preempt(slurm)
    slurm.follow(lambda: slurm.job(number)["JobState"] == "PENDING", lambda: said(slurm, number))
    assert slurm.job(number)["Restarts"] == "1"
    assert "requeued: ended before training began" in said(slurm, number)
    assert "Traceback" not in said(slurm, number)
    slurm("scancel", number)


def test_a_job_that_runs_out_of_time_saves_and_comes_again(slurm: Cluster, undisturbed: Path) -> None:
    """Samples of text after each step make it last longer than its minutes. SLURM warns it 30 s to 60 s before the end,
    which leaves a busy machine a minute for start-up and a step."""
    longer = ("train.sample_interval=1", "train.sample_tokens=200")
    submitted = submit(slurm, "limited", *longer, options=("--time=2", "--signal=B:USR1@30"))
    run = finish(slurm, submitted)
    assert stops(run)
    assert int(slurm.job(submitted[0])["Restarts"]) == len(stops(run))
    assert "requeued:" in said(slurm, submitted[0])
    assert same(run, undisturbed), said(slurm, submitted[0])


@pytest.mark.parametrize("by", ["torchrun", "srun"])
@pytest.mark.usefixtures("slow_import")
def test_a_job_that_gains_no_step_twice_fails_and_says_what_would_do(slurm: Cluster, by: str) -> None:
    """Without an end it would be requeued for ever."""
    submitted = submit(slurm, f"vain-{by}", by=by, options=("--time=1", "--signal=B:USR1@10"))
    run, log = finish(slurm, submitted, "FAILED"), said(slurm, submitted[0])
    assert slurm.job(submitted[0])["Restarts"] == "1", log
    assert not run.exists()
    assert re.search(r"in a row gained no step: the job fails\n +start-up was not over after \d+ s, no step", log), log
    assert re.search(r"--time=[2-9] leaves room", log), log
    assert "--signal" in log
    assert "Traceback" not in log
    assert log.count("megalite: ended by SIGUSR1 after") == 2, log


@pytest.mark.parametrize("by", ["torchrun", "srun"])
def test_a_cancelled_job_is_saved_and_does_not_come_again(slurm: Cluster, undisturbed: Path, by: str) -> None:
    submitted = submit(slurm, f"cancelled-{by}", by=by)
    wait_for_step(slurm, submitted, 8)
    slurm("scancel", submitted[0])
    job = slurm.wait(submitted[0], "CANCELLED", "PENDING", "COMPLETED", "FAILED")
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), said(slurm, submitted[0])
    step = max(each["step"] for each in metrics(submitted[1]))
    assert state_bytes(submitted[1], step)
    assert same(finish(slurm, submit(slurm, f"cancelled-{by}", by=by)), undisturbed)


def test_an_array_trains_a_run_for_each_line_of_its_file(slurm: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    points = slurm.folder / "points.txt"
    runs = [slurm.folder / f"array {lr}" for lr in ("1e-3", "2e-3", "3e-3")]
    points.write_text("".join(f"optimizer.lr={run.name.split()[1]} 'run_dir={run}'\n" for run in runs))
    monkeypatch.setitem(slurm.environment, "POINTS", str(points))
    number, _ = submit(slurm, "unused", "train.steps=4", "parallel.pp=1", options=("--array=1-3", "--nodes=1"))
    slurm.follow(lambda: all(slurm.job(f"{number}_{task}")["JobState"] == "COMPLETED" for task in (1, 2, 3)))
    assert [len({each["step"] for each in metrics(run)}) for run in runs] == [4, 4, 4]


CONTAINER = """#!/bin/sh
# As what RUN_IN may be: it notes where training starts, and on one node the disk of the checkpoints is not mounted.
[ "$1" != torchrun ] || echo "$SLURMD_NODENAME" >> "$DISK.trained"
[ "$SLURMD_NODENAME" = "$BAD_NODE" ] || exec "$@"
exec unshare --mount sh -c 'mount -t tmpfs -o ro none "$0" && exec "$@"' "$DISK" "$@"
"""


@pytest.mark.parametrize(("bad", "good"), [("n0", "n1"), ("n1", "n0")])
def test_of_more_nodes_than_are_needed_the_best_train(
    slurm: Cluster, monkeypatch: pytest.MonkeyPatch, bad: str, good: str
) -> None:
    disk, container = slurm.folder / f"disk-{bad}", slurm.folder / "container"
    (disk / "runs").mkdir(parents=True)
    container.write_text(CONTAINER)
    container.chmod(0o755)
    for name, value in {"TRAIN_NODES": "1", "RUN_IN": container, "BAD_NODE": bad, "DISK": disk}.items():
        monkeypatch.setitem(slurm.environment, name, str(value))
    submitted = submit(slurm, f"disk-{bad}/runs/spare", "train.steps=4", "parallel.pp=1")
    run = finish(slurm, submitted)
    log = said(slurm, submitted[0])
    assert re.search(r"node +matmul.*\nn0 .*\nn1 ", log), log
    assert f"{bad}: error: FileNotFoundError" in log or f"{bad}: error: OSError" in log, log
    assert f"--exclude={bad}\n" in log, log
    assert disk.with_suffix(".trained").read_text() == f"{good}\n"
    assert len(read_events(run / "events.jsonl")[0]["hosts"]) == 2, "of the two ranks of one node"


def test_submitit_places_the_points_of_a_sweep(slurm: Cluster) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="needs hydra-submitit-launcher")
    folder = slurm.folder / "submitit"
    words = [word for word in overrides(slurm.folder, "", "train.steps=4") if not word.startswith("run_dir")]
    words += ["seed=1,2", f"run_dir='{folder}/s${{seed}}'", f"hydra.sweep.dir={folder}/sweep"]
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--multirun", "hydra/launcher=submitit_slurm", *words]
    done = subprocess.run(command, env=slurm.environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [metrics(folder / f"s{seed}")[-1]["step"] for seed in (1, 2)] == [4, 4]
    assert (folder / "sweep" / "comparison.html").is_file()
