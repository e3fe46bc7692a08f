"""Whether a disk has room for a run's checkpoints is known before the run begins."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from megalite.checkpoint.run_folder import require_room
from megalite.errors.problems import UserError


@pytest.mark.parametrize("total", [10**9, 0])
def test_a_checkpoint_needs_room_where_the_disk_tells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, total: int
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=total, free=999))
    require_room(tmp_path / "later", 999)
    if total:
        with pytest.raises(UserError, match=r"about 0.0 MiB, 0.0 MiB are free[\s\S]*a folder on another disk"):
            require_room(tmp_path, 1000)
    else:
        require_room(tmp_path, 1000)
