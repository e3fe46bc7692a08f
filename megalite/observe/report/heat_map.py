"""Works out the heat map of experts: a row for each layer that has some, a cell for each expert's share of the tokens.

Cells are as dark as their share is large beside the largest, at least beside twice an even one: an even layer is plain.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.observe.readable import percent
from megalite.observe.run_data import RunData

MOST_CELLS, MOST_COLUMNS = 2048, 256  # of more experts, neighbours share a cell
DARKEST = 0.5  # of the colour: text on it stays readable
WIDE = 1030.0  # of all cells of a row


@dataclass(frozen=True)
class HeatMap:
    """`rows`: by layer the shares, in cells of `experts` neighbours each, of which the largest counts. `even`: what the
    share of each of all `total` experts would be if they were used alike. `step`: the last of those that it shows."""

    rows: Sequence[tuple[int, Sequence[float]]]
    experts: int
    total: int
    step: int

    @property
    def even(self) -> float:
        return 1 / self.total

    @property
    def columns(self) -> int:
        return max(len(shares) for _, shares in self.rows)

    @property
    def cell(self) -> tuple[float, float]:
        """Width and height."""
        return WIDE / self.columns, 22.0 if len(self.rows) <= 24 else 13.0

    @property
    def description(self) -> str:
        """The values in words."""
        shares = [share for _, row in self.rows for share in row]
        return f"from {percent(min(shares))} to {percent(max(shares))}, even: {percent(self.even)}"

    def shade(self, share: float) -> float:
        """How much colour the cell of a share has."""
        largest = max(2 * self.even, *(max(shares) for _, shares in self.rows))
        return round(DARKEST * share / largest, 3)

    def name(self, column: int) -> str:
        """The experts of a column."""
        first = column * self.experts
        last = min(first + self.experts, self.total) - 1
        return f"expert {first}" if first == last else f"experts {first} to {last}"


def heat_map(run: RunData) -> HeatMap | None:
    """Of the newest record with experts; None where it tells of no tokens."""
    counts = run.routed.get("moe", {}).get("tokens_per_expert")
    if not isinstance(counts, list) or not all(isinstance(row, list) and sum(row) for row in counts) or not counts:
        return None
    first, every = (int(run.config.get(f"model.moe.{name}") or 0) for name in ("first_dense_layers", "layer_freq"))
    shared = max(-(-sum(map(len, counts)) // MOST_CELLS), -(-len(counts[0]) // MOST_COLUMNS))  # experts in a cell
    rows = []
    for at, row in enumerate(counts):
        shares = [max(row[cell : cell + shared]) / sum(row) for cell in range(0, len(row), shared)]
        rows.append((first + at * every, shares))
    return HeatMap(rows, shared, len(counts[0]), run.routed["step"])
