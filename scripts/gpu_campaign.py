"""The measurements of a machine with one GPU: is it right, is it fast, which choices are best. Ten minutes a part.

    python scripts/gpu_campaign.py --part 1 --out FOLDER      each operation, training, resuming: are they right?
    python scripts/gpu_campaign.py --part 2 --out FOLDER      speed beside a plain PyTorch loop and transformers
    python scripts/gpu_campaign.py --part 3 --out FOLDER      attention kernels, chunks, batches, graphs, fp8, experts
    python scripts/gpu_campaign.py --page                     writes docs/performance.md's table of docs/measurements

Each rung (gpu_rungs.py) runs in a process of its own with a time limit and adds one line to FOLDER/part-N.jsonl; one
that fails or takes too long stops no other. A second start does what is not "ok" there yet, for the same commit, torch
and device. `--device cpu` rehearses it on small shapes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from gpu_rungs import RUNGS, Rung

ROOT = Path(__file__).resolve().parents[1]
PART_S = 600.0
QUERY = "clocks.sm,clocks.mem,temperature.gpu,power.draw,driver_version"
BEGIN, END = "<!-- measured: begin -->\n", "<!-- measured: end -->\n"


def run_part(rungs: Sequence[Rung], out: Path, device: str, limit_s: float = PART_S) -> list[dict[str, Any]]:
    """All rungs in order, until the time is over; their records, which are added to `out`. What is "ok" there already,
    for this commit and device, is not run again."""
    records, end = [], time.monotonic() + limit_s
    about = {"commit": _output(["git", "-C", str(ROOT), "rev-parse", "HEAD"]), "torch": torch.__version__}
    about["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    known = [json.loads(line) for line in out.read_text().splitlines()] if out.exists() else []
    done = {one["rung"]: one for one in known if about["commit"] and one.items() >= (about | {"status": "ok"}).items()}
    for rung in rungs:
        if rung.name in done:
            records.append(done[rung.name])
            continue
        left = min(rung.limit_s, end - time.monotonic())
        before = clocks() if device == "cuda" else {}
        record = about | {"driver": before.get("driver_version"), "rung": rung.name} | _run(rung, device, left)
        record |= {"clocks_before": before, "clocks_after": clocks() if device == "cuda" else {}}
        with out.open("a") as file:
            file.write(json.dumps(record) + "\n")
        records.append(record)
        print(f"{record['status']:>8}  {record['seconds']:6.1f} s  {rung.name}", flush=True)
    return records


def _run(rung: Rung, device: str, limit_s: float) -> dict[str, Any]:
    """Status, seconds, figures and last words of one rung."""
    begin, figures, words = time.monotonic(), {}, ""
    if limit_s <= 0:
        return {"status": "no time", "seconds": 0.0, "figures": {}, "last_words": ""}
    with tempfile.TemporaryDirectory(prefix="megalite-rung-") as folder:
        answer, said = Path(folder, "figures.json"), Path(folder, "said")
        command = [sys.executable, str(Path(__file__).with_name("gpu_rungs.py")), rung.name, device, str(answer)]
        with said.open("w") as stream:
            process = subprocess.Popen(command, stdout=stream, stderr=stream, start_new_session=True, cwd=ROOT)
            try:
                status = "ok" if process.wait(limit_s) == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "too slow"
            finally:
                _end(process)
        words = said.read_text(errors="replace")[-2000:]
        with suppress(OSError, ValueError):
            figures = json.loads(answer.read_text())
    return {"status": status, "seconds": round(time.monotonic() - begin, 1), "figures": figures, "last_words": words}


def _end(process: "subprocess.Popen[bytes]") -> None:
    """The rung's process and all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def clocks() -> dict[str, str]:
    """What nvidia-smi says of the first GPU; nothing where it is missing."""
    values = _output(["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "--id=0"]).split(", ")
    names = QUERY.split(",")
    return dict(zip(names, values, strict=True)) if len(values) == len(names) else {}


def _output(command: Sequence[str]) -> str:
    with suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Rung, status, seconds, figures: one line each, as Markdown."""
    rows = ["| rung | status | seconds | figures |", "| --- | --- | --- | --- |"]
    for record in records:
        figures = ", ".join(f"{name} {_shown(value)}" for name, value in record["figures"].items())
        rows.append(f"| {record['rung']} | {record['status']} | {record['seconds']:.0f} | {figures} |")
    return "\n".join(rows)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def page_with(text: str, folder: Path) -> str:
    """The page's text with the table of all measurements of the folder between its marks."""
    parts = []
    for path in sorted(folder.glob("*.jsonl")):
        records = [json.loads(line) for line in path.read_text().splitlines()]
        first = records[0]
        where = f"{first['device']}, driver {first['driver']}, torch {first['torch']}, commit {first['commit'][:12]}"
        parts.append(f"**{path.stem}**: {where}\n\n{table(records)}\n")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + ("\n".join(parts) or "Nothing is measured yet.\n") + END + after


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", type=int, choices=(1, 2, 3))
    parser.add_argument("--out", type=Path, metavar="FOLDER")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--page", action="store_true", help="write the table of docs/measurements into the page")
    options = parser.parse_args(arguments)
    if options.page:
        page = ROOT / "docs" / "performance.md"
        page.write_text(page_with(page.read_text(), ROOT / "docs" / "measurements"))
        return 0
    if options.part is None or options.out is None:
        parser.error("--part and --out, or --page")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this torch sees no CUDA device (--device cpu rehearses)")
    options.out.mkdir(parents=True, exist_ok=True)
    rungs = [rung for rung in RUNGS if rung.part == options.part]
    records = run_part(rungs, options.out / f"part-{options.part}.jsonl", options.device)
    print("\n" + table(records))
    return 0 if all(record["status"] == "ok" for record in records) else 1


if __name__ == "__main__":
    sys.exit(main())
