"""Every box is written once, by a rank that holds it, and the load is level."""

from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.store import plan_writes

RANKS = st.integers(1, 5)
BOXES = st.dictionaries(st.sampled_from("abcdefghij"), st.integers(0, 100), min_size=1)


@given(BOXES, RANKS, st.data())
def test_every_box_is_written_once_by_a_rank_that_holds_it(
    sizes: dict[str, int], ranks: int, data: st.DataObject
) -> None:
    held: list[list[tuple[str, int]]] = [[] for _ in range(ranks)]
    for key, size in sizes.items():
        for rank in data.draw(st.sets(st.integers(0, ranks - 1), min_size=1)):
            held[rank].append((key, size))
    plan = plan_writes(held)
    written = [boxes[at][0] for boxes, chosen in zip(held, plan, strict=True) for at in chosen]
    assert sorted(written) == sorted(sizes)


@given(BOXES, RANKS)
def test_replicas_are_spread_to_within_the_largest_box(sizes: dict[str, int], ranks: int) -> None:
    boxes = [*sizes.items()]
    loads = [sum(boxes[at][1] for at in chosen) for chosen in plan_writes([boxes] * ranks)]
    assert max(loads) - min(loads) <= max(sizes.values())
