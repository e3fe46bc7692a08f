"""Who holds which layers.

A pipeline of `pp` ranks with `vpp` chunks each has pp*vpp stages; chunk c on rank r is stage c*pp + r. The layers of
all stages, concatenated in stage order, are 0..num_layers-1: nothing is dropped, nothing is held twice. With an encoder
and a decoder that holds for each side. Settings that cannot keep this are refused by `stage_rules`. No torch import.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megalite.layout.flaws import Flaw, is_whole, refuse
from megalite.layout.stage_rules import StageSettings, stage_flaws
from megalite.layout.stage_string import layout_counts


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


def stage_layers(settings: StageSettings) -> tuple[StageLayers, ...]:
    """All stages in stage order. Raises ValueError with all of `stage_flaws`."""
    refuse(stage_flaws(settings))
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


def get_num_layers(num_layers: int, pp: int, pp_rank: int, *, chunk: int | None = None, **rules: Any) -> int:
    """Layers on one pipeline rank: all of its chunks together, or one `chunk`.

    `rules` are further fields of `StageSettings`: `get_num_layers(12, 4, 0, standalone_embedding=True)` is 0. Raises
    ValueError for settings that are refused and for a rank or chunk that does not exist.
    """
    settings = StageSettings(num_layers, pp, **rules)
    flaws = stage_flaws(settings)
    chunks = 0 if flaws else len(_counts(settings)) // pp  # known only where the settings are accepted
    for name, given, size in (("pp_rank", pp_rank, pp), ("chunk", chunk or 0, chunks)):
        if is_whole(size, 1) and not (is_whole(given, 0) and given < size):
            flaws.append(Flaw(name, "value", f"{given!r} is none of 0 to {size - 1}", ()))
    refuse(flaws)
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
    before, after = ([] if end is None else [end] for end in (first, settings.last_layers))
    between = pp - len(before) - len(after)
    rest = layers - sum(before) - sum(after)
    ranks = [*before, *([rest // between] * between if between else []), *after]
    return [count // vpp for count in ranks] * vpp  # every rank's layers, evenly over its chunks
