"""The page of a run: everything is there, nothing from outside is markup, nothing is loaded, it can be read."""

import base64
import hashlib
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from megalite.commands.report import main
from megalite.errors.words import plain
from megalite.layout.ranks import ParallelLayout
from megalite.observe.report.charts import COLOURS
from megalite.observe.report.comparison import compare, names_of
from megalite.observe.report.page import HERE, environment, render
from megalite.observe.run_data import MOST_LISTED, MOST_SAMPLED, read_run
from megalite.plan.picture import STYLE as PICTURE_STYLE
from tests.observe.report.runs import EVIL, event, start_of, write_run


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


STYLE = (HERE / "report.css").read_text()


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
        "passed over", "profiled into /runs/profile", "forward 40.0%", "1 checkpoint was written", "8.25",
    ):  # fmt: skip
        assert words in headings, words


def test_whatever_a_run_holds_is_text(tmp_path: Path) -> None:
    """Of samples, messages, hosts and paths."""
    run = write_run(tmp_path / "a&b <i>", events=EVENTS)
    page = Page(render(read_run(run)))
    assert page.text.count(EVIL) >= 5
    assert "a&b <i>" in page.text
    assert [attributes for name, attributes in page.tags if name == "script"] == [{}]
    both = Page(compare([read_run(run), read_run(write_run(tmp_path / "other", lr=0.5))]))
    assert [attributes for name, attributes in both.tags if name == "script"] == [{}]


def test_control_characters_are_written_out() -> None:
    template = environment().from_string('<pre title="{{ it }}">{{ it }}</pre>')
    assert template.render(it="a\0\x1b[31m\n<") == '<pre title="a\\x00\\x1b[31m\n&lt;">a\\x00\\x1b[31m\n&lt;</pre>'


