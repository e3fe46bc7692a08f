"""The layout of stages as text or list: what it means, and where it is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.layout.stage_string import LayoutError, example_layout, layout_counts, without_prediction


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
    assert list(layout_counts(text)) == counts


def test_the_layout_of_61_layers_with_its_prediction_taken_out() -> None:
    for text in ("Et*3|(tt|)*29,m|L", "Et*3|(tt|)*29, m * 1 |L"):
        assert list(layout_counts(without_prediction(text))) == [3] + [2] * 29 + [0, 0]


def test_a_list_of_counts_and_a_list_of_symbols_mean_the_same_as_the_text() -> None:
    text = layout_counts("Et*3|tt||tL")
    assert text == layout_counts([3, 2, 0, 1]) == layout_counts(("Ettt", "t*2", "", "tL")) == (3, 2, 0, 1)


@st.composite
def _written(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A text in any of its spellings, with the counts that it was made from."""
    items = draw(
        st.lists(st.tuples(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 4)), max_size=4)
    )
    commas = st.sampled_from(["", ",", " ", ", "])

    def stage(count: int) -> str:
        starred = count > 0 and draw(st.booleans())
        return draw(commas) + (f"t{draw(commas)}*{draw(commas)}{count}" if starred else "t" * count) + draw(commas)

    text, counts = "E", []
    for group, repeats in items:
        body = "|".join(stage(count) for count in group) + "|"
        text += body if repeats == 1 else f"({body}){draw(commas)}*{repeats}"
        counts += group * repeats
    last = draw(st.integers(0, 5))
    return text + stage(last) + "L", [*counts, last]


@given(_written())
def test_every_spelling_of_a_layout_means_the_same(written: tuple[str, list[int]]) -> None:
    text, counts = written
    assert list(layout_counts(text)) == counts


@given(st.integers(1, 300), st.integers(1, 100))
def test_the_example_holds_every_layer_as_evenly_as_possible(num_layers: int, stages: int) -> None:
    counts = layout_counts(example_layout(num_layers, stages))
    assert (len(counts), sum(counts)) == (stages, num_layers)
    assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("", "position 1: the first stage must begin with E"),
        ("tt|ttL", "position 1: the first stage must begin with E"),
        ("|Ett|ttL", "position 1: the first stage must begin with E"),
        ("Ett|tt", "the end: the last stage must end with L"),
        ("Ett|ttL|", "the end: the last stage must end with L"),
        ("Ett|EttL", "position 5: a second E"),
        ("EttL|ttL", "position 4: a second L"),
        ("E*2tL", "position 1: a second E"),
        ("Ett|t,xL", "position 7: 'x' is none of"),
        ("Ett|t xL", "position 7: 'x' is none of"),
        ("Et3|tL", "position 3: '3' is none of"),
        ("Ett,m|L", "position 5: 'm', multi-token prediction, is not built"),
        ("Et*|tL", "position 3: a number must follow"),
        ("Et*²|tL", "position 3: a number must follow"),
        ("(*2)*3", r"position 2: nothing stands before"),
        ("Et*2*3L", "position 5: nothing stands before"),
        ("E(t*2|)*2*3L", "position 10: nothing stands before"),
        ("Et*1,0L", "position 5: a comma or blank inside a number"),
        ("Et*1 0L", "position 5: a comma or blank inside a number"),
        ("Et*0|tL", "position 3: repeats 0 times"),
        ("E(t|)tL", "position 5: a group needs a number of repeats"),
        ("E()*2tL", "position 3: an empty group"),
        ("E((t)*2|)*2tL", "position 3: groups do not nest"),
        ("Et)*2tL", r"position 3: this '\)' closes no"),
        ("E(t|tL", r"position 2: this '\(' is never closed"),
        ("Et*100001L", "position 3: repeats to more than 100,000"),
        ("E(t*99999|)*99999L", "position 12: repeats to more than 100,000"),
        ("Et*" + "9" * 5000 + "L", "position 3: repeats to more than 100,000"),
        ([], "must be text like"),
        (3, "must be text like"),
        ({"E": 1}, "must be text like"),
        ([3, "t"], "all whole numbers or all symbols"),
        ([3, True], "all whole numbers or all symbols"),
        ([3, 2.0], "all whole numbers or all symbols"),
        ([3, -1], "stage 2 of the list: -1 layers"),
        (["Et", "t|t", "L"], "stage 2 of the list, position 2: an entry is one stage"),
        (["Et", "tx", "L"], "stage 2 of the list, position 2: 'x' is none of"),
        (["Et", "tE", "L"], "stage 2 of the list, position 2: a second E"),
        (["", "Et", "L"], "position 1: the first stage must begin with E"),
    ],
)
def test_a_malformed_layout_is_refused_where_it_goes_wrong(layout: object, said: str) -> None:
    with pytest.raises(LayoutError, match=said):
        layout_counts(layout)  # type: ignore[arg-type]
