"""A program that is started by `start_server` behaves as one that `python` starts."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.warm import start_server

ABOUT = "import os, sys; print(sys.argv, os.getcwd(), os.environ['NAME'], sys.stdin.read(), __name__, sys.path[0])"


@pytest.mark.parametrize("words", [["-c", ABOUT, "one", "--two"], ["about.py", "one"], ["-u", "-m", "about", "one"]])
def test_it_gets_what_its_caller_gives_it(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "about.py").write_text(ABOUT)

    def said(python: str) -> str:
        variables = {"NAME": "value", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [python, *words]
        return subprocess.run(command, cwd=tmp_path, env=variables, input="in", stdout=-1, text=True, check=True).stdout

    assert said(start_server()) == said(sys.executable) != ""


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('why')", 1),
        ("1 / 0", 1),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("import atexit, os; atexit.register(os._exit, 4)", 4),
    ],
)
def test_its_end_is_its_caller_s(code: str, status: int) -> None:
    assert subprocess.run([start_server(), "-"], input=code, text=True, stderr=-1, check=False).returncode == status


def test_it_has_imported_torch_but_nothing_of_megalite() -> None:
    code = "import sys; assert 'torch' in sys.modules and 'megalite' not in sys.modules and 'tests' not in sys.modules"
    subprocess.run([start_server(), "-c", code], check=True)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_gets_signals_and_dies_with_its_caller(number: signal.Signals) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    with subprocess.Popen([start_server(), "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        assert process.stdout.read() == b"", "the output ends when all that hold it have ended"
        assert process.wait() == -number
