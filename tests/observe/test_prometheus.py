"""Prometheus reads a run's newest numbers while it trains, in the text that its rules ask for."""

import re
import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, build_opener

import pytest

from megalite.errors.problems import UserError
from megalite.observe.prometheus import Prometheus, Server
from megalite.observe.run_data import RunData
from megalite.train.history import read_events, read_metrics
from tests.train.runs import finish, launch, overrides, write_text

HELP, TYPE = re.compile(r"# HELP (\S+) (\S.*\.)"), re.compile(r"# TYPE (\S+) (gauge|counter)")
LINE = re.compile(r'([a-z_]+)(\{(?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)+\})? (NaN|[+-]Inf|-?[0-9.e+-]+)')
END: dict[str, Any] = {"step": 4, "kind": "finished", "status": 0}
URL = re.compile(r"prometheus: (http://127\.0\.0\.1:\d+/metrics)")


def read(url: str) -> str:
    with build_opener(ProxyHandler({})).open(url, timeout=10) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        return str(answer.read().decode())


def parsed(text: str) -> dict[str, float]:
    """Values by name and labels, by the rules of the text format: each name has a help line, a type, then its lines."""
    assert text.endswith("\n")
    found, lines = dict[str, float](), text.splitlines()
    name = ""
    for at, line in enumerate(lines):
        if head := HELP.fullmatch(line):
            name = head[1]
            kind = TYPE.fullmatch(lines[at + 1])
            assert kind is not None
            assert kind[1] == name
            assert (kind[2] == "counter") == name.endswith("_total")
        elif not TYPE.fullmatch(line):
            value = LINE.fullmatch(line)
            assert value is not None, line
            assert value[1] == name
            found[f"{name}{value[2] or ''}"] = float(value[3])
    names = [head[1] for line in lines if (head := HELP.fullmatch(line))]
    assert len({*names}) == len(names)
    return found


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[RunData, Prometheus, str]]:
    run, notes = RunData(tmp_path / 'a "b"\\c', {"train.steps": 9}), list[str]()
    server = Prometheus(run, "my\nrun", 0, notes.append)
    found = URL.fullmatch(notes[0])
    assert found is not None
    yield run, server, found[1]
    server.add(END)


def test_numbers_have_names_and_units_and_what_is_not_known_has_no_line(
    served: tuple[RunData, Prometheus, str], tmp_path: Path
) -> None:
    run, server, url = served
    info = f'megalite_run_info{{run_name="my\\nrun",run_dir="{tmp_path}/a \\"b\\"\\\\c"'
    before = parsed(read(url))
    assert [name for name in before if "run_info" not in name] == ["megalite_steps", "megalite_step_timestamp_seconds"]
    assert next(iter(before)).startswith(info)
    line = {"step": 3, "tokens": 96, "loss": float("nan"), "lr": 1e-3, "grad_norm": float("inf"), "tokens_per_s": 12.5}
    line |= {"step_time_s": 0.25, "data_wait_share": 0.5, "mfu": None, "memory_gib": 0.5, "bad_steps": 1}
    for record in (line, {"step": 3, "val_loss": 2.5}, {"step": 3, "kind": "spike"}, {"step": 3, "kind": "spike"}):
        run.add(record)
        server.add(record)
    for record in ({"time": 77.5, "step": 2, "kind": "checkpoint", "bytes": 1, "seconds": 1.0, "stall_s": 0.1},):
        run.add(record)
        server.add(record)
    values = {name.removeprefix("megalite_"): value for name, value in parsed(read(url)).items()}
    assert values.pop("loss") != values.get("loss")  # NaN
    assert abs(values.pop("step_timestamp_seconds") - time.time()) < 60
    assert {name: value for name, value in values.items() if "run_info" not in name} == {
        "step": 3,
        "steps": 9,
        "tokens": 96,
        "validation_loss": 2.5,
        "learning_rate": 1e-3,
        "gradient_norm": float("inf"),
        "tokens_per_second": 12.5,
        "step_seconds": 0.25,
        "data_wait_ratio": 0.5,
        "memory_bytes": 2**29,
        "bad_steps": 1,
        "checkpoint_step": 2,
        "checkpoint_timestamp_seconds": 77.5,
        'events_total{kind="checkpoint"}': 1,
        'events_total{kind="spike"}': 2,
    }


def test_a_silent_client_holds_nobody_up_and_the_end_frees_the_port(served: tuple[RunData, Prometheus, str]) -> None:
    _, server, url = served
    port = int(url.split(":")[2].split("/")[0])
    with closing(socket.create_connection(("127.0.0.1", port))):
        assert "megalite_steps 9" in read(url)
        with pytest.raises(HTTPError, match="404"):
            read(url.replace("metrics", "secrets"))
        server.add(END)
    Server(port).server_close()


def test_a_port_in_use_is_refused_with_one_that_works() -> None:
    with Server(0) as other:
        port = other.server_address[1]
        with pytest.raises(UserError) as caught:
            Server(port)
        [problem] = caught.value.problems
        assert (problem.setting, problem.value, problem.rule) == (
            "log.metrics_port",
            port,
            "the port is in use on this host",
        )
        offered = re.match(r"log\.metrics_port=(\d+) is free now", problem.hint)
        assert offered
        Server(int(offered[1])).server_close()


def test_a_run_is_read_while_it_trains(tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    with Server(0) as other:
        arguments = overrides(tmp_path, "refused", f"log.metrics_port={other.server_address[1]}")
        status, said = finish(launch(arguments, ranks=2))
        assert status != 0
        assert "the port is in use on this host" in said
        assert not (tmp_path / "refused").exists()
    process = launch(overrides(tmp_path, "run", "log.metrics_port=0", "train.steps=100000"))
    try:
        assert process.stdout is not None
        url = next(found[1] for line in iter(process.stdout.readline, "") if (found := URL.match(line)))
        seen, deadline = dict[str, float](), time.monotonic() + 60
        while seen.get("megalite_checkpoint_step", 0) < 10:
            assert time.monotonic() < deadline
            seen = parsed(read(url))
            time.sleep(0.05)
    finally:
        process.terminate()
    finish(process)
    records = {line["step"]: line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line}
    record = records[int(seen["megalite_step"])]
    assert seen["megalite_loss"] == record["loss"]
    assert seen["megalite_memory_bytes"] == record["memory_gib"] * 2**30
    saved = [event for event in read_events(tmp_path / "run" / "events.jsonl") if event["kind"] == "checkpoint"]
    times = {event["step"]: event["time"] for event in saved}
    assert seen["megalite_checkpoint_timestamp_seconds"] == times[int(seen["megalite_checkpoint_step"])]
