"""The checkpoints of one run in an object store (checkpoint.remote), by fsspec. They are brought from there where they
are newer than those of the run's folder; uploads.py uploads them.

    run.json, config.yaml, metrics.jsonl, events.jsonl, tokenizer/    as they were at the newest upload
    checkpoints/step-00000200/                                        as in the run's folder

Stores have no rename. A checkpoint is complete there once its manifest is: it is uploaded when the store lists every
other file at its size, and deleted before any of them. What the manifest says of hashes is verified at the download.
"""

import json
import re
import secrets
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from megalite.checkpoint.commit import CHECKPOINTS, STATE, begin, publish, step_name
from megalite.checkpoint.manifest import MANIFEST, digest, file_fault
from megalite.checkpoint.reading import Found, inspect, set_aside
from megalite.config.files import OWN, RUN, sync_folder, write_atomically, write_new
from megalite.errors.problems import REMEDIES, Problem, UserError, shortened
from megalite.launch.context import ParallelContext, all_ranks_or_raise, rank0_broadcast

SETTING = "checkpoint.remote"
WITHOUT = f"{SETTING}=null to go on without it"
ANSWER_S = 15.0  # for the first answer of a store
TRIES, PAUSE_S = 3, 1.0  # of a download
AT_ONCE = 8  # files
# Uploads are tried again by uploads.py, with more patience than libraries have. S3 parts are 50 MiB of memory each.
QUICK = {"retries": {"total_max_attempts": 1}, "connect_timeout": 10, "response_checksum_validation": "when_required"}
S3, LOCAL = {"max_concurrency": 4, "config_kwargs": QUICK}, {"auto_mkdir": True}
OPTIONS: dict[str, dict[str, Any]] = {"s3": S3, "s3a": S3, "file": LOCAL, "local": LOCAL}
PLACE = re.compile(rf".*/{CHECKPOINTS}/step-(\d{{8}})/([^/]+)")

Result = TypeVar("Result")


def open_remote(url: str | None, context: ParallelContext) -> "Remote | None":
    """The store of checkpoint.remote; collective. UserError on all ranks where it cannot be used now."""
    if url is None:
        return None
    remote = all_ranks_or_raise(context, lambda: Remote(url))
    rank0_broadcast(context, remote.check)
    return remote


def in_words(error: BaseException) -> str:
    """What went wrong in a library, in one line."""
    return shortened(" ".join(str(error).split()) or type(error).__name__)


