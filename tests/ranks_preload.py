"""Imported once by the forkserver behind `run_ranks`: whatever ranks will need.

A module that does not import is left to the tests that use it.
"""

import contextlib
import importlib

from tests.ranks import preloaded_modules

for name in preloaded_modules():
    with contextlib.suppress(Exception):
        importlib.import_module(name)

import torch  # noqa: E402

torch.set_num_threads(1)
