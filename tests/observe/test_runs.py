"""A run at wandb and in TensorBoard, with the real packages: they hold in the end what metrics.jsonl holds.

The run is started offline, and continued with a key and a server that nobody can reach. Then the commands that it told
its user send it to a server of this test.
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megalite.observe.flat import flat_values
from megalite.train.history import read_metrics
from tests.observe.wandb_server import WandbServer
from tests.train.runs import finish, launch, overrides, write_text

KEY = "local-0123456789abcdef0123456789abcdef0123cafe"
SHAPE = ["train.steps=4", "train.eval_interval=4", "train.sample_interval=2", "train.sample_tokens=4"]
NOBODY = {"WANDB_API_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2"}


def alone(home: Path, **variables: str) -> dict[str, str]:
    """An environment without the settings, keys and caches of whoever runs this test."""
    empty = {name: "" for name in (*os.environ, "WANDB_MODE") if name.startswith("WANDB_")}
    return {**empty, "NETRC": str(home / "netrc"), "HOME": str(home), **variables}


def send_as_told(said: str, server: WandbServer, home: Path) -> None:
    """Run the command that the user was told."""
    found = re.search(r"wandb: .*: wandb (sync .+)", said)
    assert found, said
    variables = {**os.environ, **alone(home, WANDB_API_KEY=KEY, WANDB_BASE_URL=server.address)}
    variables = {name: value for name, value in variables.items() if value or not name.startswith("WANDB_")}
    command = [sys.executable, "-m", "wandb", *shlex.split(found[1])]
    sent = subprocess.run(command, env=variables, cwd=home, capture_output=True, text=True, timeout=60, check=False)
    assert sent.returncode == 0, sent.stderr


@dataclass(frozen=True)
class Shown:
    folder: Path
    home: Path
    said: list[str]  # by each start
    server: WandbServer

    @property
    def identity(self) -> str:
        return str(json.loads((self.folder / "wandb.json").read_text())["id"])


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    top = tmp_path_factory.mktemp("shown")
    write_text(top / "text.txt")
    (top / "home").mkdir()
    said = []
    for extra, variables in ((["log.wandb=offline"], {}), (["log.wandb=online", "train.steps=6"], NOBODY)):
        arguments = overrides(top, "run", *SHAPE, "checkpoint.interval=2", "log.tensorboard=true", *extra)
        status, output = finish(launch(arguments, variables=alone(top / "home", **variables)))
        assert status == 0, output
        said.append(output)
    with WandbServer() as server:
        for output in said:
            send_as_told(output, server, top / "home")
        yield Shown(top / "run", top / "home", said, server)


def test_the_told_commands_send_what_metrics_jsonl_holds(shown: Shown) -> None:
    lines = shown.server.history[shown.identity]
    sent = [{name: it for name, it in line.items() if name[0] != "_"} for line in lines if "samples" not in line]
    assert sent == [flat_values(record) for record in read_metrics(shown.folder / "metrics.jsonl")]


def test_all_starts_are_one_run_at_wandb(shown: Shown) -> None:
    assert list(shown.server.history) == [shown.identity]
    assert shown.server.exit_codes[shown.identity] == [0, 0]


def test_samples_are_a_table(shown: Shown) -> None:
    lines = [line for line in shown.server.history[shown.identity] if "samples" in line]
    assert [line["step"] for line in lines] == [2, 4, 6]
    (file,) = (shown.folder / "wandb").glob(f"offline-run-*/files/{lines[0]['samples']['path']}")
    table = json.loads(file.read_text())
    assert table["columns"] == ["step", "prompt", "text"]
    events = [json.loads(line) for line in (shown.folder / "events.jsonl").read_text().splitlines()]
    samples = [line for line in events if line["kind"] == "sample" and line["step"] == 2]
    assert table["data"] == [[2, line["prompt"], line["text"]] for line in samples]


def test_wandb_knows_the_settings(shown: Shown) -> None:
    held = {name: entry["value"] for name, entry in shown.server.config.items() if name != "_wandb"}
    kept = yaml.safe_load((shown.folder / "config.yaml").read_text())
    assert held == {name: value for name, value in kept.items() if name in held}
    assert {"model", "optimizer", "train", "seed"} <= set(held)


def test_a_server_that_nobody_can_reach_is_told_once(shown: Shown) -> None:
    (line,) = [line for line in shown.said[1].splitlines() if "cannot be sent now" in line]
    assert "connection refused" in line or "CommError" in line or "timeout" in line
    assert "6 of 6 steps" in shown.said[1]


def test_no_file_holds_the_key(shown: Shown) -> None:
    files = [path for folder in (shown.folder, shown.home) for path in folder.rglob("*") if path.is_file()]
    assert any(path.suffix == ".wandb" for path in files)
    assert not [path for path in files if KEY.removeprefix("local-").encode() in path.read_bytes()]


def test_tensorboard_holds_every_number_of_metrics_jsonl(shown: Shown) -> None:
    board = EventAccumulator(str(shown.folder / "tensorboard"), size_guidance={"scalars": 0, "tensors": 0})
    board.Reload()
    expected: dict[str, list[tuple[int, float]]] = {}
    for record in read_metrics(shown.folder / "metrics.jsonl"):
        step = record.pop("step")
        for name, value in flat_values(record).items():
            expected.setdefault(name, []).append((step, value))
    assert set(board.Tags()["scalars"]) == set(expected)
    for name, points in expected.items():
        held = board.Scalars(name)
        assert [event.step for event in held] == [step for step, _ in points]
        assert all(
            math.isclose(event.value, value, rel_tol=1e-6) for event, (_, value) in zip(held, points, strict=True)
        )
    texts = [name for name in board.Tags()["tensors"] if name.startswith("samples/")]
    assert texts
    assert [event.step for event in board.Tensors(texts[0])] == [2, 4, 6]
