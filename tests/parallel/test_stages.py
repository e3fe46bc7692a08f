"""Who holds which layers: nothing is dropped, every refusal names a way out that works."""

import ast
import re
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.config.problems import Problem, UserError
from megalite.parallel.stage_rules import DEFAULTS, FIELD_NAMES, StageSettings, broken_rules, stage_problems
from megalite.parallel.stages import StageLayers, get_num_layers, stage_layers
from tests.parallel.following import ways_out


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
        ({"layout": [1, 5, 6, 0]}, [1, 5, 6, 0]),
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


def test_one_rank_holds_everything() -> None:
    assert stage_layers(StageSettings(12, 1)) == (StageLayers(0, 0, 0, 0, 12, embedding=True, loss=True),)


def test_the_records_of_two_chunks_on_two_ranks() -> None:
    assert stage_layers(StageSettings(8, 2, vpp=2)) == (
        StageLayers(stage=0, rank=0, chunk=0, first=0, count=2, embedding=True, loss=False),
        StageLayers(stage=1, rank=1, chunk=0, first=2, count=2, embedding=False, loss=False),
        StageLayers(stage=2, rank=0, chunk=1, first=4, count=2, embedding=False, loss=False),
        StageLayers(stage=3, rank=1, chunk=1, first=6, count=2, embedding=False, loss=True),
    )


def test_a_standalone_embedding_leaves_every_chunk_of_rank_0_empty() -> None:
    assert _counts(12, 4, standalone_embedding=True, vpp=2) == [0, 2, 2, 2, 0, 2, 2, 2]
    assert get_num_layers(12, 4, 0, chunk=1, vpp=2, standalone_embedding=True) == 0


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
    stages = stage_layers(StageSettings(61, 16, layout="Et*3|(tt|)*29,|L"))
    by_rank = [[stage.count for stage in stages if stage.rank == rank] for rank in range(16)]
    assert by_rank == [[3, 2], *[[2, 2]] * 13, [2, 0], [2, 0]]


def test_80_layers_are_never_silently_fewer() -> None:
    """Plain integer division would build 48 of them on 16 ranks of 3 chunks, and train on."""
    for pp in (1, 2, 4, 5, 6, 8, 10, 16, 20, 40, 80):
        for vpp in range(1, 5):
            if not stage_problems(StageSettings(80, pp, vpp=vpp)):
                assert sum(_counts(80, pp, vpp=vpp)) == 80
    assert stage_problems(StageSettings(80, 16, vpp=3))


def test_no_torch_is_imported() -> None:
    program = "import sys, megalite.parallel.stages; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


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
        return StageSettings(sum(counts), pp, vpp=draw(st.sampled_from([vpp, None])), layout=counts)
    pp, alone = pp + 1, draw(st.booleans())
    split = draw(st.integers(1 + alone, pp - 1))
    return StageSettings((split - alone) * (pp - split) * each, pp, split_rank=split, standalone_embedding=alone)


@settings(deadline=None)
@given(_accepted())
def test_the_layers_of_all_stages_in_order_are_the_model(asked: StageSettings) -> None:
    stages = stage_layers(asked)
    sides = ["decoder"] if asked.split_rank is None else ["encoder", "decoder"]
    for side in sides:
        held = [layer for stage in stages if stage.side == side for layer in stage.layers]
        assert held == list(range(asked.num_layers))


@settings(deadline=None)
@given(_accepted())
def test_chunk_c_on_rank_r_is_stage_c_pp_r_and_the_ends_are_where_tokens_enter_and_leave(asked: StageSettings) -> None:
    stages = stage_layers(asked)
    assert len(stages) % asked.pp == 0
    assert [stage.stage for stage in stages] == list(range(len(stages)))
    assert all(stage.stage == stage.chunk * asked.pp + stage.rank for stage in stages)
    assert all(0 <= stage.rank < asked.pp for stage in stages)
    assert [stage.stage for stage in stages if stage.loss] == [len(stages) - 1]
    assert [stage.stage for stage in stages if stage.embedding] == [
        0,
        *([asked.split_rank] if asked.split_rank else []),
    ]


@settings(deadline=None)
@given(_accepted())
def test_the_count_of_a_rank_is_the_sum_over_its_chunks(asked: StageSettings) -> None:
    stages = stage_layers(asked)
    rules = {field: getattr(asked, field) for field in DEFAULTS}
    for rank in range(asked.pp):
        chunks = [stage.count for stage in stages if stage.rank == rank]
        by_chunk = [get_num_layers(asked.num_layers, asked.pp, rank, chunk=c, **rules) for c in range(len(chunks))]
        assert by_chunk == chunks
        assert get_num_layers(asked.num_layers, asked.pp, rank, **rules) == sum(chunks)


