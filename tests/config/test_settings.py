"""A config goes out by the names that users know, and comes back by them."""

import inspect
import keyword
from dataclasses import replace
from functools import reduce
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf

from megalite.checkpoint.resume_rules import flatten
from megalite.config.compose import load_config
from megalite.config.document import generated_files
from megalite.config.schema import CheckpointConfig, Config
from megalite.config.settings import SETTINGS, as_plain, flat, typed_settings, value_of, with_values
from tests.config.test_document import ROOT

OTHER_VALUES = {
    int: 12,
    float: 0.25,
    bool: True,
    str: "other",
    list[int]: [3, 7],
    list[float]: [0.5],
    list[str]: ["norm"],
    Any: ["a", 1],
}


def other(name: str) -> Any:
    return False if SETTINGS[name].default is True else OTHER_VALUES[SETTINGS[name].kind]


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_is_written_read_and_changed_by_its_name(name: str) -> None:
    changed = with_values(Config(), {name: other(name)})
    assert changed != Config()
    assert value_of(changed, name) == other(name)
    plain = as_plain(changed)
    assert reduce(dict.__getitem__, name.split("."), plain) == other(name)
    assert with_values(Config(), flat(yaml.safe_load(yaml.safe_dump(plain)))) == changed


def test_what_is_written_holds_every_setting_and_nothing_else() -> None:
    plain = as_plain(Config())
    assert sorted(flatten(plain)) == sorted(SETTINGS)


def test_what_is_written_shares_nothing_with_the_config() -> None:
    config = Config()
    as_plain(config)["optimizer"]["betas"].append(1.0)
    assert config == Config()


def test_a_keyword_names_a_setting_whose_field_is_called_otherwise() -> None:
    renamed = {name: setting.field for name, setting in SETTINGS.items() if setting.leaf != setting.field}
    assert renamed == {"checkpoint.async": "asynchronous"}
    assert all(keyword.iskeyword(SETTINGS[name].leaf) for name in renamed), "any other name a field can have itself"


def test_users_never_see_the_name_of_the_field() -> None:
    written = [*generated_files(ROOT).values(), yaml.safe_dump(as_plain(load_config(["checkpoint.async=true"], 1)))]
    assert not [text for text in written if "asynchronous" in text]
    assert "asynchronous" in inspect.signature(CheckpointConfig).parameters


def test_a_copy_with_other_values_leaves_the_config_and_its_other_groups() -> None:
    config = Config()
    changed = with_values(config, {"checkpoint.async": True, "checkpoint.keep": 7, "seed": 1})
    assert changed == replace(config, seed=1, checkpoint=CheckpointConfig(keep=7, asynchronous=True))
    assert config == Config()
    assert changed.model is config.model


def test_the_typed_tree_has_the_defaults() -> None:
    assert with_values(Config(), flat(OmegaConf.to_container(typed_settings()))) == Config()
