"""Uploads the checkpoints of one run to checkpoint.remote, behind the training: a thread of each rank.

Rank 0 decides which checkpoint is uploaded, always the newest, and tells the others in the store where the ranks met.
Each uploads what it has written, and rank 0 the rest; the manifest comes last, once the store lists all of it. There is
no collective, and training waits for nothing: what has failed is tried again until a newer checkpoint is saved.
"""

import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import chain, repeat
from math import inf
from typing import Any

from torch.distributed import DistError
from torch.distributed.distributed_c10d import PrefixStore

from megalite.checkpoint.commit import CHECKPOINTS, step_name
from megalite.checkpoint.manifest import MANIFEST, Manifest
from megalite.checkpoint.remote import Remote, in_words
from megalite.checkpoint.run_folder import TOKENIZER, RunFolder
from megalite.config.files import RUN
from megalite.launch.context import ParallelContext

PAUSES_S = (1, 2, 4, 8, 16, 30)  # between tries; the last one stays
LOOK_S = 1.0  # between two looks at what other ranks have done
STANDSTILL_S = 120.0  # of other ranks: then that has failed
PATIENCE_S, SHORT_S = 300.0, 15.0  # for the last upload of a run that is finished, or was stopped
RECORDS = ("config.yaml", "metrics.jsonl", "events.jsonl", f"{TOKENIZER}/*")
OVER = "over"  # in place of a step

Tell = Callable[..., object]  # (kind, step, **fields) of an event


