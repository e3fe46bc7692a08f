"""Bad data through the real commands: exit status 2, one message that says what is wrong and what would work, and not a
file more than before. tests/bad_input/test_data.py has the rows that every reader expects first (missing, empty,
binary); test_bad_data.py has what is left.
"""

import bz2
import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

import pretrain_gpt
from megalite.commands import prepare
from megalite.config.schema import Config
from megalite.data.tokenizers import byte_tokenizer, char_tokenizer
from megalite.errors.problems import UserError
from megalite.launch.context import ParallelContext
from megalite.launch.environment import ProcessEnvironment
from megalite.prepare import prepare as preparation
from megalite.prepare.token_writer import TokenWriter
from megalite.train.setup import open_training_data
from tests.bad_input.launching import SMALL, launch_folder, tree
from tests.ranks import run_ranks

__all__ = ["launch_folder"]  # used by every test here

GOOD = '{"text": "some good text"}\n'


@dataclass(frozen=True)
class Row:
    """A command that is refused, and words of its message. `prepare`: of `megalite prepare`, not of training."""

    name: str
    argv: str
    words: list[str]
    files: dict[str, bytes | str] | Callable[[Path], None]
    prepare: bool = False

    def arrange(self, folder: Path) -> None:
        if callable(self.files):
            self.files(folder)
            return
        for name, content in self.files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def table(name: str, **columns: list[object]) -> Callable[[Path], None]:
    return lambda folder: parquet.write_table(pyarrow.table(columns), folder / name)


def several(*arrangements: Callable[[Path], None]) -> Callable[[Path], None]:
    def arrange(folder: Path) -> None:
        for one in arrangements:
            one(folder)

    return arrange


def patched(name: str, change: Callable[[bytearray], object]) -> Callable[[Path], None]:
    """Change the bytes of a file."""

    def arrange(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        change(content)
        (folder / name).write_bytes(content)

    return arrange


def cut_in_half(content: bytearray) -> None:
    del content[len(content) // 2 :]


def no_page_header(content: bytearray) -> None:
    content[4:60] = bytes(56)


def not_utf8(folder: Path) -> None:
    """Parquet whose third text is no UTF-8."""
    offsets, data = struct.pack("<4i", 0, 3, 6, 9), b"onetwo\xff\xfe!"
    column = pyarrow.StringArray.from_buffers(3, pyarrow.py_buffer(offsets), pyarrow.py_buffer(data))
    parquet.write_table(pyarrow.table({"text": column}), folder / "a.parquet")


def tokens(dtype: str, ids: list[int], facts: dict[str, object] | None = None) -> Callable[[Path], None]:
    """A token file called `corpus`."""

    def arrange(folder: Path) -> None:
        writer = TokenWriter(folder / "corpus", np.dtype(dtype))
        writer.add(np.array(ids))
        writer.end_document()
        writer.finish(facts or {})

    return arrange


def dtype_code(code: int) -> Callable[[Path], None]:
    return patched("corpus.idx", lambda content: content.__setitem__(17, code))


def prepared_then_changed(folder: Path) -> None:
    """Token files of ours, one byte of which is another now."""
    (folder / "a.txt").write_text("some text " * 50)
    assert (
        prepare.main(["data=text", f"data.path={folder}/a.txt", "tokenizer=byte", "--output", str(folder / "corpus")])
        == 0
    )
    patched("corpus.bin", lambda content: content.__setitem__(10, content[10] ^ 1))(folder)


def no_json(folder: Path) -> None:
    byte_tokenizer().save(folder / "tokenizer")
    (folder / "tokenizer" / "tokenizer.json").write_text("{")


def with_code(folder: Path) -> None:
    """A tokenizer that is Python code, which leaves a trace if it runs."""
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer" / "config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["own.Own", None]}}))
    (folder / "tokenizer" / "own.py").write_text("from pathlib import Path\nPath('ran').touch()\nclass Own: pass\n")


def two_tokenizers(folder: Path) -> None:
    for name, tokenizer in (("one", byte_tokenizer()), ("two", char_tokenizer(["abc"]))):
        tokens("uint16", [1] * 500)(folder)
        for suffix in (".bin", ".idx", ".json"):
            (folder / f"corpus{suffix}").rename(folder / f"{name}{suffix}")
        tokenizer.save(folder / f"{name}.tokenizer")


def broken_link(folder: Path) -> None:
    (folder / "f").mkdir()
    (folder / "f" / "b.txt").write_text("x" * 900)
    (folder / "f" / "a.txt").symlink_to("nowhere")


def script(folder: Path) -> None:
    """A data set that is Python code, as the hub once took them."""
    (folder / "set").mkdir()
    (folder / "set" / "set.py").write_text("from pathlib import Path\nPath('ran').touch()\n")


