"""Everything that the launcher must refuse, once each, as a user meets it: status 2, one message, nothing written.

The rows run the launcher's `main` in this process; what needs several ranks or a clock runs as a real command. Finer
cases of each kind are tested in the rooms that refuse them.
"""

import os
import resource
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import pretrain_gpt
from megalite.checkpoint.lock import RunLock
from megalite.data.samples import Part, SampleSource
from megalite.data.token_file import TokenFile
from tests.train.runs import ROOT

# A model that trains in milliseconds.
SMALL = [
    *("model.num_layers=1", "model.hidden_size=16", "model.num_attention_heads=2", "tokenizer=byte", "train.steps=4"),
    *("train.seq_length=16", "train.global_batch_size=4", "train.micro_batch_size=2", "train.sample_tokens=0"),
    *("train.eval_interval=0", "device=cpu", "precision=fp32"),
]
TOKENS = ["data=tokens", "data.path=corpus", "model.vocab_size=256"]


def nothing(folder: Path) -> None:
    """No files are needed."""


def file(name: str, content: bytes) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        (folder / name).write_bytes(content)

    return arrange


def corpus(folder: Path, *, stranger_at: int = -1, count: int = 5000) -> None:
    """A token file of one document, with an id beyond the vocabulary of 256 somewhere."""
    tokens = (np.arange(count) % 200).astype("<u2")
    if stranger_at >= 0:
        tokens[stranger_at] = 9999
    tokens.tofile(folder / "corpus.bin")
    arrays = np.array([count], "<i4").tobytes() + np.array([0, 0, 1], "<i8").tobytes()
    (folder / "corpus.idx").write_bytes(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, 1, 2) + arrays)


def truncated_corpus(folder: Path) -> None:
    corpus(folder)
    os.truncate(folder / "corpus.bin", 8000)


def corpus_of_another_index(folder: Path) -> None:
    corpus(folder, count=100)
    index = (folder / "corpus.idx").read_bytes()
    corpus(folder)
    (folder / "corpus.idx").write_bytes(index)


def pipe(folder: Path) -> None:
    os.mkfifo(folder / "pipe.txt")


def gpt2_folder(folder: Path) -> None:
    (folder / "gpt").mkdir()
    (folder / "gpt" / "config.json").write_text(
        '{"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 300, "n_positions": 64}'
    )


@dataclass(frozen=True)
class Row:
    """A command that is refused, and words of its message."""

    name: str
    argv: str
    words: list[str]
    arrange: Callable[[Path], None] = nothing
    variables: dict[str, str] = field(default_factory=dict)


