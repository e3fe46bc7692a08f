"""What a process takes of its host: it keeps the memory that a step frees, leaves cores to others and opens many files.
The workers that inductor compiles with hold up no end of a run."""

import ctypes
import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from megalite.launch import environment as host

ROOT = Path(__file__).parents[2]
GLIBC = sys.platform == "linux" and hasattr(ctypes.CDLL(None), "mallopt")
STARTED = """
from megalite.config.compose import load_config
from megalite.launch.process import ProcessEnvironment
from megalite.train.build import open_context
open_context(load_config(["device=cpu"], 1), ProcessEnvironment())
"""
FAULTS_OF_A_STEP = """
import ctypes, resource, torch
assert ctypes.CDLL(None).prctl(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE: small pages on all machines
def step():
    activations = [torch.ones(5 << 18) for _ in range(16)]  # 5 MiB each, from a heap of 80 MiB
    large = torch.ones(48 << 18)  # more than glibc ever takes from the heap by itself
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 5)
"""
PAGES = (128 << 20) // resource.getpagesize()  # that a step allocates


def _faults(program: str, **variables: str) -> float:
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name and "GLIBC" not in name}
    command = [sys.executable, "-c", program + FAULTS_OF_A_STEP]
    done = subprocess.run(command, env=environment | variables, capture_output=True, text=True, check=True)
    return float(done.stdout)


@pytest.mark.skipif(not GLIBC, reason="glibc's malloc")
def test_a_step_finds_the_pages_of_the_one_before() -> None:
    assert _faults(STARTED) < PAGES / 100
    assert _faults("") > PAGES / 4  # what it saves


@pytest.mark.skipif(not GLIBC, reason="glibc's malloc")
@pytest.mark.parametrize(
    ("variables", "least", "most"),
    [
        ({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1000000"}, PAGES / 4, math.inf),
        # which is not about pages
        pytest.param({"MALLOC_ARENA_MAX": "2"}, -1, PAGES / 100, marks=pytest.mark.long),
    ],
)
def test_who_chose_how_malloc_works_is_left_alone(variables: dict[str, str], least: float, most: float) -> None:
    assert least < _faults(STARTED, **variables) < most


@pytest.mark.parametrize("name", ["", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_of_cuda_memory_grow_unless_the_user_has_decided(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_busy", lambda: False)
    found = {name: ""} if name else {}
    host.set_variables(found)
    assert found == ({name: ""} if name else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


@pytest.mark.parametrize(("given", "left"), [(None, None), ("1", "8"), ("8", "8"), ("32", "32")])
def test_cuda_is_not_left_at_a_number_of_queues_that_serialises_streams(
    given: str | None, left: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who exports 1 for Megatron-LM is told so; where no driver is, nobody is."""
    for driver, expected in ((tmp_path / "absent", given), (tmp_path, left)):
        found = {} if given is None else {host.CUDA_QUEUES: given}
        monkeypatch.setattr(host, "NVIDIA", driver)
        assert bool(host.set_variables(found)) == (given != expected)
        assert found.get(host.CUDA_QUEUES) == expected


@pytest.mark.parametrize(
    ("running", "usable", "busy"),
    [(1, 8, False), (2, 8, True), (6, 2, False), (8, 2, True), (None, 8, False)],
    ids=["alone", "beside one", "on cores that others leave", "on cores that they do not", "where nobody tells"],
)
def test_threads_sleep_soon_if_others_need_the_cores(
    running: int | None, usable: int, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host, "usable_cores", lambda: usable)
    monkeypatch.setattr(host, "LOAD", tmp_path / "loadavg")
    if running is not None:
        host.LOAD.write_text(f"0.52 0.58 0.59 {running}/967 12345\n")
    environ: dict[str, str] = {}
    host.set_variables(environ)
    assert ("GOMP_SPINCOUNT" in environ) == busy


FILES = """
import resource
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
{start}
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(65_536, hard), hard)
"""
TRAIN = "from megalite.commands.train import main_to_the_end; main_to_the_end(['--help'])"
PLAN = "from megalite.commands.plan import ranks; ranks(['--world-size', '2'])"


@pytest.mark.parametrize("start", [TRAIN, PLAN], ids=["train", "another command"])
def test_a_command_may_open_as_many_files_as_the_system_allows(start: str) -> None:
    command = [sys.executable, "-c", FILES.format(start=start)]
    subprocess.run(command, capture_output=True, check=True, cwd=ROOT)


def test_a_system_that_allows_fewer_files_than_it_says_stops_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    host.ready_files()


WORKERS = """
import os, sys, time
from pathlib import Path
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
from megalite.launch.process import end_compile_workers

end_compile_workers()  # where nothing was compiled
pool = AsyncCompile.process_pool()
pids = [pool.process.pid, pool.submit(os.getpid).result()]
assert all(Path(f"/proc/{pid}").exists() for pid in pids)
end_compile_workers()
pool.process.wait(30)  # killed: it would not end by itself while its pipe is open
deadline = time.monotonic() + 30
while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
    time.sleep(0.05)
print([Path(f"/proc/{pid}").exists() for pid in pids], pool.process.returncode)
pool.shutdown = None  # whoever called it would fail
print(AsyncCompile.process_pool().submit(os.getpid).result() not in pids)  # whoever compiles again has new ones
end_compile_workers()
"""


def test_compile_workers_are_killed_and_not_waited_for() -> None:
    environment = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_COMPILE_THREADS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WORKERS]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, False] -9\nTrue\n", "")
