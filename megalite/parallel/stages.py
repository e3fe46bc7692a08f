"""Who holds which layers.

A pipeline of `pp` ranks with `vpp` chunks each has pp*vpp stages; chunk c on rank r is stage c*pp + r. The layers of
all stages, concatenated in stage order, are 0..num_layers-1: nothing is dropped, nothing is held twice. With an encoder
and a decoder that holds for each side. Settings that cannot keep this are refused by `stage_rules`. No torch import.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from megalite.config.problems import Problem, UserError
from megalite.parallel.remedies import is_whole
from megalite.parallel.stage_rules import FIELD_NAMES, StageSettings, stage_problems
from megalite.parallel.stage_string import layout_counts


@dataclass(frozen=True)
class StageLayers:
    """Layers [first, first + count) of the model, held by one chunk of one pipeline rank.

    `embedding`: tokens enter here (stage 0, and the decoder's first stage where there is an encoder). `loss`: the final
    norm, the logits and the loss are computed here (the last stage); where embeddings are tied, a stage that has
    `loss` holds the embedding table too.
    """

    stage: int
    rank: int
    chunk: int
    first: int
    count: int
    embedding: bool
    loss: bool
    side: Literal["encoder", "decoder"] = "decoder"  # a GPT is a decoder

    @property
    def layers(self) -> range:
        """Global indices of the layers, counted from 0 on each side."""
        return range(self.first, self.first + self.count)


def stage_layers(
    settings: StageSettings, names: Mapping[str, str] = FIELD_NAMES, pp_sizes: Collection[int] | None = None
) -> tuple[StageLayers, ...]:
    """All stages in stage order. Raises `UserError` with all of `stage_problems`, told in `names` and `pp_sizes`."""
    if problems := stage_problems(settings, names, pp_sizes):
        raise UserError(problems)
    counts = _counts(settings)
    pp, split = settings.pp, settings.split_rank
    stages, first = [], 0
    for stage, count in enumerate(counts):
        chunk, rank = divmod(stage, pp)
        first = 0 if stage == split else first  # the decoder counts its layers from 0 again
        entry, last = stage in (0, split), stage == len(counts) - 1
        side: Literal["encoder", "decoder"] = "encoder" if split is not None and stage < split else "decoder"
        stages.append(StageLayers(stage, rank, chunk, first, count, entry, last, side))
        first += count
    sides = 1 if split is None else 2
    assert sum(counts) == sides * settings.num_layers, (settings, counts)
    return tuple(stages)


def get_num_layers(
    num_layers: int,
    pp: int,
    pp_rank: int,
    *,
    chunk: int | None = None,
    names: Mapping[str, str] = FIELD_NAMES,
    **rules: Any,
) -> int:
    """Layers on one pipeline rank: all of its chunks together, or one `chunk`.

    `rules` are further fields of `StageSettings`: `get_num_layers(12, 4, 0, standalone_embedding=True)` is 0. Raises
    `UserError` for settings that are refused and for a rank or chunk that does not exist.
    """
    settings = StageSettings(num_layers, pp, **rules)
    problems = stage_problems(settings, names)
    accepted = not problems  # only then is the number of chunks known
    chunks = len(_counts(settings)) // pp if accepted else 0
    for name, given, size in (("pp_rank", pp_rank, pp), ("chunk", 0 if chunk is None else chunk, chunks)):
        known = is_whole(size, 1)
        if known and not (is_whole(given, 0) and given < size):
            remedy = f"{names.get(name, name)}=0" + (f" to {size - 1}" if size > 1 else "")
            problems.append(Problem(names.get(name, name), given, f"there are {size}, counted from 0", remedy))
    if problems:
        raise UserError(problems)
    return sum(
        one.count for one in stage_layers(settings) if one.rank == pp_rank and (chunk is None or one.chunk == chunk)
    )


def _counts(settings: StageSettings) -> list[int]:
    """Layers of every stage, in stage order, for settings that are accepted."""
    layers, pp, vpp = settings.num_layers, settings.pp, settings.vpp or 1
    if settings.layout is not None:
        return list(layout_counts(settings.layout))
    if settings.split_rank is not None:
        standalone = int(settings.standalone_embedding)
        encoder, decoder = settings.split_rank - standalone, pp - settings.split_rank
        return [0] * standalone + [layers // encoder] * encoder + [layers // decoder] * decoder
    if settings.count_embedding or settings.count_loss:
        counts = [(layers + settings.count_embedding + settings.count_loss) // (pp * vpp)] * (pp * vpp)
        counts[0] -= settings.count_embedding
        counts[-1] -= settings.count_loss
        return counts
    first = 0 if settings.standalone_embedding else settings.first_layers
    ends = [count for count in (first, settings.last_layers) if count is not None]
    between = pp - len(ends)
    ranks = [(layers - sum(ends)) // between] * between if between else []
    ranks = (
        ([] if first is None else [first]) + ranks + ([] if settings.last_layers is None else [settings.last_layers])
    )
    return [count // vpp for count in ranks] * vpp  # every rank's layers, evenly over its chunks