ROWS = [
    Row("unknown key", "optimzer.lr=1 +model.foo=1", ["2 problems", "optimzer.lr=1", "did you mean optimizer.lr=1"]),
    Row("wrong type", "train.steps=abc optimizer.lr=x", ["2 problems", "'abc'", "whole number", "optimizer.lr=0.001"]),
    Row("unknown choice", "model.norm=rmsnrom", ["'rmsnrom'", "model.norm=rmsnorm is the nearest", "layernorm"]),
    Row("sizes", "model.num_layers=0 train.seq_length=-4", ["2 problems", "num_layers=0", "-4", "at least 1"]),
    Row("more steps than a checkpoint's name holds", "train.steps=100000000", ["train.steps", "at most 99999999"]),
    Row("hidden size and heads", "model.hidden_size=100 model.num_attention_heads=12", ["=100", "=12", "96 or 120"]),
    Row("key-value heads", "model.num_attention_heads=4 model.num_key_value_heads=3", ["heads=3", "1 or 2 or 4"]),
    Row("odd rotary head", "model.head_size=33", ["33", "even", "32 or 34"]),
    Row("batch", "train.global_batch_size=100 train.micro_batch_size=3", ["=100", "=3 x 1", "99 or 102"]),
    Row("positions", "model=gpt2 train.seq_length=2048", ["=2048", "model.max_positions=1024", "rope"]),
    Row("warm-up", "lr.warmup_steps=20 train.steps=10", ["=20", "train.steps=10", "lr.warmup_steps=1 "]),
    Row("preset", "model=gpt5", ["'gpt5'", "model=gpt2 is the nearest", "llama3_8b"]),
    Row(
        "parallel sizes",
        "parallel.tp=2 parallel.cp=2 parallel.vpp=2",
        ["3 problems", "parallel.cp=2", "not built yet", "parallel.vpp=2", "parallel.pp=1 has none", "tp=1"],
    ),
    Row(
        "stages and their schedule",
        "parallel.pp=2 parallel.vpp=3 parallel.schedule=zb-h1 train.compile=true",
        ["4 problems", "fewer than the 6 stages", "model.num_layers=6 or 12", "schedule='zb-h1'", "train.compile=True"],
    ),
    Row("secret", "+wandb.api_key=CLISECRET", ["wandb.api_key", "secret", "WANDB_API_KEY"]),
    Row("no rank", "", ["RANK=null", "WORLD_SIZE=2", "torchrun"], variables={"WORLD_SIZE": "2"}),
    Row("no CUDA", "device=cuda", ["device='cuda'", "no usable CUDA device", "device=cpu"]),
    Row("missing file", "data=text data.path=none.txt", ["none.txt", "no such file", "txt, jsonl or parquet"]),
    Row("empty file", "data=text data.path=e.txt", ["e.txt", "is empty (0 bytes)"], file("e.txt", b"")),
    Row("pipe", "data=text data.path=pipe.txt", ["pipe.txt", "no regular file", "to a file first"], pipe),
    Row(
        "binary file", "data=text data.path=b.txt", ["b.txt", "zero byte", "offset 3", "UTF-8"], file("b.txt", b"abc\0")
    ),
    Row(
        "binary deep inside",
        "data=text data.path=b.txt",
        ["b.txt", "invalid byte at byte offset 3,000,000"],
        file("b.txt", b"good text\n" * 300_000 + b"\xff\xfe"),
    ),
    Row(
        "short text",
        "data=text data.path=s.txt",
        ["/s.txt'", "one sample of 17", "=4 or less"],
        file("s.txt", b"short"),
    ),
    Row("truncated tokens", " ".join(TOKENS), ["corpus.bin", "has 8,000 bytes", "describes 10,000"], truncated_corpus),
    Row("index of other tokens", " ".join(TOKENS), ["corpus.bin", "10,000 bytes", "200"], corpus_of_another_index),
    Row("tokens without a vocabulary", "data=tokens data.path=corpus", ["model.vocab_size=null", "set it"], corpus),
    Row("small vocabulary", "model.vocab_size=100", ["model.vocab_size=100", "257 tokens", "at least 257"]),
    Row("tokenizer folder", "tokenizer=./none", ["'./none'", "no folder", "transformers tokenizer"]),
    Row(
        "hub names without network",
        "data=hf data.path=some/corpus tokenizer=some/tokenizer",
        ["2 problems", "some/corpus", "some/tokenizer", "hub does not answer", "to work offline"],
    ),
    Row("run_dir is a file", "run_dir=taken", ["run_dir='taken'", "not a folder", "a new folder"], file("taken", b"")),
    Row("run_dir cannot be made", "run_dir=/proc/megalite", ["'/proc/megalite'", "cannot be written", "may write"]),
    Row("weights of another model", "checkpoint.init_from=gpt", ["hidden_size=16: is 64", "num_layers=2"], gpt2_folder),
    Row(
        "device and data",
        "device=cuda data=text data.path=none.txt tokenizer=some/tokenizer",
        ["3 problems", "none.txt"],
    ),
]


