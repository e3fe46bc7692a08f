"""Step times without a store, with one that is idle and with one that is dead: three trainings side by side, which meet
the same load of the machine.

python -m tests.object_store.step_time [SECONDS]

The first saves behind the training every 40 steps and has no store, the second has one and nothing to upload, the third
saves as the first and uploads to a server that is gone. Compared are the steps from 45 on that all have done.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from megalite.train.history import METRICS, read_metrics
from tests.object_store.server import running
from tests.train.runs import kill, launch, overrides, wait_for_step, write_text

SETTINGS = ("train.steps=400", "train.eval_interval=10000", "train.sample_tokens=0", "checkpoint.async=true")


def times_of(run: Path) -> dict[int, float]:
    return {line["step"]: line["step_time_s"] for line in read_metrics(run / METRICS) if "loss" in line}


def main() -> None:
    lasts_s = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    with tempfile.TemporaryDirectory() as place, running() as alive, running() as dead:
        write_text((folder := Path(place)) / "text.txt")
        words = {
            "none": (alive, ["checkpoint.interval=40"]),
            "idle": (alive, ["checkpoint.interval=1000", f"checkpoint.remote={alive.url()}"]),
            "dead": (dead, ["checkpoint.interval=40", f"checkpoint.remote={dead.url()}"]),
        }
        runs = {
            kind: launch(overrides(folder, kind, *SETTINGS, *each), variables=store.environment)
            for kind, (store, each) in words.items()
        }
        wait_for_step(runs["dead"], folder / "dead", 5)
        dead.stop()
        deadline = time.monotonic() + lasts_s
        while time.monotonic() < deadline and all(process.poll() is None for process in runs.values()):
            time.sleep(0.1)
        for process in runs.values():
            kill(process)
        times = {kind: times_of(folder / kind) for kind in runs}
        dead.start()  # `running` stops it
    steps = range(45, min(map(max, times.values())))
    for kind, of_step in times.items():
        print(f"{kind}: median of {len(steps)} steps {1000 * median(of_step[step] for step in steps):.2f} ms")


if __name__ == "__main__":
    main()
