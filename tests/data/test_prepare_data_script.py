"""scripts/prepare_data.py: what docs/data.md says about it is so."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "prepare_data.py"


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=False)


def test_it_prepares_says_what_it_made_and_verifies_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": "some text é " * 20}) + "\n" for _ in range(50)))
    made = run(tmp_path / "*.jsonl", "--column", "body", "--tokenizer", "byte", "--output", tmp_path / "out")
    assert made.returncode == 0, made.stderr
    assert "50 documents, 13,050 tokens, 13,000 bytes, 0.996 bytes per token, vocabulary 257" in made.stdout
    sound = run("--verify", tmp_path / "out")
    assert (sound.returncode, "sound; 50 documents, 13,050 tokens" in sound.stdout) == (0, True)
    beyond = run("--verify", tmp_path / "out", "--vocab-size", 150)
    assert beyond.returncode == 2
    assert "token id 195 in document 0" in beyond.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gone.txt", "--output", "x"], "there is no such file"),
        (["gone.txt"], "--output=null: is needed"),
        (["--output", "x"], "give files or --hub NAME"),
        (["gone.txt", "--hub", "a/b", "--workers", "0"], "refused, 3 problems"),
        (["--verify", "gone"], "gone.bin.*is missing"),
    ],
)
def test_mistakes_are_refused_with_status_two_and_no_traceback(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    refused = subprocess.run(
        [sys.executable, SCRIPT, *arguments], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert message.split(".*")[-1] in refused.stderr