@pytest.fixture(autouse=True)
def launch_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to launch from, an empty cache beside it, and no GPU."""
    folder = tmp_path / "launch"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return folder


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() if path.is_file() else b"" for path in sorted(folder.rglob("*"))}


def refused(capfd: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one message with which the launcher refuses a command."""
    capfd.readouterr()
    assert pretrain_gpt.main(argv) == 2
    message = capfd.readouterr().err
    assert message.count("megalite: refused") == 1, message
    assert "Traceback" not in message
    return message


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_input_is_refused_in_one_message_and_leaves_nothing(
    row: Row, launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    row.arrange(launch_folder)
    for name, value in row.variables.items():
        monkeypatch.setenv(name, value)
    before = tree(launch_folder)
    message = refused(capfd, [*SMALL, *row.argv.split()])
    assert all(word in message for word in row.words), message
    assert "CLISECRET" not in message
    assert tree(launch_folder) == before
    left = [path.name for path in (launch_folder.parent / "cache").rglob("*")]
    assert not [name for name in left if ".partial-" in name or ".tmp-" in name]


def test_bf16_is_refused_where_the_device_lacks_it(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megalite.parallel.startup.choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr("megalite.parallel.device._has_fast_bf16", lambda _: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old card")
    message = refused(capfd, [*SMALL, "precision=bf16"])
    assert "precision='bf16': an old card cannot multiply bf16" in message
    assert "precision=fp32" in message
    assert tree(launch_folder) == {}


def test_a_run_dir_of_a_live_job_is_refused_with_its_host_and_pid(
    launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (launch_folder / "run").mkdir()
    lock = RunLock.acquire(launch_folder / "run" / "lock")
    before = tree(launch_folder)
    message = refused(capfd, [*SMALL, "run_dir=run"])
    assert f"in use by process {os.getpid()} on " in message
    assert tree(launch_folder) == before
    lock.release()
    assert pretrain_gpt.main([*SMALL, "run_dir=run"]) == 0


def test_a_resume_with_another_model_lists_the_differences(
    launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_gpt.main([*SMALL, "run_dir=run", "train.steps=0"]) == 0
    before = tree(launch_folder)
    message = refused(
        capfd, [*SMALL, "run_dir=run", "model.hidden_size=32", "model.num_layers=2", "train.seq_length=8"]
    )
    for words in ("model.hidden_size=16", "model.num_layers=1", "train.seq_length=16", "another run_dir"):
        assert words in message
    assert tree(launch_folder) == before
    assert "resume=never" in refused(capfd, [*SMALL, "run_dir=run", "resume=never"])
    assert tree(launch_folder) == before


def test_a_full_disk_ends_neither_training_nor_the_last_checkpoint(
    launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain_gpt.main([*SMALL, "run_dir=run", "train.steps=1"]) == 0
    capfd.readouterr()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # stands for a full disk: a checkpoint takes 120 KiB
    try:
        assert pretrain_gpt.main([*SMALL, "run_dir=run", "checkpoint.interval=2"]) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    said = capfd.readouterr()
    assert "the checkpoint of step 2 was not saved: File too large" in said.out
    assert "step-00000001 stays the newest checkpoint" in said.out
    assert "4 of 4 steps" in said.out
    assert "the state of step 4 is not saved; the newest is of step 1" in said.err
    assert [path.name for path in (launch_folder / "run" / "checkpoints").iterdir()] == ["step-00000001"]


def test_files_of_a_run_that_are_in_the_way_are_refused(launch_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (launch_folder / "run").mkdir()
    (launch_folder / "run" / "metrics.jsonl").write_bytes(b"\xff\xfe\n")
    assert "metrics.jsonl" in refused(capfd, [*SMALL, "run_dir=run"])
    (launch_folder / "other").mkdir()
    (launch_folder / "other" / "logs").write_text("mine")
    assert "rank-00000.log cannot be written" in refused(capfd, [*SMALL, "run_dir=other"])


def test_a_refusal_on_the_way_keeps_what_was_learned(launch_folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for extra in ([], ["train.eval_interval=2", "train.eval_batches=1"]):
        corpus(launch_folder, stranger_at=4505 if extra else place_of_sample(launch_folder, 4 * 2))
        message = refused(capfd, [*SMALL, *TOKENS, *extra, f"run_dir=run{len(extra)}", "data.validation_fraction=0.1"])
        assert "corpus.bin" in message
        assert "token id 9999 at token" in message
        assert "model.vocab_size" in message
        assert [path.name for path in (launch_folder / f"run{len(extra)}" / "checkpoints").iterdir()] == [
            "step-00000002"
        ]


def place_of_sample(folder: Path, index: int) -> int:
    """A token that only this sample of a run on `corpus` holds."""
    corpus(folder)
    part = Part(TokenFile.open(folder / "corpus"), 0, 4500)
    _, starts = SampleSource([part], (1,), 16, 256, 1234, None).places(np.array([index]))
    return int(starts[0]) + 5


def test_what_one_other_machine_lacks_is_said_there(
    launch_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pretrain_gpt, "WAIT_FOR_RANK_ZERO_S", 0.0)
    for name, value in {"RANK": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "first", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert "no folder" in refused(capfd, [*SMALL, "tokenizer=./none"])
    monkeypatch.setenv("LOCAL_RANK", "1")  # its neighbour has said it
    assert pretrain_gpt.main([*SMALL, "tokenizer=./none"]) == 2
    monkeypatch.setenv("LOCAL_RANK", "0")  # rank 0 sees this, too
    assert pretrain_gpt.main([*SMALL, "zzz=1"]) == 2
    assert capfd.readouterr().err == ""


def test_what_only_rank_1_reads_ends_the_job_with_one_message(launch_folder: Path) -> None:
    """Each of the two microbatches of a step is another rank's."""
    corpus(launch_folder, stranger_at=place_of_sample(launch_folder, 4 * 2 + 2))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    argv = [*SMALL, *TOKENS, "run_dir=run", "data.validation_fraction=0.1"]
    done = subprocess.run(
        [*command, str(ROOT / "pretrain_gpt.py"), *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr  # torchrun's own
    assert done.stderr.count("token id 9999") == done.stderr.count("megalite:") == 1, done.stderr
    assert "[rank" not in done.stderr, "no rank leaves a traceback"
    assert [path.name for path in (launch_folder / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_the_scan_of_a_token_file_names_the_document(launch_folder: Path) -> None:
    corpus(launch_folder, stranger_at=1000)
    script = [sys.executable, str(ROOT / "scripts" / "prepare_data.py")]
    begin = time.monotonic()
    done = subprocess.run(
        [*script, "--verify", "corpus", "--vocab-size", "256"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "input='corpus.bin': token id 9999 in document 0 (token 1,000)" in done.stderr
    assert time.monotonic() - begin < 10
