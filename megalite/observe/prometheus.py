"""The newest numbers of a run for Prometheus, as text at http://127.0.0.1:PORT/metrics (log.metrics_port).

Names, units and help lines are as Prometheus wants them: seconds, bytes and ratios; what may fall, as a rollback makes
steps fall, is a gauge. A number that is not known yet has no line.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from errno import EADDRINUSE
from http.server import BaseHTTPRequestHandler
from math import isfinite, isnan
from socketserver import ThreadingTCPServer
from threading import Thread
from typing import Any

from megalite import __version__
from megalite.errors.problems import Problem, UserError, printable
from megalite.observe.run_data import RunData
from megalite.train.history import ENDS, Note, Record

HOST, GIB = "127.0.0.1", 1 << 30
CONTENT = "text/plain; version=0.0.4; charset=utf-8"
Read = Callable[[RunData], float | None]


def newest(name: str, unit: float = 1.0) -> Read:
    return lambda run: None if run.last.get(name) is None else run.last[name] * unit


def of_checkpoint(name: str) -> Read:
    return lambda run: (run.newest.get("checkpoint") or {}).get(name)


GAUGES: tuple[tuple[str, str, Read], ...] = (
    ("step", "Newest step whose numbers are recorded.", newest("step")),
    ("steps", "Steps that the run is to do.", lambda run: run.steps),
    ("tokens", "Tokens that the run has been trained on.", newest("tokens")),
    ("loss", "Training loss of the newest step in nats per token.", newest("loss")),
    ("validation_loss", "Newest validation loss in nats per token.", lambda run: run.evaluation.get("val_loss")),
    ("learning_rate", "Learning rate of the newest step.", newest("lr")),
    ("gradient_norm", "L2 norm of the gradient in the newest step.", newest("grad_norm")),
    ("tokens_per_second", "Tokens per second since the record before.", newest("tokens_per_s")),
    ("step_seconds", "Mean time of a step since the record before.", newest("step_time_s")),
    ("data_wait_ratio", "Share of that time in which training waited for data.", newest("data_wait_share")),
    ("mfu_ratio", "Model FLOP/s over the peak of the devices.", newest("mfu")),
    ("memory_bytes", "Peak memory of rank 0.", newest("memory_gib", GIB)),
    ("bad_steps", "Steps of the run that were not applied.", newest("bad_steps")),
    ("loss_scale", "Factor of the loss in fp16.", newest("loss_scale")),
    ("checkpoint_step", "Step of the newest checkpoint.", of_checkpoint("step")),
    ("checkpoint_timestamp_seconds", "When the newest checkpoint was written, since 1970.", of_checkpoint("time")),
)


class Server(ThreadingTCPServer):
    """Answers a scrape with what `text` returns. UserError where the port cannot be had."""

    allow_reuse_address, daemon_threads = True, True

    def __init__(self, port: int, text: Callable[[], str] = str) -> None:
        self.text = text
        try:
            super().__init__((HOST, port), Requests)
        except OSError as error:
            with Server(0) as other:
                free = f"log.metrics_port={other.server_address[1]} is free now, 0 takes any port that is"
            rule = "the port is in use on this host" if error.errno == EADDRINUSE else f"{error.strerror}"
            raise UserError(Problem("log.metrics_port", port, rule, free, here=True)) from error


class Requests(BaseHTTPRequestHandler):
    server: Server
    timeout = 10  # of a client that says nothing

    def do_GET(self) -> None:
        found = self.path.partition("?")[0] in ("/", "/metrics")
        content = self.server.text().encode() if found else b"see /metrics\n"
        self.send_response(200 if found else 404)
        self.send_header("Content-Type", CONTENT)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        """A scrape is no news."""


class Prometheus:
    """Serves the numbers of `run`, which holds a record before `add`, a view, is given it. Closed at the run's end."""

    def __init__(self, run: RunData, name: str, port: int, note: Note) -> None:
        self._run, self._name, self._events, self._recorded = run, name, Counter[str](), time.time()
        self._server = Server(port, self.text)
        Thread(target=self._server.serve_forever, name="prometheus", daemon=True).start()
        note(f"prometheus: http://{HOST}:{self._server.server_address[1]}/metrics")

    def add(self, record: Record) -> None:
        if "kind" in record:
            self._events[record["kind"]] += 1
        elif "loss" in record:
            self._recorded = time.time()
        if record.get("kind") in ENDS:
            self._server.shutdown()
            self._server.server_close()

    def text(self) -> str:
        """All numbers, each with its help line and type."""
        lines = list[str]()

        def add(name: str, kind: str, words: str, values: Mapping[str, Any]) -> None:
            known = {labels: value for labels, value in values.items() if value is not None}
            if known:
                lines.extend([f"# HELP megalite_{name} {words}", f"# TYPE megalite_{name} {kind}"])
            lines.extend(f"megalite_{name}{labels} {written(value)}" for labels, value in known.items())

        labels = {"run_name": self._name, "run_dir": str(self._run.folder), "version": __version__}
        add("run_info", "gauge", "The run, by name and folder.", {labelled(labels): 1})
        for name, words, read in GAUGES:
            add(name, "gauge", words, {"": read(self._run)})
        when = "When the newest step was recorded, or this start began, since 1970."
        add("step_timestamp_seconds", "gauge", when, {"": self._recorded})
        counted = {labelled({"kind": kind}): count for kind, count in sorted(self._events.copy().items())}
        add("events_total", "counter", "Events of this start by kind.", counted)
        return "\n".join([*lines, ""])


def labelled(labels: Mapping[str, str]) -> str:
    escaped = {"\\": r"\\", '"': r"\"", "\n": r"\n"}
    texts = {name: "".join(escaped.get(sign, sign) for sign in printable(text)) for name, text in labels.items()}
    return "{" + ",".join(f'{name}="{text}"' for name, text in texts.items()) + "}"


def written(value: float) -> str:
    """A number as Prometheus reads it."""
    return repr(value) if isfinite(value) else "NaN" if isnan(value) else "+Inf" if value > 0 else "-Inf"
