"""Bad data through the real commands: exit status 2, one message that says what is wrong and what would work, and not a
file more than before. tests/bad_input/test_data.py has the rows that every reader expects first (missing, empty,
binary).
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import pretrain_gpt
from megalite.commands import models
from megalite.config.schema import Config
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.process import ProcessEnvironment
from megalite.prepare import prepare as preparation
from megalite.prepare import tokenizing
from megalite.train.run import open_training_data
from tests.bad_input.launching import SMALL, launch_folder, tree
from tests.data.conftest import write_token_file
from tests.ranks import run_ranks

__all__ = ["launch_folder"]  # used by every test here

GOOD = '{"text": "some good text"}\n'
Arrange = Callable[[], object]  # in the current folder


def table(name: str, **columns: list[Any]) -> Arrange:
    return lambda: parquet.write_table(pyarrow.table(columns), name)


def several(*arrangements: Arrange) -> Arrange:
    return lambda: [arrange() for arrange in arrangements]


def text(name: str, content: str | bytes) -> Arrange:
    def write() -> None:
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return write


def patched(name: str, change: Callable[[bytearray], object]) -> Arrange:
    def arrange() -> None:
        content = bytearray(Path(name).read_bytes())
        change(content)
        Path(name).write_bytes(content)

    return arrange


def byte(at: int, value: int) -> Callable[[bytearray], object]:
    return lambda content: content.__setitem__(at, content[at] ^ value)


def cut_in_half(content: bytearray) -> None:
    del content[len(content) // 2 :]


def not_utf8() -> None:
    """Parquet whose third text is no UTF-8."""
    offsets, data = struct.pack("<4i", 0, 3, 6, 9), b"onetwo\xff\xfe!"
    column = pyarrow.StringArray.from_buffers(3, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data))
    parquet.write_table(pyarrow.table({"text": column}), "a.parquet")


def tokens(dtype: str, ids: list[int], name: str = "corpus", **facts: object) -> Arrange:
    return lambda: write_token_file(Path(name), [ids], np.dtype(dtype), facts)


def broken_link() -> None:
    os.symlink("nowhere", "f/a.txt")


def prepared() -> None:
    text("a.txt", "some text " * 50)()
    assert models.prepare(["data=text", "data.path=a.txt", "tokenizer=byte", "--output", "corpus"]) == 0


def tokenizer_of_code() -> None:
    """A tokenizer that is Python code, which leaves a trace if it runs."""
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    for name in ("tokenizer_config.json", "config.json"):
        text(f"tokenizer/{name}", json.dumps(settings))()
    text("tokenizer/own.py", "from pathlib import Path\nPath('ran').touch()\nclass Own: pass\n")()


def run_on_other_text() -> None:
    """A run that has begun."""
    text("a.txt", "some text " * 90)()
    assert pretrain_gpt.main([*SMALL, "data=text", "data.path=a.txt", "run_dir=run", "train.steps=0"]) == 0
    text("a.txt", "other " * 150)()


A, LONG = "data=text data.path=a", text("a.txt", "x" * 900)
SCHEMA = pyarrow.schema([("text", pyarrow.string())])
PARQUET = table("a.parquet", text=["abc"] * 99)
SET = text("set/train.jsonl", GOOD * 10)
SCAN, BLEND = "--verify data=tokens data.path=corpus", "data=tokens data.path=[a,b]"
ROWS: list[tuple[str, str, Arrange]] = [  # the command, words of its refusal, what there is
    ("data=text data.path=none/*.txt", "none/*.txt|no such file, and no folder or glob|a quoted", several()),
    ("data=text data.path=f", "no folder or glob of .txt|quoted", text("f/a.pdf", "x")),
    ("data=text data.path=f", "f/a.txt|no such file", several(text("f/b.txt", "x"), broken_link)),
    ("data=text data.path=f", "b.txt|is empty", several(text("f/a.txt", "x" * 900), text("f/b.txt", ""))),
    (f"{A}.txt", "a.txt: is not UTF-8 text", text("a.txt", "é".encode() * 3_000_000 + b"\xc3")),
    (f"{A}.jsonl.gz", "a.jsonl.gz|incorrect header", text("a.jsonl.gz", "no gzip")),
    (f"{A}.csv", "must be one column 'text'|it has: id, body", text("a.csv", "id,body\n1,x\n")),
    (f"{A}.csv", "a.csv|not csv in UTF-8", text("a.csv", b"text\nx\n\xff\n")),
    (f"{A}.parquet", "a.parquet|arquet|copy it again", several(PARQUET, patched("a.parquet", cut_in_half))),
    (f"{A}.parquet", "'text'|it has: body, id|data.text_column", table("a.parquet", body=["x"], id=[1])),
    (f"{A}.parquet tokenizer=bpe", "holds no text at all", lambda: parquet.ParquetWriter("a.parquet", SCHEMA).close()),
    (f"{A}.parquet", "'text' holds int|a.parquet|data.text_column", table("a.parquet", text=[1])),
    (f"{A}.parquet", "a.parquet|'utf-8' codec", not_utf8),
    (f"{A}.jsonl", "a.jsonl: line 2|can't decode byte 0xff", text("a.jsonl", GOOD.encode() + b'{"text": "\xff"}\n')),
    (f"{A}.jsonl", "only empty documents|data.text_column", text("a.jsonl", '{"text": ""}\n{"text": null}\n')),
    (f"{A}.json", "a.json: line 1: Expecting value|data=hf reads JSON", text("a.json", f"[\n{GOOD.strip()}\n]")),
    (
        "data=text data.path=[a.txt,b.txt]",
        "b.txt|less than one sample of 17|train.seq_length=",
        several(LONG, text("b.txt", "x" * 9)),
    ),
    (SCAN, "corpus.bin|not what was prepared|prepare the data", several(prepared, patched("corpus.bin", byte(10, 1)))),
    (f"{SCAN} model.vocab_size=99", "token id -1 at token 2 (document 0)", tokens("int32", [5, 6, -1, 8] * 50)),
    ("data=tokens data.path=corpus", "uint8 ids, up to 255|257 tokens", tokens("uint8", [5] * 500, vocab_size=257)),
    (
        f"{A}.txt tokenizer=tokenizer",
        "tokenizer.json cannot be read|copy the tokenizer",
        several(LONG, text("tokenizer/tokenizer.json", "{")),
    ),
    (f"{A}.txt tokenizer=tokenizer", "no tokenizer.json|give a folder", several(LONG, tokenizer_of_code)),
    (f"{A}.txt tokenizer=char data.mask_end_of_document=true", "data.mask_end_of_document|no end-of-document", LONG),
    ("data=hf data.path=set", "cannot be loaded|never run|parquet", text("set/set.py", "open('ran', 'w').close()")),
    ("data=hf data.path=set data.split=dev", 'set|"dev"|[\'train\']|data.split', SET),
    ("data=hf data.path=set data.text_column=body", "'body'|it has: text|data.text_column", SET),
    (f"{A}.txt run_dir=run", "data=|data or tokenizer differ|another run_dir", run_on_other_text),
    (f"{BLEND} data.weights=[1.0]", "data.weights|must be as many as data.path has parts, 2", several()),
]  # fmt: skip


@pytest.mark.parametrize(("argv", "words", "arrange"), ROWS)
def test_bad_data_is_refused_in_one_message_and_leaves_nothing(
    argv: str, words: str, arrange: Arrange, launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arrange()
    before = tree(launch_folder)
    capfd.readouterr()
    status = (models.prepare if "--verify" in argv else lambda words: pretrain_gpt.main([*SMALL, *words]))(argv.split())
    said = capfd.readouterr()
    assert status == 2, said.err
    assert said.err.count("megalite: refused") == 1, said.err
    assert "Traceback" not in said.err
    assert all(word in said.err for word in words.split("|")), said.err
    assert tree(launch_folder) == before
    left = [path.name for path in (launch_folder.parent / "cache").rglob("*")]
    assert not [name for name in left if ".partial-" in name or ".tmp-" in name]


def test_a_mistake_found_by_a_worker_process_comes_back_as_one(tmp_path: Path, config: Config) -> None:
    good = "".join(json.dumps({"text": "word " * 50}) + "\n" for _ in range(10_000))
    (tmp_path / "a.jsonl").write_text(good + "oops\n" + good)
    config.data.path, config.data.workers = str(tmp_path / "a.jsonl"), 2
    with pytest.raises(UserError, match=r"a\.jsonl: line 10,001: Expecting value"):
        preparation.prepare(config)


def test_all_bad_files_are_named_at_once(tmp_path: Path, config: Config) -> None:
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\x00")
    config.data.path = [str(tmp_path / "*.txt"), str(tmp_path / "gone")]
    with pytest.raises(UserError, match="gone"):
        preparation.prepare(config)
    config.data.path = [str(tmp_path / "empty.txt"), str(tmp_path / "binary.txt")]
    with pytest.raises(UserError) as refusal:
        preparation.prepare(config)
    assert len(refusal.value.problems) == 2


def test_an_unreadable_file_and_a_full_disk_are_said_plainly(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    config.data.path, opened = str(tmp_path / "a.txt"), Path.open

    def refuse(self: Path, *args: Any, **settings: Any) -> Any:
        if self.name == "a.txt":
            raise PermissionError(13, "Permission denied")  # a test that runs as root cannot lack permission
        return opened(self, *args, **settings)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    for name in ("is_dir", "open"):  # its folder cannot be entered, and it cannot be read
        with monkeypatch.context() as patch:
            patch.setattr(Path, name, refuse)
            with pytest.raises(UserError, match=r"a\.txt.*cannot be read: Permission denied"):
                preparation.prepare(config)
    monkeypatch.setattr(tokenizing, "write_index", full)
    with pytest.raises(UserError, match=r"No space left[\s\S]*is kept"):
        preparation.prepare(config)


def test_ranks_that_find_different_data_at_one_place_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
        monkeypatch.chdir(tmp_path / node)
        tokens("uint16", [int(node)] * 500, vocab_size=2)()
    said = run_ranks(open_as_another_node, 2, str(tmp_path))
    assert said[0] == said[1]
    assert "data.path='corpus': ranks 0 and 1 find different data at this place" in said[0]
    assert "give every node the same files" in said[0]


def open_as_another_node(context: ParallelContext, folder: str) -> str:
    """Where each rank's working folder holds files of its own, as disks that nodes do not share."""
    os.chdir(Path(folder, str(context.rank)))
    config = Config(tokenizer="byte")
    config.data.source, config.data.path = "tokens", "corpus"
    config.train.seq_length = 16
    with pytest.raises(UserError) as refusal:
        open_training_data(config, context, ProcessEnvironment(local_rank=0), preparation.prepare)
    return str(refusal.value)
