"""What is due every so many steps: a check of the replicas, an evaluation, a sample of text, a checkpoint.

An evaluation or a sample of text that a stop is asked for in ends at its next batch or token; the next start makes up
for the evaluation.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from megalite.data.batches import validation_batches
from megalite.train.build import data_share
from megalite.train.evaluate import evaluate
from megalite.train.job import Job
from megalite.train.metrics import Meter
from megalite.train.replicas import check_replicas
from megalite.train.run_log import RunLog
from megalite.train.sample import sample
from megalite.train.saving import Saver


class Hook(NamedTuple):
    """A function to call with the step after every `every`-th step (0: never), once the metrics are read."""

    every: int
    function: Callable[[int], None]
    after_last: bool = False  # after the last step, too
    pauses: bool = True  # it takes time that counts in no step

    def is_due(self, step: int, last: int) -> bool:
        return self.every > 0 and (step % self.every == 0 or (self.after_last and step == last))


def hooks_of(job: Job, log: RunLog, saver: Saver) -> list[Hook]:
    """The hooks of a run, in the order in which they are called."""
    train, interval = job.config.train, job.config.checkpoint.interval
    return [
        Hook(train.check_replicas_every, partial(check_replicas, job.training, job.context), pauses=False),
        Hook(job.evaluation_interval, partial(evaluate_model, job, log), after_last=True),
        Hook(train.sample_interval, partial(sample_text, job, log)),
        Hook(interval, saver.save),
    ]


def evaluate_model(job: Job, log: RunLog, step: int) -> None:
    """The validation set after a step."""
    assert job.data.validation is not None, "else no evaluation is due"
    begin, share = time.perf_counter(), data_share(job.config, job.context)
    batches = validation_batches(job.data.validation, job.config, **share, device=job.context.device)
    metrics = evaluate(job.training, job.context, batches, job.data.bytes_of_ids, job.go_on)
    if metrics is None:
        broken_off(log, "evaluation", step)
        return
    job.evaluated_step = step
    log.add(
        {
            "step": step,
            "tokens": job.progress.tokens,
            "val_loss": metrics.loss,
            "val_perplexity": metrics.perplexity,
            "val_bits_per_byte": metrics.bits_per_byte,
            "eval_time_s": time.perf_counter() - begin,
        }
    )


def sample_text(job: Job, log: RunLog, step: int) -> None:
    """Text from the model after a step. All ranks call it; each model writes the same, so that ranks stay together when
    a stop ends it."""
    train, tokenizer = job.config.train, job.data.tokenizer
    if tokenizer is None or not job.prompts or job.sampled_step == step:
        return
    job.sampled_step = step
    following = sample(
        job.training,
        job.context,
        [prompt.tokens for prompt in job.prompts],
        train.sample_tokens,
        seq_length=train.seq_length,
        seed=job.config.seed,
        rows=train.micro_batch_size if train.compile else None,
        go_on=job.go_on,
    )
    if any(len(text) < train.sample_tokens for text in following):
        broken_off(log, "sample of text", step)
        return
    for prompt, tokens in zip(job.prompts, following, strict=True):
        log.event("sample", step, prompt=prompt.text, text=tokenizer.decode(tokens))


def broken_off(log: RunLog, what: str, step: int) -> None:
    log.note(f"asked to stop: the {what} after step {step} is broken off, nothing of it is recorded")


def gather_ranks(job: Job, log: RunLog, meter: Meter, step: int) -> None:
    """What each rank takes, and which ranks are slow."""
    if job.gathered_step == step:
        return
    job.gathered_step = step
    memory, compute, slow = meter.gather()
    log.event("ranks", step, memory_gib=memory, compute_s=compute)
    for rank, (times, share) in slow.items():
        fields = {"times": round(times, 2), "share": round(share, 3), "host": job.hosts[rank]}
        log.event("straggler", step, rank=rank, **fields)
