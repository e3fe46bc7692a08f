"""Step times without a store, with one that is idle, and with one that is dead, in turns.

python -m tests.object_store.step_time [ROUNDS]

Each run is a process of its own that saves after step 40 of 120. An idle store has that checkpoint soon; a dead one
refuses connections from step 20 on, and the upload is tried again until the end. Printed are the medians of steps 81 to
119 over all rounds, and the smallest of a round.
"""

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from megalite.train.history import METRICS, read_metrics
from tests.object_store.server import ObjectStore, running
from tests.train.runs import kill, launch, overrides, wait_for_step, write_text

SAVED, FROM, STEPS = 40, 81, 120
SETTINGS = (f"train.steps={STEPS}", f"checkpoint.interval={SAVED}", "train.eval_interval=1000", "train.sample_tokens=0")
LARGER = ("model.hidden_size=128", "train.global_batch_size=16", "train.check_replicas_every=0")
KINDS = ("no store", "idle", "dead")


def step_times(store: ObjectStore, folder: Path, kind: str, number: int) -> list[float]:
    run = f"{kind.replace(' ', '-')}-{number}"
    remote = [] if kind == "no store" else [f"checkpoint.remote={store.url()}"]
    process = launch(overrides(folder, run, *SETTINGS, *LARGER, *remote), variables=store.environment)
    wait_for_step(process, folder / run, SAVED // 2)
    if kind == "dead":
        with store.dead():
            wait_for_step(process, folder / run, STEPS - 1)
            kill(process)
    else:
        wait_for_step(process, folder / run, STEPS - 1)
        kill(process)
    lines = read_metrics(folder / run / METRICS)
    return [line["step_time_s"] for line in lines if "loss" in line and FROM <= line["step"] < STEPS]


def main() -> None:
    times: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as place, running() as store:
        write_text(Path(place) / "text.txt")
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 5):
            for at in range(len(KINDS)):
                kind = KINDS[(at + number) % len(KINDS)]
                times[kind].append(step_times(store, Path(place), kind, number))
                time.sleep(0.1)
    print("| store | median of all | smallest median of a round |\n| --- | --- | --- |")
    for kind, rounds in times.items():
        whole, best = median(one for each in rounds for one in each), min(map(median, rounds))
        print(f"| {kind} | {1000 * whole:.2f} ms | {1000 * best:.2f} ms |")


if __name__ == "__main__":
    main()
