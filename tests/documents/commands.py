"""How the commands that README and docs print are run: exactly as printed.

The text is taken from the pages and given to bash, in a copy of the repository, page by page and block by block. Only
the size is another: `python` and `torchrun` are found in a folder of small scripts that add settings of a small model
to the words that they are given, and then call the real ones; tests are only collected. Blocks that need a cluster, an
account or hours say so by their language: `text` instead of `bash`. Benchmarks run in fp32: where a processor has no
bf16 instructions, bf16 takes hours. A plain run starts them by `tests.warm`, verifies without data parallelism, and
of four ranks or more only checks the settings: that layouts train is tests/layouts' claim. A full one starts them as
users do.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(
    r"^(?:\$ )?(\w+=\S+ )*(python|torchrun|bash|srun|sbatch|docker|pip|source|lm_eval|tests/|mkdir)\b", re.MULTILINE
)
REFUSED = 2
IGNORED = [line.strip("/") for line in (ROOT / ".gitignore").read_text().split()]
# What a clone does not have, or who tries these pages has made.
LEFT_OUT = (".git", *IGNORED, "tokens", "corpus", "exported", "my-model")
# Pages with commands in `text` blocks: they need Docker, a GPU or several, the hub, or a root of their own.
NEEDS_MORE = {
    "clusters.md": 5,
    "data.md": 0,
    "docker.md": 5,
    "huggingface.md": 2,
    "mup.md": 1,
    "optimizer.md": 1,
    "performance.md": 1,
    "sweeps.md": 2,
    "training.md": 1,
}

SMALL = """\
#!/usr/bin/env bash
# Calls the real {name} with what makes a documented command small.
steps=$(grep -o 'train.steps=[0-9]*' <<<" $* " | tail -n 1)
[ "${{steps#*=}}" -le 20 ] 2>/dev/null || steps=train.steps=3
length=$(grep -o 'train.seq_length=[0-9]*' <<<" $* " | tail -n 1)
[ "${{length#*=}}" -le 64 ] 2>/dev/null || length=train.seq_length=32
tokenizer=
case " $* " in *" data=tokens "* | *" tokenizer="*) ;; *) tokenizer=tokenizer=byte ;; esac
case " $* " in
    *" -m pip "*) echo "nothing is to be installed: see setup.sh's stamp" >&2; exit 1 ;;
    *pretrain_gpt.py*--help*) ;;
    *pretrain_gpt.py*) set -- "$@" {settings} $steps $length $tokenizer ;;
    *" -m megalite train "*) set -- "$@" $steps $length ;;
    *benchmark.py*--overhead*) set -- "${{@/bf16/fp32}}" --precision fp32 --steps 4 --batch 1 ;;
    *benchmark.py*--optimizer*) set -- "$@" --model tiny_moe --precision fp32 --steps 1 --batch 1 ;;
    *benchmark.py*--context*) set -- "$@" --precision fp32 --steps 1 ;;
    *benchmark.py*--experts*) set -- "${{@/bf16/fp32}}" --precision fp32 --steps 1 --batch 2 ;;
    *benchmark.py*) set -- "${{@/bf16/fp32}}" --model tiny --precision fp32 --steps 1 --batch 1 ;;
    *" -m pytest "*.py*) set -- "$@" --collect-only -q ;;
    *" -m pytest "*) set -- "$@" --collect-only -q tests/test_house.py ;;
esac
case "{name} $* " in
    "torchrun --standalone --nproc-per-node "[4-9]" pretrain_gpt.py "*)
        [ -n "${{MEGALITE_TESTS_FULL:-}}" ] || exec {python} -c '{check}' "$3" "${{@:5}}" ;;
    "python -m megalite verify "*) [ -n "${{MEGALITE_TESTS_FULL:-}}" ] || set -- "$@" --dp 1 ;;
