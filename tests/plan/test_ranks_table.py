"""Tables, JSON and header lines say what the layout's groups are, whatever its size."""

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.ranks import DEFAULT_ORDER, ParallelLayout, header_lines
from megalite.layout.stages import StageSettings, stage_layers
from megalite.plan.ranks import SETS, Groups, groups_of, stage_lines, table_lines
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


def read_tables(lines: list[str]) -> Groups:
    """The groups that tables show, as a reader of the brackets finds them."""
    sections: Groups = {"expert": {}}
    text: dict[str, str] = {}
    for line in lines:
        if line in ("dense:", "expert:"):
            text = {}
            section = line.removesuffix(":")
        elif found := re.match(r"  (\S+) +(\d+) groups? +of (\d+): +", line):
            axes, count, members = found[1], int(found[2]), int(found[3])
            text[axes] = line[found.end() :]
        elif text and line:
            text[axes] += f" {line.strip()}"
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
def test_tables_read_back_are_the_groups(layout: ParallelLayout, width: int) -> None:
    shown = groups_of(layout)
    lines = list(table_lines(shown, layout.world_size, width))
    assert read_tables(lines) == shown
    known = SETS if layout.has_experts else {"dense": SETS["dense"], "expert": ()}
    assert shown == {name: {axes: layout.groups(axes) for axes in sets} for name, sets in known.items()}
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize(
    ("layout", "lines"),
    [
        (laid_out(1, experts=True), ["1 rank", "experts: 1 rank"]),
        (laid_out(4, pp=2, vpp=3, order="pp-dp"), ["4 ranks: dp 2 x pp 2 (vpp 3), order pp-dp"]),
        (
            LARGE,
            ["16384 ranks: tp 8 x cp 2 x dp 64 x pp 16, order tp-cp-ep-dp-pp", "experts: ep 64 x edp 16 x pp 16"],
        ),
    ],
)
def test_header_says_the_sizes_of_all_axes(layout: ParallelLayout, lines: list[str]) -> None:
    assert header_lines(layout) == lines


def test_tables_and_json_of_sixteen_thousand_ranks_take_under_two_seconds() -> None:
    begin, groups = time.process_time(), groups_of(LARGE)
    assert sum(map(len, table_lines(groups, LARGE.world_size, 120))) > 1e6
    assert time.process_time() - begin < 2


def test_stages_are_listed_by_layer_with_what_else_they_hold() -> None:
    assert list(stage_lines(stage_layers(StageSettings(4, 2, 2, layout="Et||tt|tL")))) == [
        "stages:",
        "  pp rank 0, chunk 0: 1 layer, 0-0 (embedding)",
        "  pp rank 1, chunk 0: no layers",
        "  pp rank 0, chunk 1: 2 layers, 1-2",
        "  pp rank 1, chunk 1: 1 layer, 3-3 (loss)",
    ]
    assert list(stage_lines(stage_layers(StageSettings(12, 4, split_rank=2, standalone_embedding=True)))) == [
        "stages:",
        "  pp rank 0, chunk 0: encoder, no layers (embedding)",
        "  pp rank 1, chunk 0: encoder, 12 layers, 0-11",
        "  pp rank 2, chunk 0: 6 layers, 0-5 (embedding)",
        "  pp rank 3, chunk 0: 6 layers, 6-11 (loss)",
    ]
