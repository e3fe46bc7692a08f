"""The view of a run: aligned lines, a summary, and numbers that stay readable when they go bad."""

import io
import math
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.observe import readable
from megalite.observe import terminal as terminal_module
from megalite.observe.run_data import RunData
from megalite.observe.terminal import NAMES_EVERY, Terminal, curve

STEP: dict[str, Any] = {
    "step": 1,
    "tokens": 4096,
    "loss": 8.3213,
    "lr": 1e-5,
    "grad_norm": 2.5,
    "tokens_per_s": 13421.4,
    "mean_tokens_per_s": 12000.0,
    "step_time_s": 0.3052,
    "training_s": 0.34,
    "memory_gib": 1.214,
    "data_wait_share": 0.0012,
    "time_split": {},
    "mfu": None,
    "mfu_causal": None,
    "bad_steps": 0,
}


def line(**changes: Any) -> dict[str, Any]:
    return STEP | changes


def evaluation(step: int, loss: float, bits_per_byte: float | None) -> dict[str, Any]:
    measures = {"val_loss": loss, "val_perplexity": math.exp(loss), "val_bits_per_byte": bits_per_byte}
    return {"step": step, "tokens": 1000, **measures, "eval_time_s": 1.23}


COMMAND = "python pretrain_gpt.py 'data.path=my file.txt' train.steps=300"


def a_run(
    sample: tuple[str, str] = ("def ", "foo(self):\n    return \x1b[31m1"),
    command: str = COMMAND,
    folder: str = "runs/tiny-stdlib-1a2b",
    step: int = 300,
) -> RunData:
    run = RunData(Path(folder), {"train.steps": 300})
    run.add({"time": 1.0, "step": 0, "kind": "start", "command": command})
    speed = {"mean_tokens_per_s": 13421.4, "tokens_per_s": 9000.0, "tokens": 1_228_800}
    for at, loss in ((1, 8.3213), (2, 7.5), (step, 4.1234)):
        run.add({"step": at, "loss": loss, **speed})
    for at, loss in ((100, 4.9), (200, 4.2), (300, 4.3)):
        run.add({"step": at, "val_loss": loss, "val_perplexity": 73.7, "val_bits_per_byte": 2.31})
    run.add({"time": 2.0, "step": step, "kind": "sample", "prompt": sample[0], "text": sample[1]})
    return run


def finish(terminal: Terminal, run: RunData, stopped_by: str | None = None) -> None:
    terminal.follow(run, "tiny on stdlib")
    end = {"kind": "finished"} if stopped_by is None else {"kind": "stopped", "by": stopped_by}
    medians = {"median_tokens_per_s": 14000.0, "median_step_time_s": 0.3052} if stopped_by is None else {}
    run.add(event := {"time": 3.0, "step": run.step, "status": 0, **end, **medians})
    terminal.add(event)


class Plain:
    """A terminal that writes to a log, and what it wrote."""

    def __init__(self) -> None:
        self.stream = io.StringIO()
        self.terminal = Terminal(self.stream)
        self.terminal.follow(a_run(), "tiny on stdlib")

    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


@pytest.fixture
def plain() -> Plain:
    return Plain()


def ends_of_cells(line: str) -> list[int]:
    """Where the right-aligned cells of a line end."""
    return [match.end() for match in re.finditer(r"[^ ]+", line)]


AWKWARD = [
    STEP,
    line(step=299, loss=math.nan, grad_norm=math.inf, data_wait_share=0.5),
    line(step=20, loss=123456.0, lr=0.0, grad_norm=0.0000123, tokens_per_s=98_765_432, step_time_s=0.0001),
    line(step=300, loss=-0.5, tokens_per_s=3.2, step_time_s=4321, memory_gib=139.72, data_wait_share=1.0),
]


@pytest.mark.parametrize(("steps", "mfu"), [(5, None), (300, 0.4231), (9_999_999, None)])
def test_all_lines_of_a_log_have_the_same_columns_and_fit(plain: Plain, steps: int, mfu: float | None) -> None:
    for view in AWKWARD:
        plain.terminal.follow(RunData(Path("run"), {"train.steps": steps}), "")
        plain.terminal.add(view | {"step": min(view["step"], steps), "mfu": mfu})
    names, *rows = plain.lines()
    assert len(rows) == len(AWKWARD)
    assert ("mfu" in names) == (mfu is not None)
    for row in rows:
        assert ends_of_cells(row) == ends_of_cells(names)
        assert len(row) <= 100