@settings(deadline=None)
@given(_accepted())
def test_no_stage_is_empty_unless_asked_for(asked: StageSettings) -> None:
    if asked.layout is not None:
        return
    for stage in stage_layers(asked):
        ends = (asked.first_layers == 0 and stage.rank == 0) or (asked.last_layers == 0 and stage.rank == asked.pp - 1)
        counted = (asked.count_embedding and stage.embedding) or (asked.count_loss and stage.loss)
        assert stage.count > 0 or ends or counted or (asked.standalone_embedding and stage.rank == 0)


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(1, 4), st.integers(1, 5), st.booleans(), st.booleans())
def test_offsets_with_counted_ends_are_those_of_megatron(
    pp: int, vpp: int, each: int, embedding: bool, loss: bool
) -> None:
    """Published rule: chunk * (total // vpp) + rank * share, less the embedding's place for all but the first."""
    total = pp * vpp * (each + 1)
    asked = StageSettings(total - embedding - loss, pp, vpp=vpp, count_embedding=embedding, count_loss=loss)
    for stage in stage_layers(asked):
        expected = stage.chunk * (total // vpp) + stage.rank * (each + 1) - (embedding and stage.stage > 0)
        assert stage.first == expected


@settings(deadline=None)
@given(st.integers(3, 9), st.integers(1, 4), st.integers(0, 5), st.integers(0, 5), st.integers(1, 5))
def test_offsets_with_first_and_last_counts_are_those_of_megatron(
    pp: int, vpp: int, first: int, last: int, each: int
) -> None:
    """Each of the vpp rounds holds its part of the first, the middle and the last rank's layers."""
    layers = (first + last + each * (pp - 2)) * vpp
    asked = StageSettings(layers, pp, vpp=vpp, first_layers=first * vpp, last_layers=last * vpp)
    for stage in stage_layers(asked):
        within = first + (stage.rank - 1) * each if stage.rank else 0
        assert stage.first == stage.chunk * (first + each * (pp - 2) + last) + within


# --- refusals ------------------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_layers=0: must be a whole number", {"num_layers": 0}),
    ("num_layers=-3: must be a whole number", {"num_layers": -3}),
    ("num_layers=12.0: must be a whole number", {"num_layers": 12.0}),
    ("num_layers=True: must be a whole number", {"num_layers": True}),
    ("num_layers=null: must be a whole number", {"num_layers": None}),
    ("pp=0: must be a whole number", {"pp": 0}),
    ("pp='4': must be a whole number", {"pp": "4"}),
    ("pp='many': must be a whole number", {"pp": "many"}),
    ("vpp=0: must be a whole number", {"vpp": 0}),
    ("vpp=1.5: must be a whole number", {"vpp": 1.5}),
    ("vpp=2: virtual stages divide the stages of a pipeline, and pp=1 has none", {"pp": 1, "vpp": 2}),
    ("num_layers=10: does not divide over the 4 stages of pp=4: 2 would be left over", {"num_layers": 10}),
    ("num_layers=80: does not divide over the 48 stages of pp=16 x vpp=3", {"num_layers": 80, "pp": 16, "vpp": 3}),
    ("num_layers=3: fewer than the 4 stages of pp=4: a stage would be left empty", {"num_layers": 3}),
    ("num_layers=1000001: does not divide", {"num_layers": 10**6 + 1, "pp": 8190, "vpp": 3}),
    ("num_layers=10: with standalone_embedding=True it leaves 10", {"num_layers": 10, "standalone_embedding": True}),
    ("standalone_embedding=True: sets ranks apart", {"pp": 1, "standalone_embedding": True}),
    ("split_rank=0: must be a whole number, at least 1", {"split_rank": 0}),
    ("split_rank=4: must be 1 to 3 with pp=4", {"split_rank": 4}),
    ("split_rank=1: must be 2 to 3 with pp=4 and standalone", {"split_rank": 1, "standalone_embedding": True}),
    ("split_rank=1: needs 2 ranks or more with pp=1", {"pp": 1, "split_rank": 1}),
    ("split_rank=1: needs 3 ranks or more", {"pp": 2, "split_rank": 1, "standalone_embedding": True}),
    ("split_rank=9: must be 1 to 7", {"num_layers": 13, "pp": 8, "split_rank": 9}),
    ("num_layers=10: does not divide over the 3 ranks of the encoder", {"num_layers": 10, "split_rank": 3}),
    ("5 ranks of the encoder nor over the 3 ranks of the dec", {"num_layers": 13, "pp": 8, "split_rank": 5}),
    ("vpp=2: cannot be combined with split_rank=2", {"vpp": 2, "split_rank": 2}),
    ("first_layers=-1: must be a whole number, at least 0", {"first_layers": -1}),
    ("last_layers=2.5: must be a whole number, at least 0", {"last_layers": 2.5}),
    ("first_layers=3: sets ranks apart, but pp=1 is one rank", {"pp": 1, "first_layers": 3}),
    ("it leaves -1, which is fewer than the 3 other stages", {"first_layers": 13}),
    ("it leaves 0, which is fewer than the 2 other stages", {"first_layers": 6, "last_layers": 6}),
    ("it leaves 10, which does not divide over the 3 other stages", {"last_layers": 2}),
    ("it leaves 6, which no other rank is there to hold", {"pp": 2, "first_layers": 3, "last_layers": 3}),
    ("first_layers=3: does not divide over the chunks of a rank, vpp=2", {"pp": 2, "vpp": 2, "first_layers": 3}),
    ("last_layers=3: does not divide over the chunks of a rank, vpp=2", {"pp": 2, "vpp": 2, "last_layers": 3}),
    ("with count_loss=True it counts as 13", {"count_loss": True}),
    ("with count_embedding=True and count_loss=True it counts as 14", {"count_loss": True, "count_embedding": True}),
    ("count_loss=True: cannot be combined with first_layers=3", {"first_layers": 3, "count_loss": True}),
    ("count_loss=True: cannot be combined", {"num_layers": 10, "first_layers": 2, "count_loss": True}),
    ("count_embedding=True: cannot be .* standalone", {"standalone_embedding": True, "count_embedding": True}),
    ("first_layers=0: cannot be .* standalone_embedding=True", {"standalone_embedding": True, "first_layers": 0}),
    ("last_layers=3: cannot be combined with split_rank=2", {"split_rank": 2, "last_layers": 3}),
    ("split_rank=2: cannot be combined with layout", {"split_rank": 2, "layout": "Et*3|(t*3|)*2t*3L"}),
    ("standalone_embedding=True: cannot be .* layout", {"standalone_embedding": True, "layout": [0, 4, 4, 4]}),
    ("layout='Etx': position 3", {"layout": "Etx"}),
    ("'m', multi-token prediction, is not built", {"num_layers": 61, "pp": 16, "layout": "Et*3|(tt|)*29,m|L"}),
    ("layout='Et.*': has 3 stages, not a multiple of pp=4", {"layout": "Et*4|t*4|t*4L"}),
    (r"layout=\[6, 6\]: has 2 stages, but pp=1 has one", {"pp": 1, "layout": [6, 6]}),
    (r"vpp=3: layout=\[.*\] has 4 stages, that is 2", {"pp": 2, "vpp": 3, "layout": [3, 3, 3, 3]}),
    ("vpp=2: virtual stages", {"pp": 1, "vpp": 2, "layout": [6, 6]}),
    (r"num_layers=12: layout=\[.*\] places 11", {"layout": [3, 3, 3, 2]}),
]


