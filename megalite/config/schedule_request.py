"""The schedule of a pipeline that a user asks for. The schedules themselves are in `megalite.pipeline`; here are their
names, and what the rules and other settings need to know of them."""

from dataclasses import dataclass

SCHEDULE_NAMES = ("1f1b", "interleaved", "zb-h1", "gpipe")
CHUNKED = {"interleaved"}  # these go through several chunks of layers on each rank
SPLITTING = {"zb-h1"}  # these put weight gradients off


@dataclass(frozen=True)
class ScheduleRequest:
    """The schedule, and the sizes that it is for."""

    schedule: str
    pp: int
    microbatches: int
    vpp: int = 1
    group_size: int | None = None

    @property
    def group(self) -> int:
        """Microbatches that a rank takes through one chunk in a row before it goes on with the next chunk: as asked, or
        the smallest number from pp on that leaves no short rest."""
        sizes = range(self.pp, self.microbatches + 1)
        return self.group_size or next((size for size in sizes if not 0 < self.microbatches % size < self.pp), self.pp)
