"""Who holds which layers.

A pipeline of `pp` ranks with `vpp` chunks each has pp*vpp stages; chunk c on rank r is stage c*pp + r. The layers of
all stages, concatenated in stage order, are 0..num_layers-1: nothing is dropped, nothing is held twice. With an encoder
and a decoder that holds for each side. Settings that cannot keep this are refused, never rounded. No torch import.
"""

from dataclasses import dataclass
from typing import Any, Literal

from megalite.layout.stage_string import layout_counts

# A setting says who holds the layers, or one of the others does: both at once would place the same layers twice.
EXCLUDED_BY = {
    "vpp": ("split_rank",),
    "standalone_embedding": ("layout",),
    "split_rank": ("layout",),
    "first_layers": ("layout", "split_rank", "standalone_embedding"),
    "last_layers": ("layout", "split_rank"),
    "count_embedding": ("layout", "split_rank", "standalone_embedding", "first_layers", "last_layers"),
    "count_loss": ("layout", "split_rank", "standalone_embedding", "first_layers", "last_layers"),
}


@dataclass(frozen=True)
class StageSettings:
    """What is asked about who holds which of `num_layers` layers, on `pp` pipeline ranks.

    Layers are divided evenly over the pp * vpp stages, except that
    - `standalone_embedding`: rank 0 holds none in any of its chunks, the other ranks share all;
    - `first_layers`, `last_layers`: so many on the first or last rank, all of its chunks together; the others share the
      rest (0 is allowed);
    - `count_embedding`, `count_loss`: the embedding or the loss takes the place of one layer in its stage;
    - `layout`: said stage by stage, see `stage_string`;
    - `split_rank`: an encoder and a decoder of `num_layers` each; this is the decoder's first rank. A standalone
      embedding takes one of the encoder's ranks.
    """

    num_layers: int
    pp: int
    vpp: int = 1
    standalone_embedding: bool = False
    split_rank: int | None = None
    first_layers: int | None = None
    last_layers: int | None = None
    count_embedding: bool = False
    count_loss: bool = False
    layout: str | None = None

    @property
    def asked(self) -> list[str]:
        """The settings that ask for more than plain division; so does a count of 0."""
        plain = StageSettings(self.num_layers, self.pp)
        return [name for name in (*EXCLUDED_BY, "layout") if getattr(self, name) != getattr(plain, name)]

    @property
    def clashes(self) -> dict[str, list[str]]:
        """{setting: other settings that place the same layers}"""
        found = {name: [other for other in EXCLUDED_BY.get(name, ()) if other in self.asked] for name in self.asked}
        return {name: others for name, others in found.items() if others}


@dataclass(frozen=True)
class StageLayers:
    """Layers [first, first + count) of the model, held by one chunk of one pipeline rank.

    `embedding`: tokens enter here (stage 0, and the decoder's first stage where there is an encoder). `loss`: the final
    norm, the logits and the loss are computed here (the last stage); where embeddings are tied, a stage that has
    `loss` holds the embedding table too.
    """

    stage: int
    pp_rank: int
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
    """All stages in stage order. Raises ValueError for settings that do not place every layer once."""
    counts = stage_counts(settings)
    split = settings.split_rank
    stages, first = [], 0
    for stage, count in enumerate(counts):
        chunk, pp_rank = divmod(stage, settings.pp)
        first = 0 if stage == split else first  # the decoder counts its layers from 0 again
        entry, last = stage in (0, split), stage == len(counts) - 1
        side: Literal["encoder", "decoder"] = "encoder" if split is not None and stage < split else "decoder"
        stages.append(StageLayers(stage, pp_rank, chunk, first, count, entry, last, side))
        first += count
    return tuple(stages)


def stages_of(settings: StageSettings, pp_rank: int) -> list[StageLayers]:
    """The stages that are the chunks of one pipeline rank, in order."""
    return [stage for stage in stage_layers(settings) if stage.pp_rank == pp_rank]


def get_num_layers(num_layers: int, pp: int, pp_rank: int, *, chunk: int | None = None, **settings: Any) -> int:
    """Layers on one pipeline rank: all of its chunks together, or one `chunk`.

    `settings` are further fields of `StageSettings`: `get_num_layers(12, 4, 0, standalone_embedding=True)` is 0. Raises
    ValueError for settings that do not place every layer once and for a rank or chunk that does not exist.
    """
    stages = stage_layers(StageSettings(num_layers, pp, **settings))
    held = [one.count for one in stages if one.pp_rank == pp_rank and chunk in (None, one.chunk)]
    if not held:
        raise ValueError(f"of {pp} pipeline ranks there is no pp_rank={pp_rank}, chunk={chunk}")
    return sum(held)


def stage_counts(settings: StageSettings) -> list[int]:
    """Layers of every stage, in stage order. Raises ValueError for settings that do not place every layer once."""
    layers, pp, vpp, split = settings.num_layers, settings.pp, settings.vpp, settings.split_rank
    if settings.clashes:
        raise ValueError(f"settings that place the same layers twice: {settings.clashes}")
    if settings.layout is not None:
        counts = layout_counts(settings.layout)
        if (len(counts), sum(counts)) != (pp * vpp, layers):
            raise ValueError(f"places {sum(counts)} layers on {len(counts)} stages, not {layers} on {pp * vpp}")
        return list(counts)
    if split is not None:
        alone = int(settings.standalone_embedding)
        return [0] * alone + _shared(layers, split - alone) + _shared(layers, pp - split)
    if counted := settings.count_embedding + settings.count_loss:
        each = _shared(layers + counted, pp * vpp)
        each[0] -= settings.count_embedding
        each[-1] -= settings.count_loss
        return each
    first = 0 if settings.standalone_embedding else settings.first_layers
    before, after = ([_divided(end, vpp)] if end is not None else [] for end in (first, settings.last_layers))
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


def _divided(layers: int, chunks: int) -> int:
    if layers < 0 or layers % chunks:
        raise ValueError(f"{layers} layers of one rank cannot be divided over its {chunks} chunks")
    return layers // chunks