def hub_like(folder: Path) -> None:
    (folder / "set").mkdir()
    (folder / "set" / "train.jsonl").write_text(GOOD * 10)


def run_on_text(folder: Path) -> None:
    """A run that has begun."""
    (folder / "a.txt").write_text("some text " * 90)
    assert pretrain_gpt.main([*SMALL, "data=text", "data.path=a.txt", "run_dir=run", "train.steps=0"]) == 0


A = "data=text data.path=a"
NOT_THE_SAME = ["data=", "data or tokenizer differ", "another run_dir"]
ROWS = [
    Row(
        "48 a glob without a match",
        "data=text data.path=none/*.txt",
        ["none/*.txt", "matches no file", "a quoted"],
        {},
    ),
    Row("48 a folder without text", "data=text data.path=f", ["holds no .txt", "1 .pdf", "quoted"], {"f/a.pdf": b"x"}),
    Row("48 a glob of folders", "data=text data.path=f*", ["matches no file"], {"f/a.txt": "x"}),
    Row("48 a link to nothing", "data=text data.path=f", ["f/a.txt", "a link to nothing"], broken_link),
    Row("48 a packed file", f"{A}.jsonl.bz2", ["a.jsonl.bz2", "not UTF-8"], {"a.jsonl.bz2": bz2.compress(b"x")}),
    Row("50 a damaged packed file", f"{A}.jsonl.gz", ["a.jsonl.gz", "incorrect header"], {"a.jsonl.gz": "no gzip"}),
    Row("53 no such column in csv", f"{A}.csv", ["'text'", "it has: id, body"], {"a.csv": "id,body\n1,x\n"}),
    Row("57 invalid UTF-8 in csv", f"{A}.csv", ["a.csv", "not csv in UTF-8"], {"a.csv": b"text\nx\n\xff\n"}),
    Row(
        "49 an empty file among others",
        "data=text data.path=f",
        ["b.txt", "is empty"],
        {"f/a.txt": "x" * 900, "f/b.txt": ""},
    ),
    Row(
        "50 truncated parquet",
        f"{A}.parquet",
        ["a.parquet", "arquet", "copy it again"],
        several(table("a.parquet", text=["abc"] * 99), patched("a.parquet", cut_in_half)),
    ),
    Row(
        "51 a corrupt page",
        f"{A}.parquet",
        ["a.parquet", "arquet", "copy it again"],
        several(table("a.parquet", text=["abc"] * 99), patched("a.parquet", no_page_header)),
    ),
    Row(
        "52 content that changed",
        "--verify data=tokens data.path=corpus",
        ["corpus.bin", "not what was prepared", "prepare the data again"],
        prepared_then_changed,
        prepare=True,
    ),
    Row(
        "53 no such column",
        f"{A}.parquet",
        ["'text'", "it has: body, id", "data.text_column"],
        table("a.parquet", body=["x"], id=[1]),
    ),
    Row(
        "53 a column of numbers",
        f"{A}.parquet",
        ["'text' holds int", "a.parquet", "the column that"],
        table("a.parquet", text=[1]),
    ),
    Row(
        "54 columns of another name",
        "data=text data.path=[a.parquet,b.parquet]",
        ["b.parquet", "it has: content", "data.text_column"],
        several(table("a.parquet", text=["x"]), table("b.parquet", content=["x"])),
    ),
    Row(
        "54 columns of another type",
        "data=text data.path=[a.jsonl,b.jsonl]",
        ["b.jsonl: line 1", "holds list"],
        {"a.jsonl": GOOD, "b.jsonl": '{"text": ["x"]}\n'},
    ),
    Row(
        "55 a bad line",
        f"{A}.jsonl",
        ["a.jsonl: line 3", "column 10", '{"text": ,}'],
        {"a.jsonl": GOOD * 2 + '{"text": ,}\n'},
    ),
    Row(
        "55 a line without end of brackets",
        f"{A}.jsonl",
        ["a.jsonl: line 2", "recursion depth", "'[[[["],
        {"a.jsonl": GOOD + "[" * 100_000 + "\n"},
    ),
    Row("55 an array of texts", f"{A}.json", ["a.json: row 1", "holds str"], {"a.json": f'[{GOOD.strip()}, "x"]'}),
    Row("55 an array cut short", f"{A}.json", ["a.json", "is not JSON"], {"a.json": f"[{GOOD.strip()},"}),
    Row(
        "56 nothing but empty documents",
        f"{A}.jsonl",
        ["a.jsonl", "only empty documents", "data.text_column"],
        {"a.jsonl": '{"text": ""}\n{"text": null}\n'},
    ),
    Row(
        "57 invalid UTF-8 in a line",
        f"{A}.jsonl",
        ["a.jsonl: line 2", "can't decode byte 0xff in position 10"],
        {"a.jsonl": GOOD.encode() + b'{"text": "\xff"}\n'},
    ),
    Row("57 invalid UTF-8 in parquet", f"{A}.parquet", ["a.parquet", "row 2", "'utf-8' codec"], not_utf8),
    Row(
        "58 one short part of a blend",
        "data=text data.path=[a.txt,b.txt]",
        ["b.txt", "less than one sample of 17", "train.seq_length="],
        {"a.txt": "x" * 900, "b.txt": "x" * 9},
    ),
    Row(
        "60 a negative id",
        "--verify data=tokens data.path=corpus model.vocab_size=99",
        ["token id -1 in document 0 (token 2)"],
        tokens("int32", [5, 6, -1, 8] * 50),
        prepare=True,
    ),
    Row(
        "61 ids too narrow for the tokenizer",
        "data=tokens data.path=corpus",
        ["corpus.bin", "uint8 ids, up to 255", "257 tokens"],
        several(tokens("uint8", [5] * 500, {"vocab_size": 257})),
    ),
    Row(
        "61 numbers that are no ids",
        "data=tokens data.path=corpus model.vocab_size=99",
        ["corpus.bin'", "token id 7.0", "outside the vocabulary of 99"],
        several(tokens("int32", [5] * 500), dtype_code(7)),
    ),
    Row(
        "62 a tokenizer cut short",
        f"{A}.txt tokenizer=tokenizer",
        ["tokenizer.json cannot be read", "copy the tokenizer"],
        several(no_json, lambda folder: (folder / "a.txt").write_text("x" * 900)),
    ),
    Row(
        "62 parts of two tokenizers",
        "data=tokens data.path=[one,two]",
        ["different tokenizers", "one (", "two (", "one tokenizer"],
        two_tokenizers,
    ),
    Row(
        "63 no end of document to mask",
        f"{A}.txt tokenizer=char data.mask_end_of_document=true",
        ["data.mask_end_of_document", "no end of document"],
        {"a.txt": "x" * 900},
    ),
    Row(
        "64 a tokenizer that is code",
        f"{A}.txt tokenizer=tokenizer",
        ["no tokenizer.json", "give a folder with tokenizer.json"],
        several(with_code, lambda folder: (folder / "a.txt").write_text("x" * 900)),
    ),
    Row(
        "65 a data set that is code",
        "data=hf data.path=set",
        ["set", "cannot be loaded", "never run", "parquet"],
        script,
    ),
    Row(
        "65 an unknown split",
        "data=hf data.path=set data.split=dev",
        ["set", '"dev"', "['train']", "data.split"],
        hub_like,
    ),
    Row(
        "65 an unknown column",
        "data=hf data.path=set data.text_column=body",
        ["'body'", "it has: text", "data.text_column"],
        hub_like,
    ),
    Row(
        "62 another tokenizer than the run's",
        f"{A}.txt run_dir=run tokenizer=char model.vocab_size=257",
        NOT_THE_SAME,
        run_on_text,
    ),
    Row(
        "69 data that changed since the run began",
        f"{A}.txt run_dir=run",
        NOT_THE_SAME,
        several(run_on_text, lambda folder: (folder / "a.txt").write_text("other " * 150)),
    ),
    Row(
        "66 weights of another number",
        "data=tokens data.path=[a,b] data.weights=[1.0]",
        ["data.weights", "1 share for the 2 parts"],
        {},
    ),
    Row(
        "66 a negative weight",
        "data=tokens data.path=[a,b] data.weights=[1.0,-0.5]",
        ["data.weights", "above 0", "data.weights=null"],
        {},
    ),
    Row(
        "66 a weight that is no number",
        "data=tokens data.path=[a,b] data.weights=[1.0,nan]",
        ["data.weights", "must be finite"],
        {},
    ),
    Row("66 weights of nothing", "data=tokens data.path=[a,b] data.weights=[0.0,0.0]", ["data.weights", "above 0"], {}),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_bad_data_is_refused_in_one_message_and_leaves_nothing(
    row: Row, launch_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row.arrange(launch_folder)
    before = tree(launch_folder)
    capfd.readouterr()
    status = prepare.main(row.argv.split()) if row.prepare else pretrain_gpt.main([*SMALL, *row.argv.split()])
    said = capfd.readouterr()
    assert status == 2, said.err
    assert said.err.count("megalite: refused") == 1, said.err
    assert "Traceback" not in said.err
    assert all(word in said.err for word in row.words), said.err
    assert tree(launch_folder) == before
    left = [path.name for path in (launch_folder.parent / "cache").rglob("*")]
    assert not [name for name in left if ".partial-" in name or ".tmp-" in name]


def test_ranks_that_find_different_data_at_one_place_refuse_it(tmp_path: Path) -> None:
    for node in ("0", "1"):
        (tmp_path / node).mkdir()
        tokens("uint16", [int(node)] * 500, {"vocab_size": 2})(tmp_path / node)
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
