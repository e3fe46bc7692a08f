"""Every number that an option of a command takes has bounds, and words that a command does not take are refused."""

from importlib import import_module

import pytest

from megalite.commands.command import Command
from megalite.commands.dispatch import COMMANDS
from megalite.errors.problems import UserError

FOUND: dict[str, Command] = {
    name: getattr(module, "measure" if name == "preflight" else function)
    for name, (place, function, _) in COMMANDS.items()
    if name != "train" and (module := import_module(f"megalite.commands.{place}"))
}
OPTIONS = [
    pytest.param(command, option[0], settings, id=f"{name} {option[0]}")
    for name, command in FOUND.items()
    for option, settings in command.options
    if option[0].startswith("-") and settings.get("action") is None
]
NUMBERS = [each for each in OPTIONS if each.values[2].get("type").__class__.__name__ == "function"]


@pytest.mark.parametrize(("command", "name", "settings"), NUMBERS)
@pytest.mark.parametrize("value", ["nan", "inf", "-1", "1e400", "x", "", "9" * 5000, "1" + "0" * 30])
def test_a_number_out_of_bounds_is_refused(
    command: Command, name: str, settings: dict[str, object], value: str
) -> None:
    if name == "--temperature" and value.startswith("10"):
        return  # nearly all tokens alike
    with pytest.raises(UserError, match=f"{name}.* must be a (whole )?number (from|above) [01]"):
        command.parse([f"{name}={value}"])


def test_no_option_of_commands_reads_numbers_without_bounds() -> None:
    assert (len(OPTIONS) > 25, len(NUMBERS) > 18) == (True, True), "the options are found"
    assert [each.id for each in OPTIONS if each.values[2].get("type") in (int, float)] == []


@pytest.mark.parametrize("name", ["report", "preflight"])
def test_a_command_without_overrides_offers_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        FOUND[name].parse(["--help"])
    assert "OVERRIDES" not in capsys.readouterr().out
    with pytest.raises(UserError, match="unrecognized arguments: --zzz=1"):
        FOUND[name].parse(["--zzz=1", *(["a"] if name == "report" else [])])
