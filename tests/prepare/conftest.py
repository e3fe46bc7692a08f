"""Small texts, small configs, and a cache of each test's own."""

from tests.data.conftest import config, write_tokens

__all__ = ["config", "write_tokens"]
