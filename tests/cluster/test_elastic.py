"""An elastic torchrun: nodes come and go, data parallelism follows, and the run stays the same run."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megalite.config.compose import load_config
from megalite.launch.context import ParallelContext
from megalite.train.history import read_events
from tests.train.runs import ROOT, metrics, overrides, train_on_rank, wait_for_step, write_text
from tests.train.test_launch import processes_of

pytestmark = pytest.mark.long
EXACT = ("precision=fp64", "model.dropout=0", "train.steps=160", "train.eval_interval=40")
SLOW = ("train.sample_interval=1",)  # text after each step: a node has time to come


class Nodes:
    """Agents of one job, each a node with one rank. `size` is torchrun's `--nnodes`."""

    def __init__(self, folder: Path, run: str, *arguments: str, size: str = "1:2", kind: str = "own store") -> None:
        self.run, self._folder, self._size, self._kind = folder / run, folder, size, kind
        self._words = overrides(folder, run, *arguments)
        self._port = 29000 + os.getpid() % 1000
        self.agents: list[subprocess.Popen[str]] = []

    def add(self) -> "subprocess.Popen[str]":
        """One more node joins."""
        options = f"--nnodes {self._size} --nproc-per-node 1 --max-restarts 3 --rdzv-id {self._port}"
        if self._kind == "static":
            options += f" --node-rank {len(self.agents)} --master-addr 127.0.0.1 --master-port {self._port}"
        else:
            options += f" --rdzv-backend c10d --rdzv-endpoint 127.0.0.1:{self._port} --local-addr 127.0.0.1"
            options += " --rdzv-conf last_call_timeout=2"
        command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(ROOT / "pretrain_gpt.py")]
        own_store = str(int(self._kind == "own store"))
        environment = {**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store, "OMP_NUM_THREADS": "1"}
        with (self._folder / f"node-{len(self.agents)}.log").open("w") as log:
            process = subprocess.Popen(
                [*command, *self._words], env=environment, stdout=log, stderr=log, text=True, start_new_session=True
            )
        self.agents.append(process)
        deadline = time.monotonic() + 30
        while not self._met():  # the first one serves the rendezvous
            assert time.monotonic() < deadline, self.output(0)
            time.sleep(0.05)
        return process

    def _met(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port), timeout=1):
            return True
        return False

    def lose(self, agent: "subprocess.Popen[str]") -> None:
        """The node is gone, with all that ran there."""
        for pid in [agent.pid, *self.ranks(agent)]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait()

    def ranks(self, agent: "subprocess.Popen[str]") -> list[int]:
        return [pid for pid in processes_of(self.run) if f"\nPPid:\t{agent.pid}\n" in status_of(pid)]

    def output(self, node: int) -> str:
        return (self._folder / f"node-{node}.log").read_text()


def status_of(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/status").read_text()
    return ""


@contextmanager
def nodes(folder: Path, run: str, *arguments: str, **kinds: str) -> Iterator[Nodes]:
    write_text(folder / "text.txt")
    found = Nodes(folder, run, *arguments, **kinds)
    try:
        yield found
    finally:
        for agent in found.agents:
            if agent.poll() is None:
                found.lose(agent)


def layouts(run: Path) -> list[int]:
    """The number of ranks of each start."""
    return [len(event["hosts"]) for event in read_events(run / "events.jsonl") if event["kind"] in ("start", "resume")]


def test_a_node_that_comes_and_goes_changes_how_many_ranks_train_and_nothing_else(tmp_path: Path) -> None:
    with nodes(tmp_path, "elastic", *EXACT, *SLOW) as job:
        first = job.add()
        wait_for_step(first, job.run, 5)
        second, deadline = job.add(), time.monotonic() + 60
        while layouts(job.run)[-1] < 2:
            assert time.monotonic() < deadline, job.output(0) + job.output(1)
            time.sleep(0.1)
        wait_for_step(first, job.run, len({line["step"] for line in metrics(job.run)}) + 5)
        job.lose(second)
        assert first.wait(120) == 0, job.output(0)
        assert layouts(job.run) == [1, 2, 1], job.output(0)
    assert train_on_rank(ParallelContext(), load_config(overrides(tmp_path, "alone", *EXACT), 1)) == 0
    elastic, alone = metrics(job.run), metrics(tmp_path / "alone")
    assert len(elastic) == len(alone)
    for found, expected in zip(elastic, alone, strict=True):
        assert found == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("killed", [0, 1])
@pytest.mark.parametrize("kind", ["own store", "shared store", "static"])
def test_a_killed_rank_costs_one_restart_whoever_serves_the_store(tmp_path: Path, kind: str, killed: int) -> None:
    """The other node's torchrun restarts its rank, too, and need not count that."""
    with nodes(tmp_path, "killed", "train.steps=30", "parallel.startup_timeout_s=15", size="2", kind=kind) as job:
        first, second = job.add(), job.add()
        wait_for_step(first, job.run, 7)
        for pid in job.ranks(second if killed else first):
            os.kill(pid, signal.SIGKILL)
        assert [first.wait(90), second.wait(90)] == [0, 0], job.output(0) + job.output(1)
        said = job.output(0) + job.output(1)
    assert "refused" not in said
    assert layouts(job.run) == [2, 2], said
    assert metrics(job.run)[-1]["step"] == 30
