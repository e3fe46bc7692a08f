"""No command is silent for long."""

import time

import pytest

from megalite.commands import command


def test_a_command_that_takes_long_says_so(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "SILENCE_S", 0.05)

    @command.command()
    def slow(options: object, overrides: object) -> command.Shown:
        time.sleep(0.2)
        return command.Shown(["done"])

    assert slow([]) == 0
    said = capfd.readouterr()
    assert said.out == "done\n"
    assert said.err.startswith("megalite: at work\n")
    time.sleep(0.1)
    assert capfd.readouterr().err == "", "it is over"
