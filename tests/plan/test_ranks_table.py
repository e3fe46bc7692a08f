"""Tables, JSON and header lines say what the layout's groups are, whatever its size."""

import json
import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.ranks import DEFAULT_ORDER, ParallelLayout, RankGenerator
from megalite.layout.stages import StageSettings, stage_layers
from megalite.layout.summary import header_lines
from megalite.plan.ranks_table import SETS, json_lines, stage_lines, table_lines
from tests.plan.laid_out import laid_out

LARGE = laid_out(16384, tp=8, cp=2, pp=16, ep=64, etp=1)
size = st.sampled_from([1, 1, 2, 3, 4])
layouts = st.one_of(
    st.builds(
        ParallelLayout,
        tp=size,
        cp=size,
        dp=size,
        pp=size,
        order=st.permutations(DEFAULT_ORDER.split("-")).map("-".join),
    ),
    st.builds(
        lambda etp, ep, edp, pp: ParallelLayout(tp=etp, dp=ep * edp, pp=pp, ep=ep, etp=etp), size, size, size, size
    ),
)


def read_tables(lines: list[str]) -> dict[str, dict[str, list[list[int]]]]:
    """The groups that tables show, as a reader of the brackets finds them."""
    sections: dict[str, dict[str, list[list[int]]]] = {"expert": {}}
    text: dict[str, str] = {}
    for line in lines:
        if line in ("dense:", "expert:"):
            text = {}
            section = line.removesuffix(":")
        elif found := re.match(r"  (\S+) +(\d+) groups? +of (\d+): +", line):
            axes, count, members = found[1], int(found[2]), int(found[3])
            text[axes] = line[found.end() :]
        elif text and line:
            text[axes] += line
        else:
            continue
        if text:
            groups = [[int(rank) for rank in group.split()] for group in re.findall(r"\[([\d ]+)\]", text[axes])]
            if "each rank alone" in text[axes]:
                assert members == 1
                groups = [[rank] for rank in range(count)]
            sections.setdefault(section, {})[axes] = groups
    return sections


@given(layout=layouts, width=st.integers(60, 160))
@settings(deadline=None)
def test_tables_read_back_are_the_json_which_is_the_groups(layout: ParallelLayout, width: int) -> None:
    lines = list(table_lines(layout, width))
    shown = json.loads("\n".join(json_lines(layout)))
    assert read_tables(lines) == shown
    assert list(shown) == ["dense", "expert"]
    assert tuple(shown["dense"]) == SETS["dense"]
    assert tuple(shown["expert"]) == (SETS["expert"] if layout.has_experts else ())
    for numbering in shown.values():
        for axes, groups in numbering.items():
            assert groups == layout.groups(axes)
    assert max(map(len, lines)) <= width


def test_groups_of_a_small_layout_stand_in_one_line_per_axis() -> None:
    lines = list(table_lines(laid_out(16, tp=4, pp=2), 120))
    assert lines == [
        "16 ranks: tp 4 x dp 2 x pp 2, order tp-cp-ep-dp-pp",
        "rank 0: tp 0-3, dp 0 4, pp 0 8",
        "",
        "dense:",
        "  tp         4 groups of 4:  [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]",
        "  cp        16 groups of 1:  each rank alone",
        "  dp         8 groups of 2:  [0 4] [1 5] [2 6] [3 7] [8 12] [9 13] [10 14] [11 15]",
        "  pp         8 groups of 2:  [0 8] [1 9] [2 10] [3 11] [4 12] [5 13] [6 14] [7 15]",
        "  tp-pp      2 groups of 8:  [0 1 2 3 8 9 10 11] [4 5 6 7 12 13 14 15]",
        "  dp-cp      8 groups of 2:  [0 4] [1 5] [2 6] [3 7] [8 12] [9 13] [10 14] [11 15]",
        "  tp-cp      4 groups of 4:  [0 1 2 3] [4 5 6 7] [8 9 10 11] [12 13 14 15]",
        "  tp-dp-cp   2 groups of 8:  [0 1 2 3 4 5 6 7] [8 9 10 11 12 13 14 15]",
    ]


def test_groups_that_take_several_lines_are_not_broken() -> None:
    lines = list(table_lines(laid_out(64, tp=2), 54))
    first = next(number for number, line in enumerate(lines) if line.startswith("  tp "))
    assert lines[first : first + 3] == [
        "  tp        32 groups of 2:  [0 1] [2 3] [4 5] [6 7]",
        "                             [8 9] [10 11] [12 13]",
        "                             [14 15] [16 17] [18 19]",
    ]


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        (laid_out(1), ["1 rank"]),
        (laid_out(1, experts=True), ["1 rank", "experts: 1 rank"]),
        (laid_out(8), ["8 ranks: dp 8"]),
        (
            laid_out(8, ep=4),
            ["8 ranks: dp 8, order tp-cp-ep-dp-pp", "experts: ep 4 x edp 2", "rank 0: dp 0-7, ep 0-3, edp 0 4"],
        ),
        (
            laid_out(4, pp=2, vpp=3, order="pp-dp"),
            ["4 ranks: dp 2 x pp 2 (vpp 3), order pp-dp", "rank 0: dp 0 2, pp 0 1"],
        ),
        (
            LARGE,
            [
                "16384 ranks: tp 8 x cp 2 x dp 64 x pp 16, order tp-cp-ep-dp-pp",
                "experts: ep 64 x edp 16 x pp 16",
                "rank 0: tp 0-7, cp 0 8, dp 0 16 32 .. 1008, pp 0 1024 2048 .. 15360, ep 0-63, edp 0 64 128 .. 960",
            ],
        ),
    ],
)
def test_header_says_the_sizes_and_the_neighbours_of_one_rank(layout: ParallelLayout, lines: list[str]) -> None:
    assert header_lines(layout) == lines


def test_header_of_sixteen_thousand_ranks_lists_no_groups_and_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(RankGenerator, "groups")
    begin = time.process_time()
    assert len(header_lines(LARGE)) == 3
    assert time.process_time() - begin < 0.1


def test_tables_and_json_of_sixteen_thousand_ranks_take_under_two_seconds() -> None:
    begin = time.process_time()
    assert sum(map(len, table_lines(LARGE, 120))) > 1e6
    assert len(json.loads("\n".join(json_lines(LARGE)))["expert"]["ep"]) == 256
    assert time.process_time() - begin < 2


def test_stages_are_listed_by_layer_with_what_else_they_hold() -> None:
    assert list(stage_lines(stage_layers(StageSettings(4, 2, 2, layout="Et||tt|tL")))) == [
        "stages:",
        "  pp rank 0, chunk 0: 1 layer, 0 (embedding)",
        "  pp rank 1, chunk 0: no layers",
        "  pp rank 0, chunk 1: 2 layers, 1-2",
        "  pp rank 1, chunk 1: 1 layer, 3 (loss)",
    ]
    assert list(stage_lines(stage_layers(StageSettings(12, 4, split_rank=2, standalone_embedding=True)))) == [
        "stages:",
        "  pp rank 0: encoder, no layers (embedding)",
        "  pp rank 1: encoder, 12 layers, 0-11",
        "  pp rank 2: decoder, 6 layers, 0-5 (embedding)",
        "  pp rank 3: decoder, 6 layers, 6-11 (loss)",
    ]
