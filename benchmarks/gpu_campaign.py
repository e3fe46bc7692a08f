"""The measurements of a machine with one GPU: is it right, and how fast. 280 seconds do the first and seven timings.

    python benchmarks/gpu_campaign.py --out FOLDER                 what is right, all at once; then one timing at a time
    python benchmarks/gpu_campaign.py --out FOLDER --known FILE    goes on: what is "ok" in FILE is not done again

Each rung (gpu_rungs.py) runs in a process of its own with a time limit and adds one line to FOLDER/results.jsonl; one
that fails or takes too long stops no other. What is "ok" there already, or in a FILE of another folder, for the same
commit, torch and device, is done. The commit is git's or, in a copy without .git, what the file COMMIT in it says
(`git rev-parse HEAD > COMMIT`). `--device cpu` rehearses all of it on small shapes.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS, RIGHT_S = 280.0, 110.0  # of the whole, and of what is right
QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
NEEDED = (  # to import, and to run the tests
    *("torch", "transformers", "tokenizers", "safetensors", "numpy", "pandas", "pyarrow", "PyYAML", "Jinja2"),
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "datasets", "dill", "multiprocess", "xxhash", "fsspec"),
    *("pytest", "pytest-xdist", "hypothesis"),
)
RIGHT = (
    *("products", "fp8_products", "attention", "rotary", "head_and_loss", "embedding", "steps", "training", "resuming"),
    "tests",
)


@dataclass(frozen=True)
class Timing:
    """A shape of gpu_rungs.py, or one of SHAPES, on one of the sides of benchmark_sides.py."""

    side: str
    shape: str
    settings: tuple[str, ...] = ()
    batch: int | None = None  # sequences of a microbatch; None: the shape's
    microbatches: int = 1

    @property
    def name(self) -> str:
        batch = [f"batch={self.batch}"] if self.batch else []
        several = [f"microbatches={self.microbatches}"] if self.microbatches > 1 else []
        return " ".join([self.side, self.shape, *batch, *several, *self.settings])


TIMINGS = (
    *(Timing("megalite", "124M"), Timing("plain loop", "124M"), Timing("megalite", "1.3B")),
    *(Timing("megalite", "7B, 8 layers"), Timing("peer", "124M"), Timing("megalite", "350M")),
    Timing("megalite", "124M", ("train.attention=flash",)),
    # Beyond 280 s: a second command does these, and in its time first what docs/performance.md has figures of.
    *(Timing("megalite", "experts, 4 layers", microbatches=several) for several in (1, 4)),
    Timing("megalite", "124M", batch=4),  # a graph, if that pays
    *(Timing("megalite", "124M", (setting,)) for setting in ("train.attention=flex", "train.deterministic=true")),
    *(Timing("megalite", "124M", (f"train.cuda_graph={graph}",), batch=4) for graph in ("false", "true")),
    *(Timing("megalite", "1.3B", (f"train.fp8={recipe}",)) for recipe in ("tensorwise", "rowwise")),
    *(
        Timing("megalite", "1.3B", (f"train.fp8={recipe}", "train.fp8_weight_gradients=true"))
        for recipe in ("tensorwise", "rowwise")
    ),
    Timing("megalite", "124M", ("train.cuda_graph=false",), batch=64),
    *(Timing("megalite", shape, ("train.cuda_graph=true",)) for shape in ("124M", "experts, 4 layers")),
    *(Timing("megalite", "124M", (f"train.cuda_graph={it}", "model.dropout=0.1"), batch=4) for it in ("false", "true")),
    *(Timing("megalite", "7B, 8 layers", microbatches=4), Timing("plain loop", "1.3B")),
)
FAST = ("ceilings", *(timing.name for timing in TIMINGS), "kinds of kernels")
WARM = [f"warm {timing.name}" for timing in (TIMINGS[0], TIMINGS[1], TIMINGS[4])]  # inductor's cache keeps it


class Process:
    """A rung that runs, with all that it starts."""

    def __init__(self, rung: str, device: str, limit_s: float, folder: Path, *, alone: bool) -> None:
        self.rung, self.begin, self.end = rung, time.monotonic(), time.monotonic() + limit_s
        stem = re.sub(r"\W+", "_", rung)
        self._answer, self._said = folder / f"{stem}.json", folder / f"{stem}.log"
        command = [sys.executable, str(Path(__file__).with_name("gpu_rungs.py")), rung, device, str(self._answer)]
        few = {} if alone else {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "2"}
        with self._said.open("w") as said:
            self._process = subprocess.Popen(
                command, stdout=said, stderr=said, start_new_session=True, cwd=ROOT, env=os.environ | few
            )

    def record(self) -> dict[str, Any] | None:
        """Status, seconds, figures and last words; None while it runs and has time."""
        status = self._process.poll()
        if status is None and time.monotonic() < self.end:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        figures: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            figures = json.loads(self._answer.read_text())
        word = {0: "ok", None: "too slow"}.get(status, "failed")
        seconds, words = round(time.monotonic() - self.begin, 1), self._said.read_text(errors="replace")[-2000:]
        return {"rung": self.rung, "status": word, "seconds": seconds, "figures": figures, "last_words": words}


class Campaign:
    """Runs rungs and keeps their records, by name."""

    def __init__(self, out: Path, known: Sequence[Path], about: Mapping[str, str], device: str, seconds: float) -> None:
        self._file, self._about, self._device = out / "results.jsonl", dict(about), device
        self._end = time.monotonic() + seconds
        self.records: dict[str, dict[str, Any]] = {}
        wanted = self._about | {"status": "ok"}
        for file in (*known, *([self._file] if self._file.exists() else [])):
            try:
                lines = [json.loads(line) for line in file.read_text().splitlines()]
                by_name = [(line["rung"], line) for line in lines]
            except (ValueError, TypeError, KeyError) as error:
                raise SystemExit(f"{file} holds something else than results of this command: {error!r}") from error
            self.records |= {name: line for name, line in by_name if line.items() >= wanted.items()}
        out.mkdir(parents=True, exist_ok=True)

    def run(self, rungs: Sequence[str], at_a_time: int, limit_s: float) -> None:
        """Run the rungs that have no record yet, until the time is over."""
        waiting = [rung for rung in rungs if rung not in self.records]
        running: list[tuple[Process, dict[str, str]]] = []
        with tempfile.TemporaryDirectory(prefix="megalite-rungs-") as folder:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    rung, left = waiting.pop(0), min(limit_s, self._end - time.monotonic())
                    if left <= 0:
                        self._note({"rung": rung, "status": "no time", "seconds": 0.0, "figures": {}, "last_words": ""})
                    else:
                        process = Process(rung, self._device, left, Path(folder), alone=at_a_time == 1)
                        running.append((process, clocks(self._device)))
                for one in list(running):
                    if (record := one[0].record()) is not None:
                        running.remove(one)
                        if record["status"] == "too slow" and time.monotonic() >= self._end:
                            record["status"] = "no time"
                        self._note(record | {"clocks_before": one[1], "clocks_after": clocks(self._device)})
                time.sleep(0.1)

    def _note(self, record: dict[str, Any]) -> None:
        record = self._about | record
        self.records[record["rung"]] = record
        with self._file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(f"{record['status']:>8}  {record['seconds']:6.1f} s  {record['rung']}", flush=True)


def clocks(device: str) -> dict[str, str]:
    """Clocks, temperature and power of the first GPU by nvidia-smi; empty without it."""
    query = ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "--id=0"]
    values, names = _output(query).split(", ") if device == "cuda" else [], QUERY.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _output(command: Sequence[str]) -> str:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT).stdout.strip()
    return ""


def missing_packages() -> list[str]:
    """Packages that are not installed, with the versions of requirements.txt and requirements-test.txt."""
    pinned = [line for name in ("", "-test") for line in (ROOT / f"requirements{name}.txt").read_text().splitlines()]
    found = []
    for name in NEEDED:
        try:
            version(name)
        except PackageNotFoundError:
            found.append(next(line for line in pinned if line.startswith(f"{name}==")))
    return found


def how_to_bring(packages: Sequence[str]) -> str:
    """Commands for a machine with a package index, and for this one."""
    python, names = f"Python {sys.version_info.major}.{sys.version_info.minor}", " ".join(packages)
    return (
        f"not installed here: {names}\n"
        f"  where there is an index, with {python}:  pip wheel --no-deps --wheel-dir wheels {names}\n"
        "  here:  pip install --no-index --no-deps --target packages wheels/*.whl; export PYTHONPATH=$PWD/packages"
    )


def commit() -> str:
    """The commit by git or, without git, by the file COMMIT, which may be of an older copy; empty: neither."""
    if (ROOT / ".git").exists() and (said := _output(["git", "rev-parse", "HEAD"])):
        return said
    return (ROOT / "COMMIT").read_text().strip() if (ROOT / "COMMIT").exists() else ""


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Rung, status, seconds, figures: one line each, as Markdown."""
    rows = ["| rung | status | seconds | figures |", "| --- | --- | --- | --- |"]
    for record in records:
        figures = ", ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in record["figures"].items()
        )
        rows.append(f"| {record['rung']} | {record['status']} | {record['seconds']:.0f} | {figures} |")
    return "\n".join(rows)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="FOLDER", required=True)
    parser.add_argument("--known", type=Path, metavar="FILE", nargs="+", default=[], help="results.jsonl of before")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"the time for all (default: {SECONDS:.0f})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    options = parser.parse_args(arguments)
    if missing := missing_packages():
        parser.error(how_to_bring(missing))
    if not (revision := commit()):
        parser.error(f"no git here: write the commit into {ROOT / 'COMMIT'} (git rev-parse HEAD > COMMIT)")
    if unread := [str(path) for path in options.known if not path.is_file()]:
        parser.error(f"--known: no file {', '.join(unread)}")
    import torch

    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device (--device cpu rehearses)")
    name = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    about = {"commit": revision, "torch": torch.__version__, "device": name}
    campaign = Campaign(options.out, options.known, about, options.device, options.seconds)
    right = [rung for rung in RIGHT if rung not in campaign.records]
    at_a_time = len(right) + 1 if options.device == "cuda" else 2
    campaign.run([*right, *([] if TIMINGS[0].name in campaign.records else WARM)], at_a_time, RIGHT_S)
    campaign.run(FAST, 1, 600.0)
    print("\n" + table([*campaign.records.values()]))
    failed = [rung for rung, record in campaign.records.items() if record["status"] not in ("ok", "no time")]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
