"""The server that tests of object stores use is one, and its proxy fails as it says."""

import time
from pathlib import Path

import pytest

from tests.object_store.server import How, ObjectStore

CONTENT = bytes(range(256)) * 400
PATIENCE = {"config_kwargs": {"connect_timeout": 2, "read_timeout": 2, "retries": {"total_max_attempts": 1}}}


def test_fsspec_finds_the_server_by_the_environment(object_store: ObjectStore, tmp_path: Path) -> None:
    import fsspec

    url = object_store.url()
    (tmp_path / "a").write_bytes(CONTENT)
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    files.put_file(str(tmp_path / "a"), f"{url}/x/a")
    files.pipe_file(f"{url}/b", b"")
    assert files.cat_file(f"{url}/x/a") == CONTENT
    assert files.cat_file(f"{url}/x/a", start=256, end=300) == CONTENT[256:300]
    assert {path: each["size"] for path, each in files.find(url, detail=True).items()} == {
        f"{url[5:]}/b": 0,
        f"{url[5:]}/x/a": len(CONTENT),
    }
    assert object_store.count("PUT", url) == 2
    assert object_store.count("GET", f"{url}/x/a") == 2
    with pytest.raises(FileNotFoundError):
        files.cat_file("s3://no-such-bucket/a")


@pytest.mark.parametrize("how", ["refuse", "cut", "hang", 403, 503])
def test_requests_fail_as_long_as_they_should(object_store: ObjectStore, how: How) -> None:
    import fsspec

    url, files = object_store.url(), fsspec.filesystem("s3", skip_instance_cache=True, **PATIENCE)
    files.retries = 1  # s3fs has its own
    with object_store.failing(how, methods="PUT", keys="*/a") as fault, pytest.raises(Exception):  # noqa: B017, PT011
        files.pipe_file(f"{url}/a", CONTENT)
    assert fault.struck >= 1
    assert not files.exists(f"{url}/a")
    files.pipe_file(f"{url}/a", CONTENT)
    assert files.cat_file(f"{url}/a") == CONTENT
    with object_store.failing("delay", methods="GET", seconds=0.3, times=1):
        begun = time.monotonic()
        assert files.cat_file(f"{url}/a") == CONTENT
        assert time.monotonic() - begun >= 0.3


def test_bytes_are_lost_and_hurt_silently(object_store: ObjectStore) -> None:
    import fsspec

    url, files = object_store.url(), fsspec.filesystem("s3", skip_instance_cache=True)
    with object_store.failing("truncate", methods="PUT", times=1):
        files.pipe_file(f"{url}/a", CONTENT)
    assert files.cat_file(f"{url}/a") == CONTENT[: len(CONTENT) // 2]
    files.pipe_file(f"{url}/a", CONTENT)
    with object_store.failing("corrupt", methods="GET", times=1):
        read = files.cat_file(f"{url}/a")
    assert sum(one != other for one, other in zip(read, CONTENT, strict=True)) == 1


def test_a_dead_server_lives_again_at_the_same_place(object_store: ObjectStore) -> None:
    import fsspec

    url, files = object_store.url(), fsspec.filesystem("s3", skip_instance_cache=True, **PATIENCE)
    files.retries = 1
    files.pipe_file(f"{url}/a", CONTENT)
    with object_store.dead(), pytest.raises(Exception, match="connect"):
        files.cat_file(f"{url}/a")
    assert files.cat_file(f"{url}/a") == CONTENT
