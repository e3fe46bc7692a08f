"""Without network, names of the hub are refused within seconds, with advice."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.launch.environment import read_environment
from megalite.prepare import hub
from megalite.prepare.prepare import prepare
from megalite.prepare.tokenizer import named_tokenizer

ALONE = read_environment({})
ROOT = Path(__file__).parents[2]
PATIENCE = hub.PATIENCE


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and never answers: the slowest way to have no network."""
    for name in (*hub.OFFLINE, "http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(hub, "PATIENCE", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("silent_server", "empty_cache")
def test_a_data_set_without_network_is_refused_in_seconds(config: Config) -> None:
    config.data.source, config.data.path = "hf", "org/name"
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"not in the local cache[\s\S]*to work offline"):
        prepare(config)
    assert time.monotonic() - begin < 5


@pytest.mark.usefixtures("silent_server", "empty_cache")
def test_who_asked_early_waits_no_second_time(config: Config) -> None:
    config.data.source, config.data.path = "hf", "org/name"
    hub.ask_early(config, ALONE)
    time.sleep(hub.PATIENCE)
    begin = time.monotonic()
    assert not hub.reachable()
    assert time.monotonic() - begin < hub.PATIENCE / 2


@pytest.mark.usefixtures("empty_cache")
def test_nobody_asks_for_what_is_here(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in hub.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hub, "_ask", lambda _: pytest.fail("asked"))
    hub.ask_early(config, ALONE)
    config.tokenizer, config.data.source, config.data.path = str(tmp_path), "hf", str(tmp_path)
    hub.ask_early(config, ALONE)
    (tmp_path / "hf" / "hub" / "models--org--name").mkdir(parents=True)
    config.tokenizer = "org/name"
    hub.ask_early(config, ALONE)
    config.tokenizer, config.data.source = "other/name", "tokens"  # its files bring their tokenizer
    hub.ask_early(config, ALONE)
    config.data.source = "text"
    hub.ask_early(config, replace(ALONE, local_rank=1))
    with pytest.raises(pytest.fail.Exception, match="asked"):
        hub.ask_early(config, ALONE)


def test_an_answer_counts_that_a_long_import_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PATIENCE", 0.0)
    monkeypatch.setattr(hub, "_answers", lambda _: time.sleep(0.1) or True)
    assert hub._Question("anywhere").there()


@pytest.mark.usefixtures("silent_server", "empty_cache")
@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_a_tokenizer_without_network_is_refused_in_seconds(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"not in the local cache[\s\S]*to work offline"):
        named_tokenizer(name)
    assert time.monotonic() - begin < 5


@pytest.mark.usefixtures("silent_server")
def test_a_resolver_that_hangs_does_not_hold_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_answers", lambda _: time.sleep(3) or True)
    begin = time.monotonic()
    assert not hub.reachable()
    assert time.monotonic() - begin < 1.5


@pytest.mark.usefixtures("silent_server")
@pytest.mark.parametrize(("status", "there"), [("200 OK", True), ("404 Not Found", True), ("403 Forbidden", False)])
def test_an_answer_is_an_answer_unless_a_proxy_refuses(
    status: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n".encode())

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        assert hub.reachable() is there
        thread.join(5)


def test_the_offline_switch_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_answers", lambda _: True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert not hub.reachable()


@pytest.mark.usefixtures("silent_server", "empty_cache")
@pytest.mark.parametrize("words", [["data=hf", "data.path=org/name"], ["tokenizer=org/name"]], ids=str)
def test_the_command_waits_for_a_silent_hub_while_it_starts(words: list[str], tmp_path: Path) -> None:
    """As a user sees it, with the patience that the code has; on a loaded machine only the difference can be judged."""
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *words, f"run_dir={tmp_path / 'run'}"]

    def seconds(**variables: str) -> float:
        begin = time.monotonic()
        done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **variables})
        assert (done.returncode, done.stderr.count("not in the local cache")) == (2, 1), done.stderr
        return time.monotonic() - begin

    assert PATIENCE <= 3.0, "with a start of under two seconds a refusal takes less than five"
    offline = seconds(HF_HUB_OFFLINE="1")
    assert seconds() < offline + PATIENCE - 0.5, "it asked only when everything was imported"
