"""Token files are Megatron's to the byte, appear whole or not at all, and open at any size at once."""

import json
import os
import struct
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megalite.data.token_file import CODES, HEADER, MAGIC, TokenFile, dtype_for, verify
from megalite.errors.problems import UserError
from megalite.prepare.token_writer import TokenWriter, join

WriteTokens = Callable[..., Path]


def test_the_bytes_are_megatrons(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("two", [[5, 6, 7], [8, 9]])
    assert prefix.with_suffix(".bin").read_bytes() == struct.pack("<5H", 5, 6, 7, 8, 9)
    assert prefix.with_suffix(".idx").read_bytes() == (
        b"MMIDIDX\x00\x00"
        + struct.pack("<Q", 1)  # version
        + b"\x08"  # u16
        + struct.pack("<QQ", 2, 3)  # sequences, document boundaries
        + struct.pack("<ii", 3, 2)  # lengths in tokens
        + struct.pack("<qq", 0, 6)  # pointers in bytes
        + struct.pack("<qqq", 0, 1, 2)  # boundaries
    )


def test_one_document_is_one(write_tokens: WriteTokens) -> None:
    prefixes = write_tokens("two", [[5, 6, 7], [8, 9]]), write_tokens("one", [[5, 6]])
    assert [TokenFile.open(prefix).counts for prefix in prefixes] == ["2 documents, 5 tokens", "1 document, 2 tokens"]


def test_sixteen_bits_below_65500_tokens_else_thirty_two() -> None:
    assert dtype_for(65499) == np.dtype("<u2")
    assert dtype_for(65500) == np.dtype("<i4")


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
def test_every_dtype_of_ids_is_readable(tmp_path: Path, dtype: np.dtype) -> None:
    writer = TokenWriter(tmp_path / "x", dtype)
    writer.add(np.array([1, 2, 100]))
    writer.end_document()
    writer.finish({})
    assert TokenFile.open(tmp_path / "x").tokens[:].tolist() == [1, 2, 100]


def test_a_multimodal_index_is_readable(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("modes", [[1, 2], [3]])
    with prefix.with_suffix(".idx").open("ab") as file:
        file.write(b"\x00\x01")  # one mode per sequence
    assert TokenFile.open(prefix).documents == 2


def test_documents_are_found_by_position(write_tokens: WriteTokens) -> None:
    file = TokenFile.open(write_tokens("three", [[1] * 5, [2] * 3, [3] * 10]))
    assert [file.document_at(position) for position in (0, 4, 5, 7, 8, 17)] == [0, 0, 1, 1, 2, 2]
    assert file.document_starts(0, 18) == [5, 8]
    assert file.document_starts(5, 8) == []
    assert file.document_starts(4, 6) == [5]


def test_a_document_longer_than_a_sequence_stays_one_document(tmp_path: Path) -> None:
    writer = TokenWriter(tmp_path / "long", dtype_for(100), longest=4)
    for length in (10, 3):
        writer.add(np.arange(length))
        writer.end_document()
    writer.finish({})
    file = TokenFile.open(tmp_path / "long")
    assert file.lengths[:].tolist() == [4, 4, 2, 3]
    assert file.documents == 2
    assert file.document_starts(0, 13) == [10]
    verify(tmp_path / "long", 100)


def test_joined_files_hold_all_documents_in_order(write_tokens: WriteTokens, tmp_path: Path) -> None:
    files = [
        TokenFile.open(write_tokens(name, documents)) for name, documents in (("a", [[1, 2], [3]]), ("b", [[4] * 5]))
    ]
    join(files, tmp_path / "both", {})
    both = TokenFile.open(tmp_path / "both")
    assert both.tokens[:].tolist() == [1, 2, 3, 4, 4, 4, 4, 4]
    assert both.starts(0, 4).tolist() == [0, 2, 3, 8]
    verify(tmp_path / "both", 10)


def test_a_torn_write_is_never_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop the writer before every rename: a reader finds nothing, or the whole."""
    replace = os.replace
    for allowed in range(4):
        prefix, done = tmp_path / f"torn{allowed}", []

        def counted(draft: Path, target: Path, done: list[Path] = done, allowed: int = allowed) -> None:
            if len(done) == allowed:
                raise KeyboardInterrupt
            done.append(target)
            replace(draft, target)

        monkeypatch.setattr(os, "replace", counted)
        writer = TokenWriter(prefix, dtype_for(100))
        writer.add(np.arange(50))
        writer.end_document()
        if allowed < 3:
            with pytest.raises(KeyboardInterrupt):
                writer.finish({})
            with pytest.raises(UserError, match="is missing"):
                TokenFile.open(prefix)
            assert not prefix.with_suffix(".idx").exists(), "what preparation takes for the sign of a whole file"
        else:
            writer.finish({})
            assert len(TokenFile.open(prefix).tokens) == 50
    assert len(done) == 3


def sparse_file(prefix: Path, lengths: np.ndarray) -> None:
    """A token file of u16 zeros that takes no disk for its tokens."""
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1].astype(np.int64) * 2)])
    with prefix.with_suffix(".idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, len(lengths), len(lengths) + 1))
        for array, dtype in ((lengths, "<i4"), (pointers, "<i8"), (np.arange(len(lengths) + 1), "<i8")):
            file.write(array.astype(dtype).tobytes())
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(int(lengths.sum()) * 2)


@pytest.mark.parametrize("documents", [8, 2_000_000])
def test_ten_billion_tokens_open_at_once_and_in_constant_memory(tmp_path: Path, documents: int) -> None:
    sparse_file(tmp_path / "big", np.full(documents, 10_000_000_000 // documents))
    elapsed = []
    tracemalloc.start()
    for _ in range(3):  # the best of three: other tests may share the machine
        begin = time.perf_counter()
        file = TokenFile.open(tmp_path / "big")
        assert file.identity()
        starts = file.document_starts(9_999_990_000, 9_999_999_999)
        elapsed.append(time.perf_counter() - begin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file.tokens) == 10_000_000_000
    assert starts == ([] if documents == 8 else [9_999_995_000])
    assert min(elapsed) < 1
    assert peak < 1 << 20


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_a_file_that_is_cut_short_while_it_is_read_is_named(write_tokens: WriteTokens, suffix: str) -> None:
    """A memory map would end the process here."""
    prefix = write_tokens("x", [[5, 6, 7]] * 20_000)
    file = TokenFile.open(prefix)
    size = prefix.with_suffix(suffix).stat().st_size
    shorten(prefix, suffix, 8_192)
    with pytest.raises(UserError, match=rf"x\{suffix}.* has 8,192 bytes now, {size:,} when it was opened"):
        file.document_at(59_999) if suffix == ".idx" else file.tokens[59_000:]
    assert suffix == ".idx" or file.tokens[:2].tolist() == [5, 6]


def test_documents_are_found_by_position_in_a_file_of_many(write_tokens: WriteTokens) -> None:
    lengths = [number % 7 for number in range(3_000)]
    file = TokenFile.open(write_tokens("many", [[1] * length for length in lengths]))
    of_token = np.repeat(np.arange(3_000), lengths)
    places = range(0, len(of_token), 37)
    assert [file.document_at(place) for place in places] == of_token[::37].tolist()
    changes = (np.flatnonzero(np.diff(of_token)) + 1).tolist()
    for first, stop in ((0, len(of_token)), (100, 5_000), (changes[5], changes[6])):
        assert file.document_starts(first, stop) == [change for change in changes if first < change < stop]


def patch(prefix: Path, suffix: str, at: int, content: bytes) -> None:
    with prefix.with_suffix(suffix).open("r+b") as file:
        file.seek(at)
        file.write(content)


def shorten(prefix: Path, suffix: str, size: int) -> None:
    with prefix.with_suffix(suffix).open("r+b") as file:
        file.truncate(size)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = {
    "no index": (lambda prefix: prefix.with_suffix(".idx").unlink(), "is missing"),
    "no data": (lambda prefix: prefix.with_suffix(".bin").unlink(), "is missing"),
    "magic": (lambda prefix: patch(prefix, ".idx", 0, b"X"), "starts with b'XMIDIDX"),
    "version": (lambda prefix: patch(prefix, ".idx", 9, b"\x02"), "version 2"),
    "dtype code": (lambda prefix: patch(prefix, ".idx", 17, b"\x63"), "dtype code 99"),
    "index cut in its header": (lambda prefix: shorten(prefix, ".idx", 20), "has 20 bytes"),
    "index cut in its arrays": (
        lambda prefix: shorten(prefix, ".idx", 50),
        "50 bytes; 2 sequences and 3 boundaries need 82",
    ),
    "empty index": (lambda prefix: shorten(prefix, ".idx", 0), "has 0 bytes"),
    "data cut": (lambda prefix: shorten(prefix, ".bin", 8), "has 8 bytes, x.idx describes 10 .5 tokens of 2 bytes"),
    "empty data": (lambda prefix: shorten(prefix, ".bin", 0), "holds no tokens"),
    "first pointer": (lambda prefix: patch(prefix, ".idx", 42, b"\x02"), "sequence 0 starts at byte 2 with"),
    "length": (lambda prefix: patch(prefix, ".idx", 34, b"\x02"), "sequence 0 starts at byte 0 with 2 tokens"),
    "boundaries": (lambda prefix: patch(prefix, ".idx", 74, b"\x07"), "boundaries do not run from 0 to 2"),
    "inner boundary": (
        lambda prefix: patch(prefix, ".idx", 66, b"\x63"),
        "document 1 ends before it starts, at sequence 2",
    ),
    "negative boundary": (lambda prefix: patch(prefix, ".idx", 66, b"\xff" * 8), "document 0 ends before it starts"),
    "sidecar of another type": (
        lambda prefix: prefix.with_suffix(".json").write_text('{"vocab_size": "many"}'),
        "x.json.*vocab_size='many', which is not of type int",
    ),
    "negative sidecar": (lambda prefix: prefix.with_suffix(".json").write_text('{"bytes": -5}'), "bytes=-5, .*from 0"),
    "pipe for data": (lambda prefix: pipe(prefix.with_suffix(".bin")), "x.bin.*is not a regular file"),
    "folder for an index": (lambda prefix: folder(prefix.with_suffix(".idx")), "x.idx.*is not a regular file"),
    "pipe for a sidecar": (lambda prefix: pipe(prefix.with_suffix(".json")), "x.json.*is not a regular file"),
    "sidecar": (lambda prefix: prefix.with_suffix(".json").write_text("{"), "x.json.*is not JSON"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_refused_with_file_and_numbers(write_tokens: WriteTokens, damage: str) -> None:
    prefix = write_tokens("x", [[5, 6, 7], [8, 9]])
    act, message = DAMAGES[damage]
    act(prefix)
    with pytest.raises(UserError, match=message) as refusal:
        TokenFile.open(prefix).facts()
    assert str(prefix) in str(refusal.value)


def test_the_identity_is_the_content_not_the_place(write_tokens: WriteTokens) -> None:
    one, same = (TokenFile.open(write_tokens(name, [[1, 2, 3]])) for name in ("one", "same"))
    other = TokenFile.open(write_tokens("other", [[1, 2, 4]]))
    assert one.identity() == same.identity() != other.identity()


def test_verify_names_the_document_of_an_id_beyond_the_vocabulary(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("bad", [[1, 2], [3, 70, 80], [4]])
    with pytest.raises(UserError, match=r"token id 70 in document 1 \(token 3\).*vocabulary of 70; 2 such tokens"):
        verify(prefix, 70)
    assert verify(prefix, 81).documents == 3


def test_verify_finds_a_broken_index_that_opening_does_not_see(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("many", [[1]] * 100_000)
    patch(prefix, ".idx", HEADER.size + 4 * 4321, b"\x02")
    TokenFile.open(prefix)
    with pytest.raises(UserError, match="sequence 4,321 starts at byte 8,642 with 2 tokens"):
        verify(prefix, 10)


def test_verify_finds_content_that_is_not_what_was_prepared(write_tokens: WriteTokens, tmp_path: Path) -> None:
    join([TokenFile.open(write_tokens("a", [[1, 2, 3]]))], tmp_path / "j", {})
    assert "xxh3_128" in json.loads((tmp_path / "j.json").read_text())
    verify(tmp_path / "j", 10)
    patch(tmp_path / "j", ".bin", 2, b"\x05")
    with pytest.raises(UserError, match="not what was prepared"):
        verify(tmp_path / "j", 10)


def test_an_id_that_does_not_fit_is_refused_without_assertions_too(tmp_path: Path) -> None:
    """Not cut to 16 bits."""
    program = (
        "import pathlib, sys, numpy\nfrom megalite.prepare.token_writer import TokenWriter\n"
        "TokenWriter(pathlib.Path(sys.argv[1]), numpy.dtype('<u2')).add(numpy.array([70_000]))"
    )
    command = [sys.executable, "-O", "-c", program, str(tmp_path / "x")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    assert "token id 70000 does not fit uint16" in done.stderr
