"""What goes wrong after the start: training keeps what was learned, and says what happened once, on whatever rank."""

import multiprocessing.spawn
import os
import resource
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch

import pretrain_gpt
from megalite.commands import train
from megalite.data.samples import Part, SampleSource
from megalite.data.token_file import TokenFile
from tests.bad_input.launching import SMALL, TOKENS, refused, write_corpus
from tests.train.runs import ROOT
from tests.warm import warm_python

LARGE = 9_000_000  # tokens of a file that is not looked at as a whole when it is opened


def test_a_full_disk_ends_neither_training_nor_the_last_checkpoint(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_gpt.main([*SMALL, "run_dir=run", "train.steps=1"]) == 0
    view = Mock()
    view.name = "trackers"
    monkeypatch.setattr("megalite.observe.about.open_trackers", lambda *_: view)
    capfd.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # stands for a full disk: a checkpoint takes 120 KiB
    try:
        assert pretrain_gpt.main([*SMALL, "run_dir=run", "checkpoint.interval=2"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr()
    assert "the checkpoint of step 2 was not saved: " in said.out
    assert "File too large" in said.out
    assert "4 of 4 steps" in said.out
    assert "the state of step 4 is not saved; the newest is of step 1" in said.err
    assert view.add.call_args.args[0]["status"] == 1
    assert [path.name for path in (launch_folder / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_a_refusal_on_the_way_keeps_what_was_learned(launch_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["train.eval_interval=2", "train.eval_batches=1"]):
        stranger = LARGE * 9 // 10 + 5 if extra else place_of_sample(launch_folder, 4 * 2)
        write_corpus(launch_folder, stranger_at=stranger, count=LARGE)
        message = refused(capfd, [*SMALL, *TOKENS, *extra, f"run_dir=run{len(extra)}", "data.validation_fraction=0.1"])
        assert "corpus.bin" in message
        assert "token id 9999 at token" in message
        assert "model.vocab_size" in message
        assert [path.name for path in (launch_folder / f"run{len(extra)}" / "checkpoints").iterdir()] == [
            "step-00000002"
        ]


def place_of_sample(folder: Path, index: int) -> int:
    """A token that only this sample of a run on `corpus` holds, and that no look at the file finds."""
    write_corpus(folder, count=LARGE)
    part = Part(TokenFile.open(folder / "corpus"), 0, LARGE * 9 // 10)
    _, starts = SampleSource([part], (1,), 16, 256, 1234, None).places(np.array([index]))
    return int(starts[0]) + 5


def test_what_one_other_machine_lacks_is_said_there(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train, "WAIT_FOR_RANK_ZERO_S", 0.0)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "no folder" in refused(capfd, [*SMALL, "tokenizer=./none"])
    monkeypatch.setenv("LOCAL_RANK", "1")  # its neighbour has said it
    assert pretrain_gpt.main([*SMALL, "tokenizer=./none"]) == 2
    monkeypatch.setenv("LOCAL_RANK", "0")  # rank 0 sees this, too
    assert pretrain_gpt.main([*SMALL, "zzz=1"]) == 2
    assert capfd.readouterr().err == ""


@pytest.mark.long  # without torchrun: tests/train/test_run.py
def test_what_only_rank_1_reads_ends_the_job_with_one_message(launch_folder: Path) -> None:
    """Each of the two microbatches of a step is another rank's."""
    write_corpus(launch_folder, stranger_at=place_of_sample(launch_folder, 4 * 2 + 2), count=LARGE)
    command = [warm_python(), "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*SMALL, *TOKENS, "run_dir=run", "data.validation_fraction=0.1"]
    done = subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr  # torchrun's own
    assert done.stderr.count("token id 9999") == done.stderr.count("megalite:") == 1, done.stderr
    assert "[rank" not in done.stderr, "no rank leaves a traceback"
    assert [path.name for path in (launch_folder / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_the_scan_of_a_token_file_names_the_document(launch_folder: Path) -> None:
    write_corpus(launch_folder, stranger_at=1000)
    prepare = [sys.executable, "-m", "megalite", "prepare"]
    begin = time.monotonic()
    words = ["--verify", "data=tokens", "data.path=corpus", "model.vocab_size=256"]
    done = subprocess.run([*prepare, *words], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "corpus.bin': token id 9999 at token 1,000 (document 0)" in done.stderr
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize("pause", [0.0, 0.5], ids=["at any time", "while the next one starts"])
def test_a_data_process_that_is_killed_is_named_with_what_may_have_killed_it(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], pause: float
) -> None:
    """As the kernel does where memory runs out."""
    start = BaseProcess.start
    monkeypatch.setattr(BaseProcess, "start", lambda process: (time.sleep(pause), start(process)))
    (launch_folder / "python").write_text("#!/bin/sh\nkill -9 $$\n")
    (launch_folder / "python").chmod(0o755)
    (launch_folder / "a.jsonl").write_text('{"text": "some text"}\n' * 150_000)
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", os.fsencode(launch_folder / "python"))
    with pytest.raises(RuntimeError):
        pretrain_gpt.main([*SMALL, "data=text", "data.path=a.jsonl", "data.workers=2"])
    assert "a tokenizing process was ended (out of memory?)" in capfd.readouterr().err
    assert not (launch_folder / "runs").exists()


def test_a_step_without_memory_is_named_with_what_would_need_less(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def without_memory(*arguments: object, **options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    write_corpus(launch_folder)
    monkeypatch.setattr("megalite.train.step.TrainStep.__call__", without_memory)
    with pytest.raises(torch.OutOfMemoryError):
        pretrain_gpt.main([*SMALL, *TOKENS])
    said = capfd.readouterr().err
    assert f"megalite: rank 0 on {os.uname().nodename}, step 1: OutOfMemoryError: CUDA out of memory" in said
    assert "megalite: less memory is needed with train.micro_batch_size=" in said
    assert "train.recompute" in said
