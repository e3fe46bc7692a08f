"""Alerts: a command or a webhook of the user's hears what should make somebody look at a run.

The target is log.alert_command, or MEGALITE_ALERT_COMMAND, which counts more and is recorded nowhere. An address there
is a webhook: it gets the event as JSON by POST. Anything else is a shell command: it gets the JSON on stdin, and
variables. A thread sends; nothing waits for it but the end of the run, for a while. Words on a failure hold no address.
"""

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from math import isfinite
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from megalite.config.machine_rules import ALERTS, WEBHOOK
from megalite.config.schema import Config
from megalite.observe.readable import words_of
from megalite.observe.trackers import Trackers
from megalite.train.history import ENDS, Note, Record

ALERTED = ("spike", "skipped", "rolled_back", "straggler", "checkpoint_failed", "stall", *ENDS)  # kinds of events
ADDRESS = re.compile(r"https?://\S+")  # which may hold a secret
LIMIT_S = 10.0  # that a command or a webhook may take


def alert_target(config: Config) -> str | None:
    """The user's command or address; None: nobody is to hear."""
    return os.environ.get(ALERTS) or config.log.alert_command


def open_alerts(config: Config, note: Note) -> Trackers:
    """Alerts of a run, for rank 0: `add` of what is returned is a view."""
    target = alert_target(config)
    openers = {"alerts": lambda: (Alerts(config, target).add, "")} if target else {}
    return Trackers(openers, note, wanted=partial(is_alarming, config))


def is_alarming(config: Config, record: Record) -> bool:
    """Whether an event is for alerts. fp16 skips steps until it has found its scale: that alarms nobody."""
    scale = record.get("loss_scale")
    usual = record.get("kind") == "skipped" and scale is not None and scale > config.optimizer.min_loss_scale
    return record.get("kind") in ALERTED and not usual


class Alerts:
    """Sends events to `target`, of each kind at most one in log.alert_minutes; the end of a run always."""

    def __init__(self, config: Config, target: str) -> None:
        self._config, self._target = config, target
        self._sent = dict[str, float]()  # when, by kind
        self._left_out, self._slow = Counter[str](), set[int]()  # events by kind since the newest alert; known ranks

    def add(self, record: Record) -> None:
        """Send the event, unless its kind was sent a moment ago. An error where it could not be."""
        kind, now = record["kind"], time.monotonic()
        if record.get("rank") in self._slow:
            return
        self._slow |= {record["rank"]} if kind == "straggler" else set()
        if kind not in ENDS and now - self._sent.get(kind, -float("inf")) < 60 * self._config.log.alert_minutes:
            self._left_out[kind] += 1
            return
        self._sent[kind], left_out = now, dict(self._left_out)
        self._left_out.clear()
        send(self._config, self._target, record, left_out)


def send_stall(config: Config, step: int, message: str) -> None:
    """The watchdog's alert, from any rank, whose main thread hangs. What fails is not said: the process ends."""
    if target := alert_target(config):
        with suppress(Exception):
            send(config, target, {"time": time.time(), "step": step, "kind": "stall", "message": message}, {})


def send(config: Config, target: str, record: Record, left_out: dict[str, int]) -> None:
    """Send one event, within LIMIT_S. An error says what went wrong."""
    words = f"step {record['step']}, {record['kind'].replace('_', ' ')}: {words_of(record)}".rstrip(": ")
    more = ", ".join(f"{count} of {kind}" for kind, count in left_out.items())
    text = f"{config.run_name}: {words}{f' (left out since the last alert: {more})' if more else ''}"
    where = {"run_name": config.run_name, "run_dir": config.run_dir, "host": socket.gethostname()}
    fields = {"text": text, **where, **record, "left_out": left_out}
    content = json.dumps({name: _plain(value) for name, value in fields.items()}, default=str).encode()
    if WEBHOOK.match(target):
        _post(target, content)
        return
    variables = {"KIND": record["kind"], "STEP": str(record["step"]), "TEXT": text, "RUN_DIR": config.run_dir}
    _run(target, content, {f"MEGALITE_ALERT_{name}": value.replace("\0", "") for name, value in variables.items()})


def _plain(value: Any) -> Any:
    """JSON has no numbers that are not finite."""
    return str(value) if isinstance(value, float) and not isfinite(value) else value


def _post(address: str, content: bytes) -> None:
    try:
        with urlopen(Request(address, content, {"Content-Type": "application/json"}), timeout=LIMIT_S):
            pass
    except HTTPError as error:
        raise RuntimeError(f"the webhook answers with status {error.code}") from None
    except Exception as error:  # whose words may hold the address
        reason = error.reason if isinstance(error, URLError) else error
        words = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
        raise RuntimeError(f"the webhook cannot be reached: {words}") from None


def _run(command: str, content: bytes, variables: dict[str, str]) -> None:
    """In a session of its own, which outlives a rank that is killed."""
    pipe, environment = subprocess.PIPE, {**os.environ, **variables}
    with subprocess.Popen(
        command, shell=True, stdin=pipe, stdout=subprocess.DEVNULL, stderr=pipe, env=environment, start_new_session=True
    ) as process:
        try:
            said = process.communicate(content, timeout=LIMIT_S)[1].decode(errors="replace").split("\n")
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise RuntimeError(f"the command has not ended within {LIMIT_S:g} s and was killed") from None
    if process.returncode:
        last = ADDRESS.sub("(an address)", next((line for line in reversed(said) if line.strip()), ""))
        raise RuntimeError(f"the command ended with status {process.returncode}{f': {last}' if last else ''}")
