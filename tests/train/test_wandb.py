"""A run at wandb, with the real wandb: what it is told, what it costs the run, and what happens when it fails.

wandb writes to disk (its offline mode), or talks to a server of this test that takes what it sends, or never answers.
"""

import ast
import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from megalite.config.schema import Config, LogConfig
from megalite.config.settings import as_plain
from megalite.parallel.environment import read_environment
from megalite.train import wandb_mirror
from megalite.train.metrics import read_metrics
from megalite.train.run import run as run_here
from megalite.train.wandb_key import key_is_set_up
from megalite.train.wandb_mirror import WandbMirror, chosen_mode, open_mirror
from megalite.train.wandb_rows import flattened
from megalite.train.wandb_sender import AlreadySendingError, sending
from tests.config.refusal import refusal
from tests.train.runs import ROOT, write_text
from tests.train.test_run import config_for
from tests.train.wandb_records import exit_code, history
from tests.train.wandb_server import WandbServer

KEY = "local-0123456789abcdef0123456789abcdef0123cafe"
PATIENCE_S = 90.0  # for wandb's process to come to its end on a busy machine
LINES = [
    {"step": 1, "loss": 5.0 / 3.0, "tokens": 64, "mfu": None, "time_split": {"data": 0.25, "forward": 1e-7}},
    {"step": 2, "loss": math.nan, "tokens": 128},
    {"step": 2, "val_loss": 4.25},
    {"step": 3, "loss": 1.1, "tokens": 192},
]
LOGGED: dict[int, dict[str, Any]] = {
    1: {"loss": 5.0 / 3.0, "tokens": 64, "time_split/data": 0.25, "time_split/forward": 1e-7},
    2: {"loss": "not a number", "tokens": 128, "val_loss": 4.25},
    3: {"loss": 1.1, "tokens": 192},
}


def make_run(folder: Path, lines: list[dict[str, Any]]) -> Path:
    """A run folder as the trainer leaves it."""
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(as_plain(Config())))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def home_alone(patch: pytest.MonkeyPatch, home: Path, **variables: str) -> None:
    """No settings, keys or caches of whoever runs this test."""
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            patch.delenv(name)
    home.mkdir(exist_ok=True)
    for name, value in {"HOME": str(home), **variables}.items():
        patch.setenv(name, value)


def mirrored(folder: Path, mode: str, status: int = 0) -> list[str]:
    """Run the mirror over what is in the folder, to its end; what it told."""
    told: list[str] = []
    mirror = WandbMirror(folder, mode, told.append)
    mirror.record({})
    process = mirror._process
    assert process is not None
    mirror.finish(status)
    process.wait(PATIENCE_S)
    return told


def offline_runs(folder: Path) -> list[Path]:
    """wandb's folders, oldest first."""
    return sorted((folder / "wandb").glob("offline-run-*"), key=lambda path: path.stat().st_mtime_ns)


