"""Token files are Megatron's to the byte, appear whole or not at all, and open at any size at once."""

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import xxhash

from megalite.data import token_file
from megalite.data.token_file import CODES, HEADER, MAGIC, TokenFile
from megalite.errors.problems import UserError
from megalite.prepare.tokenizing import dtype_for, verify
from tests.data.conftest import write_token_file

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


def test_sixteen_bits_below_65500_tokens_else_thirty_two() -> None:
    assert dtype_for(65499) == np.dtype("<u2")
    assert dtype_for(65500) == np.dtype("<i4")


@pytest.mark.parametrize("dtype", list(CODES), ids=str)
def test_every_dtype_of_ids_is_readable(tmp_path: Path, dtype: np.dtype) -> None:
    write_token_file(tmp_path / "x", [[1, 2, 100]], dtype)
    assert TokenFile.open(tmp_path / "x").tokens[:].tolist() == [1, 2, 100]


def test_a_document_longer_than_a_sequence_stays_one_document(tmp_path: Path) -> None:
    write_token_file(tmp_path / "long", [list(range(10)), list(range(3))], dtype_for(100), longest=4)
    file = TokenFile.open(tmp_path / "long")
    assert file.lengths[:].tolist() == [4, 4, 2, 3]
    assert file.documents == 2
    assert file.document_starts(0, 13) == [10]
    verify(tmp_path / "long", 100)


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
        assert file.identity(1)
        starts = file.document_starts(9_999_990_000, 9_999_999_999)
        elapsed.append(time.perf_counter() - begin)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(file.tokens) == 10_000_000_000
    assert starts == ([] if documents == 8 else [9_999_995_000])
    assert min(elapsed) < 1
    assert peak < 1 << 20


def test_a_file_that_is_cut_short_while_it_is_read_is_named(write_tokens: WriteTokens) -> None:
    """A memory map would end the process here."""
    prefix = write_tokens("x", [[5, 6, 7]] * 20_000)
    file = TokenFile.open(prefix)
    os.truncate(prefix.with_suffix(".bin"), 8_192)
    with pytest.raises(UserError, match=r"x\.bin.* was cut short since it was opened"):
        file.read(59_000, 60_000)
    assert file.read(0, 2).tolist() == [5, 6]


def test_documents_are_found_by_position_in_a_file_of_many(write_tokens: WriteTokens) -> None:
    lengths = [number % 7 for number in range(3_000)]
    file = TokenFile.open(write_tokens("many", [[1] * length for length in lengths]))
    of_token = np.repeat(np.arange(3_000), lengths)
    places = range(0, len(of_token), 37)
    assert [file.document_at(place) for place in places] == of_token[::37].tolist()
    changes = (np.flatnonzero(np.diff(of_token)) + 1).tolist()
    for first, stop in ((0, len(of_token)), (100, 5_000), (changes[5], changes[6])):
        assert file.document_starts(first, stop) == [change for change in changes if first < change < stop]


def patch(at: int, content: bytes) -> Callable[[Path], object]:
    def act(path: Path) -> None:
        with path.open("r+b") as file:
            file.seek(at)
            file.write(content)

    return act


def shorten(size: int) -> Callable[[Path], object]:
    return lambda path: os.truncate(path, size)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


DAMAGES = {  # what is done to a file, and words of the refusal
    "no data": (".bin", Path.unlink, "is missing"),
    "magic": (".idx", patch(0, b"X"), "starts with b'XMIDIDX"),
    "dtype code": (".idx", patch(17, b"\x63"), "dtype code 99"),
    "floats": (".idx", patch(17, b"\x07"), "dtype code 7"),
    "index cut in its arrays": (".idx", shorten(50), "50 bytes; 2 sequences and 3 boundaries need 82"),
    "data cut": (".bin", shorten(8), "has 8 bytes, x.idx describes 10"),
    "empty data": (".bin", shorten(0), "holds no tokens"),
    "first pointer": (".idx", patch(42, b"\x02"), "sequence 0 starts at byte 2 with"),
    "length": (".idx", patch(34, b"\x02"), "sequence 0 starts at byte 0 with 2 tokens"),
    "negative length": (".idx", patch(34, struct.pack("<iiqq", -1, 6, 0, -2)), "sequence 0 .* with -1 tokens"),
    "boundaries": (".idx", patch(74, b"\x07"), "boundaries do not run from 0 to 2"),
    "inner boundary": (".idx", patch(66, b"\x63"), "document 1 ends before it starts"),
    "facts of another type": (".json", text('{"vocab_size": "many"}'), "x.json.*'many', which is not of type int"),
    "negative facts": (".json", text('{"bytes": -5}'), "bytes=-5, .*below 0"),
    "pipe for data": (".bin", pipe, "x.bin.*is not a regular file"),
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damage_is_refused_with_file_and_numbers(write_tokens: WriteTokens, damage: str) -> None:
    prefix = write_tokens("x", [[5, 6, 7], [8, 9]])
    suffix, act, message = DAMAGES[damage]
    act(prefix.with_suffix(suffix))
    with pytest.raises(UserError, match=message) as refusal:
        _ = TokenFile.open(prefix).facts
    assert str(prefix) in str(refusal.value)


def test_verify_names_the_document_of_an_id_beyond_the_vocabulary(write_tokens: WriteTokens) -> None:
    prefix = write_tokens("bad", [[1, 2], [3, 70, 80], [4]])
    with pytest.raises(UserError, match=r"token id 70 at token 3 \(document 1\) is outside the vocabulary of 70"):
        verify(prefix, 70)
    assert verify(prefix, 81).documents == 3


def test_verify_finds_a_broken_index_that_opening_does_not_see(
    write_tokens: WriteTokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_file, "ROWS", 64)
    monkeypatch.setattr(token_file, "LOOKS", 2)
    prefix = write_tokens("many", [[1]] * 100_000)
    patch(HEADER.size + 4 * 4321, b"\x02")(prefix.with_suffix(".idx"))
    TokenFile.open(prefix)
    with pytest.raises(UserError, match="sequence 4,321 starts at byte 8,642 with 2 tokens"):
        verify(prefix, 10)


def test_verify_finds_content_that_is_not_what_was_prepared(tmp_path: Path) -> None:
    facts = {"xxh3_128": xxhash.xxh3_128_hexdigest(struct.pack("<3H", 1, 2, 3))}
    write_token_file(tmp_path / "j", [[1, 2, 3]], np.dtype("<u2"), facts)
    verify(tmp_path / "j", 10)
    patch(2, b"\x05")(tmp_path / "j.bin")
    with pytest.raises(UserError, match="not what was prepared"):
        verify(tmp_path / "j", 10)


def test_the_index_comes_last_when_all_else_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(Path(os.readlink(f"/proc/self/fd/{file}")).name))
    write_token_file(tmp_path / "x", [[1, 2]], np.dtype("<u2"))
    assert [name[:6] for name in synced if name != tmp_path.name] == ["x.bin", ".x.jso", ".x.idx"]