def test_the_loss_on_each_set_is_below_the_validation_loss(plain: Plain) -> None:
    """However many sets there are, and where nothing is held out."""
    sets = {f"set_{number}": {"loss": 3.0 + number, "bits_per_byte": None} for number in range(9)}
    plain.terminal.add(evaluation(100, 4.2, 1.5) | {"validation": sets})
    plain.terminal.add({"step": 200, "tokens": 1000, "validation": sets, "eval_time_s": 2.0})
    lines = plain.lines()
    assert lines[0].startswith("step 100  validation loss 4.2000, perplexity 66.6863, bits per byte 1.5000")
    assert lines[1].startswith("  on set_0 3.0000, set_1 4.0000, ")
    assert lines[3] == "step 200  validation loss by set  (2.00 s)"
    assert lines[4:] == lines[1:3]
    assert max(map(len, lines)) <= 100
    run = a_run()
    for step, loss in ((100, 5.5), (300, 4.5)):
        run.add({"step": step, "val_loss": 5.0, "validation": {"web": {"loss": loss, "bits_per_byte": None}}})
    finish(plain.terminal, run)
    assert "  on web           5.5000 -> 4.5000" in plain.lines()


def test_a_step_line_holds_every_number_under_names_that_come_back_every_few_lines(plain: Plain) -> None:
    for step in range(1, 2 * NAMES_EVERY + 2):
        plain.terminal.add(line(step=step, mfu=0.423))
    names, row, *_ = lines = plain.lines()
    assert " ".join(names.split()) == "step loss lr grad_norm tokens/s time GiB wait mfu left"
    assert " ".join(row.split()) == "1/300 8.3213 1.00e-05 2.5000 13,421 305.2ms 1.21 0.1% 42.3% 1:31"
    assert [number for number, line in enumerate(lines) if line == names] == [0, NAMES_EVERY + 1, 2 * (NAMES_EVERY + 1)]
    slow = Plain()
    for step, seconds in enumerate((60.0, 1.0, 1.1, 30.0, 0.9, 1.0), 1):  # the first one compiles
        slow.terminal.add(line(step=step, step_time_s=seconds))
    assert slow.lines()[-1].split()[-1] == "4:54", "what is left is told by a median"


def test_an_evaluation_line_and_what_is_not_finite(plain: Plain) -> None:
    plain.terminal.add(line(loss=math.nan, grad_norm=math.inf))
    assert plain.lines()[1].split()[1:4] == ["nan", "1.00e-05", "inf"]
    for record in (evaluation(1, math.nan, math.nan), evaluation(20, 4.2, 2.3123), evaluation(300, 4.2, None)):
        plain.terminal.add(record)
    assert plain.lines()[2:] == [
        "step 1  validation loss nan, perplexity nan, bits per byte nan  (1.23 s)",
        "step 20  validation loss 4.2000, perplexity 66.6863, bits per byte 2.3123  (1.23 s)",
        "step 300  validation loss 4.2000, perplexity 66.6863  (1.23 s)",
    ]


def test_the_summary_says_what_was_learned_and_how_to_go_on(plain: Plain) -> None:
    finish(plain.terminal, a_run())
    text = plain.stream.getvalue()
    for said in (
        "finished: 300 of 300 steps",
        "  time             0:00\n",
        "  speed            14,000 tokens/s, 305.2 ms a step (medians); over all steps 13,421 tokens/s\n",
        "1,228,800",
        "8.3213 -> 4.1234",
        "4.9000 -> 4.3000, perplexity 73.7000, bits per byte 2.3100, best 4.2000 at step 200",
        "validation as ●",
        "  | def foo(self):\n  |     return \\x1b[31m1\n",
        "runs/tiny-stdlib-1a2b",
        "python pretrain_gpt.py 'data.path=my file.txt' train.steps=600",
    ):
        assert said in text
    stopped = Plain()
    finish(stopped.terminal, a_run(step=120), "SIGTERM")
    text = stopped.stream.getvalue()
    assert "stopped by SIGTERM after 120 of 300 steps" in text
    assert "  speed            13,421 tokens/s\n" in text, "it had one step"
    assert f"{COMMAND}   (the same command)" in text
    assert "foo" not in text


