"""Who holds which layers.

A pipeline of `pp` ranks with `vpp` chunks each has pp*vpp stages; chunk c on rank r is stage c*pp + r. The layers of
all stages, concatenated in stage order, are 0..num_layers-1: nothing is dropped, nothing is held twice. With an encoder
and a decoder that holds for each side. Settings that cannot keep this are refused, never rounded. No torch import.
"""

import re
from dataclasses import dataclass, fields
from typing import Any, Literal

# Settings, and those with which each would place the same layers twice.
_OTHERS = ("layout", "split_rank", "standalone_embedding", "first_layers", "last_layers")
EXCLUDED_BY = {
    "vpp": ("split_rank",),
    "standalone_embedding": ("layout",),
    "split_rank": ("layout",),
    "first_layers": _OTHERS[:3],
    "last_layers": _OTHERS[:2],
    "count_embedding": _OTHERS,
    "count_loss": _OTHERS,
}


@dataclass(frozen=True)
class StageSettings:
    """What is asked about who holds which layers. They are divided evenly over pp * vpp stages but for these cases."""

    num_layers: int
    pp: int
    vpp: int = 1
    standalone_embedding: bool = False  # rank 0 (with an encoder, its first rank) holds none in any of its chunks
    split_rank: int | None = None  # the decoder's first rank; encoder and decoder have `num_layers` each
    first_layers: int | None = None  # on the first rank, all of its chunks together; the others share the rest
    last_layers: int | None = None  # on the last rank
    count_embedding: bool = False  # the embedding takes the place of one layer in its stage
    count_loss: bool = False
    layout: str | None = None  # stage by stage, see `layout_counts`

    @property
    def asked(self) -> list[str]:
        """The settings that ask for more than plain division; so does a count of 0."""
        return [field.name for field in fields(self)[2:] if getattr(self, field.name) != field.default]

    @property
    def clashes(self) -> dict[str, list[str]]:
        """{setting: other settings that place the same layers}"""
        found = {name: [other for other in self.asked if other in EXCLUDED_BY.get(name, ())] for name in self.asked}
        return {name: others for name, others in found.items() if others}


@dataclass(frozen=True)
class StageLayers:
    """Layers [first, first + count) of the model, held by one chunk of one pipeline rank."""

    stage: int
    pp_rank: int
    chunk: int
    first: int
    count: int
    embedding: bool  # tokens enter here: stage 0, and the decoder's first stage where there is an encoder
    loss: bool  # the last stage: final norm, logits and loss; it holds the embedding table too where that is tied
    side: Literal["encoder", "decoder"] = "decoder"  # a GPT is a decoder

    @property
    def layers(self) -> range:
        """Global indices of the layers, counted from 0 on each side."""
        return range(self.first, self.first + self.count)


def stage_layers(settings: StageSettings) -> tuple[StageLayers, ...]:
    """All stages in stage order. Raises ValueError for settings that do not place every layer once."""
    counts, split = stage_counts(settings), settings.split_rank or 0
    stages = []
    for stage, count in enumerate(counts):
        chunk, pp_rank = divmod(stage, settings.pp)
        first = sum(counts[split if stage >= split else 0 : stage])  # the decoder counts its layers from 0 again
        side: Literal["encoder", "decoder"] = "encoder" if stage < split else "decoder"
        last = stage == len(counts) - 1
        stages.append(StageLayers(stage, pp_rank, chunk, first, count, stage in (0, split), last, side))
    return tuple(stages)


def stages_of(settings: StageSettings, pp_rank: int) -> list[StageLayers]:
    """The stages that are the chunks of one pipeline rank, in order."""
    return [stage for stage in stage_layers(settings) if stage.pp_rank == pp_rank]


def get_num_layers(num_layers: int, pp: int, pp_rank: int, *, chunk: int | None = None, **settings: Any) -> int:
    """Layers on one pipeline rank: all of its chunks together, or one `chunk`. `settings` are further fields of
    `StageSettings`: `get_num_layers(12, 4, 0, standalone_embedding=True)` is 0. ValueError also for a rank or chunk
    that does not exist."""
    stages = stages_of(StageSettings(num_layers, pp, **settings), pp_rank)
    if held := [stage.count for stage in stages if chunk in (None, stage.chunk)]:
        return sum(held)
    raise ValueError(f"of {pp} pipeline ranks there is no pp_rank={pp_rank}, chunk={chunk}")


def stage_counts(settings: StageSettings) -> list[int]:
    """Layers of every stage, in stage order. Raises ValueError for settings that do not place every layer once."""
    layers, pp, vpp, split = settings.num_layers, settings.pp, settings.vpp, settings.split_rank
    if settings.clashes:
        raise ValueError(f"settings that place the same layers twice: {settings.clashes}")
    if settings.layout is not None:
        counts = layout_counts(settings.layout)
        if (len(counts), sum(counts)) != (pp * vpp, layers):
            raise ValueError(f"places {sum(counts)} layers on {len(counts)} stages, not {layers} on {pp * vpp}")
        return counts
    if split is not None:
        alone = int(settings.standalone_embedding)
        return [0] * alone + _shared(layers, split - alone) + _shared(layers, pp - split)
    if counted := settings.count_embedding + settings.count_loss:
        each = _shared(layers + counted, pp * vpp)
        each[0] -= settings.count_embedding
        each[-1] -= settings.count_loss
        return each
    ends = [0 if settings.standalone_embedding else settings.first_layers, settings.last_layers]
    if any((end or 0) < 0 or (end or 0) % vpp for end in ends):
        raise ValueError(f"the layers of the first or last rank cannot be divided over its {vpp} chunks")
    before, after = ([] if end is None else [end // vpp] for end in ends)
    between = pp - len(before) - len(after)
    rest = layers - vpp * sum(before + after)
    return [*before, *_shared(rest, between * vpp)[:between], *after] * vpp  # every rank's, evenly over its chunks


def _shared(layers: int, stages: int) -> list[int]:
    """The layers of so many stages that share them, at least one each."""
    if layers == stages == 0:
        return []
    if stages < 1 or layers < stages or layers % stages:
        raise ValueError(f"{layers} layer{'s' * (layers != 1)} cannot be divided over {stages} stages")
    return [layers // stages] * stages


def layout_counts(layout: str) -> list[int]:
    """Layers of every stage, from a text in Megatron-LM's form; ValueError for a text that is no layout.

    `E` embedding, `t` one transformer layer, `L` loss, `|` the border of two stages; `*n` repeats the symbol or the
    parenthesised group before it; commas and blanks mean nothing. `Et*3|(tt|)*2,L` is 3, 2, 2 and 0 layers. E opens the
    first stage and L closes the last, so the layers per stage say everything.
    """
    text = re.sub(r"[,\s]", "", layout)
    for item in (r"([EtL|])", r"\(([EtL|]+)\)"):
        text = re.sub(item + r"\*([1-9][0-9]{0,3})", lambda found: found[1] * int(found[2]), text)
    if re.search(r"[0-9][,\s]+[0-9]", layout) or not re.fullmatch(r"E[t|]*L", text):
        raise ValueError("must be stages like 'Ett|t*4|(tt|)*2tL': E, the embedding, first, L, the loss, last")
    return [stage.count("t") for stage in text.split("|")]
