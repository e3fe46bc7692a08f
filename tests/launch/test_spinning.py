"""Who else runs on the cores, as Linux tells it."""

import os
from pathlib import Path

import pytest

from megalite.launch import host


@pytest.mark.parametrize(
    ("running", "usable", "busy"),
    [(1, 8, False), (2, 8, True), (6, 2, False), (8, 2, True)],
    ids=["alone", "beside one", "on cores that others leave", "on cores that they do not"],
)
def test_a_machine_is_busy_if_others_need_its_cores(
    running: int, usable: int, busy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(host, "usable_cores", lambda: usable)
    load = tmp_path / "loadavg"
    load.write_text(f"0.52 0.58 0.59 {running}/967 12345\n")
    assert host.is_busy(load, looks=2) is busy


def test_where_nobody_tells_libgomp_is_left_alone(tmp_path: Path) -> None:
    assert not host.is_busy(tmp_path / "absent")
