"""Two hosts as network namespaces, joined by a cable that the test pulls out: each end says that the other is gone."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megalite.launch.watchdog import REPORT_S
from tests.train.runs import ROOT, metrics, overrides, state_bytes, wait_for_step, write_text

TOOLS = [name for name in ("ip", "unshare") if shutil.which(name) is None]
REASON = f"needs {', '.join(TOOLS)}" if TOOLS else "network namespaces need root"
pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(TOOLS) or os.geteuid() != 0, reason=REASON)]
TIMEOUT_S = 4


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


class Hosts:
    """`host-a` is 10.77.0.1, `host-b` 10.77.0.2."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._names_file = folder, folder / "hosts"
        self._names_file.write_text("127.0.0.1 localhost\n10.77.0.1 host-a\n10.77.0.2 host-b\n")
        self.names = [f"megalite-{os.getpid()}-{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ends = [["eth0", "netns", name] for name in self.names]
        ip("link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for number, name in enumerate(self.names, 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
            ip("-n", name, "link", "set", "lo", "up")

    def cable(self, state: str) -> None:
        ip("-n", self.names[0], "link", "set", "eth0", state)

    def start(self, arguments: list[str]) -> "list[subprocess.Popen[str]]":
        """torchrun on both, two ranks each."""
        processes = []
        for number, (name, letter) in enumerate(zip(self.names, "ab", strict=True), 1):
            options = "--nnodes 2 --nproc-per-node 2 --max-restarts 0 --rdzv-backend c10d --rdzv-id 7"
            options += f" --rdzv-endpoint 10.77.0.1:29400 --local-addr 10.77.0.{number}"
            command = [sys.executable, "-m", "torch.distributed.run", *options.split(), str(ROOT / "pretrain_gpt.py")]
            become = f"hostname host-{letter} && mount --bind {self._names_file} /etc/hosts"
            own = ["sh", "-c", f'{become} && exec "$@"', "sh", *command, *arguments]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
            with self.log(letter).open("w") as log:
                words = ["ip", "netns", "exec", name, "unshare", "--uts", "--mount", *own]
                process = subprocess.Popen(words, env=environment, stdout=log, stderr=log, text=True)
            processes.append(process)
        return processes

    def log(self, letter: str) -> Path:
        return self._folder / f"host-{letter}.log"

    def kill(self) -> None:
        """All that runs there."""
        for name in self.names:
            found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
            for pid in found.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        for name in self.names:
            ip("netns", "del", name)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    try:
        yield found
    finally:
        found.close()


def test_a_cut_cable_is_reported_at_both_ends_and_the_next_start_goes_on(hosts: Hosts, tmp_path: Path) -> None:
    write_text(tmp_path / "text.txt")
    shape = ("parallel.tp=2", "model.num_attention_heads=2", f"parallel.timeout_s={TIMEOUT_S}", "train.steps=60")
    both = hosts.start(overrides(tmp_path, "cut", *shape))
    wait_for_step(both[0], tmp_path / "cut", 8)
    hosts.cable("down")
    others = {"a": "no answer from rank 2, 3 on host-b", "b": "the place where the ranks met (rank 0 on host-a"}
    deadline = time.monotonic() + TIMEOUT_S + REPORT_S + 10
    while not all(words in hosts.log(letter).read_text() for letter, words in others.items()):
        assert time.monotonic() < deadline, [hosts.log(letter).read_text() for letter in others]
        time.sleep(0.1)
    hosts.kill()  # torchrun itself takes minutes to notice
    hosts.cable("up")
    both = hosts.start(overrides(tmp_path, "cut", *shape))
    assert [process.wait(120) for process in both] == [0, 0], [hosts.log(letter).read_text() for letter in others]
    assert "from the checkpoint of step" in hosts.log("a").read_text() + hosts.log("b").read_text()
    undisturbed = hosts.start(overrides(tmp_path, "whole", *shape))
    assert [process.wait(120) for process in undisturbed] == [0, 0]
    assert metrics(tmp_path / "cut") == metrics(tmp_path / "whole")
    assert state_bytes(tmp_path / "cut", 60) == state_bytes(tmp_path / "whole", 60)
