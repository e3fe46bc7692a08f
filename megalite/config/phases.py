"""A run in phases: settings that change at planned steps, while weights and the optimizer's state stay.

An entry of `phases` is {until: STEP or share of the run, SETTING: VALUE, ...}; the last has no `until`. What an entry
changes stays changed in the phases after it. A phase that sets something of the learning rate has a schedule of its
own, over its steps, which begins at the rate that the phase before ended with; others go on with the one that they
find.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import ceil
from typing import Any

from megalite.config.derive import derive, derive_lengths
from megalite.config.schema import Config
from megalite.config.settings import SETTINGS, value_of, with_values, yaml_value
from megalite.config.step_plan import known_steps, samples_after, steps_to

UNTIL, PEAK = "until", "optimizer.lr"
MAY_CHANGE = (  # settings, or beginnings of their names
    *("data.source", "data.path", "data.weights", "data.subset", "data.split", "data.streaming", "data.text_column"),
    "data.validation",
    *("data.cross_document_attention", "data.mask_end_of_document"),
    *("lr.", PEAK, "train.seq_length", "train.global_batch_size", "train.micro_batch_size", "train.eval_"),
    *("train.label_smoothing", "train.z_loss", "train.recompute", "train.sample_", "model.loss_chunk_tokens"),
    *("model.dropout", "model.attention_dropout", "model.embedding_dropout", "model.rope_", "model.moe.aux_loss"),
    *("model.moe.z_loss_coeff", "model.moe.expert_bias_rate", "model.moe.capacity_factor"),
)
NEVER = ("data.validation_fraction", "lr.warmup_tokens", "lr.decay_tokens")  # though their names begin so
# Settings that a model, its executor and its memory do not depend on: with these alone they stay as they are.
OUTSIDE_OF_MODEL = ("data.", "lr.", PEAK, "train.eval_", "train.sample_", "train.global_batch_size")
INSIDE = ("data.cross_document_attention", "data.path")  # but for masks, and sums of the loss by source


@dataclass(frozen=True)
class RunPhase:
    """The steps `begin` + 1 to `end` of a run. `changes`: what the phase itself sets; `config`: what holds in it."""

    number: int  # from 1
    begin: int
    end: int
    changes: Mapping[str, Any]
    config: Config
    start_lr: float | None = None  # the rate before it, where a run has begun it; None: by the phases before

    @property
    def schedules(self) -> bool:
        """Whether the learning rate has a schedule of its own here."""
        return any(name == PEAK or name.startswith("lr.") for name in self.changes)

    @property
    def words(self) -> str:
        """`phase 2, steps 81 to 160: data.weights=[1.0,3.0]`"""
        changes = ", ".join(f"{name}={yaml_value(value)}" for name, value in self.changes.items())
        return f"phase {self.number}, steps {self.begin + 1:,} to {self.end:,}: {changes or 'the settings of the run'}"


def phase_at(phases: Sequence[RunPhase], step: int) -> RunPhase:
    """The phase in which `step` (from 1) is done; the first for 0, the last beyond the run."""
    return next((phase for phase in phases if step <= phase.end), phases[-1])


def same_model(one: Config, other: Config) -> bool:
    """Whether a model that was built for one config trains with the other, too."""
    apart = (name for name in SETTINGS if value_of(one, name) != value_of(other, name))
    return not any(name in INSIDE or not name.startswith(OUTSIDE_OF_MODEL) for name in apart)


def may_change(name: str) -> bool:
    """Whether a phase may set it."""
    return name.startswith(MAY_CHANGE) and name not in NEVER


def ends_of(config: Config) -> list[int]:
    """The last step of each phase. A share is one of train.steps, or of train.tokens, which phases consume by batches
    and lengths of their own."""
    tokens, settings, ends, samples, consumed = config.train.tokens, config, list[int](), 0, 0
    for phase in config.phases:
        settings = with_values(settings, {name: value for name, value in phase.items() if name != UNTIL})
        train, done, until = settings.train, ends[-1] if ends else 0, phase.get(UNTIL)
        share = 1.0 if until is None else until if until < 1 else None
        if share is None:
            end = int(until or 0)
        elif tokens is None:
            end = round(share * (known_steps(train) or 0))
        else:
            wanted = -(-(ceil(Fraction(str(share)) * tokens) - consumed) // train.seq_length)
            end = steps_to(train, samples + max(0, wanted), done=done, samples=samples)
        after = samples_after(train, end, done=done, samples=samples)
        consumed, samples = consumed + (after - samples) * train.seq_length, after
        ends.append(end)
    return ends


def phases_of(config: Config, world_size: int = 1) -> list[RunPhase]:
    """The phases of a derived config: the whole run is one where it has no other."""
    entries, kept = config.phases, ("run_dir", "run_name", "train.steps", "model.max_positions")
    if not entries:
        return [RunPhase(1, 0, config.train.steps, {}, config)]
    ends, asked = ends_of(config), {*config.derived}
    config = derive_lengths(config, ends[-1])
    settings = with_values(config, {n: None for n in asked if n not in kept and SETTINGS[n].default is None})
    found, begin = list[RunPhase](), 0
    for number, (entry, end) in enumerate(zip(entries, ends, strict=True), 1):
        changes = {name: value for name, value in entry.items() if name != UNTIL}
        anew = {"data.weights": None} if "data.path" in changes else {}  # those were of other sources
        derived = tuple(name for name in settings.derived if name not in changes)
        settings = replace(with_values(settings, anew | changes), derived=derived)
        phase, own = RunPhase(number, begin, end, changes, derive(settings, world_size)), dict[str, Any]()
        if phase.schedules:
            own["lr.steps"] = steps = changes.get("lr.steps", end - begin)
            own |= {"lr.decay_steps": steps // 5} if "lr.decay_steps" in asked else {}
            own |= {"lr.warmup_steps": 0} if number > 1 else {}
            own |= {name: value for name, value in changes.items() if name in own}
        found.append(replace(phase, config=with_values(phase.config, own)))
        begin = end
    return found
