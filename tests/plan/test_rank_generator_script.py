"""scripts/rank_generator.py: the worked examples number by number, and mistakes all told at once."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megalite.commands.plan import ranks
from tests.plan import running
from tests.plan.running import Done

ROOT = Path(__file__).parents[2]
SCRIPT = "scripts/rank_generator.py"


def run(*arguments: str) -> Done:
    return running.run(ranks, *arguments)


def groups(*arguments: str) -> Any:
    done = run(*arguments, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_sixteen_ranks_at_tp_4_pp_2_dp_2() -> None:
    assert groups("--world-size", "16", "--tp", "4", "--pp", "2") == {"dense": DENSE_TP4_PP2, "expert": {}}


@pytest.mark.parametrize(
    "sizes",
    [
        "--tp 4 --pp 2 --etp 1 --ep 4",
        "parallel.tp=4 parallel.pp=2 parallel.etp=1 parallel.ep=4",
        "--tp 4 --pp 2 parallel.etp=1 parallel.ep=4",
    ],
)
@pytest.mark.parametrize("world", ["--world-size 16", "--world_size 16"])
def test_sixteen_ranks_at_etp_1_ep_4_pp_2_edp_2(world: str, sizes: str) -> None:
    shown = groups(*world.split(), *sizes.split())
    assert shown["dense"] == DENSE_TP4_PP2
    assert list(shown["expert"]) == ["etp", "ep", "edp", "pp", "etp-ep", "etp-ep-pp"]
    assert shown["expert"] == {
        "etp": [[rank] for rank in range(16)],
        "ep": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "edp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
        "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
        "etp-ep": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
        "etp-ep-pp": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    }


DENSE_TP4_PP2 = {
    "tp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "cp": [[rank] for rank in range(16)],
    "dp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "pp": [[0, 8], [1, 9], [2, 10], [3, 11], [4, 12], [5, 13], [6, 14], [7, 15]],
    "tp-pp": [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]],
    "dp-cp": [[0, 4], [1, 5], [2, 6], [3, 7], [8, 12], [9, 13], [10, 14], [11, 15]],
    "tp-cp": [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]],
    "tp-dp-cp": [[0, 1, 2, 3, 4, 5, 6, 7], [8, 9, 10, 11, 12, 13, 14, 15]],
}


def test_with_a_number_of_experts_their_holders_are_shown() -> None:
    sizes = ("--world-size", "8", "parallel.tp=2", "parallel.etp=2", "parallel.ep=2", "model.moe.num_experts=6")
    assert groups(*sizes)["experts"] == {"0-2": [[0, 1, 4, 5]], "3-5": [[2, 3, 6, 7]]}
    lines = run(*sizes).stdout.splitlines()
    assert [line.split() for line in lines[-3:]] == [
        ["experts:"],
        ["0-2", "1", "group", "of", "4:", "[0", "1", "4", "5]"],
        ["3-5", "1", "group", "of", "4:", "[2", "3", "6", "7]"],
    ]


@pytest.mark.parametrize("asked", ["parallel.ep=1", "--experts"])
def test_experts_are_shown_where_they_are_asked_for(asked: str) -> None:
    shown = groups("--world-size", "4", "parallel.tp=2", asked)
    assert shown["expert"]["etp"] == [[0, 1], [2, 3]]
    assert shown["expert"]["edp"] == [[0, 2], [1, 3]]


@pytest.mark.parametrize(
    ("arguments", "counts"),
    [
        ([], [3, 3, 3, 3]),
        (["--pp-split-rank", "2", "parallel.standalone_embedding=true"], [0, 12, 6, 6]),
        (["parallel.first_stage_layers=2", "parallel.last_stage_layers=4"], [2, 3, 3, 4]),
        (["parallel.vpp=2", "parallel.pipeline_layout='Et*5|tt|t|t|t|t||tL'"], [5, 2, 1, 1, 1, 1, 0, 1]),
        (["model.num_layers=10", "parallel.count_embedding=true", "parallel.count_loss=true"], [2, 3, 3, 2]),
    ],
)
def test_stages_hold_the_layers_that_the_rules_say(arguments: list[str], counts: list[int]) -> None:
    layers = [] if any("num_layers" in word for word in arguments) else ["model.num_layers=12"]
    stages = groups("--world-size", "8", "parallel.pp=4", *arguments, *layers)["stages"]
    assert [stage["count"] for stage in stages] == counts
    places = [(stage["chunk"], stage["pp_rank"]) for stage in stages]
    assert places == [divmod(stage, 4) for stage in range(len(counts))]


def test_tables_end_with_the_stages_and_the_name_of_the_picture(tmp_path: Path) -> None:
    picture = tmp_path / "ranks.svg"
    done = run("--world-size", "8", "parallel.pp=2", "model.num_layers=4", "parallel.vpp=2", "--picture", str(picture))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "8 ranks: dp 4 x pp 2 (vpp 2), order tp-cp-ep-dp-pp"
    assert "  pp rank 1, chunk 1: 1 layer, 3-3 (loss)" in lines
    assert picture.read_text().startswith("<?xml")
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        (
            "16 parallel.tp=zero parallel.pp=2.5 model.num_layers=many --picture ranks.svg",
            {"parallel.tp", "parallel.pp", "model.num_layers"},
        ),
        (
            "16 parallel.tp=3 parallel.pp=2 model.num_layers=5 parallel.order=tp-xx",
            {"parallel.order", "--world-size", "model.num_layers"},
        ),
    ],
)
def test_everything_that_is_wrong_is_told_at_once_and_nothing_is_written(
    words: str, settings: set[str], tmp_path: Path
) -> None:
    done = running.run(ranks, "--world-size", *words.split(), cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert {*re.findall(r"^  \d+\. ([\w.-]+)", done.stderr, re.MULTILINE)} == settings
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("16 parallel.tp=3", r"--world-size=16: not a multiple of parallel.tp=3.*\n.*--world-size=12 or 15 or 18"),
        ("99999999999", "must be a whole number from 1 to 1,048,576"),
        ("4 --order tp", "settings are written name=value"),
        ("16 parallel.pp=4 model.num_layers=12 --pp-split-rank=4", "fix: --pp-split-rank=1 or 2 or 3"),
        ("4 parallel.pp=4 model.num_layers=8 parallel.pipeline_layout='Q|t'", "parallel.pipeline_layout='Q|t'"),
        ("4 parallel.pp=4 --pp-split-rank 2", "model.num_layers: is needed by --pp-split-rank"),
        ("4 --picture ranks.pdf", r"--picture='ranks.pdf': must end in .svg"),
        ("4 --picture no/such/ranks.svg", "cannot be written.*No such file"),
    ],
)
def test_bad_input_is_refused_with_status_two_and_no_traceback(arguments: str, message: str) -> None:
    done = run("--world-size", *arguments.split(" "))
    assert (done.returncode, done.stdout) == (2, "")
    assert re.search(message, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_of_a_checkout_takes_the_same_words_and_starts_without_what_is_slow() -> None:
    words = ["--world-size", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4", "--json"]
    code = (
        f"import runpy, sys\nsys.argv = ['rank_generator.py', *{words}]\n"
        f"try: runpy.run_path({SCRIPT!r}, run_name='__main__')\n"
        "except SystemExit as end: sys.exit(end.code or bool({'torch', 'numpy'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["dense"] == DENSE_TP4_PP2
