"""Takes a run from one phase into the next, and holds it to the phases that have begun."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from megalite.config.phases import RunPhase, same_model
from megalite.config.settings import yaml_value
from megalite.data.open import OpenedData
from megalite.errors.problems import Problem, refuse, several
from megalite.optim.schedule import step_rates
from megalite.train.build import rebuilt

PLACES = ("data.path", "data.validation")

if TYPE_CHECKING:
    from megalite.train.loop import Job
    from megalite.train.saving import SavedState


def begin(job: "Job", phase: RunPhase) -> None:
    """Go on with the settings and the data of a phase; collective."""
    before, job.config, data = job.config, phase.config, job.opened[phase.number - 1]
    assert data is not None, "what is left to do has been opened"
    of_before, samples = job.position, job.progress.samples
    job.position, source = of_before.moved(data.train, data.identities, samples)
    job.data = replace(data, train=source)
    if not same_model(before, job.config):
        job.training = rebuilt(job.training, job.config, job.context, job.log.note)
    if job.training.spikes is not None and phase.number > len(job.begun):
        job.training.spikes.fill([])  # other losses
    epochs = dict(zip(data.names, source.epochs(samples), strict=True))
    if phase.number > len(job.begun):
        lr = step_rates(phase.begin - 1, job.plan)[0] if phase.number > 1 else 0.0
        job.begun = [*job.begun, begun_phase(phase, data.fingerprint, lr)]
        if phase.number > 1:
            job.log.event("phase", job.progress.step, message=phase.words, epochs=epochs)
    elif job.position.first > of_before.first:  # the command has changed the length
        words = ", ".join(f"{name} after {several(round(share, 3), 'epoch')}" for name, share in epochs.items())
        job.log.note(f"samples have {source.seq_length:,} tokens from here on; each source goes on: {words}")


def begun_phase(phase: RunPhase, fingerprint: str, lr: float) -> dict[str, Any]:
    """What a checkpoint keeps of a phase that has begun, which must be as it was when the run goes on. `lr`: the rate
    of the step before it, which another length of the run would change."""
    return {"begin": phase.begin, "changes": dict(phase.changes), "data": fingerprint, "lr": lr}


def _same(saved: dict[str, Any], phase: RunPhase, data: OpenedData | None) -> bool:
    """Whether a phase is the one that has begun. Its sources are known by their content, wherever they are now."""
    if phase.begin != saved["begin"] or (data and data.fingerprint != saved["data"]):
        return False
    before, now = ({name: one[name] for name in one if name not in PLACES} for one in (saved["changes"], phase.changes))
    return before == now


def take_up_phases(job: "Job", state: "SavedState") -> None:
    """The run's place in its phases and sources becomes that of a checkpoint."""
    job.position = state.position
    job.begun = state.phases or [begun_phase(RunPhase(1, 0, 0, {}, job.base), state.data["fingerprint"], 0.0)]
    check_phases(job)
    for at, saved in enumerate(job.begun):
        job.plan[at] = replace(job.plan[at], start_lr=saved["lr"])
    if not state.position.sources:  # a checkpoint of an earlier version
        source = replace(job.data.train, seq_length=state.config["train"]["seq_length"])
        job.position, _ = state.position.moved(source, job.data.identities, 0)


def check_phases(job: "Job") -> None:
    """UserError where the command changes a phase that has begun, but for the end of one under way."""
    problems = list[Problem]()
    for at, saved in enumerate(job.begun):
        phase = job.plan[at] if at < len(job.plan) else None
        data = job.opened[at] if phase else None
        if phase is None or not _same(saved, phase, data):
            apart = "is not there any more" if phase is None else f"differs now: {phase.words}"
            changes = ", ".join(f"{name}={yaml_value(value)}" for name, value in saved["changes"].items())
            rule = f"phase {at + 1} has begun after step {saved['begin']} with {changes or 'no change'}, and {apart}"
            hint = "phases that have begun as they were, until as a number of steps; or a new run_dir"
            problems.append(Problem("phases", job.config.phases, rule, hint))
    if len(job.plan) > 1 and job.begun and not problems and job.plan[len(job.begun) - 1].end < job.progress.step:
        rule = f"phase {len(job.begun)} would have ended before step {job.progress.step}, which is done"
        problems.append(Problem("phases", job.config.phases, rule, f"until of {job.progress.step} or more for it"))
    refuse(problems)
