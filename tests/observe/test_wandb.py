"""Runs at wandb, with the real package: they hold in the end what metrics.jsonl holds, whatever the network does.

One run has three starts, each a process: without a key, with a server that does not answer, and with one that does.
Then the commands that the first two told their user send the rest. The server is one of this test.
"""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE
from typing import Any, NamedTuple

import pytest

from megalite.config.schema import Config, LogConfig
from megalite.config.settings import as_plain, with_values
from megalite.observe.trackers import flat_values, open_trackers
from tests.config.refusal import refusal
from tests.observe.wandb_server import WandbServer
from tests.train.runs import ROOT

KEY = "local-0123456789abcdef0123456789abcdef0123cafe"
HALVED = {"train.micro_batch_size": 2}


SIZES: dict[str, Any] = {
    "update_rms": {"block_3": 0.001},
    "group_update_rms": {"*.router.*": 0.002},
    "max_attention_logit": 9.0,
    "layer_attention_logit": {"0": 9.0},
    "source_loss": {"web/part.1": 3.0},
}


def lines_of(start: int) -> list[dict[str, Any]]:
    """Three steps, the second of them with two samples and a validation loss."""
    first, second, third = range(3 * start + 1, 3 * start + 4)
    return [
        {"step": first, "loss": 1.0, "mfu": None, "time_split": {"data": 0.5}, **SIZES},
        {"step": second, "loss": 0.5},
        {"step": second, "val_loss": 0.75, "validation": {"web": {"loss": 0.8, "bits_per_byte": 0.2}}},
        {"step": second, "kind": "sample", "prompt": "a", "text": "b"},
        {"step": second, "kind": "sample", "prompt": "c", "text": "d"},
        {"step": second, "kind": "checkpoint", "bytes": 3},
        {"step": second, "kind": "settings_changed", "settings": HALVED},
        {"step": third, "loss": 0.25},
    ]


RUN = """
import json, sys, time
from pathlib import Path
from megalite.config.schema import Config, LogConfig
from megalite.observe.trackers import open_trackers

trackers = open_trackers(Config(log=LogConfig(wandb="online")), Path(sys.argv[1]), 0, print)
begin = time.monotonic()
for line in json.loads(sys.stdin.readline()):
    trackers.add(line)
print("recorded in", time.monotonic() - begin)
sys.stdin.readline()
trackers.add({"kind": "finished", "step": 9, "status": 0})
print("finished in", time.monotonic() - begin)
"""


def alone(home: Path, **variables: str) -> dict[str, str]:
    """An environment without the settings, keys and caches of whoever runs this test."""
    empty = {name: "" for name in (*os.environ, "WANDB_MODE") if name.startswith("WANDB_")}
    return {**empty, "NETRC": str(home / "netrc"), "HOME": str(home), **variables}


def started(folder: Path, home: Path, lines: list[dict[str, Any]], **variables: str) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    environment = {**os.environ, **alone(home, **variables)}
    command = [sys.executable, "-u", "-c", RUN, str(folder)]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True)
    assert process.stdin is not None
    print(json.dumps(lines), file=process.stdin, flush=True)
    return process


def ended(process: subprocess.Popen[str]) -> str:
    """What it told its user."""
    said, errors = process.communicate("\n", timeout=90)
    assert (process.returncode, errors) == (0, "")
    return said


def sync_command(said: str) -> list[str]:
    """As the user was told."""
    found = re.search(r"wandb: .*: wandb (sync .+)", said)
    assert found, said
    return shlex.split(found[1])


