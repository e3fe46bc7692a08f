"""The page of a run: everything is there, nothing from outside is markup, nothing is loaded, it can be read."""

import base64
import hashlib
import json
import math
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.commands.models import report as main
from megalite.layout.ranks import ParallelLayout
from megalite.observe.report.page import HERE, differences, environment, names_of, render
from megalite.observe.run_data import MOST_LISTED, MOST_SAMPLED, RunData, read_run
from megalite.plan.picture import STYLE as PICTURE_STYLE
from tests.observe.report.runs import EVIL, event, sizes_at, start_of, write_run


class Page:
    """The elements and texts of a page, which is XML but for its scripts."""

    def __init__(self, page: str) -> None:
        self.scripts = re.findall("<script[^>]*>(.*?)</script>", page, re.DOTALL)
        root = ElementTree.fromstring(re.sub("(<script[^>]*>).*?(</script>)", r"\1\2", page, flags=re.DOTALL))
        self.tags = [(element.tag, element.attrib) for element in root.iter()]
        self.texts = [*root.itertext()]
        self.text = " ".join(self.texts)
        self.records = json.loads(self.scripts[0], parse_constant=pytest.fail)  # no NaN is JSON in a browser


def page_of(*runs: RunData | Path, live: bool = False) -> Page:
    return Page(render([run if isinstance(run, RunData) else read_run(run) for run in runs], live=live))


COLOURS = 10
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


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", layout=LAYOUT, mfu=0.2, events=EVENTS)


def test_everything_that_is_known_of_a_run_is_shown(run: Path) -> None:
    page = page_of(run)
    headings = "".join(page.texts)
    for words in (
        "Learning", "Speed and memory", "Communication", "bits per byte",
        "tp: 4 groups of 2", "dp: 2 groups of 4", "on node0", "torchrun pretrain_gpt.py", "model=gpt2",
        "2.13.0", "NVIDIA H200", "after step 40", "early", "optimizer.lr", "train.sample_prompts",
        "loss nan, grad_norm nan, loss_scale 1024", "times 1.7", "stopped", "by SIGTERM",
        "skipped on request", "folder /runs/profile", "The newest checkpoint, of step 20", "8.25",
    ):  # fmt: skip
        assert words in headings, words
    (records,) = page.records["runs"]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for name in ("loss", "val_loss", "lr", "grad_norm", "tokens_per_s", "mfu", "mfu_causal", "memory_gib"):
        known = [(line["step"], line[name]) for line in lines if math.isfinite(line.get(name, math.nan))]
        assert [tuple(point) for point in records["series"][name]] == [
            pytest.approx(point, rel=1e-5) for point in known
        ]
    assert records["not_finite"] == [7]
    assert records["memory_gib"] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.25]
    assert (records["compute_s"], records["slow"]) == ([0.1] * 7 + [0.2], [5])
    assert len(records["series"]["time_split/exchange"]) == 40  # older runs did not know it


def test_whatever_a_run_holds_is_text(tmp_path: Path) -> None:
    """Of samples, messages, hosts, settings and paths."""
    run = write_run(tmp_path / "a&b <i>", events=EVENTS)
    with (run / "config.yaml").open("a") as file:
        file.write("note: '</script><script>alert(1)</script>'\n")
    page, both = page_of(run), page_of(run, write_run(tmp_path / "other", lr=0.5))
    assert page.text.count(EVIL) >= 5
    assert "a&b <i>" in page.text
    for each in (page, both):
        scripts = [attributes for name, attributes in each.tags if name == "script"]
        assert scripts == [{"type": "application/json", "id": "records"}, {}]
    assert "</script><script>alert(1)</script>" in both.text
    assert "</script>" in str(both.records["settings"])


def test_control_characters_are_written_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    template = environment().from_string('<pre title="{{ it }}">{{ it }}</pre>')
    assert template.render(it="a\0\x1b[31m\n<") == '<pre title="a\\x00\\x1b[31m\n&lt;">a\\x00\\x1b[31m\n&lt;</pre>'
    assert main([str(write_run(tmp_path / "run\x1b[31m", lr=0.5))]) == 0
    assert capsys.readouterr().out.endswith("run\\x1b[31m/report.html\n")


