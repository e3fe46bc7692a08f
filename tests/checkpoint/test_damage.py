"""A damaged checkpoint is never loaded: it is told, set aside, and the one before is used; and no file runs code."""

import enum
import io
import json
import os
import pickle
import random
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from megalite.checkpoint import manifest as manifests
from megalite.checkpoint import store
from megalite.checkpoint.manifest import Manifest, digest, shares
from megalite.checkpoint.pieces import Piece
from megalite.checkpoint.reading import read_pieces
from megalite.checkpoint.store import Found, newest, save
from megalite.checkpoint.trusted_metadata import UntrustedMetadataError, read_metadata
from megalite.config.problems import UserError
from megalite.parallel.context import ParallelContext
from tests.checkpoint.samples import SINGLE, blank, cut, equal, files_below, no_report, values, whole
from tests.ranks import run_ranks


@pytest.fixture
def two_steps(tmp_path: Path) -> Path:
    """A folder with steps 1 and 2."""
    for step in (1, 2):
        save(tmp_path, step, whole(values(step)), {"step": step}, SINGLE, keep=2)
    return tmp_path


def rewrite(checkpoint: Path, name: str, content: bytes) -> None:
    """Put `content` into a file and make the manifest vouch for it, as a forger would."""
    (checkpoint / name).write_bytes(content)
    path = checkpoint / "COMMIT.json"
    step = int(checkpoint.name.removeprefix("step-"))
    manifest = Manifest.parse(path.read_bytes(), step)
    files = {**manifest.files, name: (len(content), digest(content))}
    path.write_bytes(Manifest(step, manifest.about, files).render())


def load(found: Found | None) -> int:
    """Read the checkpoint into live tensors; the step whose values they have."""
    assert found is not None
    pieces = blank(whole(values(found.step)))
    found.read_into(pieces)
    assert equal(pieces, whole(values(found.step)))
    return found.step


def test_every_single_bit_flip_is_noticed(tmp_path: Path) -> None:
    """400 random flips, spread over all files so that the small ones get their share."""
    run_ranks(save_two, 2, tmp_path)
    (checkpoint,) = tmp_path.iterdir()
    names = sorted(os.listdir(checkpoint))
    assert names == [".metadata", "COMMIT.json", "__0_0.distcp", "__1_0.distcp", "state.json"]
    chance = random.Random(0)
    for trial in range(400):
        path = checkpoint / names[trial % len(names)]
        content = path.read_bytes()
        bit = chance.randrange(len(content) * 8)
        path.write_bytes(flipped(content, bit))
        with pytest.raises(UserError, match=path.name) as refused:
            newest(tmp_path, SINGLE, no_report)
        assert "no checkpoint of this run can be read" in str(refused.value), (path.name, bit)
        path.write_bytes(content)
    assert load(newest(tmp_path, SINGLE, no_report)) == 3


