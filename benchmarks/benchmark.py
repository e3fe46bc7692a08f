"""Training speed of megalite beside transformers' model of the same shape in a plain PyTorch loop.

Both sides train on the same device in the same dtype on the same tokens, in turns, so that whatever else the machine
does hits both, each in a process of its own (benchmark_sides.py). megalite's side is its real training step (gradient
buffers, fp32 masters, clipping, AdamW); the other is what one would write by hand: `model(input_ids, labels)`,
`clip_grad_norm_` and fused AdamW on weights of that dtype, scaled_dot_product_attention, and torch.compile where
megalite compiles too.

    python benchmarks/benchmark.py                              tiny and gpt2, fp32 and bf16
    python benchmarks/benchmark.py --model tiny --precision bf16 --steps 20 --json speed.json
    python benchmarks/benchmark.py --model shakespeare_char_cpu nanoGPT's recipe for CPUs, beside a plain loop
    python benchmarks/benchmark.py --overhead                   what the training loop costs beside the step
    python benchmarks/benchmark.py --zero                       ZeRO-1 beside torch's, two ranks (benchmark_zero.py)
    python benchmarks/benchmark.py --pipeline                   the pipeline, two ranks (benchmark_pipeline.py)
    python benchmarks/benchmark.py --experts                    a layer of experts, and two ranks (benchmark_moe.py)
    python benchmarks/benchmark.py --context                    sequences on two ranks (benchmark_context.py)
    python benchmarks/benchmark.py --optimizer                  Muon beside AdamW, one process (benchmark_optimizer.py)
"""

import argparse
import contextlib
import io
import itertools
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import benchmark_context
import benchmark_moe
import benchmark_optimizer
import benchmark_pipeline
import benchmark_zero
import torch
import transformers
from benchmark_sides import SHAPES, WARM_UP_STEPS, Shape, Side, seconds_of
from figures import FIGURES, write_figures

from megalite.commands.train import train_rank
from megalite.config.files import output_problems
from megalite.config.schema import Config
from megalite.launch.device import DTYPES
from megalite.launch.process import ProcessEnvironment
from megalite.model.flops import flops_per_token, peak_flops
from megalite.model.gpt import GPT
from megalite.optim.adamw import FlatAdamW
from megalite.optim.buffers import TrainingBuffers
from megalite.train import step

# What is measured otherwise, by option: modules with SHAPES and `run`.
OTHERS: dict[str, Any] = {
    "zero": benchmark_zero,
    "pipeline": benchmark_pipeline,
    "experts": benchmark_moe,
    "context": benchmark_context,
    "optimizer": benchmark_optimizer,
}


@dataclass(frozen=True)
class Comparison:
    """One shape in one precision: medians over the rounds, and the best round of each side."""

    model: str
    precision: str
    tokens_per_step: int
    megalite_tokens_per_s: float
    peer_tokens_per_s: float
    ratio: float  # median over rounds of the peer's time by megalite's
    megalite_best_tokens_per_s: float
    peer_best_tokens_per_s: float
    megalite_tflops: float  # model FLOP/s by PaLM's formula
    megalite_of_products: float  # ... by those of a large square matrix product on the same device
    megalite_mfu: float | None  # ... by the device's dense peak, where it is known
    peer_mfu: float | None


def compare(name: str, config: Config, *, rounds: int, product_flops: float) -> Comparison:
    """Let both sides train in turns and compare their times."""
    batch, seq = config.train.global_batch_size, config.train.seq_length
    device = torch.device(config.device)
    repeat = 10 if device.type == "cuda" else 1  # an accelerator is timed while the host runs ahead of it
    times: tuple[list[float], list[float]] = ([], [])
    with Side("megalite", config) as ours, Side(SHAPES[name].beside, config) as theirs:
        sides = ours, theirs
        for number in range(rounds):
            for side in (0, 1) if number % 2 == 0 else (1, 0):
                times[side].append(sides[side].seconds(repeat))

    speeds = [[batch * seq / seconds for seconds in side] for side in times]
    flops = flops_per_token(config.model, seq, causal=False)
    median = [statistics.median(side) for side in speeds]
    peak = peak_flops(device_name(device), str(DTYPES[config.precision]).removeprefix("torch."))
    return Comparison(
        model=name,
        precision=config.precision,
        tokens_per_step=batch * seq,
        megalite_tokens_per_s=median[0],
        peer_tokens_per_s=median[1],
        ratio=statistics.median(theirs / ours for ours, theirs in zip(*times, strict=True)),
        megalite_best_tokens_per_s=max(speeds[0]),
        peer_best_tokens_per_s=max(speeds[1]),
        megalite_tflops=median[0] * flops / 1e12,
        megalite_of_products=median[0] * flops / product_flops,
        megalite_mfu=None if peak is None else median[0] * flops / peak,
        peer_mfu=None if peak is None else median[1] * flops / peak,
    )


