"""Python programs in processes that have imported torch already: a start costs a tenth of a second instead of two.

`warm_python()` is the path of an executable that takes what `python` takes. It hands a program over to a server, which
forks a process for it with the caller's arguments, environment, folder and standard streams, and passes on signals one
way and the exit status the other. What it cannot do (options, PYTHONPATH, more than standard streams) it leaves to a
real one. Megalite itself is not imported in the server: each program imports the one of its
own folder. Tests about the start of a process, its parents or its death use `sys.executable`.

As a program (`python tests/warm.py SOCKET`) this file is that server.
"""

import atexit
import contextlib
import gc
import importlib
import multiprocessing.process
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from functools import cache
from pathlib import Path

IMPORTED = [  # what programs of megalite import of others, and when they run
    *("hydra", "jinja2", "numpy", "safetensors.torch", "tokenizers", "xxhash", "yaml"),
    *("numpy.random", "torch", "torch.distributed.run", "torch.fx.experimental.symbolic_shapes", "torch.profiler"),
]
CLIENT = """\
#!{real} -IS
import os, signal, socket, sys
words = sys.argv[1:]
if words[:1] == ["-u"]:
    del words[0]
known = words and (words[0] in ("-", "-c", "-m") or not words[0].startswith("-"))
told = os.environ.keys() & {{"PYTHONPATH", "PYTHONSAFEPATH", "PYTHONOPTIMIZE", "PYTHONIOENCODING"}}
passed_on = set(os.listdir("/proc/self/fd")) - set("0123")  # 3 is that folder
if not known or told or passed_on:
    os.execv({real!r}, [{real!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = repr((sys.argv[0], words, dict(os.environ), os.getcwd())).encode()
socket.send_fds(server, [len(job).to_bytes(4, "big")], [0, 1, 2])
server.sendall(job)
answers = server.makefile()
process = int(answers.readline())
for number in {signals}:
    signal.signal(number, lambda number, frame: os.kill(process, number))
status = int(answers.readline() or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
os._exit(status)
"""
FORWARDED = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)))


def warm_python() -> str:
    """The executable; in a full run the real one."""
    return sys.executable if os.environ.get(FULL) else start_server()


FULL = "MEGALITE_TESTS_FULL"  # set by conftest.py


@cache
def start_server() -> str:
    """The path of the executable, whose server lives as long as this process."""
    folder = tempfile.mkdtemp(prefix="megalite-warm-")
    address, program = f"{folder}/socket", Path(folder, "python")
    program.write_text(CLIENT.format(real=sys.executable, address=address, signals=FORWARDED))
    program.chmod(0o755)
    command = [sys.executable, __file__, address]
    _SERVERS.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
    ready = _SERVERS[0].stdout
    assert ready is not None
    assert ready.readline() == b"ready\n"
    return str(program)


_SERVERS: list["subprocess.Popen[bytes]"] = []  # it ends when nobody holds the other end of its input


def serve(address: str) -> None:
    """Fork a process for each caller; kill it when its caller dies."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    selector = selectors.DefaultSelector()
    selector.register(listener, selectors.EVENT_READ)
    selector.register(0, selectors.EVENT_READ)
    os.write(1, b"ready\n")
    while True:
        for key, _ in selector.select():
            if key.fd == 0:
                shutil.rmtree(Path(address).parent)
                return
            if key.fileobj is listener:
                caller, _ = listener.accept()
                process = start(caller, listener, selector)
                end = os.pidfd_open(process)
                selector.register(end, selectors.EVENT_READ, (process, caller, end))
                selector.register(caller, selectors.EVENT_READ, (process, caller, end))
                with contextlib.suppress(OSError):
                    caller.sendall(b"%d\n" % process)
            elif key.fileobj in selector.get_map():  # it may have been forgotten in this round
                process, caller, end = key.data
                if key.fileobj is caller:
                    os.kill(process, signal.SIGKILL)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(OSError):
                    caller.sendall(b"%d\n" % status)
                selector.unregister(caller)
                selector.unregister(end)
                caller.close()
                os.close(end)


def start(caller: socket.socket, listener: socket.socket, selector: selectors.BaseSelector) -> int:
    """The id of the process that runs what `caller` asks for."""
    length, streams, _, _ = socket.recv_fds(caller, 4, 3)
    job = caller.recv(int.from_bytes(length, "big"), socket.MSG_WAITALL)
    process = os.fork()
    if process == 0:
        selector.close()
        listener.close()
        caller.close()
        os.setsid()
        for standard, stream in enumerate(streams):
            os.dup2(stream, standard)
            os.close(stream)
        run(*eval(job))
    for stream in streams:
        os.close(stream)
    return process


def run(executable: str, words: list[str], environment: dict[str, str], folder: str) -> None:
    """Be that program, to its end."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    multiprocessing.process.ORIGINAL_DIR = folder  # relative to which its children find the program
    sys.executable = executable  # what it starts is warm, too
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1, errors="backslashreplace")  # noqa: SIM115
    sys.__stdin__, sys.__stdout__, sys.__stderr__ = sys.stdin, sys.stdout, sys.stderr
    status: object = 0
    try:
        program(words)
    except SystemExit as end:
        status = end.code
    except BaseException as error:
        traceback.print_exc()
        status = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    if isinstance(status, str):
        print(status, file=sys.stderr)
    with contextlib.suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status if isinstance(status, int) else int(status is not None))


def program(words: list[str]) -> None:
    first, *others = words
    if first == "-m":
        sys.argv, sys.path[0] = others, os.getcwd()
        runpy.run_module(others[0], run_name="__main__", alter_sys=True)
    elif first in ("-", "-c"):
        sys.argv, sys.path[0] = [first, *others[first == "-c" :]], ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(others[0] if first == "-c" else sys.stdin.read(), "<string>", "exec"), vars(main))
    else:
        sys.argv, sys.path[0] = words, str(Path(first).resolve().parent)
        runpy.run_path(first, run_name="__main__")


if __name__ == "__main__":
    serve(sys.argv[1])
