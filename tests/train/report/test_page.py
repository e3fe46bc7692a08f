"""The page of a run: everything is there, nothing from outside is markup, nothing is loaded, it can be read."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megalite.parallel.layout import ParallelLayout
from megalite.train.report.blocks import POLICY
from megalite.train.report.comparison import compare, names_of
from megalite.train.report.data import FIRST, LAST, MOST_SAMPLES, read_run
from megalite.train.report.page import render
from megalite.train.report.style import DARK, LIGHT, SERIES, STYLE
from tests.train.report.runs import EVIL, event, start_of, write_run


class Page(HTMLParser):
    """The elements and texts of a page; tags that do not close as they opened are an error."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.texts)


EVENTS = [
    event("sample", 10, prompt="def ", text="early"),
    event("sample", 40, prompt=EVIL, text=f"late {EVIL}"),
    event("checkpoint", 20, bytes=123_000_000, seconds=2.5, stall_s=0.5),
    event("checkpoint_failed", 30, message=f"no space left on {EVIL}"),
    event("skipped", 7, loss=float("nan"), grad_norm=float("nan"), loss_scale=1024.0),
    event("skipped_on_request", 8),
    event("straggler", 30, rank=5, host=EVIL, times=1.7),
    event("profile", 31, folder="/runs/profile", wall_s=0.5, parts={"forward": 0.2, "communication": 0.1}),
    event("ranks", 40, memory_gib=[1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.25], compute_s=[0.1] * 7 + [0.2]),
    event("stopped", 35, by="SIGTERM"),
]
LAYOUT = ParallelLayout(tp=2, dp=4)


def page_of(folder: Path, **options: object) -> Page:
    write_run(folder, layout=LAYOUT, mfu=0.2, events=EVENTS, **options)  # type: ignore[arg-type]
    return Page(render(read_run(folder)))


