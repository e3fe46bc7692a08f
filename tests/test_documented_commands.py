"""Every command that README and docs print runs exactly as printed, and ends as they say.

The text is taken from the pages and given to bash, in a copy of the repository, page by page and block by block. Only
the size is another: `python` and `torchrun` are found in a folder of small scripts that add settings of a small model
to the words that they are given, and then call the real ones; tests are only collected, and of benchmarks only the
options are read (test_benchmark.py and test_benchmark_pipeline.py run them, small). Blocks that need a cluster, an
account or hours say so by their language: `text` instead of `bash`.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(\w+=\S+ )*(python|torchrun|bash|srun|sbatch|docker|pip|source|lm_eval|tests/|mkdir)\b", re.MULTILINE
)
REFUSED = 2
LEFT_OUT = (".git", ".venv", "runs", "__pycache__", ".*_cache", "*.egg-info")  # what a clone does not have
# Pages with commands in `text` blocks: they need Docker, a GPU or several, the hub, or a root of their own.
NEEDS_MORE = {"docker.md": 4, "huggingface.md": 2, "performance.md": 1, "training.md": 1, "data.md": 0}

SMALL = """\
#!/usr/bin/env bash
# Calls the real {name} with what makes a documented command small.
steps=$(grep -o 'train.steps=[0-9]*' <<<" $* " | tail -n 1)
[ "${{steps#*=}}" -le 20 ] 2>/dev/null || steps=train.steps=3
tokenizer=
case " $* " in *" data=tokens "* | *" tokenizer="*) ;; *) tokenizer=tokenizer=byte ;; esac
case " $* " in
    *" -m pip "*) echo "nothing is to be installed: see setup.sh's stamp" >&2; exit 1 ;;
    *pretrain_gpt.py*--help*) ;;
    *pretrain_gpt.py*) set -- "$@" {settings} $steps $tokenizer ;;
    *benchmark.py*) set -- "$@" --help ;;
    *" -m pytest "*.py*) set -- "$@" --collect-only -q ;;
    *" -m pytest "*) set -- "$@" --collect-only -q tests/test_house.py ;;
esac
exec {real} "$@"
"""
SETTINGS = (
    "model.num_layers=4 model.hidden_size=32 model.num_attention_heads=4 model.num_key_value_heads=4 "
    "model.ffn_hidden_size=64 train.seq_length=32 lr.warmup_steps=0 train.eval_batches=1 train.sample_tokens=4"
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences."""

    page: Path
    line: int
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, at.start()) + 1, at[1], at[2]) for at in FENCE.finditer(text)]


def commands(page: Path) -> list[tuple[Block, int]]:
    """The blocks to be run, each with the status that the page promises: output that begins with a refusal says 2."""
    found = blocks(page)
    following = {block: after.text if after.language == "" else "" for block, after in pairwise(found)}
    return [
        (block, REFUSED if following.get(block, "").startswith("megalite: refused") else 0)
        for block in found
        if block.language == "bash"
    ]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The repository as a new user has it, set up, with the files of a user beside it."""
    folder = tmp_path_factory.mktemp("clone") / "megalite"
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    real = ROOT / ".venv" / "bin"
    for name in ("python", "torchrun"):
        (programs / name).write_text(SMALL.format(name=name, real=real / name, settings=SETTINGS))
        (programs / name).chmod(0o755)
    (programs / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for files in (
        "requirements.txt",
        "requirements.txt requirements-test.txt",
    ):  # as setup.sh leaves it when it is done
        stamp = f"touch .venv/.installed-$(cat {files} pyproject.toml | cksum | tr ' ' '-')"
        subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)
    _write_user_files(folder)
    return folder


def _write_user_files(folder: Path) -> None:
    sentence = "A tree stands by the river, and the light falls through its leaves on the stones.\n"
    for name in ("my.txt", "input.txt", "a.txt", "b.txt"):
        (folder / name).write_text(sentence * 400)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "one.jsonl").write_text(f'{{"body": "{sentence.strip()}"}}\n' * 400)
    (folder / "tokens").mkdir()
    python = ROOT / ".venv" / "bin" / "python"
    for name in ("web", "code"):
        prepare = [python, "scripts/prepare_data.py", "my.txt", "--tokenizer", "byte", "--output", f"tokens/{name}"]
        subprocess.run(prepare, cwd=folder, check=True, capture_output=True)


def run(block: Block, folder: Path) -> "subprocess.CompletedProcess[str]":
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TURNS": "1"}
    command = ["bash", "-euo", "pipefail", "-c", block.text]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_the_commands_of_a_page_run_as_printed(page: Path, clone: Path) -> None:
    for block, status in commands(page):
        done = run(block, clone)
        told = f"{page.name}, line {block.line}, status {done.returncode}:\n{block.text}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == status, told


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_command_stands_in_a_block_that_nobody_runs(page: Path) -> None:
    """Unless the block says that it is `text`."""
    others = [block for block in blocks(page) if block.language != "bash" and COMMAND.search(block.text)]
    assert [block.language for block in others] == ["text"] * NEEDS_MORE.get(page.name, 0), others


def test_a_command_that_fails_is_noticed(clone: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```bash\npython pretrain_gpt.py train.step=3\n```\n\n```bash\npython no_such_script.py\n```\n")
    assert [run(block, clone).returncode == status for block, status in commands(page)] == [False, False]