def device_name(device: torch.device) -> str:
    """The GPU's name, or the processor's as Linux tells it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    with contextlib.suppress(OSError, StopIteration), open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return platform.machine()


def measure_products(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product: what a step made of nothing but products could reach here."""
    n = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    best = min(seconds_of(lambda: torch.mm(left, right, out=out), 3, device) for _ in range(5))
    return 2 * n**3 / best


class StepClock:
    """Times the parts of every training step of a real run by wrapping the methods that do them."""

    PARTS = (
        (GPT, "loss"),
        (torch.autograd, "backward"),
        (step, "norm_of"),
        (FlatAdamW, "step"),
        (TrainingBuffers, "round_masters"),
    )

    def __init__(self) -> None:
        self.parts: list[float] = []  # seconds inside PARTS, by step
        self.begins: list[float] = []  # when each step began

    @contextlib.contextmanager
    def wrapped(self) -> Iterator["StepClock"]:
        with contextlib.ExitStack() as stack:
            for owner, name in self.PARTS:
                self._replace(stack, owner, name, self._timed)
            self._replace(stack, step.TrainStep, "__call__", self._began)
            yield self

    def overhead(self) -> tuple[float, float]:
        """Median seconds of a step from one begin to the next, and the share of it outside PARTS; warm-up left out."""
        periods = [after - before for before, after in zip(self.begins, self.begins[1:], strict=False)]
        pairs = list(zip(periods, self.parts, strict=False))[WARM_UP_STEPS:]
        return statistics.median(periods), statistics.median(1 - inside / period for period, inside in pairs)

    def _replace(self, stack: contextlib.ExitStack, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, wrap(original))
        stack.callback(setattr, owner, name, original)

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = original(*args, **options)
            self.parts[-1] += time.perf_counter() - begin
            return result

        return timed

    def _began(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def began(*args: Any, **options: Any) -> Any:
            self.begins.append(time.perf_counter())
            self.parts.append(0.0)
            return original(*args, **options)

        return began


def measure_overhead(shape: Shape, *, precision: str, steps: int) -> tuple[float, float]:
    """Seconds per step of the real loop on a CPU, and the share outside forward, backward and optimizer.

    Everything of a run takes part: data from a token file, prefetch, metrics.jsonl, the terminal's lines.
    """
    with tempfile.TemporaryDirectory(prefix="megalite-benchmark-") as folder:
        text = Path(folder, "text.txt")
        text.write_text("".join(f"{number * number} is the square of {number}.\n" for number in range(20_000)))
        paths = [f"run_dir={folder}/run", "data=text", f"data.path={text}", f"data.cache_dir={folder}/cache"]
        quiet = ["checkpoint.interval=0", "train.eval_interval=0", "train.sample_tokens=0"]
        config = shape.config(shape.cpu_batch, precision, torch.device("cpu"), *paths, *quiet, f"train.steps={steps}")
        with StepClock().wrapped() as clock, contextlib.redirect_stdout(io.StringIO()):
            train_rank(config, ProcessEnvironment())
        return clock.overhead()


def table(comparisons: Sequence[Comparison]) -> str:
    """One line per comparison."""
    header = "model,precision,megalite tok/s,peer tok/s,ratio,ratio of best,TFLOP/s,of products,MFU,peer MFU"
    rows = [header.split(",")]
    for line in comparisons:
        rows.append([line.model, line.precision])
        rows[-1] += [f"{line.megalite_tokens_per_s:,.0f}", f"{line.peer_tokens_per_s:,.0f}", f"{line.ratio:.2f}"]
        rows[-1] += [f"{line.megalite_best_tokens_per_s / line.peer_best_tokens_per_s:.2f}"]
        rows[-1] += [f"{line.megalite_tflops:.3g}", f"{line.megalite_of_products:.0%}"]
        rows[-1] += ["-" if mfu is None else f"{mfu:.1%}" for mfu in (line.megalite_mfu, line.peer_mfu)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = {**SHAPES, **benchmark_zero.SHAPES, **benchmark_pipeline.SHAPES}
    some = "default: tiny and gpt2, on CUDA 1.3b too; --zero, --pipeline: tiny and wide, --experts: tiny_moe"
    parser.add_argument("--model", action="append", choices=names, help=some)
    parser.add_argument("--precision", action="append", choices=("fp32", "bf16"), help="default: both")
    parser.add_argument("--steps", type=int, default=10, help="rounds, or steps of --overhead (default: %(default)s)")
    parser.add_argument("--batch", type=int, help="sequences per step and rank (default: by shape and device)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where present")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="both sides; default: on CUDA alone")
    parser.add_argument("--overhead", action="store_true", help="measure the loop around the step instead (CPU)")
    parser.add_argument("--zero", action="store_true", help="measure data parallelism on two ranks instead (CPU)")
    parser.add_argument("--pipeline", action="store_true", help="measure a pipeline of two ranks instead (CPU)")
    parser.add_argument("--experts", action="store_true", help="measure experts instead, on one and two ranks (CPU)")
    parser.add_argument("--context", action="store_true", help="measure long sequences on two ranks instead (CPU)")
    parser.add_argument("--optimizer", action="store_true", help="measure steps with Muon beside AdamW's instead (CPU)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    options = parser.parse_args(arguments)
    if options.steps < 1 or (options.batch is not None and options.batch < 1):
        parser.error("--steps and --batch must be at least 1")
    if options.overhead and options.steps < WARM_UP_STEPS + 2:
        parser.error(f"--overhead needs --steps {WARM_UP_STEPS + 2} or more")
    modes = [mode for mode in ("overhead", *OTHERS) if getattr(options, mode)]
    if len(modes) > 1:
        parser.error(f"--{' and --'.join(modes)} measure different things: one of them")
    options.mode = modes[0] if modes else None
    known = list(OTHERS[options.mode].SHAPES if options.mode in OTHERS else SHAPES)
    if not {*known}.issuperset(options.model or ()):
        parser.error(f"--model: what is compared so is one of {', '.join(known)}")
    if options.zero and sys.platform != "linux":
        parser.error("--zero counts bytes by the statistics of Linux")
    if options.json and (problems := output_problems("--json", options.json, FIGURES)):
        parser.error("\n".join(map(str, problems)))
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch sees no CUDA device")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if options.mode:
        device = torch.device("cpu")
    on_cuda = device.type == "cuda"
    compiled = on_cuda if options.compile is None else options.compile
    precisions = options.precision or ["fp32", "bf16"]
    names = options.model or (["tiny", "gpt2", "1.3b"] if on_cuda else ["tiny", "gpt2"])
    hardware = device_name(device) + ("" if on_cuda else f", {torch.get_num_threads()} threads")
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{hardware}; {versions}", flush=True)
    if options.mode in OTHERS:
        ranks = OTHERS[options.mode]
        shapes = options.model or list(ranks.SHAPES)
        status: int = ranks.run(shapes, precisions, rounds=options.steps, batch=options.batch, file=options.json)
        return status
    report: dict[str, Any] = {"hardware": hardware, "versions": versions}
    if options.overhead:
        overheads = {each: measure_overhead(SHAPES["tiny"], precision=each, steps=options.steps) for each in precisions}
        for precision, (seconds, share) in overheads.items():
            print(f"tiny {precision}: {seconds * 1e3:.1f} ms per step, {share:.2%} of it outside the step's own work")
        if options.json:
            report["figures"] = {name: {"step_s": step, "outside": share} for name, (step, share) in overheads.items()}
            write_figures(options.json, report)
        return 0

    comparisons: list[Comparison] = []
    products = {name: measure_products(device, DTYPES[name]) for name in precisions}
    print("matrix products: " + ", ".join(f"{name} {flops / 1e12:.3g} TFLOP/s" for name, flops in products.items()))
    for name, precision in itertools.product(names, precisions):
        batch = options.batch or (SHAPES[name].cuda_batch if on_cuda else SHAPES[name].cpu_batch)
        config = SHAPES[name].config(batch, precision, device)
        config = replace(config, train=replace(config.train, compile=compiled))
        line = compare(name, config, rounds=options.steps, product_flops=products[precision])
        print(table([line]), flush=True)
        comparisons.append(line)
    print("\n" + table(comparisons))
    if options.json:
        report |= {"product_flops": products, "figures": [asdict(line) for line in comparisons]}
        write_figures(options.json, report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
