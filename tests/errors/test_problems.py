"""What is told of a mistake cannot drive a terminal, wherever a name in it comes from."""

import pytest

from megalite.errors.problems import Problem, UserError, printable


@pytest.mark.parametrize("place", ["setting", "value", "rule", "remedy"])
def test_control_characters_of_names_are_written_out(place: str) -> None:
    words = {"setting": "data.path", "value": "x", "rule": "has no such column", "remedy": "name another"}
    error = UserError(Problem(**{**words, place: "a\x1b[2Jb"}))
    assert "a\\x1b[2Jb" in str(error)
    assert "\x1b" not in str(error)


def test_text_stays_as_it_is() -> None:
    text = "a\tb\r\nc ä \u00a0 \u200d 文 \U0001f600 \\x1b"
    assert printable(text) == text
    assert printable("\x00\x7f\x85\u2028\u202e\udcff") == r"\x00\x7f\x85\u2028\u202e\udcff"