def test_everything_that_is_known_of_a_run_is_shown(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    headings = "".join(page.texts)
    for words in (
        "Loss", "Learning rate", "Gradient norm", "Tokens per second", "Model FLOPs utilisation", "Time of a step",
        "Peak memory by rank", "Computing time by rank", "The whole run", "communication", "bits per byte",
        "tp: 4 groups of 2", "dp: 2 groups of 4", "on node0 (8 ranks)", "torchrun pretrain_gpt.py", "model=gpt2",
        "2.13.0", "NVIDIA H200", "after step 40", "early", "optimizer.lr", "train.sample_prompts",
        "loss nan, gradient norm nan at a loss scale of 1024", "computes 1.70 times as long", "stopped", "by SIGTERM",
        "passed over", "traces in /runs/profile", "forward 40.0%", "1 checkpoint was written", "8.25",
    ):  # fmt: skip
        assert words in headings, words


def test_whatever_a_run_holds_is_text(tmp_path: Path) -> None:
    """Of samples, messages, hosts and paths."""
    run = write_run(tmp_path / "a&b <i>", events=EVENTS)
    page = Page(render(read_run(run)))
    assert page.text.count(EVIL) >= 5
    assert "a&b <i>" in page.text
    assert not [name for name, _ in page.tags if name == "script"]
    both = Page(compare([read_run(run), read_run(write_run(tmp_path / "other", lr=0.5))]))
    assert not [name for name, _ in both.tags if name == "script"]


def test_a_page_loads_nothing_and_runs_nothing(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    for name, attributes in page.tags:
        assert name not in ("script", "link", "img", "iframe", "object", "embed", "use", "image")
        assert not [key for key in attributes if key.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "url(" not in STYLE
    assert "@import" not in STYLE
    policies = [attributes for name, attributes in page.tags if attributes.get("http-equiv")]
    assert [each["content"] for each in policies] == [POLICY]


def test_links_of_the_page_lead_somewhere(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    places = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    led_to = {attributes["href"] for name, attributes in page.tags if name == "a"}
    assert led_to == {f"#{place}" for place in places}
    assert len(places) == 7


def test_every_picture_has_a_title(tmp_path: Path) -> None:
    page = render(read_run(write_run(tmp_path / "run", layout=LAYOUT, events=EVENTS)))
    assert page.count("<svg") == len(re.findall(r"<svg[^>]* role=\"img\"[^>]*><title>[^<]{10,}</title>", page)) > 8


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    levels = sorted(luminance(colour) for colour in (one, other))
    return (levels[1] + 0.05) / (levels[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize(("colours", "shade"), [(LIGHT, 0), (DARK, 1)], ids=["light", "dark"])
def test_text_and_lines_stand_out(colours: dict[str, str], shade: int) -> None:
    for ground in (colours["page"], colours["card"]):
        for name in ("ink", "quiet", "good", "bad", "warn"):
            assert contrast(colours[name], ground) >= 4.5, name
        for at, pair in enumerate(SERIES):
            assert contrast(pair[shade], ground) >= 3, at
    for at, pair in enumerate(SERIES):  # they are also the colours of small text in tips
        assert contrast(pair[shade], colours["card"]) >= 4, at


def test_a_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    many = [event("skipped", step, loss=1.0, grad_norm=2.0, loss_scale=None) for step in range(1, 501)]
    many += [event("sample", step, prompt="def ", text="x" * 300) for step in range(1, 1000)]
    short, long = (
        len(render(read_run(write_run(tmp_path / str(steps), steps=steps, events=many)))) for steps in (800, 6000)
    )
    assert long < 1.15 * short
    assert long < 600_000
    run = read_run(tmp_path / "6000")
    assert len(run.told) <= FIRST + LAST
    assert run.left_out == 501 - FIRST - LAST
    assert len(run.samples) <= MOST_SAMPLES
    assert {1, 999} <= {step for step, _ in run.samples}
    assert f"{run.left_out:,} more are in events.jsonl" in render(run)


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "metrics.jsonl").write_text("")
    page = Page(render(read_run(run), live=True))
    assert "running" in page.text
    assert "nothing yet" in page.text
    (run / "events.jsonl").unlink()
    assert "end unknown" in Page(render(read_run(run))).text


def test_how_a_run_stands_is_what_its_newest_start_came_to(tmp_path: Path) -> None:
    def status(*events: dict[str, object]) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        page = Page(render(read_run(write_run(folder, events=list(events)))))
        kinds = ("finished", "failed", "stopped", "not ended", "finished, not saved", "stopped, not saved")
        return next(text for text in page.texts if text in kinds)

    again = start_of(ParallelLayout(), tmp_path, kind="resume", step=5)
    assert status(event("finished", 40)) == "finished"
    assert status(event("finished", 40, status=0)) == "finished"
    assert status(event("finished", 40, status=1)) == "finished, not saved"
    assert status(event("stopped", 40, status=1, by="SIGTERM")) == "stopped, not saved"
    assert status(event("failed", 5, message="out of memory", status=1)) == "failed"
    assert status(event("failed", 5, message="out of memory"), again) == "not ended"
    assert status(event("stopped", 5, by="SIGTERM"), again, event("finished", 40)) == "finished"


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[event("finished", 40)])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('[1, 2]\n"text"\n{"no": "step"}\n{"step": 41, "ki')
    found = read_run(run)
    assert found.end is not None
    assert found.last["step"] == 40


def test_runs_are_compared_on_common_axes_with_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run", lr=1e-3, seed=1)
    second = write_run(tmp_path / "b" / "run", lr=2e-3, seed=2, layout=LAYOUT, events=[event("finished", 40)])
    third = write_run(tmp_path / "c", steps=20, lr=1e-3, seed=3)
    runs = [read_run(folder) for folder in (first, second, third)]
    assert names_of(runs[:2]) == ["a/run", "b/run"]
    page = Page(compare(runs))
    for words in ("3 runs compared", "Training loss", "Validation loss", "a/run", "optimizer.lr", "0.002", "finished"):
        assert words in page.text
    assert "run_dir" not in page.text
    settings = page.text[page.text.rindex("Different settings") :]
    assert "optimizer.lr" in settings
    assert "model.hidden_size" not in settings


def test_runs_of_different_batches_are_also_compared_over_tokens(tmp_path: Path) -> None:
    first, second = (write_run(tmp_path / name, seed=at) for at, name in enumerate(("one", "two")))
    assert "over tokens" not in compare([read_run(first), read_run(second)])
    lines = [json.loads(line) for line in (second / "metrics.jsonl").read_text().splitlines()]
    doubled = [{**line, "tokens": 2 * line["tokens"]} if "tokens" in line else line for line in lines]
    (second / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in doubled))
    assert "Training loss over tokens" in compare([read_run(first), read_run(second)])
