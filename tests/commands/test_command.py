"""What all commands keep: none is silent for long, and kinds of plan are commands by their own names."""

import time

import pytest

from megalite.commands import command, dispatch


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


def test_a_kind_of_plan_is_a_command_by_its_own_name(capfd: pytest.CaptureFixture[str]) -> None:
    assert dispatch.main(["plan", "schedule", "parallel.pp=2"]) == 0
    said = capfd.readouterr().out
    assert dispatch.main(["schedule", "parallel.pp=2"]) == 0
    assert (capfd.readouterr().out, said.count("rank 1")) == (said, 1)
    assert dispatch.main(["schedul"]) == 2