def _ways_out(asked: StageSettings, remedy: str) -> list[StageSettings]:
    """Every change that a remedy offers."""

    def read(field: str, value: str | None) -> Any:
        return DEFAULTS[field] if value is None else ast.literal_eval(value)

    return [replace(asked, **{field: read(field, value) for field, value in way.items()}) for way in ways_out(remedy)]


def _asked(changes: dict[str, Any]) -> StageSettings:
    return StageSettings(**{"num_layers": 12, "pp": 4, **changes})


@pytest.mark.parametrize(("said", "changes"), REFUSED)
def test_every_refusal_names_only_ways_out_that_work(said: str, changes: dict[str, Any]) -> None:
    asked = _asked(changes)
    with pytest.raises(UserError) as caught:
        stage_layers(asked)
    assert re.search(said, str(caught.value)), caught.value
    for problem in caught.value.problems:
        ways = _ways_out(asked, problem.remedy)
        assert ways
        if len(caught.value.problems) == 1:
            for way in ways:
                assert not stage_problems(way), (problem.remedy, way)


_anything = st.fixed_dictionaries(
    {"num_layers": st.integers(-1, 40), "pp": st.integers(0, 9)},
    optional={
        "vpp": st.integers(0, 4),
        "standalone_embedding": st.just(True),
        "split_rank": st.integers(0, 9),
        "first_layers": st.integers(-1, 12),
        "last_layers": st.integers(-1, 12),
        "count_embedding": st.just(True),
        "count_loss": st.just(True),
        "layout": st.sampled_from(["Ett|tt|ttL", "Ett|m|L", "E(t|)*3L", "x"])
        | st.lists(st.integers(-1, 9), max_size=8),
    },
)


