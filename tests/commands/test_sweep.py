"""A sweep trains every point in a folder of its own, compares them, continues, stops in order, and loses no point."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import pretrain_gpt
from megalite.commands import sweep as sweep_command
from megalite.commands.sweep import points_of
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
SMALL = ["device=cpu", "tokenizer=byte", "data=text", "data.path=a.txt", "model.num_layers=1", "model.hidden_size=32"]
SMALL += ["model.num_attention_heads=4", "train.seq_length=16", "train.global_batch_size=2", "train.sample_tokens=0"]
SMALL += ["train.steps=2", "train.eval_interval=2", "train.eval_batches=1", "hydra.sweep.dir=sweep"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("A tree stands by the river.\n" * 400)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*words: str) -> "subprocess.Popen[str]":
    command = [warm_python(), str(ROOT / "pretrain_gpt.py"), "--multirun", *SMALL, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


Sweep = Callable[..., str]


@pytest.fixture
def sweep(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Sweep:
    """A sweep whose points train in this process, one after the other; what was printed."""

    def train_here(command: list[str], output: object, stop: Path) -> int:
        assert command[:2] == [sys.executable, str(ROOT / "pretrain_gpt.py")]
        return pretrain_gpt.main(command[2:])

    def sweep(*words: str, status: int = 0) -> str:
        capfd.readouterr()
        ended = pretrain_gpt.main(["--multirun", *SMALL, *words])
        said = capfd.readouterr()
        assert ended == status, said
        return said.out + said.err

    monkeypatch.setattr(sweep_command, "run_process", train_here)
    return sweep


def records(place: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted(place.glob("sweep/**/point.json"))]


def losses(run: object) -> list[float]:
    lines = Path(str(run), "metrics.jsonl").read_text().splitlines()
    return [line["val_loss"] for line in map(json.loads, lines) if "val_loss" in line]


def test_points_are_trained_and_compared_and_the_same_command_continues_them(place: Path, sweep: Sweep) -> None:
    words = ("optimizer.lr=1e-3,3e-4",)
    told = [line for line in sweep(*words).splitlines() if line]
    found = records(place)
    assert [record["status"] for record in found] == ["trained"] * 2
    assert len({record["run_dir"] for record in found}) == 2
    assert [[record["val_loss"]] for record in found] == [losses(record["run_dir"]) for record in found]
    heads = [line.partition(": trained, validation loss ")[0] for line in told[-3:-1]]
    assert heads == ["optimizer.lr=0.001", "optimizer.lr=0.0003"], "folders of points, named by what is swept"
    assert told[-1] == f"comparison: {place / 'sweep' / 'comparison.html'}"
    page = (place / "sweep" / "comparison.html").read_text()
    assert all(Path(str(record["run_dir"])).name in page for record in found)
    kept = [place / "sweep", *(place / "sweep").rglob("*")]
    assert not [path for path in kept if path.stat().st_mode & 0o077], "what a sweep keeps is its user's alone"
    assert not list(place.glob("runs/*/.hydra"))
    assert sorted(path.name for path in place.iterdir()) == ["a.txt", "runs", "sweep"]

    again = sweep(*words)
    assert again.count("already finished: step 2 of 2") == 2
    assert records(place) == found


@pytest.mark.parametrize("name", ["stop", "comparison.html", "multirun.yaml", "notes/point.json"])
def test_files_of_others_in_the_folder_of_a_sweep_stay(place: Path, sweep: Sweep, name: str) -> None:
    for content in ("mine", ""):
        (place / "sweep" / "notes").mkdir(parents=True, exist_ok=True)
        (place / "sweep" / name).write_text(content)
        assert f"/sweep/{name}'" in sweep("seed=1,2", status=2)
        assert (place / "sweep" / name).read_text() == content
    assert not (place / "runs").exists()


def test_a_point_that_fails_does_not_lose_the_others(place: Path, sweep: Sweep) -> None:
    (place / "b").mkdir()
    (place / "a.txt").rename(place / "b" / "a.txt")
    (place / "a.txt").write_bytes(b"\xff\xfe no text" * 400)  # which is known only once it is read
    told = sweep("data.path=./a.txt,b/a.txt", status=1)
    assert "megalite: refused" in told
    found = sorted((str(record["status"]), record["val_loss"] is None) for record in records(place))
    assert found == [("failed", True), ("trained", False)]
    assert all(path.name.startswith("data.path=") for path in place.glob("sweep/*/"))


def test_a_point_without_a_run_is_not_compared(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "point.json").write_text('{"words": [], "run_dir": "", "status": "failed", "val_loss": null}')
    (place / "metrics.jsonl").touch()  # of the run in whose folder the sweep was started
    assert sweep_command._report(place) == 1
    assert "comparison" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["optimizer.lr=1e-3,fast"], ["optimizer.lr='fast'", "must be a number"]),
        (["seed=1,2", "train.step=3"], ["train.step=3", "did you mean train.steps=3"]),
        (["train.eval_batches=1,2"], ["run_dir=", "several points would train in the same folder"]),
        (["sweep.nproc_per_node=0", "seed=1,2"], ["sweep.nproc_per_node=0", "must be at least 1"]),
        (["train.global_batch_size=2,3", "sweep.nproc_per_node=2"], ["train.global_batch_size=3"]),
        (["seed=1,2", "train.seq_length=[1,{a:1}]"], ["train.seq_length=[1, {'a': 1}]"]),
        (["seed=1,2", "hydra/launcher=rq"], ["hydra/launcher/rq", "docs/sweeps.md"]),
        (["optimizer.lr=interval(1e-4,1e-3)"], ["--multirun", "INTERVAL"]),
        (["seed=range(1,9000000000)", "train.steps=1,2"], ["a grid of more than 10,000 points"]),
        (
            ["seed=1,2", "optimizer.groups=[{match:'*.routr.*',lr:0.1x}]"],
            ["optimizer.groups='*.routr.*': matches no parameter of the model"],
        ),
        (["hydra.sweep.dir=a.txt"], ["/a.txt:", "File exists", "another hydra.sweep.dir"]),
    ],
)
def test_what_can_be_known_is_refused_before_anything_starts(
    place: Path, capfd: pytest.CaptureFixture[str], words: list[str], said: list[str]
) -> None:
    assert pretrain_gpt.main(["--multirun", *SMALL, *words]) == 2
    told = capfd.readouterr().err
    assert all(part in told for part in said), told
    assert told.count("megalite: refused, 1 problem:") == 1, told
    assert [path.name for path in place.iterdir()] == ["a.txt"]


def test_the_mistakes_of_all_points_are_one_message(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert pretrain_gpt.main(["--multirun", *SMALL, "optimizer.lr=1e-3,fast,-1", "seed=1,2"]) == 2
    told = capfd.readouterr().err
    assert all(part in told for part in ("refused, 2 problems", "lr='fast'", "lr=-1.0")), told


def test_recipes_of_one_s_own_are_points(place: Path, sweep: Sweep) -> None:
    for name, seed in (("a", 5), ("b", 6)):
        (place / "mine" / "experiment").mkdir(parents=True, exist_ok=True)
        (place / "mine" / "experiment" / f"{name}.yaml").write_text(f"# @package _global_\nseed: {seed}\n")
    said = sweep("--config-dir=mine", "+experiment=a,b", "run_dir='runs/\x1b[31m${seed}'")
    assert "\x1b" not in said
    assert [Path(str(record["run_dir"])).name[-1] for record in records(place)] == ["5", "6"]
    assert [record["status"] for record in records(place)] == ["trained"] * 2


def test_ranks_do_not_sweep(place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    assert pretrain_gpt.main(["--multirun", *SMALL, "seed=1,2"]) == 2
    assert "sweep.nproc_per_node=N" in capfd.readouterr().err


def test_ctrl_c_saves_the_point_that_trains_and_starts_no_other(place: Path) -> None:
    process = start("sweep.nproc_per_node=2", "seed=1,2", "train.steps=1000000", "train.eval_interval=0")
    deadline = time.monotonic() + 120
    while not any(path.stat().st_size for path in place.glob("runs/*/metrics.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert process.returncode == 0, said
    assert "layout           2 ranks" in said
    assert [record["status"] for record in records(place)] == ["stopped", "stopped"]
    (run,) = place.glob("runs/*")
    assert list(run.glob("checkpoints/step-*"))
    assert said.splitlines()[-1] == "stopped; the same command continues"


@pytest.mark.long
def test_points_at_the_same_time_write_a_log_each(place: Path) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    start("seed=1,2", "hydra/launcher=joblib", "hydra.launcher.n_jobs=2").communicate(timeout=300)
    assert [record["status"] for record in records(place)] == ["trained"] * 2
    logs = [(place / "sweep" / f"seed={seed}" / "output.log").read_text() for seed in "12"]
    assert all("finished: 2 of 2 steps" in log for log in logs)


def test_a_sweeper_that_chooses_gets_the_final_validation_loss(place: Path, sweep: Sweep) -> None:
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    choose = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=2", "hydra.sweeper.n_jobs=1"]
    sweep(*choose, "optimizer.lr=tag(log,interval(1e-4,1e-2))")
    best = yaml.safe_load((place / "sweep" / "optimization_results.yaml").read_text())
    found = records(place)
    assert len(found) == 2
    assert best["best_value"] == min(float(str(record["val_loss"])) for record in found)


def test_the_points_are_those_of_hydra_s_basic_sweeper() -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = ["a=1,2", "+b=[1,2],[3]", "c=range(0,3)", "d='x, y'", "model=tiny,gpt2", "f=true,null"]
    expected = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), None)
    assert list(points_of(words)) == [point for batch in expected for point in batch]
