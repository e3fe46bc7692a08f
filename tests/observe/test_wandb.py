"""Which runs are shown at wandb, what the user is told, and the cost of a server that does not answer."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from subprocess import PIPE

import pytest

from megalite.config.schema import Config, LogConfig
from megalite.observe import wandb as observed
from megalite.observe.wandb import wandb_tracker
from tests.config.refusal import refusal
from tests.observe.test_runs import KEY, alone, send_as_told
from tests.observe.wandb_server import WandbServer
from tests.train.runs import ROOT

RUN = """
import sys, time
from pathlib import Path
from megalite.config.schema import Config, LogConfig
from megalite.observe.background import finish_trackers
from megalite.observe.wandb import wandb_tracker

tracker = wandb_tracker(Config(log=LogConfig(wandb=sys.argv[2])), Path(sys.argv[1]), print)
begin = time.monotonic()
for step in (1, 2, 3):
    tracker.record({"step": step, "loss": 1 / step, "mfu": None, "time_split": {"data": 0.5}})
print("recorded in", time.monotonic() - begin)
tracker.sample(3, "a", "b")
tracker.record({"step": 4, "loss": 1 / 4})
sys.stdin.readline()
finish_trackers([tracker], 0)
print("finished in", time.monotonic() - begin)
"""


def shown(folder: Path, setting: str, variables: Mapping[str, str]) -> list[str]:
    """What a run of three steps told its user."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", RUN, str(folder), setting]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, **variables},
        input="",
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def seconds(said: list[str], what: str) -> float:
    return next(float(line.split()[-1]) for line in said if line.startswith(what))


def test_an_online_run_is_sent_and_continued(tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = alone(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)
        starts = [shown(tmp_path / "run", "online", variables) for _ in range(2)]
        identity = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
        for said in starts:
            assert f"wandb: {server.address}/me/megalite/runs/{identity}" in said
        assert [line["step"] for line in server.history[identity]] == [1, 2, 3, 3, 4] * 2
        assert server.history[identity][0]["loss"] == 1
        assert server.exit_codes[identity] == [0, 0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"], "wandb writes into the run folder only"


def test_what_was_not_sent_at_the_end_is_sent_by_the_told_command(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with WandbServer() as server:
        variables = alone(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address, WANDB_FINISH_TIMEOUT="1")
        command = [sys.executable, "-c", RUN, str(tmp_path / "run"), "online"]
        environment = {**os.environ, **variables}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE, text=True) as process:
            server.wait_for_lines(5)
            server.away = True
            said, _ = process.communicate("\n", timeout=60)
        assert "wandb: not everything is sent" in said
        server.away = False
        send_as_told(said, server, tmp_path)
        (lines,) = server.history.values()
    assert [line["step"] for line in lines][-5:] == [1, 2, 3, 3, 4]


def test_a_server_that_does_not_answer_costs_its_timeout_once(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        variables = alone(tmp_path, WANDB_API_KEY=KEY, WANDB_BASE_URL=address, WANDB_INIT_TIMEOUT="2")
        said = shown(tmp_path / "run", "online", variables)
    assert seconds(said, "recorded") < 0.1
    assert seconds(said, "finished") < 15
    assert any("cannot be sent now" in line for line in said)
    assert any(f"wandb sync {tmp_path / 'run' / 'wandb' / 'offline-run-'}" in line for line in said)


@pytest.mark.parametrize("mode", ["", "disabled"])
def test_online_without_a_key_is_written_to_disk_and_asks_nothing(mode: str, tmp_path: Path) -> None:
    said = shown(tmp_path / "run", "online", alone(tmp_path, WANDB_MODE=mode))
    assert said[1] == "wandb: no key is set up (wandb login)"
    assert said[2].startswith("wandb: offline; to send it later: wandb sync ")


WITH_KEY = {"WANDB_API_KEY": KEY}
MODES = [
    (None, {}, False, "no key"),
    (None, WITH_KEY, True, None),
    (None, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, True, None),
    (None, {**WITH_KEY, "WANDB_MODE": "disabled"}, False, None),
    (None, {"WANDB_MODE": "offline"}, True, None),
    (None, {"WANDB_MODE": "online"}, True, None),
    ("disabled", WITH_KEY, False, None),
    ("online", {"WANDB_MODE": "disabled"}, True, None),
    ("offline", {}, True, None),
]


@pytest.mark.parametrize(("setting", "variables", "is_shown", "words"), MODES)
def test_the_setting_wins_then_the_variable_then_a_key(
    setting: str | None,
    variables: dict[str, str],
    is_shown: bool,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in alone(tmp_path, **variables).items():
        monkeypatch.setenv(name, value)
    told = list[str]()
    tracker = wandb_tracker(Config(log=LogConfig(wandb=setting)), tmp_path, told.append)
    assert (tracker is not None) == is_shown
    assert told == [] if words is None else words in told[0]


def test_a_key_without_the_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in alone(tmp_path, **WITH_KEY).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(observed, "is_installed", lambda package: False)
    told = list[str]()
    assert wandb_tracker(Config(), tmp_path, told.append) is None
    assert "pip install wandb" in told[0]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("log.wandb_project=a/b", ["log.wandb_project", "none of / "]),
        ("log.wandb_project=''", ["log.wandb_project", "megalite"]),
        ("log.wandb_name=' '", ["log.wandb_name", "is empty"]),
        ("log.wandb=onlin", ["log.wandb", "online"]),
    ],
)
def test_names_that_wandb_does_not_take_are_refused(override: str, words: list[str]) -> None:
    said = str(refusal(override))
    assert all(word in said for word in words), said


def test_a_mode_that_means_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "onlin")
    said = str(refusal())
    assert "WANDB_MODE='onlin'" in said
    assert "offline" in said


@pytest.mark.parametrize(
    ("override", "package"), [("log.wandb=offline", "wandb"), ("log.tensorboard=true", "tensorboard")]
)
def test_a_package_that_is_not_installed_is_refused(
    override: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megalite.config.log_rules.is_installed", lambda package: False)
    assert f"pip install {package}" in str(refusal(override))