@settings(max_examples=100, deadline=None)
@given(_anything)
def test_following_remedies_always_ends_in_accepted_settings(changes: dict[str, Any]) -> None:
    asked = StageSettings(**changes)
    for _ in range(16):  # more than there are rules to break
        problems = stage_problems(asked)
        if not problems:
            stage_layers(asked)
            return
        ways = _ways_out(asked, problems[0].remedy)
        if len(problems) == 1:
            assert all(not stage_problems(way) for way in ways), problems
        asked = ways[0]
    pytest.fail(f"remedies of {changes} lead nowhere")


@settings(max_examples=100, deadline=None)
@given(_anything, st.sets(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=4))
def test_no_remedy_offers_a_pipeline_that_the_world_has_no_room_for(changes: dict[str, Any], room: set[int]) -> None:
    asked = StageSettings(**changes)
    allowed = (room or {1}) | {asked.pp}  # what is asked for is refused, if at all, by another rule
    for problem in stage_problems(asked, pp_sizes=room):
        assert {way.pp for way in _ways_out(asked, problem.remedy)} <= allowed


def test_a_remedy_within_the_world_names_the_nearest_pipelines_that_work() -> None:
    (problem,) = stage_problems(StageSettings(12, 4, split_rank=4), pp_sizes=[1, 2, 4, 8, 16])
    assert problem.remedy == "split_rank=1 or 2 or 3, or pp=8 or 16"
    (problem,) = stage_problems(StageSettings(10, 2, vpp=2), {"num_layers": "n", "pp": "p", "vpp": "v"}, [1, 2, 4, 8])
    assert problem.remedy == "n=8 or 12, or v=1 or 5"


def test_the_rules_that_are_broken_can_be_compared_with_those_of_a_change() -> None:
    asked = StageSettings(10, 4)
    assert broken_rules(asked) == {("num_layers", "sum")}
    assert broken_rules(replace(asked, pp=5)) == frozenset()
    assert broken_rules(replace(asked, vpp=0)) == {("vpp", "value")}


def test_all_problems_are_told_at_once() -> None:
    asked = StageSettings(0, 4, vpp=2, split_rank=3, first_layers=-1, layout="Exx")
    told = [problem.setting for problem in stage_problems(asked)]
    assert told == ["num_layers", "first_layers", "layout", "vpp", "split_rank", "first_layers"]
    both = stage_problems(StageSettings(10, 4, layout=[3, 3, 3]))  # stages and layers are judged apart
    assert [problem.setting for problem in both] == ["layout", "num_layers"]


def test_messages_speak_of_the_settings_that_the_user_knows() -> None:
    names = {"num_layers": "--num-layers", "pp": "--pp"}
    (problem,) = stage_problems(StageSettings(10, 4, vpp=1), names)
    assert problem == Problem(
        "--num-layers",
        10,
        "does not divide over the 4 stages of --pp=4: 2 would be left over",
        "--num-layers=8 or 12, or --pp=1 or 2 or 5",  # no layout: this user has no such setting
    )


def test_a_rank_or_chunk_that_does_not_exist_is_refused_with_the_rest() -> None:
    with pytest.raises(UserError) as caught:
        get_num_layers(12, 4, 4, chunk=2, vpp=3)
    assert [str(problem) for problem in caught.value.problems] == [
        "pp_rank=4: there are 4, counted from 0\n      fix: pp_rank=0 to 3"
    ]
    with pytest.raises(UserError) as caught:
        get_num_layers(12, 4, -1, chunk=3, vpp=3)
    assert [problem.setting for problem in caught.value.problems] == ["pp_rank", "chunk"]
    with pytest.raises(UserError) as caught:
        get_num_layers(10, 4, 4)
    assert [problem.setting for problem in caught.value.problems] == ["num_layers", "pp_rank"]


def test_remedies_are_found_at_once_however_large_the_numbers() -> None:
    begin = time.process_time()
    for asked in (StageSettings(10**9 + 1, 4096, vpp=4), StageSettings(10**400 + 1, 4), StageSettings(997, 16, vpp=3)):
        assert stage_problems(asked, FIELD_NAMES)[0].remedy
    assert time.process_time() - begin < 2
