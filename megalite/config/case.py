"""What rules about ranks judge: a config, a world, and what a command asks for beyond them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megalite.config.bounds import has_too_many_sizes, outside
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value


@dataclass(frozen=True)
class Case:
    """One config on one world, of which any setting can be changed to see which rules it would break then.

    `dp`: the data-parallel size that must remain (None: whatever does). `experts`: a mixture of experts even without
    parallel.ep and etp. `split_rank`: see `StageSettings`. `labels`: how the user knows these.
    """

    config: Config
    world_size: int
    dp: int | None = None
    experts: bool = False
    split_rank: int | None = None
    labels: Mapping[str, str] = field(default_factory=lambda: {"world_size": "world size"})

    def value(self, name: str) -> Any:
        return value_of(self.config, name) if name in SETTINGS else getattr(self, name)

    def changed(self, changes: Mapping[str, Any]) -> "Case":
        settings = {name: value for name, value in changes.items() if name in SETTINGS}
        own = {name: value for name, value in changes.items() if name not in SETTINGS}
        return replace(self, config=with_values(self.config, settings), **own)

    def allows(self, name: str, value: Any) -> bool:
        """Whether the setting may have the value, whatever the others are."""
        if name not in SETTINGS or value is None:
            return True
        ramp = name in ("train.global_batch_size", "train.batch_ramp") and self.config.train.batch_ramp is not None
        if ramp and has_too_many_sizes(with_values(self.config, {name: value}).train):
            return False
        return outside(SETTINGS[name], value) is None

    def label(self, name: str) -> str:
        return self.labels.get(name, name)

    def show(self, name: str) -> str:
        """`parallel.pp=4`"""
        return f"{self.label(name)}={yaml_value(self.value(name))}"


def default_of(name: str) -> Any:
    """What it means to leave a setting out."""
    return SETTINGS[name].default if name in SETTINGS else None
