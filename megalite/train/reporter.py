"""What a run tells the world: its records (chronicle.py), the terminal and this rank's log, from the same figures.

Only rank 0 writes records and the terminal; every rank keeps its own log.
"""

import logging
import math
import os
import resource
import statistics
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.store import CheckpointError, Saved
from megalite.config.problems import UserError
from megalite.model.flops import flops_per_token, peak_flops
from megalite.parallel.environment import launch_command, read_environment
from megalite.train.about import resolved, start_fields
from megalite.train.chronicle import Chronicle
from megalite.train.job import Job
from megalite.train.metrics import read_metrics
from megalite.train.rank_watch import RankWatch
from megalite.train.records import EvaluationView, HeaderView, Mirror, Part, StepView, Summary
from megalite.train.sample import sample
from megalite.train.state import Progress
from megalite.train.step import StepFigures
from megalite.train.terminal import Terminal
from megalite.train.trace import TimeSplit, told

GIB = 1 << 30
Sample = tuple[str, str]  # a prompt, and what the model makes of it


class Reporter:
    """Tells of one run on this rank."""

    def __init__(self, job: Job, terminal: Terminal, log: logging.Logger, mirror: Mirror | None = None) -> None:
        """`mirror`: where rank 0 also shows the run, if it does."""
        self._job = job
        self._terminal = terminal
        self._log = log
        self._chronicle = Chronicle(job, terminal.note, mirror) if job.context.rank == 0 else None
        self._began = self._clock = time.perf_counter()
        self._speeds: list[float] = []  # tokens/s of this start's steps
        self._ranks = RankWatch(job.context)
        self._hosts: list[str] = []  # by rank
        self._ranks_told = -1  # the newest step after which ranks told each other of themselves
        self._known_slow: set[int] = set()  # ranks that the terminal was told of
        self._sampled: tuple[int, list[Sample]] = -1, []  # the newest texts, and after which step
        device = job.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(job.context.dtype).removeprefix("torch."))

    # --- the run as a whole ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """The header: everything that was resolved. All ranks call it."""
        job, train = self._job, self._job.config.train
        self._hosts = self._ranks.hosts()
        title = f"{job.config.model.name} on {job.config.data.source}"
        self._terminal.header(HeaderView(title, resolved(job), train.steps, job.progress.step))
        if train.sample_interval > 0 and train.sample_tokens > 0 and not job.prompts:
            self._terminal.note("no samples of text: the tokenizer of these tokens is not known")
        self._log.info("training from step %d to %d", job.progress.step, train.steps)
        kind = "start" if job.resumed_from is None else "resume"
        self._event(kind, job.progress.step, **start_fields(job, self._hosts))
        self.restart_clock()

    def restart_clock(self) -> None:
        """What passed since the last step (an evaluation, a checkpoint) is not part of the next one."""
        self._clock = time.perf_counter()
        self._job.training.clock.restart()

    def failed(self, error: Exception, *, taken_over: bool = False) -> None:
        """The run ends with an error: this rank's log says where; the run's files too if it still has them."""
        step = self._job.progress.step
        self._log.error("failed at step %d\n%s", step + 1, "".join(traceback.format_exception(error)))
        if self._chronicle is not None and not taken_over:
            message = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self._chronicle.end("failed", step, status=2 if isinstance(error, UserError) else 1, message=message)

    def nothing_to_do(self) -> None:
        """The run had reached its last step before this start."""
        step, steps = self._job.progress.step, self._job.config.train.steps
        self._terminal.note(f"already finished: step {step} of {steps}")
        if self._chronicle is not None:
            self._chronicle.end("finished", step, status=0, message=f"all {steps} steps were done before")

    def finish(self, status: int, *, stopped_by: str | None) -> None:
        """The run ends in order, at its last step or because it was asked to stop; `status` is not 0 where its state
        could not be saved. All ranks call it."""
        step = self._job.progress.step
        self._log.info("ended at step %d%s", step, f" ({stopped_by})" if stopped_by else "")
        self.ranks(step)
        if stopped_by is None and self._sampled[0] != step:
            self._sample_at_the_end(step)
        if self._chronicle is None:
            return
        if stopped_by is None:
            self._chronicle.end("finished", step, status=status)
        else:
            self._chronicle.end("stopped", step, status=status, by=stopped_by)
        self._terminal.finish(self._summary(self._chronicle.metrics_path, stopped_by))

    def close(self) -> None:
        """Nothing more will be told."""
        if self._chronicle is not None:
            self._chronicle.close()

    def _summary(self, metrics: Path, stopped_by: str | None) -> Summary:
        job, records = self._job, read_metrics(metrics)
        evaluations = [record for record in records if "val_loss" in record]
        last: dict[str, Any] = evaluations[-1] if evaluations else {}
        return Summary(
            step=job.progress.step,
            steps=job.config.train.steps,
            tokens=job.progress.tokens,
            seconds=time.perf_counter() - self._began,
            tokens_per_s=statistics.median(self._speeds) if self._speeds else 0.0,
            run_dir=str(job.folder.path),
            train_curve=[(record["step"], record["loss"]) for record in records if "loss" in record],
            validation_curve=[(record["step"], record["val_loss"]) for record in evaluations],
            perplexity=last.get("val_perplexity"),
            bits_per_byte=last.get("val_bits_per_byte"),
            bad_steps=job.progress.bad_steps,
            samples=self._sampled[1] if stopped_by is None else [],
            stopped_by=stopped_by,
            command=launch_command(read_environment(os.environ), sys.argv),
        )

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(
        self,
        progress: Progress,
        figures: StepFigures,
        *,
        lr: float,
        wait_s: float,
        sequences: int,
        time_split: Mapping[Part, float],
    ) -> None:
        """One step is done, on a global batch of so many `sequences`; `time_split` is this rank's."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        config = self._job.config
        speed = sequences * config.train.seq_length / seconds
        self._speeds.append(speed)
        self._ranks.add(time_split)
        loss_scale = None if self._job.training.loss_scale is None else figures.loss_scale
        if figures.skipped:
            self._skipped(progress, figures, loss_scale)
        if progress.step % config.train.log_interval and progress.step != config.train.steps:
            return
        view = StepView(
            step=progress.step,
            steps=config.train.steps,
            tokens=progress.tokens,
            loss=figures.loss,
            lr=lr,
            grad_norm=figures.grad_norm,
            tokens_per_s=speed,
            step_time_s=seconds,
            memory_gib=self._memory_gib(),
            data_wait_share=min(1.0, wait_s / seconds),
            time_split={part: round(spent, 6) for part, spent in time_split.items()},
            mfu=self._utilisation(speed, causal=False),
            mfu_causal=self._utilisation(speed, causal=True),
            bad_steps=progress.bad_steps,
            loss_scale=loss_scale,
        )
        self._terminal.step(view)
        left_out = ("steps", *(["loss_scale"] if loss_scale is None else []))
        self._record({name: value for name, value in vars(view).items() if name not in left_out})

    def _skipped(self, progress: Progress, figures: StepFigures, loss_scale: float | None) -> None:
        self._log.warning("step %d skipped: loss %s, norm %s", progress.step, figures.loss, figures.grad_norm)
        where = "" if loss_scale is None else f" at a loss scale of {loss_scale:g}"
        self._terminal.note(
            f"step {progress.step}: loss or gradient is not finite{where}, the step is not applied "
            f"({progress.bad_steps} in all)"
        )
        found = {"loss": figures.loss, "grad_norm": figures.grad_norm}
        self._event("skipped", progress.step, **found, loss_scale=loss_scale)

    def skipped_on_request(self, step: int) -> None:
        """The step was passed over, as train.skip_steps says."""
        self._log.info("step %d passed over: it is one of train.skip_steps", step)
        self._terminal.note(f"step {step}: passed over, it is one of train.skip_steps")
        self._event("skipped_on_request", step)

    def profiled(self, step: int, split: TimeSplit, folder: Path) -> None:
        """The step was recorded by the profiler."""
        self._log.info("step %d profiled into %s\n%s", step, folder, told(split))
        self._terminal.note(f"step {step}: profiled into {folder}")
        self._event("profile", step, folder=str(folder), wall_s=split.wall_s, parts=split.parts, inside=split.inside)

    def not_profiled(self, step: int, why: str) -> None:
        self._log.error("the profile of step %d could not be kept: %s", step, why)
        self._terminal.note(f"warning: the profile of step {step} could not be kept: {why}")

    # --- between steps -----------------------------------------------------------------------------------------------

    def evaluation(self, step: int, loss: float, *, seconds: float) -> None:
        """The validation set was evaluated after `step`; `loss` in nats per token."""
        view = EvaluationView(step, loss, _perplexity(loss), self._bits_per_byte(loss), seconds)
        self._terminal.evaluation(view)
        self._record(
            {
                "step": step,
                "val_loss": loss,
                "val_perplexity": view.perplexity,
                "val_bits_per_byte": view.bits_per_byte,
                "eval_time_s": seconds,
            }
        )
        self._log.info("step %d validation loss %.6f", step, loss)

    def saved(self, saved: Saved) -> None:
        """A checkpoint is complete."""
        took = f"{saved.bytes / GIB:.3f} GiB in {saved.seconds:.2f} s, training held up for {saved.stall_s:.3f} s"
        self._log.info("saved %s: %s", saved.path.name, took)
        times = {"seconds": round(saved.seconds, 3), "stall_s": round(saved.stall_s, 3)}
        self._event("checkpoint", int(saved.path.name.rpartition("-")[2]), bytes=saved.bytes, **times)

    def not_saved(self, error: CheckpointError) -> None:
        self._log.error("%s", error)
        self._terminal.note(f"warning: {error}")
        self._event("checkpoint_failed", self._job.progress.step, message=str(error))

    def ranks(self, step: int) -> None:
        """What each rank takes, and who is slow. All ranks call it after the same step; one small all-gather."""
        if step == self._ranks_told:
            return
        self._ranks_told = step
        figures = self._ranks.gather(self._memory_gib())
        self._event("ranks", step, memory_gib=figures.memory_gib, compute_s=figures.compute_s)
        for slow in figures.stragglers:
            where = {"rank": slow.rank, "host": self._hosts[slow.rank], "times": round(slow.times, 2)}
            self._event("straggler", step, **where)
            if slow.rank not in self._known_slow:
                self._terminal.note(
                    f"rank {slow.rank} on {self._hosts[slow.rank]} computes {slow.times:.1f} times as long as others "
                    f"with the same work (step {step})"
                )
        self._known_slow |= {slow.rank for slow in figures.stragglers}

    def sample(self, step: int) -> None:
        """Text from the model after a step. All ranks call it; the first rank's model writes, others wait for it."""
        if self._job.prompts:
            self._sampled = step, self._texts()
            for prompt, text in self._sampled[1]:
                self._told_sample(step, prompt, text)
                if step < self._job.config.train.steps:  # else the summary shows it
                    self._terminal.sample(step, prompt, text)
            self._job.context.barrier(patient=True)

    def _sample_at_the_end(self, step: int) -> None:
        """The run is trained and saved: it does not fail here."""
        try:
            self._sampled = step, self._texts()
        except Exception as error:
            self._terminal.note(f"no sample of text: {type(error).__name__}: {error}")
        for prompt, text in self._sampled[1]:
            self._told_sample(step, prompt, text)

    def _texts(self) -> list[Sample]:
        """Each prompt with what follows it, on the ranks of the first rank's model; nothing on others."""
        job, train = self._job, self._job.config.train
        if job.context.source("tp-pp") != 0 or job.data.tokenizer is None:
            return []
        following = sample(
            job.training,
            job.context,
            [prompt.tokens for prompt in job.prompts],
            train.sample_tokens,
            seq_length=train.seq_length,
            seed=job.config.seed,
            rows=train.micro_batch_size if train.compile else None,
        )
        texts = map(job.data.tokenizer.decode, following)
        return [(prompt.text, text) for prompt, text in zip(job.prompts, texts, strict=True)]

    def _told_sample(self, step: int, prompt: str, text: str) -> None:
        if self._chronicle is not None:
            self._log.info("sample after step %d: %s%s", step, prompt, text)
            self._chronicle.sample(step, prompt, text)

    # --- figures -----------------------------------------------------------------------------------------------------

    def _record(self, line: dict[str, Any]) -> None:
        if self._chronicle is not None:
            self._chronicle.record(line)

    def _event(self, kind: str, step: int, **fields: Any) -> None:
        if self._chronicle is not None:
            self._chronicle.event(kind, step, **fields)

    def _memory_gib(self) -> float:
        """Peak memory of this rank so far: of the accelerator's allocator, on a CPU of the process."""
        if self._job.context.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._job.context.device) / GIB
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak * (1 if sys.platform == "darwin" else 1024) / GIB  # macOS counts bytes, Linux KiB

    def _utilisation(self, tokens_per_s: float, *, causal: bool) -> float | None:
        """Model FLOPs utilisation; None where the device's peak is not known."""
        if self._peak is None:
            return None
        flops = flops_per_token(self._job.config.model, self._job.config.train.seq_length, causal=causal)
        return tokens_per_s * flops / (self._peak * self._job.context.world_size)

    def _bits_per_byte(self, loss: float) -> float | None:
        ratio = self._job.data.bytes_per_token
        return None if ratio is None else loss / math.log(2) / ratio


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf  # exp overflows a double from there on