esac
exec {real} "$@"
"""
CHECK = "import sys; from megalite.config.compose import load_config; load_config(sys.argv[2:], int(sys.argv[1]))"
SETTINGS = (
    "model.num_layers=4 model.hidden_size=32 model.num_attention_heads=4 model.num_key_value_heads=4 "
    "model.ffn_hidden_size=64 lr.warmup_steps=0 train.eval_batches=1 train.sample_tokens=4"
)


@dataclass(frozen=True)
class Block:
    """What stands between two fences. A transcript begins with `$ `: a command, and below it what that says."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def is_transcript(self) -> bool:
        return self.language == "" and self.text.startswith("$ ")

    @property
    def is_program(self) -> bool:
        """Python that stands alone, rather than a piece of some file."""
        return self.language == "python" and self.text.startswith(("from ", "import "))

    @property
    def command(self) -> str:
        if self.is_program:
            return f"python - <<'END'\n{self.text}END"
        return self.text.partition("\n")[0][2:] if self.is_transcript else self.text


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(page, text.count("\n", 0, at.start()) + 1, at[1], at[2]) for at in FENCE.finditer(text)]


def commands(page: Path) -> list[tuple[Block, int]]:
    """The blocks to be run, each with the status that the page promises: output that begins with a refusal says 2."""
    found = blocks(page)
    output = {block: after.text if after.language == "" else "" for block, after in pairwise(found)}
    output |= {block: block.text.partition("\n")[2] for block in found if block.is_transcript}
    return [
        (block, REFUSED if output.get(block, "").startswith("megalite: refused") else 0)
        for block in found
        if block.language == "bash" or block.is_transcript or block.is_program
    ]


def copy_repository(folder: Path, python: str) -> None:
    """`folder` is the repository as a new user has it, set up, with the files of a user beside it. `python`: by which
    commands are run."""
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*LEFT_OUT))
    programs = folder / ".venv" / "bin"
    programs.mkdir(parents=True)
    for name, real in (("python", python), ("torchrun", f"{python} -m torch.distributed.run")):
        (programs / name).write_text(SMALL.format(name=name, real=real, settings=SETTINGS, python=python, check=CHECK))
        (programs / name).chmod(0o755)
    (programs / "activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for files in (
        "requirements.txt",
        "requirements.txt " + " ".join(f"requirements-{name}.txt" for name in ("wandb", "tensorboard", "s3", "test")),
    ):  # as setup.sh leaves it when it is done
        stamp = f"touch .venv/.installed-$(cat {files} pyproject.toml | cksum | tr ' ' '-')"
        subprocess.run(["bash", "-c", stamp], cwd=folder, check=True)
    _write_user_files(folder, python)


def _write_user_files(folder: Path, python: str) -> None:
    sentence = "A tree stands by the river, and the light falls through its leaves on the stones.\n"
    for name in ("my.txt", "input.txt", "a.txt", "b.txt"):
        (folder / name).write_text(sentence * 400)
    (folder / "corpus").mkdir()
    (folder / "corpus" / "one.jsonl").write_text(f'{{"body": "{sentence.strip()}"}}\n' * 400)
    (folder / "tokens").mkdir()
    for name in ("web", "code"):
        prepare = [python, "-m", "megalite", "prepare", "data=text", "data.path=my.txt", "tokenizer=byte"]
        subprocess.run([*prepare, "--output", f"tokens/{name}"], cwd=folder, check=True, capture_output=True)


def run(block: Block, folder: Path) -> "subprocess.CompletedProcess[str]":
    path = f"{folder / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "TURNS": "1"}  # of what a page measures
    command = ["bash", "-euo", "pipefail", "-c", block.command]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def check(page: Path, folder: Path) -> None:
    """The page's commands end as it says, one after the other."""
    for block, status in commands(page):
        done = run(block, folder)
        told = f"{page.name}, line {block.line}, status {done.returncode}:\n{block.text}\n{done.stdout}\n{done.stderr}"
        assert done.returncode == status, told
        if block.is_transcript:
            assert done.stdout + done.stderr == block.text.partition("\n")[2], told
