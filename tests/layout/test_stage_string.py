"""The layout of stages as text: what it means, and what is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.layout.stage_string import layout_counts, layout_text


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


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40))
def test_what_is_written_is_read_back(counts: list[int]) -> None:
    assert list(layout_counts(layout_text(counts))) == counts


@pytest.mark.parametrize(
    "text",
    [
        *("", "tt|ttL", "|Ett|ttL", "Ett|tt", "Ett|ttL|", "Ett|EttL", "EttL|ttL", "E*2tL"),
        *("Ett|t,xL", "Et3|tL", "Et*|tL", "Et*²|tL", "(*2)*3", "Et*2*3L", "E(t*2|)*2*3L", "Et*1,0L", "Et*1 0L"),
        *("Et*0|tL", "E(t|)tL", "E()*2tL", "E((t)*2|)*2tL", "Et)*2tL", "E(t|tL"),
    ],
)
def test_a_malformed_layout_is_refused_with_its_form(text: str) -> None:
    with pytest.raises(ValueError, match="must be stages like 'Ett"):
        layout_counts(text)


@pytest.mark.parametrize(
    "text", ["Et*100001L", "Et*" + "9" * 5000 + "L", "E(t*99999|)*99999L", "Et*90000" + "t*90000" * 1000 + "L"]
)
def test_a_layout_that_would_fill_the_memory_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="more than 100,000 symbols"):
        layout_counts(text)


def test_prediction_of_several_tokens_is_named() -> None:
    with pytest.raises(ValueError, match="multi-token prediction, is not built"):
        layout_counts("Et*3|(tt|)*29,m|L")
