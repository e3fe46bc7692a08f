"""What a run tells the world: metrics.jsonl, the terminal and this rank's log, from the same figures.

Only rank 0 writes metrics and the terminal; every rank keeps its own log.
"""

import logging
import math
import os
import resource
import statistics
import sys
import time
import traceback
from typing import Any

import torch

from megalite.checkpoint.store import CheckpointError, Saved
from megalite.model.flops import flops_per_token, parameter_count, peak_flops
from megalite.parallel.environment import launch_command, read_environment
from megalite.parallel.tables import header_lines
from megalite.train.job import Job
from megalite.train.metrics import MetricsFile, read_metrics
from megalite.train.records import EvaluationView, HeaderView, StepView, Summary
from megalite.train.sample import sample
from megalite.train.state import Progress
from megalite.train.step import StepFigures
from megalite.train.terminal import Terminal

GIB = 1 << 30
PROMPTS = {"stdlib": "def "}  # how a sample begins, by data source; otherwise with an end of document


class Reporter:
    """Tells of one run on this rank."""

    def __init__(self, job: Job, terminal: Terminal, log: logging.Logger) -> None:
        self._job = job
        self._terminal = terminal
        self._log = log
        self._path = job.folder.path / "metrics.jsonl"
        self._metrics = MetricsFile(self._path, resume_step=job.progress.step) if job.context.rank == 0 else None
        self._behind = False  # the last line of metrics could not be written
        self._began = self._clock = time.perf_counter()
        self._speeds: list[float] = []  # tokens/s of this start's steps
        device = job.context.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak = peak_flops(name, str(job.context.dtype).removeprefix("torch."))

    def start(self) -> None:
        """The header: everything that was resolved."""
        job, train, model = self._job, self._job.config.train, self._job.config.model
        tokens_per_step = train.global_batch_size * train.seq_length
        flops = flops_per_token(model, train.seq_length, causal=False)
        epochs = train.steps * train.global_batch_size / job.data.train.samples
        rows = [
            ("model", f"{model.name}: {parameter_count(model):,} parameters, {flops / 1e6:,.1f} MFLOP per token"),
            (
                "",
                f"{model.num_layers} layers, {model.hidden_size} wide, {model.num_attention_heads} heads, "
                f"vocabulary {model.vocab_size:,}",
            ),
            (
                "batch",
                f"{tokens_per_step:,} tokens per step: {train.global_batch_size} sequences of {train.seq_length}, "
                f"{train.micro_batch_size} at a time",
            ),
            ("data", job.data.description),
            ("", f"{train.steps * tokens_per_step:,} tokens in {train.steps:,} steps: {epochs:.3g} epochs"),
            *zip(("layout", "", ""), header_lines(job.context.layout), strict=False),
            ("device", f"{self._device_name()}, {str(job.context.dtype).removeprefix('torch.')}"),
            ("run folder", str(job.folder.path)),
        ]
        if job.resumed_from is not None:
            rows.append(("continues", f"from the checkpoint of step {job.resumed_from}"))
        header = HeaderView(f"{model.name} on {job.config.data.source}", rows, train.steps, job.progress.step)
        self._terminal.header(header)
        self._log.info("training from step %d to %d", job.progress.step, train.steps)
        self.restart_clock()

    def restart_clock(self) -> None:
        """What passed since the last step (an evaluation, a checkpoint) is not part of the next one."""
        self._clock = time.perf_counter()

    def step(self, progress: Progress, figures: StepFigures, *, lr: float, wait_s: float) -> None:
        """One step is done."""
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        config = self._job.config
        speed = config.train.global_batch_size * config.train.seq_length / seconds
        self._speeds.append(speed)
        loss_scale = None if self._job.training.loss_scale is None else figures.loss_scale
        if figures.skipped:
            self._log.warning("step %d skipped: loss %s, norm %s", progress.step, figures.loss, figures.grad_norm)
            where = "" if loss_scale is None else f" at a loss scale of {loss_scale:g}"
            self._terminal.note(
                f"step {progress.step}: loss or gradient is not finite{where}, the step is not applied "
                f"({progress.bad_steps} in all)"
            )
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
            mfu=self._utilisation(speed, causal=False),
            mfu_causal=self._utilisation(speed, causal=True),
            bad_steps=progress.bad_steps,
            loss_scale=loss_scale,
        )
        self._terminal.step(view)
        left_out = ("steps", *(["loss_scale"] if loss_scale is None else []))
        self._write({name: value for name, value in vars(view).items() if name not in left_out})

    def evaluation(self, step: int, loss: float, *, seconds: float) -> None:
        """The validation set was evaluated after `step`; `loss` in nats per token."""
        view = EvaluationView(step, loss, _perplexity(loss), self._bits_per_byte(loss), seconds)
        self._terminal.evaluation(view)
        self._write(
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

    def not_saved(self, error: CheckpointError) -> None:
        self._log.error("%s", error)
        self._terminal.note(f"warning: {error}")

    def failed(self, error: Exception) -> None:
        """The run ends with an error: this rank's log says where."""
        self._log.error(
            "failed at step %d\n%s", self._job.progress.step + 1, "".join(traceback.format_exception(error))
        )

    def finish(self, *, stopped_by: str | None) -> None:
        """The run ends in order, at its last step or because it was asked to stop."""
        self._log.info("ended at step %d%s", self._job.progress.step, f" ({stopped_by})" if stopped_by else "")
        prompt, text = "", None
        if stopped_by is None and self._job.context.source("tp-pp") == 0:  # the ranks of the first rank's model
            prompt, text = self._sample()
        if self._metrics is None:
            return
        self._metrics.close()
        records = read_metrics(self._path)
        evaluations = [record for record in records if "val_loss" in record]
        last: dict[str, Any] = evaluations[-1] if evaluations else {}
        self._terminal.finish(
            Summary(
                step=self._job.progress.step,
                steps=self._job.config.train.steps,
                tokens=self._job.progress.tokens,
                seconds=time.perf_counter() - self._began,
                tokens_per_s=statistics.median(self._speeds) if self._speeds else 0.0,
                run_dir=str(self._job.folder.path),
                train_curve=[(record["step"], record["loss"]) for record in records if "loss" in record],
                validation_curve=[(record["step"], record["val_loss"]) for record in evaluations],
                perplexity=last.get("val_perplexity"),
                bits_per_byte=last.get("val_bits_per_byte"),
                bad_steps=self._job.progress.bad_steps,
                sample=text,
                sample_prompt=prompt,
                stopped_by=stopped_by,
                command=launch_command(read_environment(os.environ), sys.argv),
            )
        )

    def _sample(self) -> tuple[str, str | None]:
        """A prompt and what the trained model makes of it. The run is trained and saved: it does not fail here."""
        try:
            return self._written_text()
        except Exception as error:
            self._terminal.note(f"no sample of text: {type(error).__name__}: {error}")
            return "", None

    def _written_text(self) -> tuple[str, str | None]:
        config, tokenizer = self._job.config, self._job.data.tokenizer
        if tokenizer is None or config.train.sample_tokens == 0:
            return "", None
        prompt = PROMPTS.get(config.data.source, "")
        if prompt:
            tokens = tokenizer.encode(prompt)
        elif tokenizer.end_of_document is not None:
            tokens = [tokenizer.end_of_document]
        else:  # whatever else we thought of, a char tokenizer might not know
            part = self._job.data.train.parts[0]
            tokens = [int(part.file.tokens[part.first])]
        following = sample(
            self._job.training,
            self._job.context,
            tokens,
            config.train.sample_tokens,
            seq_length=config.train.seq_length,
            seed=config.seed,
        )
        return prompt, tokenizer.decode(following)

    def _write(self, record: dict[str, Any]) -> None:
        if self._metrics is None:
            return
        try:
            self._metrics.append(record)
        except OSError as error:
            if not self._behind:
                self._terminal.note(f"warning: {self._path.name} cannot be written for now: {error.strerror}")
            self._behind = True
        else:
            self._behind = False

    def _device_name(self) -> str:
        device = self._job.context.device
        if device.type == "cuda":
            return torch.cuda.get_device_name(device)
        return f"cpu, {torch.get_num_threads()} thread(s) per rank"

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