def test_a_page_loads_nothing_and_runs_only_its_own_script(run: Path) -> None:
    page = page_of(run)
    _, script = re.findall("<script[^>]*>(.*?)</script>", render([read_run(run)]), re.DOTALL)
    assert all((HERE / name).read_text() in script for name in ("charts.js", "report.js"))
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
    places = {attributes["id"] for name, attributes in page.tags if "id" in attributes and name == "section"}
    assert {attributes["href"] for name, attributes in page.tags if name == "a"} == {f"#{place}" for place in places}
    assert len(places) == 7
    for style in (STYLE, PICTURE_STYLE.read_text()):
        assert not re.search(r"url\(|@import", style)


def contrast(*colours: str) -> float:
    """As WCAG 2 defines it."""
    levels = []
    for colour in colours:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        levels.append(sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True)))
    return (max(levels) + 0.05) / (min(levels) + 0.05)


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
    short_page, long = (
        render([read_run(write_run(tmp_path / str(steps), steps=steps, events=many))]) for steps in (800, 3000)
    )
    assert len(long) < 1.25 * len(short_page)
    assert len(long) < 600_000
    run = read_run(tmp_path / "3000")
    assert len(run.listed) <= MOST_LISTED
    assert len(run.samples) <= MOST_SAMPLED
    assert {1, 999} <= run.samples.keys()
    assert "events.jsonl has older ones" in long


def test_a_run_that_has_just_begun_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=1)
    (run / "metrics.jsonl").write_text("")
    page = page_of(run, live=True)
    assert "running" in page.text
    assert "nothing yet" in page.text
    found = read_run(run)
    found.start["layout"] = {"tp": "many"}
    assert "Layout" not in page_of(found).texts, "a layout that is none costs its picture"
    (run / "events.jsonl").unlink()
    assert "end unknown" in page_of(run).text


@pytest.mark.parametrize(
    ("status", "events"),
    [
        ("stopped, not saved", [event("stopped", 40, status=1, by="SIGTERM")]),
        ("failed", [event("failed", 5, message="out of memory", status=1)]),
        ("not ended", [event("failed", 5, message="out of memory"), "again"]),
        ("finished", [event("stopped", 5, by="SIGTERM"), "again", event("finished", 40)]),
    ],
)
def test_how_a_run_stands_is_what_its_newest_start_came_to(status: str, events: list[Any], tmp_path: Path) -> None:
    again = start_of(ParallelLayout(), tmp_path, kind="resume", step=5)
    page = page_of(write_run(tmp_path / "run", events=[again if it == "again" else it for it in events]))
    kinds = ("finished", "failed", "stopped", "not ended", "finished, not saved", "stopped, not saved")
    assert next(text for text in page.texts if text in kinds) == status


