"""Alerts reach real commands and a real server, no more often than asked, and nothing about them disturbs a run."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megalite.config.derive import derive
from megalite.config.schema import Config, LogConfig
from megalite.data.batches import StepBatches
from megalite.launch.context import ParallelContext
from megalite.observe import alerts as module
from megalite.observe import trackers
from megalite.observe.alerts import open_alerts, send_stall
from megalite.train.history import Record
from megalite.train.metrics import Meter, StepMetrics
from tests.config.refusal import refusal, settings
from tests.ranks import run_ranks
from tests.train.runs import outcome, write_text
from tests.train.test_run import config_for, start

FINISHED: Record = {"time": 9.0, "step": 9, "kind": "finished", "status": 0}
KEEP = 'cat >> "{0}"; echo >> "{0}"; echo "$MEGALITE_ALERT_KIND $MEGALITE_ALERT_STEP " >> "{0}.env"'
SECRET = "T0/B0/swordfish"


class Hook(ThreadingHTTPServer):
    """Keeps what it is sent; answers with `status`, after `delay_s`."""

    daemon_threads, status, delay_s = True, 200, 0.0

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HookRequests)
        self.address, self.got = f"http://127.0.0.1:{self.server_port}/{SECRET}", list[Any]()


class HookRequests(BaseHTTPRequestHandler):
    server: Hook

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append((self.path, self.headers["Content-Type"], json.loads(body, parse_constant=self.refuse)))
        time.sleep(self.server.delay_s)
        self.send_response(self.server.status)
        self.end_headers()

    def refuse(self, constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hook]:
    monkeypatch.setenv("no_proxy", "*")
    with Hook() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def config(command: str | None, minutes: float = 0.0) -> Config:
    return Config(run_name="mine", run_dir="runs/mine", log=LogConfig(alert_command=command, alert_minutes=minutes))


def event(kind: str, step: int, **fields: Any) -> Record:
    return {"time": float(step), "step": step, "kind": kind, **fields}


def run(of: Config, *records: Record) -> list[str]:
    """The notes to the user of a run with these records."""
    notes = list[str]()
    view = open_alerts(of, notes.append)
    for record in (*records, FINISHED):
        view.add(record)
    return notes


def heard(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_command_gets_the_event_and_its_words(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    spike = event("spike", 3, loss=7.25, grad_norm=2.0, loss_scale=None)
    others = [{"step": 4, "loss": 1.0}, event("checkpoint", 5, bytes=3, seconds=1.0, stall_s=0.1)]
    lost = event("checkpoint_failed", 5, message="it's full; `rm` $(helps)")
    assert run(config(KEEP.format(path)), spike, *others, lost) == []
    first, second, end = heard(path)
    assert spike.items() <= first.items()
    assert first["text"] == "mine: step 3, spike: loss 7.25, grad_norm 2, loss_scale None"
    assert (first["run_name"], first["run_dir"], first["left_out"]) == ("mine", "runs/mine", {})
    assert second["text"] == "mine: step 5, checkpoint failed: it's full; `rm` $(helps)"
    assert FINISHED.items() <= end.items()
    told = Path(f"{path}.env").read_text().splitlines()
    assert told == ["spike 3 ", "checkpoint_failed 5 ", "finished 9 "]


def test_variables_hold_the_words_for_commands_that_read_no_json(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    command = f'echo "$MEGALITE_ALERT_TEXT in $MEGALITE_ALERT_RUN_DIR" >> {path}'
    assert run(config(command), event("rolled_back", 4, checkpoint=2, message='"a"\n$HOME')) == []
    assert path.read_text().startswith('mine: step 4, rolled back: "a"\n$HOME in runs/mine\nmine: step 9, finished')


def test_a_webhook_gets_json_by_post(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_ALERT_COMMAND", hook.address)
    assert run(config("exit 1"), event("skipped", 3, loss=float("nan"), grad_norm=float("inf"), loss_scale=None)) == []
    (path, kind, sent), (_, _, end) = hook.got
    assert (path, kind) == (f"/{SECRET}", "application/json")
    assert (sent["kind"], sent["loss"], sent["grad_norm"], end["kind"]) == ("skipped", "nan", "inf", "finished")


def test_each_kind_comes_once_in_its_time_with_how_many_were_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    sent = list[Any]()
    monkeypatch.setattr(module, "send", lambda config, target, record, left_out: sent.append((record, left_out)))
    alerts = module.Alerts(config("true", minutes=10), "true")
    slow = event("straggler", 1, rank=3, host="n1", times=2.0, share=0.1)
    for at_s, record in (
        (0, event("spike", 1)),
        (599, event("spike", 2)),
        (599, event("rolled_back", 3)),
        (600, event("spike", 4)),
        (601, event("spike", 5)),
        (602, slow),
        (9999, slow),  # known
        (9999, event("failed", 6, status=1)),
        (9999, event("stopped", 6, status=0)),
    ):
        now[0] = at_s
        alerts.add(record)
    assert [(record["kind"], record["step"], left) for record, left in sent] == [
        ("spike", 1, {}),
        ("rolled_back", 3, {"spike": 1}),
        ("spike", 4, {}),
        ("straggler", 1, {"spike": 1}),
        ("failed", 6, {}),
        ("stopped", 6, {}),
    ]


def test_the_search_for_a_loss_scale_alarms_nobody(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    skipped = [event("skipped", step, loss=1.0, grad_norm=1.0, loss_scale=scale) for step, scale in ((1, 64.0), (2, 1))]
    assert run(config(KEEP.format(path)), *skipped) == []
    assert [each["step"] for each in heard(path)] == [2, 9]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("echo no; echo 'no mail here' >&2; exit 7", "the command ended with status 7: no mail here"),
        ("echo 'no answer of https://hooks.example/T0/SECRET' >&2; exit 3", "status 3: no answer of (an address)"),
        ("no-such-program-anywhere", "ended with status 127"),
        ("sleep 60 & sleep 60", "has not ended within 0.3 s and was killed"),
    ],
)
def test_a_command_that_fails_or_hangs_is_one_note(command: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    began = time.monotonic()
    [note] = run(config(command), event("spike", 1), event("spike", 2), event("rolled_back", 3))
    assert note.startswith("alerts: warning: ")
    assert words in note
    assert time.monotonic() - began < 20


def test_a_webhook_that_fails_is_a_note_without_its_address(hook: Hook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LIMIT_S", 0.3)
    said = list[str]()
    for delay_s, status, address in (
        (0, 500, hook.address),
        (1, 200, hook.address),
        (0, 0, "http://127.0.0.1:1/" + SECRET),
    ):
        hook.delay_s, hook.status = delay_s, status
        monkeypatch.setenv("MEGALITE_ALERT_COMMAND", address)
        said += run(config(None), event("spike", 1), event("spike", 2))
    monkeypatch.setenv("MEGALITE_ALERT_COMMAND", f"http://127.0.0.1:1/{SECRET}\x7f")
    said += run(config(None), event("spike", 1))
    words = ("status 500", "TimeoutError", "Connection refused", "InvalidURL")
    assert len(said) == len(words)
    assert all(word in note for word, note in zip(words, said, strict=True)), said
    assert not [note for note in said if "swordfish" in note]


def test_a_target_that_hangs_holds_up_no_step_and_the_end_not_for_long(
    hook: Hook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "FAILED_S", 0.2)
    hook.delay_s = 5
    monkeypatch.setenv("MEGALITE_ALERT_COMMAND", hook.address)
    notes, began = list[str](), time.monotonic()
    view = open_alerts(config(None), notes.append)
    for step in range(200):
        view.add(event("spike", step))
    assert time.monotonic() - began < 0.2
    view.add(event("failed", 200, status=1, message="x"))
    assert time.monotonic() - began < 2
    assert "not done at the end of the run" in notes[0]


def test_nobody_is_told_where_nobody_asks() -> None:
    view = open_alerts(config(None), print)
    view.add(FINISHED)
    assert view._thread.ident is None


def test_a_stall_is_told_and_no_failure_of_that_is_one(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    send_stall(config(KEEP.format(path)), 7, "no progress within parallel.timeout_s (600 s); all ranks answer")
    [told] = heard(path)
    assert (told["kind"], told["step"]) == ("stall", 7)
    assert told["text"].startswith("mine: step 7, stall: no progress")
    send_stall(config("exit 1"), 7, "")


def hanging(context: ParallelContext, of: Config) -> None:
    """Rank 1 never comes to the end of its step 3."""
    if context.rank == 1:
        add = Meter.add

        def and_hang(self: Meter, metrics: StepMetrics, data: StepBatches) -> None:
            if data.planned.step == 3:
                time.sleep(600)
            add(self, metrics, data)

        Meter.add = and_hang  # type: ignore[method-assign]
    try:
        outcome(context, of)
    except RuntimeError:  # the other rank has ended a moment earlier
        assert context.rank == 0


def test_a_run_tells_of_its_end_and_of_a_stall_though_its_ranks_hang(tmp_path: Path) -> None:
    path = tmp_path / "heard"
    for name in ("goes on", "hangs"):
        of = config_for(write_text(tmp_path / "text.txt"), tmp_path / name, steps=4)
        of.log = LogConfig(alert_command=f"sleep 1; {KEEP.format(path)}")
        if name == "goes on":
            assert start(of) == 0
            continue
        of.parallel = replace(of.parallel, timeout_s=2.0)
        assert run_ranks(hanging, 2, derive(of, 2), may_die=[0, 1], timeout=60) == [None] * 2
    end, stall, *_ = heard(path)  # and maybe that rank 0 has lost rank 1
    assert (end["kind"], end["step"], end["run_dir"]) == ("finished", 4, str(tmp_path / "goes on"))
    assert (stall["kind"], stall["run_dir"]) == ("stall", str(tmp_path / "hangs"))
    assert stall["step"] in (3, 4)
    assert "no progress within parallel.timeout_s (2 s); all ranks answer" in stall["text"]


def test_addresses_of_webhooks_are_no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (
        "log.alert_command=https://example.org/T0/swordfish",
        "'log.alert_command=\"curl -d @- https://hooks.slack.com/services/swordfish\"'".strip("'"),
        "log.alert_command=https://discord.com/api/webhooks/1/swordfish",
    ):
        error = refusal(text)
        assert "swordfish" not in str(error)
        assert "secret" in str(error)
    monkeypatch.setenv("MEGALITE_ALERT_COMMAND", "https://swordfish name/")
    error = refusal()
    assert settings(error) == ["MEGALITE_ALERT_COMMAND"]
    assert "swordfish" not in str(error)
    assert "log.alert_minutes" in str(refusal("log.alert_minutes=-1"))
