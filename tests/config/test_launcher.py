"""The launcher as a user meets it: one message, exit status 2, quickly, and nothing on disk."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

import pretrain_gpt

LAUNCHER = Path(__file__).parents[2] / "pretrain_gpt.py"
Launch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def launch_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Launch:
    """The same in this process."""
    monkeypatch.chdir(tmp_path)

    def launched(*argv: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        status = pretrain_gpt.main(list(argv))
        return subprocess.CompletedProcess(argv, status, *capfd.readouterr())

    return launched


REFUSED: list[tuple[Sequence[str], dict[str, str], list[str]]] = [
    (["optimzer.lr=1", "model=gtp2"], {}, ["2 problems", "optimizer.lr=1", "model=gpt2"]),
    (["--multirun", "seed=1,2", "zzz=1"], {}, ["zzz=1"]),
    (["seed=1", "--run", "word", "~seed", "--foo=3"], {}, ["3 problems", "word: is no setting", "~seed", "--foo"]),
    (["--run", "--cfg", "job"], {}, ["--cfg/-c: not allowed with argument --run"]),
    (["train.steps=x"], {"WORLD_SIZE": "2"}, ["4 problems", "RANK", "MASTER_ADDR", "MASTER_PORT", "train.steps"]),
]


@pytest.mark.parametrize(("argv", "variables", "words"), REFUSED, ids=[" ".join(row[0]) for row in REFUSED])
def test_a_refusal_is_one_message_with_status_2_and_leaves_nothing(
    argv: Sequence[str], variables: dict[str, str], words: list[str], tmp_path: Path, launch_here: Launch
) -> None:
    done = launch_here(*argv, **variables)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("megalite: refused") == 1
    assert "Traceback" not in done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "word"),
    [
        (["--help"], "experiment: gpt2_124m_openwebtext, llama3_8b_fineweb, qwen3_0_6b, shakespeare_char"),
        (["experiment=qwen3_0_6b", "--cfg", "job", "train.steps=7"], "steps: 7"),
        (["--cfg", "job", "checkpoint.async=true"], "\n  async: true\n  remote: null\n"),
        (["model=gpt2", "--cfg", "job", "data.path=[a,b]"], "hidden_size: 768"),
        (["--info", "defaults"], "Defaults List"),
        (["--version"], "Hydra"),
        (["--shell-completion", "install=bash"], "hydra_bash_completion"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else None,
)
def test_information_is_shown_and_nothing_is_left(
    argv: list[str], word: str, tmp_path: Path, launch_here: Launch
) -> None:
    done = launch_here(*argv)
    assert (done.returncode, done.stderr) == (0, "")
    assert word in done.stdout
    assert list(tmp_path.iterdir()) == []


def in_shell(words: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    command = words.replace("LAUNCH", f"{sys.executable} {LAUNCHER}")
    return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def test_a_reader_that_leaves_is_no_error(tmp_path: Path) -> None:
    done = in_shell("set -o pipefail; LAUNCH --cfg job | true".join(("bash -c '", "'")), tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_closed_streams_lead_nowhere_and_not_into_files(tmp_path: Path) -> None:
    code = (
        "import os, sys; from megalite.commands.train import main_to_the_end as main; status = main(['--cfg', 'job'])"
    )
    code += "; print('lost'); sys.exit(status or os.open('file', os.O_CREAT) <= 2)"
    done = in_shell(f'{sys.executable} -c "{code}" >&- 2>&- <&-', tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "file").read_bytes() == b""


def test_a_working_directory_that_is_gone_is_refused(tmp_path: Path) -> None:
    done = in_shell("mkdir gone; cd gone; rmdir ../gone; LAUNCH", tmp_path)
    assert done.returncode == 2
    assert "working directory: cannot be read" in done.stderr
    assert "Traceback" not in done.stderr


def test_safe_path_finds_the_package_beside_the_launcher(tmp_path: Path) -> None:
    without_install = {"PYTHONPATH": str(Path(yaml.__file__).parents[1]), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-S", str(LAUNCHER), "--cfg", "job"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **without_install}, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_only_rank_zero_speaks(launch_here: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    assert launch_here("--help", RANK="1", **ranks).stdout == ""
    other = launch_here("zzz=1", RANK="1", **ranks)
    assert (other.returncode, other.stderr) == (2, "")
    assert sum(waited) > 1, "the launcher ends all ranks with the first: rank 0 must have time to print"


CHECK = """
import sys
from megalite.commands import train
train.train_rank = lambda config, environment: 0
train.main(sys.argv[1:])
slow = {"torch", "transformers", "datasets", "tokenizers", "pyarrow", "numpy", "rich"}
print("IMPORTED", sorted(slow & {*sys.modules}))
"""


@pytest.mark.parametrize("argv", [["model=gtp2", "data=text"], ["--help"], ["--cfg", "job"]], ids=" ".join)
def test_checking_a_config_imports_nothing_slow(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK, *argv], cwd=LAUNCHER.parent, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "IMPORTED []"


def test_torchrun_prints_a_refusal_once(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(LAUNCHER)]
    done = subprocess.run(
        [*command, "model=gtp2", "zzz=1"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 1, "torchrun's own status for failed ranks"
    assert done.stderr.count("megalite: refused, 2 problems") == 1
    assert done.stderr.count("zzz=1: unknown setting") == 1
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_before_the_start_ends_with_130_and_no_traceback(tmp_path: Path) -> None:
    # Torch's import is the long part of the start; the interrupt is sent when it has begun.
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(30)\n")
    process = subprocess.Popen(
        [sys.executable, str(LAUNCHER)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background has Ctrl-C ignored, and so have all its children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert (process.returncode, "Traceback" in errors) == (130, False)
