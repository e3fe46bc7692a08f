"""A real browser draws every chart of a report without an error; skipped where there is no Chromium."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from megalite.layout.ranks import ParallelLayout
from megalite.observe.report.page import write_report
from tests.observe.report.runs import event, sizes_at, write_run

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--enable-logging=stderr")


def drawn(page: Path) -> list[tuple[str, int]]:
    """The title of each chart of a page and how many shapes it has. An error of the script is one of the test."""
    command = [str(BROWSER), *QUIET, f"--user-data-dir={page.parent / 'browser'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert not re.search(r"CONSOLE|Uncaught|Refused to", done.stderr), done.stderr
    (page.parent / "browser" / "page").write_text(done.stdout)
    _, *charts = re.split('<svg role="img" class="chart" aria-label="', done.stdout)
    return [(chart.partition('"')[0], len(re.findall("<(?:path|rect|circle)", chart))) for chart in charts]


def test_all_charts_of_a_run_are_drawn(tmp_path: Path) -> None:
    told = [event("ranks", 40, memory_gib=[1.0, 2.0], compute_s=[0.1, 0.2]), event("skipped", 7, loss=float("nan"))]
    run = write_run(tmp_path / "run", layout=ParallelLayout(dp=2), mfu=0.2, events=told)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    moe = {"imbalance_max": 3.0, "imbalance_mean": 2.5, "entropy": 1.0, "tokens_per_expert": [[1, 0, 3], [0, 4, 0]]}
    sources = {"source_loss": {"web": 4.0, "code": 3.0}, "source_tokens": {"web": 300, "code": 100}}
    added = {"moe": moe, **sources}
    sets = {"validation": {"web": {"loss": 4.0, "bits_per_byte": 1.5}, "code": {"loss": 3.5, "bits_per_byte": None}}}
    lines = [line if "loss" in line else {**line, **sets} for line in lines]
    more = [{**line, **added, **sizes_at(line["step"])} if "loss" in line else line for line in lines]
    content = "".join(json.dumps(line) + "\n" for line in more)
    (run / "metrics.jsonl").write_text(content)
    found = drawn(write_report([run], tmp_path / "run.html"))
    assert [title for title, _ in found] == [
        "Loss", "Validation loss by set", "Training loss by source", "Tokens by source",
        "Learning rate", "Gradient norm", "Bits per byte, validation", "Update over weights, by group",
        "Largest attention logit", "Update over weights, by layer", "Largest attention logit, by layer",
        "Output, by layer", "Gradient, by layer", "Tokens per second", "Time of a step",
        "Model FLOPs utilisation", "Peak memory", "Peak memory by rank", "Computing time by rank",
        "time of a step by part", "Load imbalance", "Router entropy", "Load of each layer, over the run",
        "Tokens of each expert, in all steps", "Tokens of each expert, in the newest steps",
    ]  # fmt: skip
    assert min(shapes for _, shapes in found) > 3


def test_all_charts_of_a_comparison_are_drawn_over_tokens_where_batches_differ(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, lr=lr) for name, lr in (("first", 1e-3), ("second", 2e-3))]
    for axis in ("step", "tokens"):
        found = drawn(write_report(runs, tmp_path / f"{axis}.html"))
        assert {"Loss: training", "Loss: validation", "loss over optimizer.lr"} <= {title for title, _ in found}
        assert min(shapes for _, shapes in found) > 3
        assert f">{axis}</text>" in (tmp_path / "browser" / "page").read_text()
        lines = [json.loads(line) for line in (runs[1] / "metrics.jsonl").read_text().splitlines()]
        growing = [line | {"tokens": 2048 * line["step"] ** 2 // 40} for line in lines]
        (runs[1] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in growing))
