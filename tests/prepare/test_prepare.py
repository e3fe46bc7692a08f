"""Preparation is done once, whoever starts it and however often it is killed."""

import json
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, normalizers

from megalite.config.schema import Config
from megalite.data.open import open_data
from megalite.data.token_file import TokenFile, with_suffix
from megalite.data.tokenizers import TextTokenizer, byte_tokenizer, load_tokenizer
from megalite.errors.problems import UserError
from megalite.prepare import prepare as preparation
from megalite.prepare.prepare import char_tokenizer, prepare, prepare_file, sample, targets_of
from megalite.prepare.sources import Source, sources_of

LINE = "the quick brown fox jumps over the lazy dog; "

# A preparation of its own process: prints what `prepare` reports, so that the test can kill it in the middle.
PREPARE = """
import sys
from megalite.config.schema import Config
from megalite.prepare.prepare import prepare
config = Config(tokenizer=sys.argv[3])
config.data.source, config.data.path, config.data.cache_dir = "text", sys.argv[1], sys.argv[2]
config.data.workers = int(sys.argv[4])
prepare(config, lambda *counts: print(*counts, flush=True))
"""


def write_documents(path: Path, count: int, repeats: int) -> None:
    with path.open("w") as file:
        for number in range(count):
            file.write(json.dumps({"text": f"document {number}: " + LINE * repeats}) + "\n")


def start(path: Path, cache: Path, tokenizer: str = "byte", workers: int = 2) -> "subprocess.Popen[str]":
    arguments = [str(path), str(cache), tokenizer, str(workers)]
    return subprocess.Popen([sys.executable, "-c", PREPARE, *arguments], stdout=subprocess.PIPE, text=True)


def made(config: Config, path: Path) -> TokenFile:
    """The token file of `path`."""
    config.data.path = str(path)
    [prefix] = prepare(config).prefixes
    return TokenFile.open(prefix)


@pytest.mark.parametrize("workers", [1, 2])
def test_tokens_are_the_documents_in_order_each_with_its_end(tmp_path: Path, config: Config, workers: int) -> None:
    texts = ["first", "zweites é", "", "3"]
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"text": text}) + "\n")
    config.data.workers = workers
    file = made(config, tmp_path / "*.jsonl")
    assert file.tokens[:].tolist() == [*b"first", 256, *"zweites é".encode(), 256, *b"3", 256]
    assert file.documents == 3
    facts = file.facts
    assert (facts.skipped_documents, facts.bytes, facts.vocab_size, file.tokens.dtype) == (1, 16, 257, "uint16")


def test_one_text_file_by_char_is_its_symbols_and_nothing_else(tmp_path: Path, config: Config) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    config.data.path, config.tokenizer = str(tmp_path / "a.txt"), "char"
    data = open_data(config, prepare(config))
    assert data.train.vocab_size == len(set(LINE))
    assert data.tokenizer is not None
    (part,) = data.train.parts
    assert data.tokenizer.decode(part.file.tokens[:].tolist()) == LINE * 100
    assert (part.first, part.stop, len(part.file.tokens)) == (0, int(4500 * 0.9), 4500)


def test_a_warm_start_imports_no_library_of_the_preparation(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    start(tmp_path / "a.txt", tmp_path / "cache", "bpe").communicate()
    code = PREPARE + "print([m for m in ('torch', 'datasets', 'transformers', 'pyarrow') if m in sys.modules])"
    arguments = [str(tmp_path / "a.txt"), str(tmp_path / "cache"), "bpe", "1"]
    assert subprocess.check_output([sys.executable, "-c", code, *arguments], text=True) == "[]\n"


def test_progress_grows_to_the_whole(tmp_path: Path, config: Config) -> None:
    write_documents(tmp_path / "a.jsonl", 2000, 30)
    config.data.path, config.data.workers = str(tmp_path / "a.jsonl"), 2
    seen: list[tuple[int, int, int, int]] = []
    prepare(config, lambda *counts: seen.append(counts))
    assert [done for done, *_ in seen] == sorted(done for done, *_ in seen)
    done, total, documents, tokens = seen[-1]
    assert done == total == (tmp_path / "a.jsonl").stat().st_size
    assert documents == 2000
    assert tokens > 2000 * 30 * len(LINE)


def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    write_documents(tmp_path / "a.jsonl", 8000, 30)
    process = start(tmp_path / "a.jsonl", tmp_path / "cache")
    assert process.stdout is not None
    while int(process.stdout.readline().split()[0]) == 0:
        pass
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) >= 2
    process.kill()
    process.communicate(timeout=30)  # to the end of its output, which the workers hold as well
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{child}").exists() and not is_zombie(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)


