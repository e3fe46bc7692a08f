"""What all tests share: one thread, no network, no trace in the user's cache, and when `gpu` and `long` tests run."""

import os
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import settings

from megalite.launch.process import end_compile_workers
from tests.object_store.server import ObjectStore, running

# Set before anything imports torch or a Hugging Face library: they read these once.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["WANDB_MODE"] = "disabled"  # whoever runs the tests may have a key
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # containers set it; each program started here would compile us anew
_CACHE = tempfile.TemporaryDirectory(prefix="megalite-test-cache-")
os.environ["XDG_CACHE_HOME"] = _CACHE.name
for name in list(os.environ):
    if name.startswith(("SLURM_", "TORCHELASTIC_")) or name in {
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    }:
        del os.environ[name]  # tests started inside a job are not part of that job


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    """Generated examples are few and the same in every plain run and have no time limit, so that a change fails by its
    own fault alone; a full run searches anew, among six times as many."""
    settings.register_profile("same", derandomize=True, deadline=None, max_examples=25)
    if config.getoption("--full"):
        os.environ["MEGALITE_TESTS_FULL"] = "1"  # for tests.warm
        settings.register_profile("anew", max_examples=150)
        settings.load_profile("anew")
    else:
        settings.load_profile("same")


def pytest_unconfigure() -> None:
    """A process that has compiled ends at once."""
    end_compile_workers()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--full"):
            item.add_marker(pytest.mark.skip(reason="long: run by scripts/test.sh --full"))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def fresh_compiler() -> None:
    """Forgets what was compiled before: torch compiles a function in eight variants at most, in all tests together."""
    import torch

    torch.compiler.reset()


@pytest.fixture(params=["interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def triton_device(request: pytest.FixtureRequest) -> str:
    """Where kernels written in Triton run: on a GPU or, for `TRITON_INTERPRET=1`, in numpy. Triton must see that when
    it is imported."""
    if request.param == "cuda":
        return "cuda"
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("needs TRITON_INTERPRET=1 and triton")
    pytest.importorskip("triton")
    return "cpu"


@pytest.fixture(scope="session")
def object_store() -> Iterator[ObjectStore]:
    """An S3 server that runs here, with a proxy that fails when asked to; the environment tells fsspec where it is."""
    with running() as store, pytest.MonkeyPatch.context() as patch:
        for name, value in store.environment.items():
            patch.setenv(name, value)
        yield store


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
