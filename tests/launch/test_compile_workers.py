"""The workers that inductor compiles with: none of them holds up the end of a run."""

import subprocess
import sys
from pathlib import Path

CODE = """
import os, sys, time
from pathlib import Path
from torch._inductor.async_compile import AsyncCompile, shutdown_compile_workers
from megalite.launch.environment import end_compile_workers

end_compile_workers()
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


def test_they_are_killed_and_not_waited_for() -> None:
    environment = {"PATH": "/usr/bin:/bin", "TORCHINDUCTOR_COMPILE_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
        timeout=120,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "[False, False] -9\nTrue\n", "")


def test_a_process_that_compiles_nothing_has_none() -> None:
    code = "import sys; from megalite.launch.environment import end_compile_workers; end_compile_workers()"
    code += "; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