def figures(logged: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Without what stands for a table of samples."""
    return {step: {n: v for n, v in row.items() if not n.startswith("samples/")} for step, row in logged.items()}


@pytest.fixture(scope="module")
def server() -> Iterator[WandbServer]:
    with WandbServer() as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, server: WandbServer) -> Iterator[Path]:
    """Trained to step 3 without a network, continued to step 4 with one, and after step 5 sent by a replay; all with a
    key in the environment."""
    top = tmp_path_factory.mktemp("wandb")
    with pytest.MonkeyPatch.context() as patch:
        home_alone(patch, top / "home", WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)
        patch.setattr(wandb_mirror, "FINISH_S", PATIENCE_S)
        folder = make_run(top / "run", LINES)
        (top / "told").write_text("\n".join(mirrored(folder, "offline", status=3)))
        samples = [{"kind": "sample", "step": 2, "prompt": prompt, "text": "<b>x</b>"} for prompt in ("a", "b")]
        (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in samples))
        for number, send in ((4, lambda: mirrored(folder, "online")), (5, lambda: [replayed(folder).stdout])):
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps({"step": number, "loss": 1.0 / number}) + "\n")
            with (top / "told").open("a") as file:
                file.write("\n".join(send()) + "\n")
        yield folder


def replayed(*folders: Path) -> "subprocess.CompletedProcess[str]":
    """scripts/wandb_replay.py as a user starts it."""
    command = [sys.executable, str(ROOT / "scripts" / "wandb_replay.py"), *map(str, folders)]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_wandb_holds_the_numbers_of_metrics_jsonl(run: Path) -> None:
    (offline,) = offline_runs(run)
    assert history(offline) == LOGGED
    assert exit_code(offline) == 3


def test_the_next_start_sends_what_was_missing_and_nobody_sends_a_step_twice(run: Path, server: WandbServer) -> None:
    identity = json.loads((run / "wandb.json").read_text())["id"]
    assert offline_runs(run)[0].name.endswith(f"-{identity}")
    assert list(server.history) == [identity]
    lines = server.history[identity]
    assert [line["_step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines[:3]:
        sent = {name: value for name, value in line.items() if not name.startswith("_") and name != "samples"}
        assert sent == LOGGED[line["_step"]]
    (table,) = (run / "wandb").glob(f"run-*/files/{lines[1]['samples']['path']}")
    assert json.loads(table.read_text())["data"] == [[2, "a", "<b>x</b>"], [2, "b", "<b>x</b>"]]
    assert server.exit_codes[identity] == [0, 0]


def test_wandb_knows_the_settings(run: Path, server: WandbServer) -> None:
    assert {name: entry["value"] for name, entry in server.config.items() if name != "_wandb"} == as_plain(Config())


def test_the_user_is_told_where_the_run_is(run: Path, server: WandbServer) -> None:
    address = f"{server.address}/me/megalite/runs/{json.loads((run / 'wandb.json').read_text())['id']}"
    said = (run.parent / "told").read_text().split("\n")
    assert [line for line in said if line] == [
        f"wandb: {address}",
        f"{run}: 1 steps sent, 4 were there already: {address}",
    ]


def test_no_file_holds_the_key(run: Path) -> None:
    files = [path for path in run.parent.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if KEY.removeprefix("local-").encode() in path.read_bytes()]


def test_wandb_writes_nowhere_but_into_the_run_folder(run: Path) -> None:
    assert [path for path in (run.parent / "home").rglob("*") if path.is_file()] == []


def test_a_server_that_does_not_answer_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_mirror, "FINISH_S", 0.5)
    told: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        home_alone(monkeypatch, tmp_path / "home", WANDB_API_KEY=KEY, WANDB_BASE_URL=address)
        folder = make_run(tmp_path / "run", LINES)
        mirror = WandbMirror(folder, "online", told.append)
        mirror.record({})
        process = mirror._process
        assert process is not None
        try:
            server.settimeout(PATIENCE_S)
            connection, _ = server.accept()  # from now on wandb waits
            longest = 0.0
            for _ in range(2000):
                begun = time.perf_counter()
                mirror.record({})
                longest = max(longest, time.perf_counter() - begun)
            begun = time.perf_counter()
            mirror.finish(0)
            assert time.perf_counter() - begun < 0.5 + 1.0
            assert process.poll() is None, "it waits for the server, on its own"
            assert longest < 0.1
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        connection.close()
    assert "not everything is sent yet" in told[0]
    assert f"wandb_replay.py {folder}" in told[1]


def test_a_run_that_cannot_be_opened_at_wandb_is_written_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nobody = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "1"}
    home_alone(monkeypatch, tmp_path / "home", WANDB_API_KEY=KEY, **nobody)
    monkeypatch.setattr(wandb_mirror, "FINISH_S", PATIENCE_S)
    folder = make_run(tmp_path / "run", LINES)
    told = mirrored(folder, "online")
    assert "cannot be reached (CommError" in told[0]
    assert f"wandb_replay.py {folder}" in told[1]
    assert len(told) == 2
    (offline,) = offline_runs(folder)
    assert history(offline) == LOGGED


def test_a_process_that_fails_is_told_of_once_and_raises_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home_alone(monkeypatch, tmp_path / "home")
    folder = make_run(tmp_path / "run", LINES)
    (folder / "config.yaml").unlink()
    told: list[str] = []
    mirror = WandbMirror(folder, "offline", told.append)
    deadline = time.monotonic() + PATIENCE_S
    while not told and time.monotonic() < deadline:
        mirror.record({})
    mirror.sample(1, "a", "b")
    mirror.finish(0)
    assert "ended with status 1" in told[0]
    assert len(told) == 2
    assert "config.yaml" in (folder / "logs" / "wandb.log").read_text()


def test_a_disk_without_room_for_the_log_costs_the_mirror_only(tmp_path: Path) -> None:
    told: list[str] = []
    mirror = WandbMirror(tmp_path / "there" / "is no such folder", "offline", told.append)
    mirror.record({})
    mirror.record({})
    mirror.finish(0)
    (line,) = told
    assert "not started" in line


def test_one_process_at_a_time_sends_a_run(tmp_path: Path) -> None:
    with sending(tmp_path, patience_s=0) as first, pytest.raises(AlreadySendingError), sending(tmp_path, patience_s=0):
        pass
    with sending(tmp_path, patience_s=0) as second:
        assert first == second


def test_wandb_is_imported_in_one_place_only_and_its_process_needs_no_torch() -> None:
    modules = "megalite.train.wandb_mirror, megalite.train.wandb_process, megalite.train.wandb_replay"
    code = f"import sys, {modules}; sys.exit(bool({{'torch', 'wandb'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
    importing = set()
    for path in (ROOT / "megalite").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            importing |= {path.name for name in names if name.split(".")[0] == "wandb"}
    assert importing == {"wandb_sender.py"}


WITH_KEY = {"WANDB_API_KEY": KEY}
MODES = [
    (None, {}, "disabled", "no key"),
    (None, WITH_KEY, "online", None),
    (None, {"WANDB_IDENTITY_TOKEN_FILE": "token"}, "online", None),
    (None, {**WITH_KEY, "WANDB_MODE": "disabled"}, "disabled", None),
    (None, {**WITH_KEY, "WANDB_MODE": "offline"}, "offline", "to send it later"),
    (None, {**WITH_KEY, "WANDB_MODE": "dryrun"}, "offline", "to send it later"),
    (None, {"WANDB_MODE": "online"}, "offline", "no key"),
    ("disabled", WITH_KEY, "disabled", None),
    ("online", {**WITH_KEY, "WANDB_MODE": "disabled"}, "online", None),
    ("online", {}, "offline", "no key"),
    ("offline", {}, "offline", "to send it later"),
]


@pytest.mark.parametrize(("setting", "variables", "mode", "words"), MODES)
def test_the_setting_wins_then_the_variable_then_a_key(
    setting: str | None, variables: dict[str, str], mode: str, words: str | None, tmp_path: Path
) -> None:
    chosen, note = chosen_mode(setting, variables, tmp_path)
    assert chosen == mode
    assert note is None if words is None else note is not None and words in note


@pytest.mark.parametrize(
    ("file", "text", "variables", "found"),
    [
        (".netrc", "machine api.forge.coreweave.com login user password x", {}, True),
        (".netrc", "machine api.wandb.ai login user password x", {}, True),
        (".netrc", "machine github.com login user password x", {}, False),
        (".netrc", "machine api.wandb.ai login user password x", {"WANDB_BASE_URL": "http://here:8080"}, False),
        (".netrc", "machine here:8080 login user password x", {"WANDB_BASE_URL": "http://here:8080"}, True),
        (".netrc", "machine", {}, False),
        (".config/wandb/settings", "[default]\napi_key = x\n", {}, True),
        (".config/wandb/settings", "[default]\nbase_url = http://here\n", {}, False),
        (".config/wandb/settings", "no settings", {}, False),
    ],
)
def test_a_key_is_found_where_wandb_login_leaves_it(
    file: str, text: str, variables: dict[str, str], found: bool, tmp_path: Path
) -> None:
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert chosen_mode(None, variables, tmp_path)[0] == ("online" if found else "disabled")


def test_who_has_no_key_is_told_once_and_nothing_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home_alone(monkeypatch, tmp_path)
    told: list[str] = []
    assert open_mirror(Config(), tmp_path, told.append) is None
    (line,) = told
    assert line.startswith("wandb: disabled")
    assert open_mirror(Config(log=LogConfig(wandb="disabled")), tmp_path, told.append) is None
    assert len(told) == 1


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


def test_asking_for_wandb_without_the_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.config.wandb_rules.wandb_is_installed", lambda: False)
    assert "pip install wandb" in str(refusal("log.wandb=offline"))
    monkeypatch.setattr(wandb_mirror, "wandb_is_installed", lambda: False)
    assert chosen_mode(None, WITH_KEY, Path("/nowhere"))[0] == "disabled"


TRAINER = """
import itertools, json, sys, time
from pathlib import Path
from megalite.train.wandb_mirror import WandbMirror

folder = Path(sys.argv[1])
mirror = WandbMirror(folder, "offline", print)
with (folder / "metrics.jsonl").open("a", buffering=1) as file:
    for step in itertools.count(1):
        file.write(json.dumps({"step": step, "loss": 1.0 / step}) + "\\n")
        mirror.record({})
        time.sleep(0.01)
"""


def test_killing_a_run_leaves_its_files_and_wandb_s_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home_alone(monkeypatch, tmp_path / "home")
    folder = make_run(tmp_path / "run", [])
    trainer = subprocess.Popen([sys.executable, "-c", TRAINER, str(folder)], cwd=ROOT)
    deadline = time.monotonic() + PATIENCE_S
    while not offline_runs(folder) and time.monotonic() < deadline:
        time.sleep(0.05)
    trainer.kill()
    trainer.wait()
    with sending(folder, patience_s=math.inf):  # wandb's process has ended
        losses = {record["step"]: record["loss"] for record in read_metrics(folder / "metrics.jsonl")}
    newest = max(losses)
    assert losses == {step: 1.0 / step for step in range(1, newest + 1)}
    (offline,) = offline_runs(folder)
    del losses[newest]  # it may lack its evaluation: the next start sends it
    assert exit_code(offline) == 1
    assert {step: row["loss"] for step, row in history(offline).items()} == losses


def test_a_training_run_is_mirrored_to_its_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home_alone(monkeypatch, tmp_path / "home")
    monkeypatch.setattr(wandb_mirror, "FINISH_S", PATIENCE_S)
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", steps=4)
    assert run_here(replace(config, log=LogConfig(wandb="offline")), read_environment({})) == 0
    steps: dict[int, dict[str, Any]] = {}
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        steps.setdefault(record.pop("step"), {}).update(flattened(record))
    (offline,) = offline_runs(tmp_path / "run")
    assert exit_code(offline) == 0
    assert figures(history(offline)) == steps
    assert "val_loss" in steps[4]


def test_a_run_that_failed_waits_for_no_server(tmp_path: Path) -> None:
    """The other ranks wait for this one's words, a few seconds only."""
    mirror = WandbMirror(tmp_path, "online", lambda line: None)
    mirror._process = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert mirror._process.stdout is not None
    os.set_blocking(mirror._process.stdout.fileno(), False)
    process, begin = mirror._process, time.monotonic()
    try:
        mirror.finish(1)
    finally:
        process.kill()
    assert time.monotonic() - begin < 1


@pytest.mark.parametrize("mode", ["disabled", "offline", None])
def test_a_home_that_nobody_may_read_ends_no_run(mode: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert chosen_mode(mode, {})[0] == (mode or "disabled")


def test_a_netrc_that_nobody_may_read_holds_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **options: Any) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "exists", refused)
    assert not key_is_set_up({}, tmp_path)
