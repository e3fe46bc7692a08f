"""Who holds which layers: nothing is dropped, settings that cannot keep this are refused."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.layout.stages import EXCLUDED_BY, StageSettings, get_num_layers, layout_counts, stage_layers


def _counts(num_layers: int, pp: int, **rules: Any) -> list[int]:
    return [stage.count for stage in stage_layers(StageSettings(num_layers, pp, **rules))]


# --- known answers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "counts"),
    [
        ({}, [3, 3, 3, 3]),
        ({"standalone_embedding": True}, [0, 4, 4, 4]),
        ({"split_rank": 2}, [6, 6, 6, 6]),
        ({"split_rank": 2, "standalone_embedding": True}, [0, 12, 6, 6]),
        ({"split_rank": 1}, [12, 4, 4, 4]),
        ({"split_rank": 3, "standalone_embedding": True}, [0, 6, 6, 12]),
        ({"first_layers": 3, "last_layers": 1}, [3, 4, 4, 1]),
        ({"first_layers": 0}, [0, 4, 4, 4]),
        ({"last_layers": 6}, [2, 2, 2, 6]),
        ({"standalone_embedding": True, "last_layers": 2}, [0, 5, 5, 2]),
        ({"layout": "Et|t*5|t*6|L"}, [1, 5, 6, 0]),
    ],
)
def test_twelve_layers_on_four_ranks(rules: dict[str, Any], counts: list[int]) -> None:
    assert _counts(12, 4, **rules) == counts
    assert [get_num_layers(12, 4, rank, **rules) for rank in range(4)] == counts


def test_the_embedding_or_the_loss_takes_the_place_of_a_layer() -> None:
    assert _counts(14, 4, count_embedding=True, count_loss=True) == [3, 4, 4, 3]
    assert _counts(11, 4, count_loss=True) == [3, 3, 3, 2]
    assert _counts(11, 4, count_embedding=True) == [2, 3, 3, 3]
    assert _counts(14, 4, vpp=2, count_embedding=True, count_loss=True) == [1, 2, 2, 2, 2, 2, 2, 1]
    assert _counts(2, 4, count_embedding=True, count_loss=True) == [0, 1, 1, 0]  # asked for, so allowed
    assert _counts(5, 1, count_embedding=True, count_loss=True) == [5]


def test_encoder_and_decoder_each_have_layers_0_to_the_last() -> None:
    stages = stage_layers(StageSettings(12, 4, split_rank=2, standalone_embedding=True))
    assert [(stage.side, stage.first, stage.count) for stage in stages] == [
        ("encoder", 0, 0),
        ("encoder", 0, 12),
        ("decoder", 0, 6),
        ("decoder", 6, 6),
    ]
    assert [stage.embedding for stage in stages] == [True, False, True, False]
    assert [stage.loss for stage in stages] == [False, False, False, True]


def test_61_layers_on_16_ranks_of_two_chunks_by_a_layout_string() -> None:
    stages = stage_layers(StageSettings(61, 16, vpp=2, layout="Et*3|(tt|)*29,|L"))
    by_rank = [[stage.count for stage in stages if stage.pp_rank == rank] for rank in range(16)]
    assert by_rank == [[3, 2], *[[2, 2]] * 13, [2, 0], [2, 0]]


# --- properties ----------------------------------------------------------------------------------------------------


@st.composite
def _accepted(draw: st.DrawFn) -> StageSettings:
    """Settings of every kind that hold all layers."""
    pp, vpp, each = draw(st.integers(2, 12)), draw(st.integers(1, 4)), draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["plain", "standalone", "ends", "count", "layout", "split"]))
    if kind == "plain":
        return StageSettings(pp * vpp * each, pp, vpp=vpp)
    if kind == "standalone":
        return StageSettings((pp - 1) * vpp * each, pp, vpp=vpp, standalone_embedding=True)
    if kind == "ends":
        first, last = (draw(st.none() | st.integers(0, 4)) for _ in range(2))
        between = pp - (first is not None) - (last is not None)
        total = (between * each + (first or 0) + (last or 0)) * vpp
        ends = [None if end is None else end * vpp for end in (first, last)]
        return StageSettings(max(total, vpp), pp, vpp=vpp, first_layers=ends[0], last_layers=ends[1] if total else vpp)
    if kind == "count":
        embedding, loss = draw(st.booleans()), draw(st.booleans())
        total = pp * vpp * (each + 1) - embedding - loss
        return StageSettings(total, pp, vpp=vpp, count_embedding=embedding, count_loss=loss)
    if kind == "layout":
        counts = draw(st.lists(st.integers(0, 5), min_size=pp * vpp, max_size=pp * vpp).filter(any))
        return StageSettings(sum(counts), pp, vpp=vpp, layout=f"E{'|'.join('t' * count for count in counts)}L")
    pp, alone = pp + 1, draw(st.booleans())
    split = draw(st.integers(1 + alone, pp - 1))
    return StageSettings((split - alone) * (pp - split) * each, pp, split_rank=split, standalone_embedding=alone)


@settings(deadline=None)
@given(_accepted())
def test_stages_hold_the_model_in_order_chunk_by_chunk(asked: StageSettings) -> None:
    stages = stage_layers(asked)
    for side in ["decoder"] if asked.split_rank is None else ["encoder", "decoder"]:
        held = [layer for stage in stages if stage.side == side for layer in stage.layers]
        assert held == list(range(asked.num_layers))
    assert [stage.stage for stage in stages] == list(range(len(stages)))
    assert all(stage.stage == stage.chunk * asked.pp + stage.pp_rank for stage in stages)
    assert all(0 <= stage.pp_rank < asked.pp for stage in stages)
    assert [stage.stage for stage in stages if stage.loss] == [len(stages) - 1]
    entries = [0, *([asked.split_rank] if asked.split_rank else [])]
    assert [stage.stage for stage in stages if stage.embedding] == entries
    rules = {field: getattr(asked, field) for field in (*EXCLUDED_BY, "layout")}
    for rank in range(asked.pp):
        chunks = [stage.count for stage in stages if stage.pp_rank == rank]
        by_chunk = [get_num_layers(asked.num_layers, asked.pp, rank, chunk=c, **rules) for c in range(len(chunks))]
        assert by_chunk == chunks
        assert get_num_layers(asked.num_layers, asked.pp, rank, **rules) == sum(chunks)


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("0 layers cannot be divided over 4 stages", {"num_layers": 0}),
    ("10 layers cannot be divided over 4 stages", {"num_layers": 10}),
    ("80 layers cannot be divided over 48 stages", {"num_layers": 80, "pp": 16, "vpp": 3}),
    ("3 layers cannot be divided over 4 stages", {"num_layers": 3}),
    ("10 layers cannot be divided over 3 stages", {"num_layers": 10, "standalone_embedding": True}),
    ("over 0 stages", {"pp": 1, "standalone_embedding": True}),
    ("over 0 stages", {"split_rank": 0}),
    ("over 0 stages", {"split_rank": 1, "standalone_embedding": True}),
    ("10 layers cannot be divided over 3 stages", {"num_layers": 10, "split_rank": 3}),
    ("13 layers cannot be divided over 5 stages", {"num_layers": 13, "pp": 8, "split_rank": 5}),
    ("the layers of the first or last rank cannot be", {"first_layers": -1}),
    ("9 layers cannot be divided over 0 stages", {"pp": 1, "first_layers": 3}),
    ("-1 layers cannot be divided over 3 stages", {"first_layers": 13}),
    ("0 layers cannot be divided over 2 stages", {"first_layers": 6, "last_layers": 6}),
    ("first or last rank cannot be divided over its 2 chunks", {"vpp": 2, "first_layers": 3}),
    ("13 layers cannot be divided", {"count_embedding": True}),
    ("place the same layers twice: .*'count_loss': .'first_layers'", {"count_loss": True, "first_layers": 3}),
    ("place the same layers twice", {"vpp": 2, "split_rank": 2}),
    ("place the same layers twice", {"split_rank": 2, "last_layers": 3}),
    ("place the same layers twice", {"split_rank": 2, "layout": "Et*3|(t*3|)*2t*3L"}),
    ("place the same layers twice", {"standalone_embedding": True, "layout": "E|t*4|t*4|t*4L"}),
    ("12 layers on 3 stages, not 12 on 4", {"layout": "Et*4|t*4|t*4L"}),
    ("12 layers on 4 stages, not 12 on 6", {"pp": 2, "vpp": 3, "layout": "E(t*3|)*3t*3L"}),
    ("11 layers on 4 stages, not 12 on 4", {"layout": "E(t*3|)*3ttL"}),
]


@pytest.mark.parametrize(("said", "changes"), REFUSED)
def test_settings_that_do_not_place_every_layer_once_are_refused(said: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=said):
        stage_layers(StageSettings(**{"num_layers": 12, "pp": 4, **changes}))


def test_a_rank_or_chunk_that_does_not_exist_is_refused() -> None:
    for rank, chunk in ((4, None), (-1, None), (0, 3)):
        with pytest.raises(ValueError, match=f"no pp_rank={rank}, chunk={chunk}"):
            get_num_layers(12, 4, rank, chunk=chunk, vpp=3)


# --- stages as text ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("EttttL", [4]),
        ("Ett|tt|ttL", [2, 2, 2]),
        ("Et*3|(tt|)*2,L", [3, 2, 2, 0]),
        ("E|t*4|t*4|t*4L", [0, 4, 4, 4]),
        ("Et||tL", [1, 0, 1]),
        ("Et|*3tL", [1, 0, 0, 1]),  # a border is a symbol like any other
        ("E(t|tt|)*2tL", [1, 2, 1, 2, 1]),
        ("E(t)*3L", [3]),
        ("E(t*2|t)*2L", [2, 3, 1]),  # groups may hold repeated symbols; the border only ends a stage
        ("E,t*,3,|,t*12L", [3, 12]),
        (" E t* 3 |\tt *12 L\n", [3, 12]),
        ("Et(|tt)*2|L", [1, 2, 2, 0]),
    ],
)
def test_a_text_means_the_layers_of_its_stages(text: str, counts: list[int]) -> None:
    assert layout_counts(text) == counts


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "Et*3|(tt|)*29,m|L",
            "Et*100001L",
            "tt|ttL",
            "|Ett|ttL",
            "Ett|tt",
            "Ett|ttL|",
            "Ett|EttL",
            "EttL|ttL",
            "E*2tL",
        ),
        *("Ett|t,xL", "Et3|tL", "Et*|tL", "Et*²|tL", "(*2)*3", "Et*2*3L", "E(t*2|)*2*3L", "Et*1,0L", "Et*1 0L"),
        *("Et*0|tL", "E(t|)tL", "E()*2tL", "E((t)*2|)*2tL", "Et)*2tL", "E(t|tL"),
    ],
)
def test_a_malformed_layout_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match="must be stages like 'Ett"):
        layout_counts(text)
