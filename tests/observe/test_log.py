"""The log of a rank: what is written there cannot drive the terminal of who reads it."""

from pathlib import Path

from megalite.launch.context import ParallelContext
from megalite.train.run_log import open_log


def test_control_characters_are_written_out_and_lines_stay_lines(tmp_path: Path) -> None:
    log = open_log(tmp_path, ParallelContext())
    log.info("saved %s\n\tand more", "a\x1b[2Jb\x07")
    log.error("failed\rwell")
    lines = (tmp_path / "logs" / "rank-00000.log").read_text().splitlines()
    assert lines[1].endswith("INFO saved a\\x1b[2Jb\\x07")
    assert lines[2] == "\tand more"
    assert lines[3].endswith("ERROR failed\\rwell")
