"""What all commands keep: none is silent for long, and sizes that nobody means are refused at once."""

import time

import pytest

from megalite.commands import command, dispatch
from megalite.commands.schedule import main as schedule
from megalite.commands.sequence import main as sequence


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


HUGE = ["parallel.pp=2 parallel.vpp=100000", "parallel.pp=1000000", "parallel.pp=4 train.global_batch_size=1000000"]
CUT = "train.micro_batch_size=1 train.seq_length=2000000000"


@pytest.mark.parametrize(
    ("main", "line"), [*((schedule, f"{one} {CUT}") for one in HUGE), (sequence, f"parallel.cp=1000000 {CUT}")]
)
def test_sizes_that_nobody_means_are_refused_with_sizes_that_take_seconds(
    main: command.Command, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    begin = time.process_time()
    assert main(line.split()) == 2
    assert time.process_time() - begin < 5
    said = capfd.readouterr().err
    assert "too many" in said
    advised = said.rpartition("fix: ")[2].split()[0]
    begin = time.process_time()
    if main is schedule:
        assert main([*line.split(), advised]) == 0
        assert time.process_time() - begin < 15