def test_a_pipeline_shows_its_schedule_and_what_was_recorded(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", layout=ParallelLayout(pp=2))
    assert "Pipeline" not in page_of(run).texts
    found = read_run(run)
    found.config |= {"parallel.pp": 2, "parallel.schedule": "1f1b"}
    found.config |= {"train.global_batch_size": 4, "train.micro_batch_size": 1}
    assert "1f1b: pp 2, 4 microbatches; if all chunks took equally long" in page_of(found).texts
    cells = [[["0F0", 1.0, 1.1], ["0B0", 1.4, 1.5]], [["0F0", 1.1, 1.2], ["0B0", 1.2, 1.4]]]
    lines = [{"step": 10, "schedule": EVIL, "pp": 2, "rank": rank, "actions": its} for rank, its in enumerate(cells)]
    (run / "pipeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 20, "sch')
    page = page_of(found)
    assert f"{EVIL}: pp 2, 1 microbatch; recorded in step 10" in page.texts
    assert any(text.startswith("step 500 ms; idle 50.0% of it") for text in page.texts)
    found.config["parallel.schedule"] = "gone"
    assert "Pipeline" in page_of(found).texts


def test_runs_are_compared_on_common_axes_with_the_settings_in_which_they_differ(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a" / "run", lr=1e-3, seed=1)
    second = write_run(tmp_path / "b" / "run", lr=2e-3, seed=2, layout=LAYOUT, events=[event("finished", 40)])
    third = write_run(tmp_path / "c", steps=20, lr=1e-3, seed=3)
    page = page_of(first, second, third)
    for words in ("3 runs compared", "Learning", "optimizer.lr", "0.002", "finished", "not ended"):
        assert words in page.text
    settings = page.text[page.text.rindex("Different settings") :]
    assert "optimizer.lr" in settings
    assert not re.search("model.hidden_size|run_dir", settings)
    records = page.records
    names = [{*run["name"].split()} for run in records["runs"]]
    assert names == [{"steps=40", "lr=0.001"}, {"steps=40", "lr=0.002"}, {"steps=20", "lr=0.001"}]
    assert [len(run["series"]["loss"]) for run in records["runs"]] == [39, 39, 19]
    assert {"name": "optimizer.lr", "values": [1e-3, 2e-3, 1e-3]} in records["settings"]
    alike = [read_run(first), read_run(write_run(tmp_path / "d" / "run", lr=1e-3, seed=1))]
    assert names_of(alike, differences(alike)[0]) == ["a/run", "d/run"]


@pytest.mark.parametrize(("second", "follows"), [({"lr.min_lr"}, True), (set(), False)])
def test_settings_that_follow_from_others_are_no_differences(second: set[str], follows: bool, tmp_path: Path) -> None:
    runs = []
    for lr, set_by_nobody in ((1e-3, {"lr.min_lr", "lr.warmup_steps"}), (3e-3, second)):
        folder = write_run(tmp_path / str(lr), lr=lr)
        with (folder / "config.yaml").open("a") as file:
            file.write(f"derived: [{', '.join(set_by_nobody)}]\n")
        runs.append(read_run(folder))
        assert runs[-1].derived == set_by_nobody
        runs[-1].config["lr.min_lr"] = lr * 0.1
    settings = page_of(*runs).text.rpartition("Different settings")[2]
    chosen, _, derived = settings.partition(" that follow from others")
    assert "optimizer.lr" in chosen
    assert "0.003" in chosen
    assert ("lr.min_lr" in derived, "lr.min_lr" in chosen) == (follows, not follows)
    assert "3e-4" in settings  # not 0.00030000000000000003


def test_updates_and_attention_logits_are_shown_by_layer_and_by_group(run: Path, tmp_path: Path) -> None:
    """A group without weights has no ratio; of several runs only what they have in common as curves is shown."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    known = [{**line, **sizes_at(line["step"])} if "loss" in line else line for line in lines]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in known))
    page, both = page_of(run), page_of(run, write_run(tmp_path / "other"))
    (records,) = page.records["runs"]
    steps = [*range(1, 41)]
    updates, logits = records["layers"]["relative_update"], records["layers"]["layer_attention_logit"]
    assert updates["names"] == ["embedding", "block_0", "block_1", "final_norm"]
    assert (updates["steps"], logits["steps"]) == (steps, steps)
    for at, row in enumerate(updates["rows"], 1):
        assert row == [0.0 if step == 5 else pytest.approx(at / step / 20, rel=1e-3) for step in steps]
    assert (logits["names"], logits["rows"]) == (["0", "1"], [[3 + at + step for step in steps] for at in (0, 1)])
    outputs, gradients = records["layers"]["activation_rms"], records["layers"]["gradient_rms"]
    assert outputs["names"] == gradients["names"] == updates["names"]
    assert outputs["rows"] == [[1.5] * 40] * 4
    assert gradients["rows"][0][1] == pytest.approx(10 * 1e-3 / 2)
    words = ("update", "logit", "activation", "gradient_")
    found = {name: points for name, points in records["series"].items() if any(word in name for word in words)}
    groups = {f"group_relative_update/{name}" for name in ("embedding_and_head", "muon_matrices")}
    assert found.keys() == {*groups, "max_attention_logit"}
    assert found["group_relative_update/muon_matrices"][1] == [2, pytest.approx(0.0125)]
    assert found["max_attention_logit"][1] == [2, 6]
    assert " Layers " in page.text
    assert " Layers " in both.text
    assert [one["layers"] for one in both.records["runs"]] == [{}, {}]
    assert " Layers " not in page_of(tmp_path / "other").text
