"""How the tests of this folder look at refusals: in this process, as the launcher would print them."""

import pytest

from megalite.config.compose import load_config
from megalite.errors.problems import UserError


def refusal(*argv: str, world_size: int = 1) -> UserError:
    """The error that a command line raises; the test fails where it is accepted."""
    with pytest.raises(UserError) as caught:
        load_config(list(argv), world_size)
    return caught.value


def settings(error: UserError) -> list[str]:
    return [problem.setting for problem in error.problems]