class Remote:
    """The prefix `url` of a store. A method that asks the store raises what its library raises."""

    def __init__(self, url: str) -> None:
        try:
            import fsspec  # type: ignore[import-untyped]  # a quarter of a second, and more for the library of the store

            protocol = url.partition("://")[0]
            options = {**OPTIONS.get(protocol, {}), **fsspec.config.conf.get(protocol, {})}  # what the user has chosen
            self.url = url.rstrip("/")
            self.files, root = fsspec.url_to_fs(self.url, use_listings_cache=False, **options)
        except Exception as error:
            raise self._refusal(url, f"cannot be opened: {in_words(error)}") from error
        self._root = root.rstrip("/")

    @staticmethod
    def _refusal(url: str, rule: str, hint: str = "") -> UserError:
        hint = hint or f"a bucket that exists and credentials that may list, write and delete there, or {WITHOUT}"
        return UserError(Problem(SETTING, url, rule, hint))

    def check(self) -> None:
        """UserError unless this process may list, write and delete there, and the store answers within ANSWER_S."""
        probe, answer = f"{self._root}/.megalite-{secrets.token_hex(4)}", Future[None]()

        def ask() -> None:
            try:
                self.files.pipe_file(probe, b"megalite")
                self.sizes()
                self.files.rm_file(probe)
                answer.set_result(None)
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=ask, name="store", daemon=True).start()
        try:
            answer.result(ANSWER_S)
        except Exception as error:
            late = isinstance(error, TimeoutError) and not answer.done()
            rule = f"no answer within {ANSWER_S:.0f} s" if late else in_words(error)
            raise self._refusal(self.url, f"the store cannot be used: {rule}") from error

    def sizes(self) -> dict[int, dict[str, int]]:
        """The size of each file of the checkpoints there, by step and name."""
        found, sizes = dict[str, Any](), defaultdict[int, dict[str, int]](dict)
        with suppress(FileNotFoundError):
            found = self.files.find(f"{self._root}/{CHECKPOINTS}", detail=True)
        for path, about in found.items():
            if place := PLACE.fullmatch(f"/{path}"):
                sizes[int(place[1])][place[2]] = about["size"]
        return dict(sizes)

    def complete(self) -> list[int]:
        """The steps of the checkpoints that are complete, newest first."""
        return sorted((step for step, names in self.sizes().items() if MANIFEST in names), reverse=True)

    def read(self, name: str) -> bytes:
        """The content of the file `name` below the prefix."""
        return bytes(self.files.cat_file(f"{self._root}/{name}"))

    def put(self, source: Path | bytes, name: str) -> None:
        """Upload a file, or bytes, to `name`; OSError where the store then has another size."""
        place = f"{self._root}/{name}"
        if isinstance(source, Path):
            size = source.stat().st_size
            self.files.put_file(str(source), place)
        else:
            size = len(source)
            self.files.pipe_file(place, source)
        if (there := self.files.info(place)["size"]) != size:
            raise OSError(f"{name} has {there:,} bytes there, not {size:,}")

    def remove(self, step: int, names: Iterable[str]) -> None:
        """Delete files of a checkpoint, the manifest first: from then on there is none."""
        for name in sorted(names, key=lambda name: (name != MANIFEST, name)):
            with suppress(FileNotFoundError):
                self.files.rm_file(f"{self._root}/{CHECKPOINTS}/{step_name(step)}/{name}")

    def newest(self, after: int, run_id: str | None) -> Found | None:
        """What the newest complete checkpoint after a step says of itself, if its JSON is intact. UserError where the
        checkpoints are another run's."""
        steps = self.asked(self.complete)
        owner = self.asked(self.owner) if steps and run_id else ""
        if owner and owner != run_id:
            rule = f"the checkpoints there are those of run {owner}, and the folder is that of run {run_id}"
            raise self._refusal(self.url, rule, f"another prefix, or run_dir=NEW to go on with run {owner} there")
        found = (self._look(step) for step in steps if step > after)
        return next((it for it in found if isinstance(it, Found)), None)

    def asked(self, question: Callable[[], Result], is_good: Callable[[Result], bool] = lambda answer: True) -> Result:
        """The answer to a start's question, which is asked again where it fails or its answer is not good: the last one
        counts. UserError where there is none, FileNotFoundError where that is the answer."""
        for _ in range(TRIES - 1):
            with suppress(Exception):
                if is_good(answer := question()):
                    return answer
            time.sleep(PAUSE_S)
        try:
            return question()
        except (FileNotFoundError, UserError):
            raise
        except Exception as error:
            hint = REMEDIES.get(getattr(error, "errno", None), "start again once it answers")
            raise self._refusal(self.url, f"cannot be read now: {in_words(error)}", f"{hint}, or {WITHOUT}") from error

    def fetch(self, step: int, folder: Path, report: Callable[[str], object]) -> str | None:
        """Bring a complete checkpoint, and the files of the run, to the `folder` of checkpoints of a run: None, or what
        is wrong with it there. UserError where the store does not answer now, or the disk takes it not."""
        temporary, final = begin(folder, step), folder / step_name(step)
        try:
            found = self._look(step)
            if isinstance(found, str):
                return found
            sizes, files = self.asked(self.sizes)[step], found.manifest.files
            report(f"{step_name(step)}, {sum(map(int, sizes.values())) / 2**20:,.1f} MiB, is brought from {self.url}")
            for name, (size, _) in files.items():
                if (there := sizes.get(name)) != size:
                    return f"{name} has {'no' if there is None else f'{there:,}'} bytes there, not {size:,}"

            def bring(name: str) -> str | None:
                place = f"{self._root}/{CHECKPOINTS}/{final.name}/{name}"
                self.files.get_file(place, str(temporary / name))
                sync_folder(temporary / name)
                return file_fault(temporary, name, files[name][1])

            with ThreadPoolExecutor(AT_ONCE) as pool:
                asked = partial(self.asked, is_good=lambda fault: fault is None)
                if faults := [fault for fault in pool.map(asked, (partial(bring, name) for name in files)) if fault]:
                    return "; ".join(faults[:3])
            write_new(temporary / MANIFEST, found.manifest.render())
            self._fetch_records(found.state, folder.parent)
            if final.exists():
                report(f"{final.name} is damaged and was brought again from {self.url}; {set_aside(final)}")
            publish(temporary, step)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return None

    def set_aside(self, step: int) -> str:
        """Take its manifest from a damaged checkpoint, so that it is not tried again; what became of it, in words."""
        place = f"{self._root}/{CHECKPOINTS}/{step_name(step)}/{MANIFEST}"
        try:
            self.files.mv(place, aside := f"{place}.bad-{time.strftime('%Y%m%d-%H%M%S')}")
            return f"its manifest is now {Path(aside).name}"
        except Exception as error:
            return f"not renamed: {in_words(error)}"

    def _look(self, step: int) -> Found | str:
        """The JSON of a checkpoint, verified, or what is wrong with it."""

        def look() -> Found | str:
            with TemporaryDirectory() as place:
                (folder := Path(place, step_name(step))).mkdir()
                for name in (MANIFEST, STATE):
                    with suppress(FileNotFoundError):
                        content = self.files.cat_file(f"{self._root}/{CHECKPOINTS}/{folder.name}/{name}")
                        (folder / name).write_bytes(content)
                return inspect(folder, ParallelContext(), json_only=True)

        return self.asked(look, lambda found: isinstance(found, Found))

    def _fetch_records(self, state: dict[str, Any], run: Path) -> None:
        """Bring the files whose hashes a checkpoint's state holds, unless they are here as they were then."""
        known = [(name, seal["hash"], seal["bytes"]) for name, seal in state.get("record", {}).items() if name in OWN]
        known += [(f"tokenizer/{Path(name).name}", found, None) for name, found in state.get("tokenizer", {}).items()]
        for name, expected, size in known:
            path = run / name
            if not path.is_file() or digest(path.read_bytes()[:size]) != expected:
                with suppress(FileNotFoundError):
                    content = self.asked(partial(self.read, name))
                    if digest(content[:size]) == expected:
                        path.parent.mkdir(exist_ok=True)
                        write_atomically(path, content)

    def owner(self) -> str:
        """The id of the run that uploads there; empty where no run has."""
        with suppress(FileNotFoundError, ValueError):
            return str(json.loads(self.read(RUN)).get("run_id", ""))
        return ""
