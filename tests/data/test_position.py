"""A source goes on where it was, whatever blends it is in, and however long their samples are."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.samples import Part, Position, SampleSource
from megalite.data.token_file import TokenFile

SIZES = {"a": 40, "b": 90, "c": 170}  # tokens
WEIGHTS = st.dictionaries(st.sampled_from(sorted(SIZES)), st.integers(1, 5), min_size=1)


def blend(weights: dict[str, int], length: int) -> tuple[SampleSource, list[str]]:
    parts = [Part(cast(TokenFile, SimpleNamespace(prefix=Path(name))), 0, SIZES[name]) for name in weights]
    return SampleSource(parts, tuple(weights.values()), length, 10, 7, None), [*weights]


@given(plan=st.lists(st.tuples(WEIGHTS, st.integers(0, 30)), min_size=1, max_size=5))
@settings(max_examples=60, deadline=None)
def test_each_source_gives_its_samples_in_one_order_without_a_gap(plan: list[tuple[dict[str, int], int]]) -> None:
    position, samples = Position(), 0
    found: dict[str, list[int]] = {name: [] for name in SIZES}
    keys: dict[str, int] = {}
    for weights, count in plan:
        position, source = position.moved(*blend(weights, 8), samples)
        again, same = Position(**vars(position)).moved(*blend(weights, 8), samples + count // 2)
        assert (again, same) == (position, source), "a start in the middle of a blend finds it as it was"
        parts, starts = source.places(np.arange(samples, samples + count))
        for part, start in zip(parts, starts, strict=True):
            found[[*weights][part]].append(int(start))
        keys |= dict(zip(weights, source.numbers, strict=True))
        samples += count
    for name, starts in found.items():
        if starts:
            alone, _ = blend({name: 1}, 8)
            own: Any = SampleSource(alone.parts, (1,), 8, 10, 7, None, numbers=(keys[name],))
            assert starts == own.places(np.arange(len(starts)))[1].tolist()


def test_another_length_begins_at_the_same_share_of_the_epoch() -> None:
    position, source = Position().moved(*blend({"a": 1, "c": 1}, 8), 0)
    position, source = position.moved(*blend({"c": 1, "b": 1}, 16), 30)  # 15 samples of c, which has 21 an epoch
    assert source.before == (8, 0), "8 * 16 tokens are the first to be more than 15 * 8"
    assert source.numbers == (1, 2)
    position, source = position.moved(*blend({"a": 1}, 16), 40)  # 15 samples of a: 3 epochs of 4 and 3 samples of 8
    assert source.before == (3 * 2 + 2,)
    assert source.epochs(40) == [4.0], "the rest of the epoch is too short for a longer sample"


def test_the_order_of_sources_decides_ties_so_another_one_is_another_blend() -> None:
    position, source = Position().moved(*blend({"a": 1, "b": 1}, 8), 0)
    position, other = position.moved(*blend({"b": 1, "a": 1}, 8), 3)
    before, after = (one.places(np.arange(*span)) for one, span in ((source, (0, 3)), (other, (3, 5))))
    names = [*("ab"[part] for part in before[0]), *("ba"[part] for part in after[0])]
    starts = [*before[1].tolist(), *after[1].tolist()]
    assert len({*zip(names, starts, strict=True)}) == 5, "no sample comes twice"