def test_every_line_is_flushed_and_a_closed_pipe_ends_no_run() -> None:
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w", buffering=8192, encoding="utf-8")
    terminal = Terminal(stream)
    terminal.follow(a_run(), "")
    terminal.print("first")
    assert os.read(reader, 100) == b"first\n"
    os.close(reader)
    for step in range(1, 50):
        terminal.add(line(step=step))
    stream.close()  # nothing is left to flush
    ascii_only = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii")
    finish(Terminal(ascii_only), a_run())
    assert b"8.3213 -> 4.1234" in raw.getvalue()
    assert b"?" not in raw.getvalue()
    silent = io.StringIO()
    finish(Terminal(silent, enabled=False), a_run())
    assert silent.getvalue() == "", "other ranks print nothing"


NUMBERS = [
    (readable.duration, "0 0:00, 59.6 1:00, 754 12:34, 3723 1:02:03, 359999 99:59:59, 360000 4d_04h, nan -"),
    (readable.rate, "3.216 3.22, 717 717, 12100 12_100, 999999 999_999, 999999.7 1.00M, 1234567 1.23M, 2.5e9 2.50B"),
    (readable.step_time, "0.99999 1.00_s, 0.3052 305.2_ms"),
    (readable.loss, "999.99999 1.00e+03, 2.5 2.5000"),
    (readable.percent, "0.9999 100%, 0.5 50.0%"),
]


def test_numbers_keep_a_known_width_also_where_they_are_rounded_up() -> None:
    for words, pairs in NUMBERS:
        for value, text in map(str.split, pairs.split(", ")):
            assert words(float(value)).replace(" ", "_").replace(",", "_") == text


EVIL = "a\x1b]0;owned\x07\x1b[2J\u202eb\x9b31m\rc\udcff"


def test_control_characters_reach_the_terminal_by_no_way() -> None:
    stream = io.StringIO()
    terminal = Terminal(stream)
    terminal.follow(a_run(), EVIL)
    terminal.add({"kind": "start", "step": 0, "about": [(EVIL, EVIL)]})
    terminal.print(f"warning: {EVIL}")
    terminal.add({"step": 1, "kind": "sample", "prompt": "def ", "text": EVIL})
    finish(terminal, a_run((EVIL, EVIL), folder=EVIL))
    finish(terminal, a_run(folder=EVIL, command=EVIL), EVIL)
    assert "\\x1b]0;owned" in stream.getvalue()
    assert {*stream.getvalue()} & {character for character in EVIL if not character.isprintable()} == set()


def test_a_log_tells_now_and_then_how_far_work_on_data_is(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(terminal_module.time, "monotonic", lambda: now)
    stream = io.StringIO()
    terminal = Terminal(stream)
    for show in (terminal.preparing, terminal.checking):
        for seconds, done in ((0, 600), (12, 700), (1, 710), (35, 1000), (0, 1000)):
            now += seconds
            show(done * 10**6, 10**9, done // 10, done // 2)
    streamed = Terminal(stream).preparing  # whose end nobody knows
    for seconds in (0, 12):
        now += seconds
        streamed(5 * 10**6, 0, 5, 50)
    assert stream.getvalue().splitlines() == [
        "preparing data: 700.0 MB of 1,000.0 MB, 70 documents, 350 tokens",
        "prepared 1,000.0 MB: 100 documents, 500 tokens in 0:48",
        "checking tokens: 700.0 MB of 1,000.0 MB, 70 documents, 350 tokens",
        "checked 1,000.0 MB: 100 documents, 500 tokens in 0:48",
        "preparing data: 5.0 MB, 5 documents, 50 tokens",
    ]


def test_the_line_of_a_curve_falls_and_validation_points_lie_over_it() -> None:
    falling = np.array([(step, 10.0 - step) for step in range(10)])
    assert curve(falling, np.array([(0, 1.0), (9, 10.0)]), width=5, height=2) == [
        " 10.0000 │⠉⠤  ●",
        "  1.0000 │● ⠉⠒⣀",
        "         └─────",
        "          0             9",
    ]
    constant = curve(np.array([(1, 2.0), (2, 2.0)]), np.zeros((0, 2)), width=6, height=3)
    assert constant[:3] == ["  2.0000 │⠉⠉⠉⠉⠉⠉", "         │", "  2.0000 │"]


place = st.tuples(st.integers(0, 10**7), st.floats(-99, 999))
points = st.lists(place, min_size=2, max_size=200, unique_by=lambda it: it[0])


@given(points.map(sorted))
def test_any_curve_fits_its_frame(points: list[tuple[int, float]]) -> None:
    lines = curve(np.array(points), np.array(points[:3]))
    assert len(lines) == 12
    assert all(len(line) <= 84 for line in lines)