def send(command: list[str], server: WandbServer, folder: Path, home: Path) -> None:
    variables = {**os.environ, **alone(home, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)}
    variables = {name: value for name, value in variables.items() if value or not name.startswith("WANDB_")}
    words = [sys.executable, "-m", "wandb", *command]  # which writes into its folder
    done = subprocess.run(words, env=variables, cwd=folder, stderr=PIPE, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


class Shown(NamedTuple):
    folder: Path
    home: Path
    said: list[str]  # by each start
    server: WandbServer
    identity: str
    lines: list[dict[str, Any]]


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    top = tmp_path_factory.mktemp("shown")
    folder, home = top / "run", top / "home"
    home.mkdir()
    said = [ended(started(folder, home, lines_of(0)))]
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        process = started(folder, home, lines_of(1), WANDB_API_KEY=KEY, WANDB_BASE_URL=address, WANDB_INIT_TIMEOUT="1")
        said.append(ended(process))
    with WandbServer() as server:
        for command in (sync_command(said[0]), sync_command(said[1])):
            send(command, server, folder, home)
        said.append(ended(started(folder, home, lines_of(2), WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)))
        identity = str(json.loads((folder / "wandb.json").read_text())["id"])
        yield Shown(folder, home, said, server, identity, server.history[identity])


def test_each_start_tells_where_it_is_shown_and_asks_nothing(shown: Shown) -> None:
    """A server that does not answer costs its timeout once."""
    assert "wandb: no key is set up (wandb login)\nwandb: offline; to send it later: wandb sync " in shown.said[0]
    recorded, finished = map(float, re.findall(r"(?:recorded|finished) in (\S+)", shown.said[1]))
    assert recorded < 0.1
    assert finished < 15
    assert shown.said[1].count("cannot be sent now") == 1
    starts = sorted(str(path) for path in (shown.folder / "wandb").glob("offline-run-*"))
    assert [sync_command(said) for said in shown.said[:2]] == [["sync", start] for start in starts]
    assert f"wandb: {shown.server.address}/me/megalite/runs/{shown.identity}\n" in shown.said[2]


def test_all_starts_are_one_run_with_the_steps_of_training(shown: Shown) -> None:
    assert list(shown.server.history) == [shown.identity]
    assert shown.server.exit_codes[shown.identity] == [0, 0, 0]
    assert [line["_step"] for line in shown.lines] == [*range(1, 10)]
    sent = [{name: it for name, it in line.items() if name[0] != "_" and name != "samples"} for line in shown.lines]
    expected = dict[int, dict[str, Any]]()
    for line in (line for start in range(3) for line in lines_of(start)):
        expected.setdefault(line["step"], {}).update(flat_values(line))
    assert sent == [*expected.values()]
    names = ["update_rms/block_3", "group_update_rms/*/router/*", "max_attention_logit", "layer_attention_logit/0"]
    assert [sent[1][name] for name in ("val_loss", "val_loss/web", "val_bits_per_byte/web")] == [0.75, 0.8, 0.2]
    assert [sent[0][name] for name in (*names, "source_loss/web/part/1")] == [0.001, 0.002, 9.0, 9.0, 3.0]


def test_samples_are_a_table_and_settings_are_known(shown: Shown) -> None:
    lines = [line for line in shown.lines if "samples" in line]
    assert [line["_step"] for line in lines] == [2, 5, 8]
    file, *_ = (shown.folder / "wandb").glob(f"*run-*/files/{lines[0]['samples']['path']}")
    table = json.loads(file.read_text())
    assert (table["columns"], table["data"]) == (["step", "prompt", "text"], [[2, "a", "b"], [2, "c", "d"]])
    held = {name: entry["value"] for name, entry in shown.server.config.items() if name != "_wandb"}
    assert held == as_plain(with_values(Config(log=LogConfig(wandb="online")), HALVED))


def test_wandb_writes_into_the_run_folder_only_and_no_file_holds_the_key(shown: Shown) -> None:
    files = [path for path in shown.folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if KEY.removeprefix("local-").encode() in path.read_bytes()]
    assert list(shown.home.iterdir()) == []


@pytest.mark.long
def test_what_was_not_sent_at_the_end_is_sent_by_the_shown_command(tmp_path: Path) -> None:
    with WandbServer() as server:
        variables = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": server.address, "WANDB_FINISH_TIMEOUT": "1"}
        with started(tmp_path / "run", tmp_path, lines_of(0)[:3], **variables) as process:
            assert process.stdout is not None
            assert any("/runs/" in line for line in iter(process.stdout.readline, ""))  # it is open
            server.away = True
            said = ended(process)
        assert "wandb: not everything is sent" in said
        server.away = False
        send(sync_command(said), server, tmp_path / "run", tmp_path)
        (lines,) = server.history.values()
    assert [line["_step"] for line in lines][-2:] == [1, 2]


WITH_KEY = {"WANDB_API_KEY": KEY}
MODES = [
    (None, {}, False, "a key (wandb login) and the package (pip install wandb)"),
    (None, WITH_KEY, True, None),
    (None, {**WITH_KEY, "WANDB_MODE": "disabled"}, False, None),
    (None, {"WANDB_MODE": "offline"}, True, None),
    ("online", {"WANDB_MODE": "disabled"}, True, None),
    ("offline", {}, True, None),
]


@pytest.mark.parametrize("case", MODES)
def test_the_setting_wins_then_the_variable_then_a_key(
    case: tuple[str | None, dict[str, str], bool, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, variables, is_shown, words = case
    for name, value in alone(tmp_path, **variables).items():
        monkeypatch.setenv(name, value)
    notes = list[str]()
    trackers = open_trackers(Config(log=LogConfig(wandb=setting)), tmp_path, 0, notes.append)
    assert ("wandb" in trackers._openers) == is_shown
    assert notes == [] if words is None else words in notes[0]


def test_what_wandb_would_not_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    said = str(refusal("log.wandb_project=a/b"))
    assert all(word in said for word in ("log.wandb_project", "none of / ")), said
    assert "online" in str(refusal("log.wandb=onlin"))
    monkeypatch.setattr("megalite.config.machine_rules.is_installed", lambda package: False)
    said = str(refusal("log.wandb=offline", "log.tensorboard=true", "log.trackio=true"))
    assert all(f"pip install {package}" in said for package in ("wandb", "tensorboard", "trackio"))
    monkeypatch.setenv("WANDB_MODE", "onlin")
    said = str(refusal())
    assert "WANDB_MODE='onlin'" in said
    assert "offline" in said
