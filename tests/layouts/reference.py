"""The single process to which every layout is compared; trained once for each config."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config.schema import Config
from megalite.launch.context import ParallelContext
from megalite.prepare.prepare import prepare
from tests.layouts.training import Trace, small_config, train


@cache
def _reference(workplace: tuple[Path, Path], family: str, overrides: str) -> tuple[Config, Trace]:
    """The single process, which never initialises torch.distributed."""
    config = small_config(*workplace, family, **json.loads(overrides))
    prepare(config, None)
    trace = train(ParallelContext(dtype=torch.float64), config)
    assert not dist.is_initialized()
    return config, trace


def reference(workplace: tuple[Path, Path], family: str, overrides: dict[str, Any]) -> tuple[Config, Trace]:
    return _reference(workplace, family, json.dumps(overrides))
