"""A rule that sizes break, as a plain record: what is wrong, and which settings could mend it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

Show = Callable[[str], str]  # "pp" -> "parallel.pp=4": a field and its value as the user knows them


@dataclass(frozen=True)
class Flaw:
    """A broken rule about `field`, and the fields of which one, changed alone, may mend it.

    `kind` tells the rules about one field apart.
    """

    field: str
    kind: str
    rule: str
    fixes: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str]:
        return self.field, self.kind


def shown_by(record: object) -> Show:
    """Names the fields as the record does."""
    return lambda field: f"{field}={getattr(record, field)!r}"


def refuse(flaws: Iterable[Flaw]) -> None:
    """Raise one ValueError with all flaws, if there are any."""
    if rules := [f"{flaw.field}: {flaw.rule}" for flaw in flaws]:
        raise ValueError("; ".join(rules))


def is_whole(value: object, at_least: int) -> bool:
    """Whether `value` is a whole number of at least that size; True and False are not."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least