def is_zombie(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def test_two_processes_at_once_prepare_once(tmp_path: Path, config: Config) -> None:
    write_documents(tmp_path / "a.jsonl", 2000, 30)
    both = [start(tmp_path / "a.jsonl", tmp_path / "cache", "bpe", workers=1) for _ in range(2)]
    outputs = [process.communicate()[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    config.tokenizer = "bpe"
    assert made(config, tmp_path / "a.jsonl").documents == 2000
    # The one that came second waited for the lock, then reported the finished file in one go.
    assert min(len(lines) for lines in outputs) <= 2 < max(len(lines) for lines in outputs)


def test_parts_of_a_blend_share_one_tokenizer_trained_on_all(tmp_path: Path, config: Config) -> None:
    (tmp_path / "a.txt").write_text(LINE * 100)
    (tmp_path / "b.txt").write_text("völlig andere Wörter, täglich schöne Grüße; " * 100)
    config.data.path = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]
    config.tokenizer, config.data.bpe_vocab_size = "bpe", 300
    data = open_data(config, prepare(config))
    assert len(data.train.parts) == 2
    assert data.tokenizer is not None
    assert len(data.tokenizer.encode("quick")) < 5
    assert len(data.tokenizer.encode("täglich")) < 8


def test_the_sample_for_training_a_tokenizer_is_from_all_over(tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(str(number % 10) * 1_100_000)
    plan = Source("text", (str(tmp_path),)).plan()
    taken = list(sample(plan, 4000))
    assert sum(map(len, taken)) == 4000
    assert {text[0] for text in taken} == set("0123456789")


def test_a_file_where_the_user_wants_it_is_not_overwritten_by_another(tmp_path: Path, config: Config) -> None:
    (tmp_path / "a.txt").write_text(LINE * 10)
    source = Source("text", (str(tmp_path / "a.txt"),))
    prepare_file(source, config, tmp_path / "out" / "a")
    prepare_file(source, config, tmp_path / "out" / "a", lambda *counts: pytest.fail("work was done"))
    config.tokenizer = "char"
    with pytest.raises(UserError, match="not made of this text by this tokenizer"):
        prepare_file(source, config, tmp_path / "out" / "a")


@pytest.mark.parametrize("by", ["file", "stdin"])
def test_workers_do_not_run_the_script_that_prepares(tmp_path: Path, by: str) -> None:
    """A script need not guard what it does: a worker that ran it again would wait for the lock of its parent."""
    for name in ("a", "b"):
        write_documents(tmp_path / f"{name}.jsonl", 20, 1)
    (tmp_path / "script.py").write_text(PREPARE)
    script = [str(tmp_path / "script.py") if by == "file" else "-"]
    arguments = [str(tmp_path / "*.jsonl"), str(tmp_path / "cache"), "byte", "2"]
    command = [sys.executable, *script, *arguments]
    done = subprocess.run(command, input=PREPARE, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "40 " in done.stdout.splitlines()[-1]


def test_workers_give_the_same_file_as_one_process(tmp_path: Path, config: Config) -> None:
    write_documents(tmp_path / "a.jsonl", 3000, 20)
    files = []
    for workers in (1, 3):
        config.data.workers, config.data.cache_dir = workers, str(tmp_path / f"cache-{workers}")
        config.tokenizer, config.data.path = "bpe", str(tmp_path / "a.jsonl")
        [prefix] = prepare(config).prefixes
        files.append([with_suffix(prefix, ending).read_bytes() for ending in (".bin", ".idx", ".json")])
    assert files[0] == files[1]


@pytest.mark.parametrize("changed", ["tokenizer.json", "config.json", "vocab.json"])
def test_a_tokenizer_folder_changed_in_place_is_another_one(tmp_path: Path, config: Config, changed: str) -> None:
    (tmp_path / "a.txt").write_text(LINE)
    config.data.path, path, keys = str(tmp_path / "a.txt"), tmp_path / "copied" / changed, []
    byte_tokenizer().save(tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "copied")
    for folder in ("mine", "copied", "copied"):
        config.tokenizer = str(tmp_path / folder)
        keys.append(targets_of(config, sources_of(config.data))[0].key)
        if len(keys) == 2:
            path.write_text(path.read_text() + " " if path.exists() else "{}")
    assert keys[0] == keys[1], "the content decides, not the place"
    assert keys[2] != keys[1]


def test_the_revision_of_a_hub_tokenizer_is_part_of_the_key(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache as the hub's library leaves it, whose `main` moves on."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    (tmp_path / "a.txt").write_text(LINE)
    config.data.path, config.tokenizer = str(tmp_path / "a.txt"), "org/name"
    keys = set()
    for revision, tokenizer in (("a" * 40, byte_tokenizer()), ("b" * 40, char_tokenizer([LINE]))):
        entry = tmp_path / "hub" / "models--org--name"
        tokenizer.save(entry / "snapshots" / revision)
        (entry / "refs").mkdir(exist_ok=True)
        (entry / "refs" / "main").write_text(revision)
        keys.add(targets_of(config, sources_of(config.data))[0].key)
    assert len(keys) == 2


def folder_of(backend: Tokenizer, folder: Path) -> str:
    TextTokenizer(backend, {}).save(folder)
    return str(folder)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_tokenizer_cannot_say_is_refused_with_file_and_document(
    tmp_path: Path, config: Config, workers: int
) -> None:
    backend = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    for name, texts in (("1", ["ab"]), ("2", ["ab", "", "aab", "abcab", "d"])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config.data.path, config.data.workers = str(tmp_path / "*.jsonl"), workers
    config.tokenizer = folder_of(backend, tmp_path / "tokenizer")
    with pytest.raises(UserError, match=r"no token for a symbol.* in .*2\.jsonl: document 4"):
        prepare(config)


def test_a_document_of_a_million_characters_has_the_ids_of_the_whole(tmp_path: Path, config: Config) -> None:
    pieces = {"▁": 0, "a": 1, "▁a": 2, "\n": 3}
    backend = Tokenizer(models.BPE(pieces, [("▁", "a")], unk_token="a"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    (tmp_path / "a.txt").write_text("a\n" * 600_000)
    config.tokenizer = folder_of(backend, tmp_path / "tokenizer")
    assert made(config, tmp_path / "a.txt").tokens[:].tolist() == [2, 3, *[1, 3] * 599_999]


def test_sets_for_validation_are_made_by_the_tokenizer_of_the_training_text_alone(
    tmp_path: Path, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However they come: with the training text, after it, or as its own part; the same text is one token file."""
    for name, line in (("a", LINE), ("b", "zwei Wörter. "), ("web", "<html><body>text</body></html>\n")):
        (tmp_path / f"{name}.txt").write_text(line * 400)
    config.tokenizer, config.data.bpe_vocab_size = "bpe", 300
    a, b, web = (str(tmp_path / f"{name}.txt") for name in ("a", "b", "web"))
    config.data.path = [a, b]
    alone, together, later = (replace(config.data, cache_dir=str(tmp_path / name)) for name in ("1", "2", "3"))
    wanted = prepare(replace(config, data=alone))
    assert wanted.sets == {}
    sets = {"web": web, "both": [web, b]}
    found = prepare(replace(config, data=replace(together, validation=sets)))
    assert [it.name for it in found.prefixes] == [it.name for it in wanted.prefixes]
    prepare(replace(config, data=later))
    monkeypatch.setattr(preparation, "bpe_tokenizer", None)  # it is there
    after = prepare(replace(config, data=replace(later, validation=sets)))
    for each in (found, after):
        files = {name: [TokenFile.open(prefix) for prefix in prefixes] for name, prefixes in each.sets.items()}
        ours = [TokenFile.open(prefix) for prefix in each.prefixes]
        theirs = [TokenFile.open(prefix) for prefix in wanted.prefixes]
        assert [it.tokens.tolist() for it in ours] == [it.tokens.tolist() for it in theirs]
        assert {it.facts.tokenizer for its in files.values() for it in its} == {theirs[0].facts.tokenizer}
        assert each.sets["both"] == [each.sets["web"][0], each.prefixes[1]]
        decoded = load_tokenizer(with_suffix(each.prefixes[0], ".tokenizer")).decode(files["web"][0].tokens.tolist())
        assert decoded.startswith((tmp_path / "web.txt").read_text())


def test_a_symbol_of_a_set_that_the_training_text_does_not_have_is_refused(tmp_path: Path, config: Config) -> None:
    """And the token file of the training text stays."""
    (tmp_path / "a.txt").write_text(LINE * 100)
    (tmp_path / "b.txt").write_text(LINE + "é")
    config.tokenizer, config.data.path = "char", str(tmp_path / "a.txt")
    config.data.validation = {"b": str(tmp_path / "b.txt")}
    with pytest.raises(UserError, match=r"a part of it has no token.* in .*b\.txt: document 1"):
        prepare(config)
    config.data.validation = None
    assert targets_of(config, sources_of(config.data))[0].is_prepared
