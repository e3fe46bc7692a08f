"""What is told of a mistake cannot drive a terminal, wherever a name in it comes from."""

import pytest

from megalite.errors.problems import Problem, UserError, plain, printable, several


@pytest.mark.parametrize("place", ["setting", "value", "rule", "hint"])
def test_control_characters_of_names_are_written_out(place: str) -> None:
    words = {"setting": "data.path", "value": "x", "rule": "has no such column", "hint": "name another"}
    error = UserError(Problem(**{**words, place: "a\x1b[2Jb"}))
    assert "a\\x1b[2Jb" in str(error)
    assert "\x1b" not in str(error)


def test_text_stays_as_it_is() -> None:
    text = "a\tb\r\nc ä \u00a0 \u200d 文 \U0001f600 \\x1b"
    assert printable(text) == text
    assert printable("\x00\x7f\x85\u2028\u202e\udcff") == r"\x00\x7f\x85\u2028\u202e\udcff"


def test_numbers_are_told_without_the_digits_that_computing_blurs() -> None:
    assert str(Problem("lr.min_lr", 3e-4 / 10, "rule", "remedy")).startswith("lr.min_lr=3e-05:")
    values = (3e-4 / 10, None, [0.1 + 0.2, True], 0.0, "a", 1e20)
    assert [plain(one) for one in values] == ["3e-5", "null", "[0.3,true]", "0", "a", "1e20"]


def test_one_thing_is_singular() -> None:
    told = [several(1, "step"), several(0, "step"), several(2000, "microbatch"), several(1.0, "epoch")]
    assert told == ["1 step", "0 steps", "2,000 microbatches", "1 epoch"]