def test_the_command_prints_no_control_characters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run\x1b[31m", lr=0.5)
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.endswith("run\\x1b[31m/report.html\n")


def test_a_page_loads_nothing_and_runs_only_its_own_script(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    (script,) = re.findall("<script>(.*?)</script>", render(read_run(tmp_path / "run")), re.DOTALL)
    assert script == (HERE / "charts.js").read_text()
    (policy,) = [str(attributes["content"]) for _, attributes in page.tags if attributes.get("http-equiv")]
    assert policy.startswith("default-src 'none'; ")
    assert f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert not re.search("innerHTML|insertAdjacent|document.write|eval|fetch|XMLHttp|import", script)
    for name, attributes in page.tags:
        assert name not in ("link", "img", "iframe", "object", "embed", "use", "image")
        assert not [key for key in attributes if key.startswith("on")]
        assert (attributes.get("href") or "#").startswith("#")
        assert "src" not in attributes
    assert "url(" not in STYLE
    assert "@import" not in STYLE


def test_links_lead_somewhere_and_every_picture_has_a_title(tmp_path: Path) -> None:
    page = page_of(tmp_path / "run")
    places = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    led_to = {attributes["href"] for name, attributes in page.tags if name == "a"}
    assert led_to == {f"#{place}" for place in places}
    assert len(places) == 7
    text = render(read_run(tmp_path / "run"))
    assert text.count("<svg ") == len(re.findall(r"<svg[^>]* role=\"img\"[^>]*><title>[^<]{10,}</title>", text)) > 8


def contrast(one: str, other: str) -> float:
    """As WCAG 2 defines it."""
    levels = sorted(luminance(colour) for colour in (one, other))
    return (levels[1] + 0.05) / (levels[0] + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("shade", [0, 1], ids=["light", "dark"])
def test_text_and_lines_stand_out(shade: int) -> None:
    style = STYLE.partition("@media")[0] if shade == 0 else STYLE.partition("@media")[2].partition("\n}\n")[0]
    colours = dict(re.findall(r"--([a-z]{2,}): (#\w{6})", style))
    series = re.findall(r"\.c\d \{ --c: (#\w{6}); \}", style if shade else PICTURE_STYLE.read_text())
    assert len(series) == COLOURS
    for ground in (colours["page"], colours["card"]):
        for name in ("ink", "quiet", "good", "bad", "warn"):
            assert contrast(colours[name], ground) >= 4.5, name
        for colour in [*series, colours["accent"]]:
            assert contrast(colour, ground) >= 3, colour
    for colour in series:  # they are also the colours of small text in tips
        assert contrast(colour, colours["card"]) >= 4, colour


def test_a_long_run_gives_a_page_of_bounded_size(tmp_path: Path) -> None:
    many = [event("skipped", step, loss=1.0, grad_norm=2.0, loss_scale=None) for step in range(1, 501)]
    many += [event("sample", step, prompt="def ", text="x" * 300) for step in range(1, 1000)]
    short, long = (
        len(render(read_run(write_run(tmp_path / str(steps), steps=steps, events=many)))) for steps in (800, 3000)
    )
    assert long < 1.15 * short
    assert long < 600_000
    run = read_run(tmp_path / "3000")
    assert len(run.listed) <= MOST_LISTED
    assert run.left_out == 501 - MOST_LISTED
    assert len(run.samples) <= MOST_SAMPLED
    assert {1, 999} <= run.samples.keys()
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


def test_torn_and_foreign_lines_are_passed_over_and_named(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", events=[event("finished", 40)])
    for name in ("metrics.jsonl", "events.jsonl"):
        with (run / name).open("a") as file:
            file.write('[1, 2]\n"text"\n{"no": "step"}\n{"step": 41, "ki')
    found = read_run(run)
    assert found.end is not None
    assert found.last["step"] == 40
    page = Page(render(found)).text
    for name in ("metrics.jsonl", "events.jsonl"):
        count = len((run / name).read_text().splitlines())
        assert f"{run / name}: no valid record in line {count - 3}, {count - 2}, {count - 1}; left out" in page


@pytest.mark.parametrize("layout", [{"tp": "many"}, {"tp": -2}, {"order": 3}])
def test_a_layout_that_is_none_costs_its_pictures(layout: dict[str, object], tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert "Layout" in Page(render(run)).texts
    run.start["layout"] = layout
    assert "Layout" not in Page(render(run)).texts


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


def test_settings_that_follow_from_others_are_no_differences(tmp_path: Path) -> None:
    def differences(second: set[str]) -> tuple[str, str]:
        runs = []
        for set_by_nobody, lr in (({"lr.min_lr", "lr.warmup_steps"}, 1e-3), (second, 3e-3)):
            run = read_run(write_run(tmp_path / str(len(list(tmp_path.iterdir()))), lr=lr))
            run.config |= {"lr.min_lr": lr * 0.1, "train.recompute": "none"}
            run.derived = set_by_nobody
            runs.append(run)
        settings = Page(compare(runs)).text.rpartition("Different settings")[2]
        chosen, _, derived = settings.partition(" that follow from others")
        return chosen, derived

    chosen, derived = differences({"lr.min_lr"})
    assert "optimizer.lr" in chosen
    assert "0.003" in chosen
    assert "lr.min_lr" not in chosen
    assert "lr.min_lr" in derived
    assert "3e-4" in derived  # not 0.00030000000000000003
    chosen, derived = differences(set())
    assert "lr.min_lr" in chosen
    assert derived == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (3e-3 * 0.1, "3e-4"), (1e-8, "1e-8"), (0.1, "0.1"), (1.0, "1"), (0.95, "0.95"), (1e30, "1e30"), (0.0, "0"),
        (-2.5e-5, "-2.5e-5"), (None, "null"), (True, "true"), ([0.9, 1e-4], "[0.9,1e-4]"), ("a b", "a b"),
        (65536, "65536"), (float("inf"), "inf"), (float("nan"), "nan"),
    ],
)  # fmt: skip
def test_settings_are_shown_as_people_write_them(value: object, text: str) -> None:
    assert plain(value) == text


def test_runs_of_different_batches_are_also_compared_over_tokens_each_at_its_own(tmp_path: Path) -> None:
    """A batch that grows, steps that are not applied: tokens are no multiple of steps."""
    steady, growing = (write_run(tmp_path / name, seed=at) for at, name in enumerate(("steady", "growing")))
    assert "over tokens" not in compare([read_run(steady), read_run(growing)])
    lines = [json.loads(line) for line in (growing / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line["tokens"] = 2048 * line["step"] ** 2 // 40  # in all as many as the other's
    (growing / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = compare([read_run(steady), read_run(growing)])
    assert "Training loss over tokens" in page
    charts = [json.loads(html.unescape(found)) for found in re.findall(r'data-chart="([^"]*)"', page)]
    training, validation = ([point[0] for point in it["lines"][1]["points"]] for it in charts if it["over"] == "token")
    assert validation == [2048 * step**2 // 40 for step in (8, 16, 24, 32, 40)]
    assert training == [line["tokens"] for line in lines if math.isfinite(line.get("loss", math.nan))]


def test_a_run_folder_says_which_settings_nobody_set(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "config.yaml").open("a") as file:
        file.write("derived: [lr.min_lr]\n")
    found = read_run(run)
    assert found.derived == {"lr.min_lr"}
    assert "derived" not in found.config
    (run / "config.yaml").write_text("derived: 3\n")
    assert read_run(run).derived == set()
