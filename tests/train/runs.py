"""Real runs in real processes: the launcher as a user starts it, stopped and killed at will."""

import json
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from megalite.commands.train import train_rank
from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext, rank0_broadcast
from megalite.launch.process import ProcessEnvironment
from tests.warm import warm_python

ROOT = Path(__file__).parents[2]
# Equal in every repetition.
TIMELESS = ("step", "tokens", "loss", "grad_norm", "lr", "bad_steps", "val_loss", "val_loss_ema")


def write_text(path: Path) -> Path:
    """A text with structure enough to learn from."""
    dice = random.Random(0)
    words = ["tree", "river", "stone", "cloud", "mountain", "light", "shadow", "wind"]
    path.write_text(". ".join(" ".join(dice.choices(words, k=6)) for _ in range(3000)))
    return path


def overrides(folder: Path, run: str, *extra: str) -> list[str]:
    """A run of 40 steps of some 30 ms, with everything that a resume has to carry on: dropout, evaluation, warm-up."""
    return [
        f"run_dir={folder / run}",
        "data=text",
        f"data.path={folder / 'text.txt'}",
        f"data.cache_dir={folder / 'cache'}",
        "tokenizer=byte",
        "device=cpu",
        "precision=fp32",
        "model.num_layers=2",
        "model.hidden_size=64",
        "model.dropout=0.1",
        "train.steps=40",
        "train.global_batch_size=8",
        "train.micro_batch_size=2",
        "train.seq_length=64",
        "train.eval_interval=10",
        "train.eval_batches=1",
        "train.check_replicas_every=10",
        "checkpoint.interval=5",
        *extra,
    ]


def launch(
    arguments: Sequence[str],
    ranks: int = 1,
    variables: Mapping[str, str] = MappingProxyType({}),
    cwd: Path = ROOT,
    python: str | None = None,
) -> "subprocess.Popen[str]":
    """The launcher as a process group of its own, under torchrun if there are several ranks."""
    command = [python or warm_python()]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
    return subprocess.Popen(
        [*command, str(ROOT / "pretrain_gpt.py"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=cwd,
        env=environment,
        start_new_session=True,
    )


def finish(process: "subprocess.Popen[str]", timeout: float = 120) -> tuple[int, str]:
    """Exit status and everything that was printed."""
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{output}") from None
    return process.returncode, output


def metrics(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl, with nothing that a clock decides."""
    path = run / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{key: value for key, value in json.loads(line).items() if key in TIMELESS} for line in lines]


def wait_for_step(process: "subprocess.Popen[str]", run: Path, step: int, timeout: float = 90) -> None:
    """Return once the run has reported `step`."""
    deadline = time.monotonic() + timeout
    while not any(record["step"] >= step for record in metrics(run)):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"step {step} was not reached within {timeout} s"
        time.sleep(0.005)


def kill(process: "subprocess.Popen[str]") -> None:
    """SIGKILL the launcher and all that it started."""
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def state_bytes(run: Path, step: int) -> dict[str, bytes]:
    """The tensor files of one checkpoint."""
    files = sorted((run / "checkpoints" / f"step-{step:08d}").glob("*.safetensors"))
    assert files
    return {file.name: file.read_bytes() for file in files}


def train_on_rank(context: ParallelContext, config: Config) -> int:
    """The exit status of one rank of a run. Ranks of `run_ranks` leave their world for the one that the run makes."""
    rank, size, port = context.rank, context.world_size, 0
    if size > 1:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = rank0_broadcast(context, lambda: probe.getsockname()[1])
        context.close()
    return train_rank(config, ProcessEnvironment(rank, size, rank, size, master_port=port))


def outcome(context: ParallelContext, config: Config) -> int | str:
    """The exit status of one rank of a run, or the words of its refusal."""
    try:
        return train_on_rank(context, config)
    except UserError as error:
        return str(error)
