"""A signal before the first step ends the start at once and in one line, whatever the start is at."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.train.runs import ROOT, overrides

# Stands still at the named function of run.py: in Python, in a destructor, whose exceptions Python ignores, or inside
# an operation of C that no signal interrupts.
DRIVER = """
import ctypes, sys, time
sys.path.insert(0, {root!r})
from megalite.commands.train import main_to_the_end
def stand_still(*_, **__):
    print("here", flush=True)
    while {inside!r} != "C":
        time.sleep(1)
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex of glibc
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(mutex)
class Destroyed:
    __del__ = stand_still
def destroy(*_, **__):
    Destroyed()
    while True:
        time.sleep(1)
if {at!r}:
    import megalite.train.run
    setattr(megalite.train.run, {at!r}, destroy if {inside!r} == "destructor" else stand_still)
sys.exit(main_to_the_end(sys.argv[1:]))
"""
LINE = r"megalite: ended by {name} after \d+ s of start-up, before the first step\n"


def begin(arguments: list[str], at: str, *, inside: str = "Python", **variables: str) -> "subprocess.Popen[str]":
    """A start that stands still there by now."""
    code = DRIVER.format(root=str(ROOT), at=at, inside=inside)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment, cwd=ROOT)
    assert process.stdout is not None
    while at and (line := process.stdout.readline()) != "here\n":
        assert line, process.communicate()
    return process


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> tuple[int, str, float]:
    """Its exit status, what it said on stderr, and how many seconds it took."""
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    return process.returncode, errors, time.monotonic() - began


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("at", ["open_context", "open_training_data", "build_training", "note_changed_files"])
def test_a_start_says_by_what_it_was_ended(folder: Path, tmp_path: Path, at: str, number: signal.Signals) -> None:
    """128 and the signal's number, as shells have it. It leaves no run folder that it has made."""
    process = begin(
        [*overrides(tmp_path, "run"), f"data.path={folder}/text.txt", f"launch.status_file={tmp_path}/told"], at
    )
    status, errors, _ = end(process, number)
    assert status == 128 + number
    assert re.fullmatch(LINE.format(name=number.name), errors), errors
    assert not (tmp_path / "run").exists(), "the main thread was unwound"
    built = at == "note_changed_files"
    assert (tmp_path / "told").exists() == built
    if built:
        told = json.loads((tmp_path / "told").read_text())
        assert (told["state"], told["step"]) == ("stopped", 0)


@pytest.mark.parametrize("inside", ["C", "destructor"])
def test_a_start_that_cannot_be_unwound_ends_too(folder: Path, inside: str) -> None:
    process = begin(overrides(folder, inside), "set_up", inside=inside)
    status, errors, seconds = end(process, signal.SIGUSR1)
    assert status == 128 + signal.SIGUSR1
    assert re.fullmatch(LINE.format(name="SIGUSR1"), errors), errors
    assert seconds < 15


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_waits_for_others_ends_and_only_rank_0_says_so(folder: Path, rank: int) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    process = begin(overrides(folder, "alone"), "", **place)
    deadline = time.monotonic() + 60
    while "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(1.0)
    status, errors, _ = end(process, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert re.fullmatch(LINE.format(name="SIGINT") if rank == 0 else "", errors), errors
