"""What a remedy offers, read as its reader would: the ways out, each a set of changes."""

import re
from itertools import product

Way = dict[str, str | None]  # by setting, the value as it is written; None: leave it out


def ways_out(remedy: str) -> list[Way]:
    """Alternatives stand between `, or `; changes that belong together between `, and ` or ` with `."""
    ways: list[Way] = []
    for alternative in remedy.split(", or "):
        choices: list[list[tuple[str, str | None]]] = []
        for step in re.split(", and | with ", alternative):
            if unset := re.fullmatch(r"leave (\S+) out", step):
                choices.append([(unset[1], None)])
            elif assigned := re.search(r"(?:^| )([\w.-]+)=(.+)$", step):
                choices.append([(assigned[1], value) for value in assigned[2].split(" or ")])
        ways += [dict(way) for way in product(*choices) if way]
    return ways