def flipped(content: bytes, bit: int) -> bytes:
    return content[: bit // 8] + bytes([content[bit // 8] ^ (1 << bit % 8)]) + content[bit // 8 + 1 :]


def save_two(context: ParallelContext, folder: Path) -> None:
    save(folder, 3, cut("flat", values(3), context.rank, 2), {"step": 3}, context, keep=1)


def test_without_the_hashes_a_flip_would_load_as_wrong_values(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: DCP by itself notices nothing, so the test above tests our check and not DCP's."""
    path = two_steps / "step-00000002" / "__0_0.distcp"
    content = path.read_bytes()
    at = content.index(values(2)["embedding.word.weight"].numpy().tobytes())
    path.write_bytes(flipped(content, at * 8 + 6))
    monkeypatch.setattr(store, "file_fault", lambda *_: None)
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    pieces = blank(whole(values(2)))
    found.read_into(pieces)
    assert not equal(pieces, whole(values(2)))


def truncate(checkpoint: Path) -> None:
    os.truncate(checkpoint / "__0_0.distcp", 1000)


def empty_the_index(checkpoint: Path) -> None:
    os.truncate(checkpoint / ".metadata", 0)


def lose_the_data(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()


def lose_the_manifest(checkpoint: Path) -> None:
    (checkpoint / "COMMIT.json").unlink()


def lose_the_state(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()


def take_data_of_the_step_before(checkpoint: Path) -> None:
    shutil.copy(checkpoint.with_name("step-00000001") / "__0_0.distcp", checkpoint)


def swap_files(checkpoint: Path) -> None:
    os.rename(checkpoint / "state.json", checkpoint / "kept")
    os.rename(checkpoint / ".metadata", checkpoint / "state.json")
    os.rename(checkpoint / "kept", checkpoint / ".metadata")


def copy_the_step_before_under_this_name(checkpoint: Path) -> None:
    shutil.rmtree(checkpoint)
    shutil.copytree(checkpoint.with_name("step-00000001"), checkpoint)


def link_to_elsewhere(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside"
    shutil.move(checkpoint / "__0_0.distcp", outside)
    (checkpoint / "__0_0.distcp").symlink_to(outside)


def link_the_manifest(checkpoint: Path) -> None:
    outside = checkpoint.parent.parent / "outside.json"
    shutil.move(checkpoint / "COMMIT.json", outside)
    (checkpoint / "COMMIT.json").symlink_to(outside)


def put_a_pipe_there(checkpoint: Path) -> None:
    (checkpoint / "__0_0.distcp").unlink()
    os.mkfifo(checkpoint / "__0_0.distcp")


def edit_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "COMMIT.json"
    path.write_text(path.read_text().replace('"step": 2', '"step": 20'))


def reformat_the_manifest(checkpoint: Path) -> None:
    path = checkpoint / "COMMIT.json"
    path.write_text(json.dumps(json.loads(path.read_text())))


def fill_the_manifest_with_rubbish(checkpoint: Path) -> None:
    (checkpoint / "COMMIT.json").write_bytes(b"[" * 100_000)


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (truncate, "__0_0.distcp has 1,000 bytes where"),
    (empty_the_index, ".metadata has 0 bytes"),
    (lose_the_data, "__0_0.distcp is missing"),
    (lose_the_manifest, "it has no COMMIT.json"),
    (lose_the_state, "state.json is missing"),
    (take_data_of_the_step_before, "__0_0.distcp is damaged"),
    (swap_files, "state.json has"),
    (copy_the_step_before_under_this_name, "COMMIT.json says that it is step 1"),
    (link_to_elsewhere, "__0_0.distcp is a link to elsewhere"),
    (link_the_manifest, "COMMIT.json cannot be read"),
    (put_a_pipe_there, "__0_0.distcp is not a regular file"),
    (edit_the_manifest, "its hash does not match"),
    (reformat_the_manifest, "its hash does not match"),
    (fill_the_manifest_with_rubbish, "COMMIT.json is damaged"),
]


@pytest.mark.parametrize(("damage", "reason"), DAMAGES, ids=[damage.__name__ for damage, _ in DAMAGES])
def test_the_one_before_is_used_and_the_damage_told(
    tmp_path: Path, damage: Callable[[Path], None], reason: str
) -> None:
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step, whole(values(step)), {"step": step}, SINGLE, keep=2)
    damage(folder / "step-00000002")
    reports: list[str] = []
    assert load(newest(folder, SINGLE, reports.append)) == 1
    (report,) = reports
    assert report.startswith("checkpoint step-00000002 is damaged and was passed over: ")
    assert reason in report
    assert report.endswith("Going on from step 1.")
    (aside,) = [path.name for path in folder.iterdir() if ".bad-" in path.name]
    assert f"kept as {aside}" in report
    assert load(newest(folder, SINGLE, no_report)) == 1
    assert save(folder, 2, whole(values(2)), {}, SINGLE, keep=2).path.name == "step-00000002"


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "..", "a/b", ""])
def test_a_manifest_cannot_point_outside_its_folder(two_steps: Path, name: str) -> None:
    path = two_steps / "step-00000002" / "COMMIT.json"
    manifest = Manifest.parse(path.read_bytes(), 2)
    path.write_bytes(Manifest(2, {}, {**manifest.files, name: (1, "0" * 32)}).render())
    reports: list[str] = []
    assert load(newest(two_steps, SINGLE, reports.append)) == 1
    assert "not a file of the checkpoint's own folder" in reports[0]


def test_if_all_are_damaged_the_run_is_refused_and_nothing_renamed(two_steps: Path) -> None:
    for step in (1, 2):
        truncate(two_steps / f"step-0000000{step}")
    before = files_below(two_steps)
    with pytest.raises(UserError) as refused:
        newest(two_steps, SINGLE, no_report)
    assert [Path(problem.setting).name for problem in refused.value.problems] == ["step-00000002", "step-00000001"]
    assert files_below(two_steps) == before


def test_a_later_format_is_refused_and_not_called_damaged(two_steps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = two_steps / "step-00000002" / "COMMIT.json"
    manifest = Manifest.parse(path.read_bytes(), 2)
    monkeypatch.setattr(manifests, "FORMAT", 2)
    path.write_bytes(manifest.render())
    monkeypatch.undo()
    before = files_below(two_steps)
    with pytest.raises(UserError, match="format 2; this megalite reads up to 1"):
        newest(two_steps, SINGLE, no_report)
    assert files_below(two_steps) == before


@pytest.mark.parametrize(
    "name", ["old-step-00000009", "step-00000009-bak", "step-9", "step-00000009.bad-1", ".tmp-step-00000009-01234567"]
)
def test_only_exact_names_are_checkpoints(two_steps: Path, name: str) -> None:
    shutil.copytree(two_steps / "step-00000001", two_steps / name)
    (two_steps / "step-00000007").touch()
    (two_steps / "step-00000008").symlink_to("step-00000001")
    assert load(newest(two_steps, SINGLE, no_report)) == 2


def newest_of_ranks(context: ParallelContext, folder: Path) -> tuple[int, list[str]]:
    reports: list[str] = []
    found = newest(folder, context, reports.append)
    return load(found), reports


def test_ranks_share_the_verification_and_reach_one_decision(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        run_ranks(save_step, 2, tmp_path, step)
    for step in (2, 3):
        path = tmp_path / f"step-0000000{step}" / "__1_0.distcp"
        path.write_bytes(flipped(path.read_bytes(), 8 * 700))
    (first, reports), (second, silence) = run_ranks(newest_of_ranks, 2, tmp_path)
    assert first == second == 1
    assert [report[:24] for report in reports] == ["checkpoint step-00000003", "checkpoint step-00000002"]
    assert silence == []


def save_step(context: ParallelContext, folder: Path, step: int) -> None:
    save(folder, step, cut("flat", values(step), context.rank, 2), {"step": step}, context, keep=9)


def test_files_are_shared_out_by_size() -> None:
    files = {f"f{i}": (size, "") for i, size in enumerate([10, 90, 40, 50, 5])}
    split = shares(files, 2)
    assert sorted(name for names in split for name in names) == sorted(files)
    assert sorted(sum(files[name][0] for name in names) for names in split) == [95, 100]


SIZES = {"__0_0.distcp": 10**9}  # of files that an index may speak of


class Exploit:
    """Pickles as a call that makes a file."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self.call = call
        self.arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call, self.arguments


@pytest.mark.parametrize("call", [os.mkdir, os.system, eval])
def test_an_index_that_runs_code_is_refused(two_steps: Path, call: Callable[..., object]) -> None:
    """The forged file does run code when it is unpickled; reading the checkpoint does not run it."""
    trace = two_steps / "trace"
    argument = {
        "mkdir": str(trace),
        "system": f"mkdir {trace}",
        "eval": f"__import__('os').mkdir({str(trace)!r})",
    }[call.__name__]
    forged = pickle.dumps(Exploit(call, argument))
    pickle.loads(forged)
    assert trace.exists()
    trace.rmdir()
    rewrite(two_steps / "step-00000002", ".metadata", forged)
    found = newest(two_steps, SINGLE, no_report)  # its hashes are right: a forger can compute them, too
    assert found is not None
    pieces = blank(whole(values(2)))
    with pytest.raises(UserError, match="which a checkpoint never needs"):
        found.read_into(pieces)
    assert not trace.exists()
    assert equal(pieces, blank(pieces))


class PicklerOfPython311(pickle.Pickler):
    """Pickles members of enums as Python 3.11.0 to 3.11.3 do, of which Debian 12 has one."""

    def reducer_override(self, value: object) -> object:
        return (getattr, (type(value), value.name)) if isinstance(value, enum.Enum) else NotImplemented


def test_an_index_that_an_early_python_3_11_wrote_is_read(two_steps: Path) -> None:
    written = io.BytesIO()
    content = (two_steps / "step-00000002" / ".metadata").read_bytes()
    PicklerOfPython311(written).dump(pickle.loads(content))
    assert b"getattr" in written.getvalue()
    assert pickle.dumps(read_metadata(written.getvalue(), SIZES)) == pickle.dumps(read_metadata(content, SIZES))


@pytest.mark.parametrize(
    ("owner", "name"), [(Metadata, "__init__"), (_MEM_FORMAT_ENCODING, "__class__"), ("x", "join")]
)
def test_no_other_attribute_is_looked_up(owner: object, name: str) -> None:
    with pytest.raises(UntrustedMetadataError, match="which a checkpoint never needs"):
        read_metadata(pickle.dumps(Exploit(getattr, owner, name)), SIZES)


def forge_data(checkpoint: Path, item: bytes) -> None:
    """Put `item` in place of every stored box, behind right hashes and a right index."""
    metadata = read_metadata((checkpoint / ".metadata").read_bytes(), SIZES)
    for where in metadata.storage_data.values():
        where.offset, where.length = 0, len(item)
    rewrite(checkpoint, "__0_0.distcp", item)
    rewrite(checkpoint, ".metadata", pickle.dumps(metadata))


def saved_by_torch(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_data_that_runs_code_is_not_run(two_steps: Path) -> None:
    """A pickle in place of a tensor's bytes."""
    trace = two_steps / "trace"
    forge_data(two_steps / "step-00000002", saved_by_torch(Exploit(os.mkdir, str(trace))))
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    with pytest.raises(store.CheckpointError, match="could not be read"):
        found.read_into(blank(whole(values(2))))
    assert not trace.exists()


def repacked(change: Callable[[bytes], bytes] = bytes, compression: int = zipfile.ZIP_STORED, name: str = "") -> bytes:
    """The stored `scale` (8 bytes), with its elements changed, compressed or renamed."""
    with zipfile.ZipFile(io.BytesIO(saved_by_torch(values(2)["scale"]))) as archive:
        contents = {entry: archive.read(entry) for entry in archive.namelist()}
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for entry, content in contents.items():
            elements = entry.endswith("/data/0")
            archive.writestr(name or entry if elements else entry, change(content) if elements else content)
    return buffer.getvalue()


def reaching_out() -> bytes:
    """The name of the elements' entry claims to be so long that they would begin behind the item."""
    item = bytearray(repacked())
    header = item.index(b"PK\x03\x04", item.index(b"byteorder"))
    item[header + 26 : header + 28] = b"\xff\xff"
    return bytes(item)


FORGED = {
    "more elements": repacked(lambda content: content * 2),
    "fewer elements": repacked(lambda content: content[:4]),
    "compressed": repacked(compression=zipfile.ZIP_DEFLATED),
    "none": repacked(name="archive/data/1"),
    "elsewhere": reaching_out(),
    "cut off": repacked()[:-10],
    "nothing": b"",
}


@pytest.mark.parametrize("item", FORGED.values(), ids=FORGED)
def test_an_item_that_is_not_the_tensor_of_the_index_is_refused(two_steps: Path, item: bytes) -> None:
    forge_data(two_steps / "step-00000002", item)
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    piece = Piece("scale", (), (), torch.tensor(77))
    with pytest.raises(store.CheckpointError, match=r"scale is not where it was written .*on rank 0"):
        read_pieces(found.path, found.manifest, [piece], SINGLE, passed_over=lambda name: name != "scale")
    assert piece.tensor == 77
    forge_data(found.path, repacked())  # it was refused for what was changed, not for having been repacked
    found = newest(two_steps, SINGLE, no_report)
    assert found is not None
    read_pieces(found.path, found.manifest, [piece], SINGLE, passed_over=lambda name: name != "scale")
    assert piece.tensor == values(2)["scale"]


def test_an_index_must_describe_the_files(two_steps: Path) -> None:
    content = (two_steps / "step-00000001" / ".metadata").read_bytes()
    size = (two_steps / "step-00000001" / "__0_0.distcp").stat().st_size
    good = {"__0_0.distcp": size}
    assert set(read_metadata(content, good).state_dict_metadata) == set(values(1))

    def refusal(change: Callable[[object], None], files: dict[str, int]) -> str:
        metadata = read_metadata(content, good)
        change(metadata)
        with pytest.raises(UntrustedMetadataError) as refused:
            read_metadata(pickle.dumps(metadata), files)
        return str(refused.value)

    assert "not part of the checkpoint" in refusal(lambda m: None, {"__1_0.distcp": size})
    assert "beyond the end" in refusal(lambda m: None, {"__0_0.distcp": size - 1000})
    assert "has data for 0" in refusal(lambda m: m.state_dict_metadata["scale"].chunks.clear(), good)
    assert "has no data at" in refusal(lambda m: m.storage_data.clear(), good)
    assert "not a tensor" in refusal(lambda m: m.state_dict_metadata.update(x=3), good)
    assert "cannot be read" in refusal(lambda m: setattr(m, "state_dict_metadata", 3), good)
    escape = lambda m: [setattr(w, "relative_path", "../../etc/passwd") for w in m.storage_data.values()]  # noqa: E731
    assert "not part of the checkpoint" in refusal(escape, good)