class Uploads:
    """The uploads of this rank; without a `remote` nothing is uploaded."""

    def __init__(self, remote: Remote | None, folder: RunFolder, context: ParallelContext, keep: int) -> None:
        self._folder, self._rank, self._world_size = folder, context.rank, context.world_size
        self._keep, self._claimed = keep, False
        self.step: int | None = None  # that rank 0 uploads: its files must stay
        self._wanted: tuple[int, int] | None = None  # the newest step that is saved, and its `good_before`
        self._news, self._over = threading.Condition(), False
        self._told = deque[tuple[str, int, dict[str, Any]]]()
        store: Any = context.store
        self._place = None if store is None else PrefixStore("uploads", store.clone())
        work = self._lead if context.rank == 0 else self._follow
        self._thread = threading.Thread(target=work, name="upload", daemon=True)
        if remote is not None:
            self._remote = remote
            self._thread.start()

    def offer(self, step: int, good_before: int) -> None:
        """The checkpoint of a step is saved. The newest one before step `good_before` is kept there, too."""
        if self._rank or not self._thread.is_alive():
            return
        with self._news:
            if self._wanted is not None:
                self._fail(self._wanted[0], f"it is skipped, as that of step {self.step} is still under way")
            self._wanted = step, good_before
            self._news.notify()

    def report(self, tell: Tell) -> None:
        """Tell what has happened since the last call."""
        while self._told:
            kind, step, fields = self._told.popleft()
            tell(kind, step, **fields)

    def end(self, hurried: Callable[[], object], note: Callable[[str], object], tell: Tell) -> str:
        """Wait for the newest upload, SHORT_S at most from when somebody is in a hurry; what is not uploaded then."""
        begun, soon, said, patience_s = time.monotonic(), inf, False, SHORT_S if hurried() else PATIENCE_S
        while self._left() and (now := time.monotonic()) < min(begun + patience_s, soon):
            soon = min(soon, now + SHORT_S) if hurried() else soon
            if not said and now > begun + LOOK_S and self._rank == 0:
                said = True
                note(f"waiting for the upload of step {self._left()}, for {patience_s:.0f} s at most")
            time.sleep(0.02)
        left = self._left()
        with self._news:
            self._over = True
            self._news.notify()
        if self._rank == 0 and self._place is not None:
            with suppress(DistError):
                self._place.set("step", OVER)
        if self._thread.is_alive():
            self._thread.join(LOOK_S)  # who comes back from the ranks' store while Python ends would abort the process
        self.report(tell)
        if not left or self._rank:
            return ""
        return f"the checkpoint of step {left} is not uploaded; the next start in this folder does it"

    def _left(self) -> int | None:
        """The newest step that is not uploaded, as far as this rank knows; None: nothing is to be waited for."""
        if self._rank:
            return -1 if self._thread.is_alive() else None
        with self._news:
            return self._wanted[0] if self._wanted else self.step

    def _fail(self, step: int, why: str) -> None:
        self._told.append(("upload_failed", step, {"message": why}))

    def _lead(self) -> None:
        """Upload what is newest, time and again; on rank 0."""
        while True:
            with self._news:
                self.step = None
                self._news.wait_for(lambda: self._wanted or self._over)
                if self._over or self._wanted is None:
                    return
                (step, good_before), self._wanted = self._wanted, None
                self.step = step
            begun, done = time.monotonic(), dict[str, int]()
            attempt = partial(self._upload, step, good_before, done)
            if self._persist(step, attempt, lambda: self._over or self._wanted is not None) and done:
                seconds = round(time.monotonic() - begun, 3)
                self._told.append(("uploaded", step, {"bytes": sum(done.values()), "seconds": seconds}))

    def _follow(self) -> None:
        """Upload this rank's files of what rank 0 says; on other ranks. The end of rank 0 ends it, too."""
        place, last = self._place, ""
        assert place is not None

        def heard() -> str:
            return place.get("step").decode() if place.check(["step"]) else ""

        def is_over(word: str) -> bool:
            return self._over or heard() != word

        with suppress(DistError):
            while (word := heard()) != OVER and not self._over:
                if word not in ("", last):
                    last, attempt = word, partial(self._upload_own, int(word), {})
                    self._persist(int(word), attempt, partial(is_over, word))
                self._pause(LOOK_S)

    def _persist(self, step: int, attempt: Callable[[], object], over: Callable[[], bool]) -> bool:
        """Whether an attempt has succeeded, of many until it is over. Only the first that fails is told."""
        for number, pause_s in enumerate(chain(PAUSES_S, repeat(PAUSES_S[-1]))):
            try:
                attempt()
                return True
            except DistError:
                raise
            except Exception as error:
                gone = not (self._folder.checkpoints / step_name(step)).exists()
                if gone or not number:
                    again = "it was deleted here" if gone else "it is tried again until a newer one is saved"
                    self._fail(step, f"{in_words(error)}; {again}")
            if not gone and not over():
                self._pause(pause_s)
            if gone or over():
                return False
        return False

    def _pause(self, seconds: float) -> None:
        with self._news:
            if not self._over:
                self._news.wait(seconds)

    def _manifest(self, step: int) -> Manifest:
        place = self._folder.checkpoints / step_name(step)
        return Manifest.parse((place / MANIFEST).read_bytes(), place)

    def _upload(self, step: int, good_before: int, done: dict[str, int]) -> None:
        """Upload a checkpoint but for what other ranks upload, and what it needs; then delete what is too old there.
        `done` stays empty where it is there already."""
        manifest, run_id, name = (
            self._manifest(step),
            self._folder.run_id,
            f"{CHECKPOINTS}/{step_name(step)}/{MANIFEST}",
        )
        if not done:
            sizes, owner = self._remote.sizes(), self._remote.owner()
            if owner not in ("", run_id) and (self._claimed or any(MANIFEST in names for names in sizes.values())):
                raise OSError(f"the checkpoints there are those of run {owner}, and this is run {run_id}")
            if MANIFEST in sizes.get(step, {}) and self._remote.read(name) == manifest.render():
                return
            self._remote.remove(step, sizes.get(step, {}))
            self._remote.put(self._folder.path / RUN, RUN)
            self._claimed, done[MANIFEST] = True, 0
            if self._place is not None:
                self._place.set("step", str(step))
        self._upload_own(step, done)
        for path in chain.from_iterable(map(self._folder.path.glob, RECORDS)):
            self._remote.put(path.read_bytes(), path.relative_to(self._folder.path).as_posix())
        self._wait_for_others(manifest, done)
        self._remote.put(manifest.render(), name)
        with suppress(Exception):  # what cannot be deleted costs space, and is deleted the next time
            self._retire(step, good_before)

    def _upload_own(self, step: int, done: dict[str, int]) -> None:
        """Upload the files that this rank has written, or that nobody has who is here, unless they are `done`."""
        place = self._folder.checkpoints / step_name(step)
        for name, (size, _) in self._manifest(step).files.items():
            number = re.search(r"\d+", name)
            if (int(number[0]) if number else 0) % self._world_size == self._rank and name not in done:
                self._remote.put(place / name, f"{CHECKPOINTS}/{place.name}/{name}")
                done[name] = size

    def _wait_for_others(self, manifest: Manifest, done: dict[str, int]) -> None:
        """Return when the store lists all files at their sizes."""
        most, since = len(manifest.files) + 1, time.monotonic()
        while True:
            there = self._remote.sizes().get(manifest.step, {})
            missing = [name for name, (size, _) in manifest.files.items() if there.get(name) != size]
            if not missing:
                done.update({name: size for name, (size, _) in manifest.files.items()})
                return
            if len(missing) < most:
                most, since = len(missing), time.monotonic()
            lost = [name for name in missing if done.pop(name, None) is not None]
            if lost or self._over or time.monotonic() > since + STANDSTILL_S:
                raise OSError(f"{missing[0]} is not there")  # another rank's log may say why
            self._pause(LOOK_S)

    def _retire(self, step: int, good_before: int) -> None:
        """Delete there what the run's folder keeps no longer, and what was begun and not completed."""
        older = {at: names for at, names in self._remote.sizes().items() if at < step}
        whole = sorted((at for at, names in older.items() if MANIFEST in names), reverse=True)
        good = next((at for at in whole if at < good_before), None)
        for at in older.keys() - {*whole[: self._keep - 1], good}:
            self._remote.remove(at, older[at])
