"""Without network, names of the hub are refused within seconds, with advice."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.prepare import hub
from megalite.prepare.prepare import named_tokenizer, prepare


@pytest.fixture
def silent_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A hub that takes connections and never answers: the slowest way to have no network."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(hub, "PATIENCE", 0.5)
    hub.reachable.cache_clear()
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
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
    assert time.monotonic() - begin < 15, "the library's own retries take 23 s"


@pytest.mark.usefixtures("silent_server", "empty_cache")
@pytest.mark.parametrize("name", ["gpt2", "org/name"])
def test_a_tokenizer_without_network_is_refused_in_seconds(name: str) -> None:
    begin = time.monotonic()
    with pytest.raises(UserError, match=r"not in the local cache[\s\S]*to work offline"):
        named_tokenizer(name)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(("status", "there"), [(200, True), (404, True), (403, False), (407, False), (502, False)])
def test_an_answer_is_an_answer_unless_a_proxy_refuses(
    status: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = SimpleNamespace(head=lambda *_, **__: SimpleNamespace(status_code=status))
    monkeypatch.setattr("huggingface_hub.get_session", lambda: answer)
    hub.reachable.cache_clear()
    assert hub.reachable() is there


@pytest.mark.usefixtures("silent_server")
def test_a_resolver_that_hangs_does_not_hold_us(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_session", lambda: time.sleep(3))
    begin = time.monotonic()
    assert not hub.reachable()
    assert time.monotonic() - begin < 1.5


def test_the_offline_switch_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set or tokenizer that is not in the cache is refused at once."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub, "PATIENCE", 60)
    hub.reachable.cache_clear()
    begin = time.monotonic()
    assert not hub.reachable()
    assert time.monotonic() - begin < 1.5
