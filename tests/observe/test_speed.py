"""One speed for a run, wherever it is shown: the tokens of training steps over the time of training steps. The last
words of a start tell medians of these steps, too."""

import statistics
from dataclasses import replace
from itertools import accumulate, repeat
from pathlib import Path

import pytest

from megalite.observe import readable
from megalite.observe.report.page import render
from megalite.observe.run_data import read_run
from megalite.train import metrics
from megalite.train.history import read_events, read_metrics
from tests.train.runs import write_text
from tests.train.test_run import config_for, start


def test_terminal_report_comparison_and_metrics_have_the_same_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With lines of every third step, evaluations in between, and a resume."""
    times = accumulate(repeat(1.0), lambda now, step: now + step + now / 10)  # no two steps take equally long
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", log_interval=3)
    assert start(replace(config, train=replace(config.train, steps=7))) == 0
    capsys.readouterr()
    assert start(config) == 0
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
    assert [line["step"] for line in lines] == [3, 6, 7, 9, 12]
    seconds = [steps * line["step_time_s"] for steps, line in zip((3, 3, 1, 2, 3), lines, strict=True)]
    assert lines[-1]["training_s"] == pytest.approx(sum(seconds))
    for line in lines:
        assert sum(line["time_split"].values()) == pytest.approx(line["step_time_s"], abs=1e-5)  # they are rounded
    mean, newest = 12 * 4 * 16 / sum(seconds), 3 * 4 * 16 / seconds[-1]
    assert (lines[-1]["mean_tokens_per_s"], lines[-1]["tokens_per_s"]) == pytest.approx((mean, newest))
    assert f"(medians); over all steps {readable.rate(mean)} tokens/s\n" in capsys.readouterr().out
    run = read_run(tmp_path / "run")
    tile = f"<dt>tokens/s</dt><dd>{readable.rate(mean)}<small>newest {readable.rate(newest)}"
    assert tile in render([run])
    other = replace(run, folder=tmp_path / "other")
    assert render([run, other]).count(f"<td>{readable.rate(mean)}</td>") == 2


def test_the_last_words_are_medians_of_the_steps_after_the_first_of_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each reading of the clock comes later after the one before: the first step of a start is the fastest here."""
    times = accumulate(repeat(1.0), lambda now, step: now + step + now / 10)
    monkeypatch.setattr(metrics, "perf_counter", lambda: next(times))
    config = config_for(write_text(tmp_path / "text.txt"), tmp_path / "run", eval_interval=3)
    for first, last in ((1, 1), (2, 7), (8, 12)):
        assert start(replace(config, train=replace(config.train, steps=last))) == 0
        said = capsys.readouterr().out
        lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "loss" in line]
        found = [line["step_time_s"] for line in lines if first < line["step"] <= last]
        end = read_events(tmp_path / "run" / "events.jsonl")[-1]
        assert end["kind"] == "finished"
        assert ("median_step_time_s" in end) == ("(medians)" in said) == bool(found)
        if found:
            seconds = statistics.median(found)
            rate = statistics.median(4 * 16 / each for each in found)  # not 4 * 16 / seconds where their number is even
            assert (end["median_step_time_s"], end["median_tokens_per_s"]) == pytest.approx((seconds, rate))
            words = f"{readable.rate(rate)} tokens/s, {readable.step_time(seconds)} a step (medians); over all steps "
            assert f"  speed            {words}{readable.rate(lines[-1]['mean_tokens_per_s'])} tokens/s\n" in said
